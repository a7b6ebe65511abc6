"""Small checkpoints of every style, made once, and a way to damage copies of them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from checkpoints import write_model

from dsv4.lab.styles import STYLES


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """style -> model folder. Not to be changed: all tests share them."""
    folder = tmp_path_factory.mktemp("originals")
    return {style: write_model(folder / style, style) for style in STYLES}


@pytest.fixture
def place(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """place(style) -> a folder with that style's config.json; the test puts damaged weights beside it."""

    def prepare(style: str) -> Path:
        (tmp_path / "config.json").write_bytes((originals[style] / "config.json").read_bytes())
        return tmp_path

    return prepare
