"""Small checkpoints for the tests of the lab, made once; they import tests/support and tests/cli."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from checkpoints import write_model


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """made(style) -> a model folder of under a megabyte. Not to be changed: all tests share it."""
    folder = tmp_path_factory.mktemp("made")

    def get(style: str) -> Path:
        if not (folder / style).exists():
            write_model(folder / style, style)
        return folder / style

    return get
