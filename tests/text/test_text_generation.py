"""generation_config.json: what it says is what a silent request gets, and nothing in it is passed over."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4.errors import ConfigError
from dsv4.text.generation import FILE, SamplingDefaults
from dsv4.text.stops import StopStrings

# As beside DeepSeek's own checkpoints.
DEEPSEEK = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": True}
DEEPSEEK |= {"temperature": 1.0, "top_p": 0.95, "transformers_version": "4.46.3"}


def load(folder: Path, content: Any) -> SamplingDefaults:
    (folder / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return SamplingDefaults.load(folder)


def test_what_is_said_is_read(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults(), "no file says nothing"
    assert load(tmp_path, DEEPSEEK) == SamplingDefaults(top_p=0.95, stop_ids=(1,))
    assert load(tmp_path, {"eos_token_id": [1, 7], "top_k": 20}).stop_ids == (1, 7)
    assert load(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0
    assert load(tmp_path, {"temperature": None, "num_beams": 1, "max_new_tokens": 99}) == SamplingDefaults()
    (tmp_path / "one.safetensors").touch()
    assert SamplingDefaults.load(tmp_path / "one.safetensors") == SamplingDefaults()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"temperature": -1}, "temperature is -1, expected a number from 0"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"num_beams": 4}, "num_beams is 4, which this engine does not do"),
        ({"frobnicate": 1}, "frobnicate is 1, which this engine does not do"),
        ({"eos_token_id": "x"}, "expected a token id"),
        ({"do_sample": "yes"}, "expected true or false"),
        ("[]", "not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, content)


def test_stop_string_can_be_told() -> None:
    for cut in range(1, 8):
        text, watcher = "ab STOP cd", StopStrings(("STOP", "OP c"), includes=True)
        pieces = [watcher.push(text[at : at + cut]) for at in range(0, len(text), cut)]
        assert "".join(piece for piece, _ in pieces) == "ab STOP" and watcher.found == "STOP"
