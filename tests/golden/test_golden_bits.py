"""A row's bits on a CPU do not depend on how its prompt was cut, nor on the number of ranks."""

import pytest

from tests.golden.bits import MODES, cuts, digest, logits


@pytest.mark.slow
@pytest.mark.parametrize(("format", "mode"), MODES)
def test_bits(format: str, mode: str) -> None:
    found = {cut: logits(format, mode, cut) for cut in cuts(format, mode)}
    for cut, rows in found.items():
        for name, value in rows.items():
            assert digest(value) == digest(found["whole"][name]), f"{name}, {cut}"
