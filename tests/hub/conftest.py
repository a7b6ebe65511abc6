"""Lets the tests of dsv4.hub import their own helpers and tests/support."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cli"), str(HERE.parent / "support")]
