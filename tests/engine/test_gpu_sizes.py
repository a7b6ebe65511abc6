"""What the GPU kernels cannot run is refused in one sentence, before weights are read."""

from dataclasses import replace

import pytest

from dsv4.config import preset
from dsv4.engine.settings import check_sizes
from dsv4.errors import ConfigError


@pytest.mark.parametrize("name", ["flash", "pro", "tiny"])
def test_published_sizes_run(name: str) -> None:
    check_sizes(preset(name))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_streams", 2, "2 streams, expected 4"),
        ("o_rank", 24, "output rank 24, expected a multiple of 16"),
        ("num_experts", 600, "600 experts, expected at most 512"),
        ("index_dim", 96, "index keys of 96 channels, expected a power of two from 64 on"),
    ],
)
def test_other_sizes_are_refused(field: str, value: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*use --device cpu"):
        check_sizes(replace(preset("tiny"), **{field: value}))
