"""Lets the tests of dsv4.lab import tests/support and the helpers that run the program."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "cli")]
