"""generation_config.json, beside a checkpoint: how its makers sample where a user does not say.

As of config.json, every key is read or passed over for a stated reason; another is refused.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4.errors import ConfigError

FILE = "generation_config.json"
# Key -> the values it may have, in words, and whether one is among them.
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "a number from 0 to 100"),
    "top_p": (1e-9, 1, "a number above 0 and at most 1"),
    "top_k": (0, 2**31 - 1, "0 (all) or a larger integer"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100"),
}
# What this engine does not do is taken at the value that asks for nothing.
_NEUTRAL: dict[str, Any] = {
    **{"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1, "epsilon_cutoff": 0},
    **{"eta_cutoff": 0, "penalty_alpha": 0, "no_repeat_ngram_size": 0, "length_penalty": 1, "min_length": 0},
    **{"diversity_penalty": 0, "encoder_repetition_penalty": 1, "early_stopping": False},
}
_IGNORED = {
    **dict.fromkeys(("_from_model_config", "transformers_version"), "provenance"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "config.json has the first; nothing is padded"),
    **dict.fromkeys(("max_length", "max_new_tokens"), "requests say how long answers may be"),
    **dict.fromkeys(("use_cache", "cache_implementation"), "the engine's own"),
    **dict.fromkeys(
        (
            *("output_scores", "output_logits", "output_attentions", "output_hidden_states"),
            "return_dict_in_generate",
        ),
        "another library's output",
    ),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Of a request that is silent; without a file, the model's distribution as it is."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()  # beside config.json's end of sequence

    @classmethod
    def load(cls, folder: Path) -> "SamplingDefaults":
        path = (folder if folder.is_dir() else folder.parent) / FILE
        try:
            given = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; mend or remove it") from None
        if not isinstance(given, dict):
            raise ConfigError(f"{path} is not a JSON object; mend or remove it")
        return cls(**_read({key: value for key, value in given.items() if value is not None}, path))

    def shown(self) -> dict[str, Any]:
        return asdict(self)


def _read(given: dict[str, Any], path: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in given.items():
        if key in _NUMBERS:
            low, high, expected = _NUMBERS[key]
            is_number = isinstance(value, int if key == "top_k" else int | float)
            if not is_number or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{path}: {key} is {value!r}, expected {expected}")
            out[key] = value
        elif key == "eos_token_id":
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in ids):
                raise ConfigError(f"{path}: {key} is {value!r}, expected a token id or a list of them")
            out["stop_ids"] = tuple(ids)
        elif key == "do_sample":
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {key} is {value!r}, expected true or false")
        elif key not in _IGNORED and value != _NEUTRAL.get(key, _NEUTRAL):
            raise ConfigError(f"{path}: {key} is {value!r}, which this engine does not do; remove it")
    if given.get("do_sample") is False:
        out["temperature"] = 0.0
    return out
