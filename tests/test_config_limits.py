"""config.json: numbers that no arithmetic could use are refused where they are read."""

from typing import Any

import pytest

from dsv4.config import ModelConfig, preset
from dsv4.errors import ConfigError

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 4096}
NESTED = {"main": {"rope_theta": 1.0}, "compress": {"rope_type": "yarn", **YARN}}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"compress_rope_theta": 1}, "compress_rope_theta is 1, expected from 2 up to"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, expected from 2 up to"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5, expected from 2 up to"),
        ({"rope_theta": -2}, "rope_theta is -2, expected more than 0"),
        (
            {"rope_theta": None, "rope_parameters": NESTED},
            r"rope_parameters\.main\.rope_theta is 1\.0, expected from 2 up to",
        ),
        ({"rope_scaling": {**YARN, "beta_slow": 1e-310}}, "beta_slow is 1e-310, expected from 1.17549e-38"),
        ({"hc_eps": 1e-45}, "hc_eps is 1e-45, expected from 1.17549e-38 up to"),
        ({"swiglu_limit": 5e-324}, "swiglu_limit is 5e-324, expected from 1.17549e-38 up to"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_that_float32_or_a_rotation_cannot_use(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_dict(preset("tiny").to_dict() | extra)
