"""`python -m bench.ops`: its inputs, what it does not time, and what each launch reads at least."""

from typing import Any

import pytest
import torch
from benched import TINY, size_of, tiny_decoder
from torch import Tensor

pytest.importorskip("triton", reason="the decode kernels need Triton")

from bench.cases import Case, Maker
from bench.ops import CHECKED_ROWS, Wished, _call, check, floor, state_bytes, weight_bytes
from dsv4.errors import ConfigError
from dsv4.gpu.tiles import Bank, Tiled
from dsv4.lab.bench.profile import kinds_of
from dsv4.lab.bench.subject import Reads
from dsv4.ops import IMPLEMENTATIONS
from dsv4.ops.agree import outputs
from dsv4.step.run import Decoder

CPU = torch.device("cpu")


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    return tiny_decoder(monkeypatch)


def test_launches_read_what_a_step_reads(decoder: Decoder) -> None:
    """Every weight is in one launch: those of the launches are those of the step, but for plain tensors."""
    tensors = decoder.bundle.weights.tensors
    tiled = {name: held for name, held in tensors.items() if isinstance(held, Tiled | Bank)}
    tasks = decoder.buffers.tasks
    tasks.expert.copy_(torch.tensor([3, 5]))
    want = Reads.of(tiled, TINY.num_layers).step([2] * TINY.num_layers)
    assert sum(weight_bytes(launch.run) for launch in decoder.launches) == pytest.approx(want, rel=1e-4)


def test_launches_read_the_cache_and_the_mixing_matrices(decoder: Decoder) -> None:
    names = [launch.name for launch in decoder.launches]
    layout, position = decoder.cache.layout, 600
    found = {True: 0, False: 0}
    for name, kind in zip(names, kinds_of(names, TINY), strict=True):
        found[name == "mhc open"] += state_bytes(name, kind, layout, position)
    assert found[False] == layout.read_bytes(position)
    assert found[True] == sum(
        size_of(t) for n, t in decoder.bundle.weights.tensors.items() if n.endswith("_fn")
    )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [*Maker(TINY, "modelopt", 4, 512, CPU).cases()]


def test_cases_are_of_every_op(cases: list[Case]) -> None:
    assert {case.op for case in cases} == set(IMPLEMENTATIONS)
    for case in cases:
        made = case.make(CHECKED_ROWS)
        assert made.num_bytes > 0
        for result in outputs(_call(case, made, "cpu")):
            assert bool(torch.isfinite(result.double()).all()), (case.op, case.function, case.name)


def test_a_wrong_backend_is_found(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4.ops.rows import cpu, prefill

    case = next(case for case in cases if case.op == "rows")
    monkeypatch.setattr(prefill, "rms_norm", cpu.rms_norm)
    assert check(case, "gpu") == "" == check(case, "cpu")
    monkeypatch.setattr(prefill, "rms_norm", lambda x, weight, eps: 1.1 * cpu.rms_norm(x, weight, eps))
    assert "relative error" in check(case, "gpu")

    def broken(*given: Any) -> Tensor:
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(prefill, "rms_norm", broken)
    assert check(case, "gpu") == "raised RuntimeError: no such kernel"


def test_floor_says_what_bounds() -> None:
    assert floor(4e6, 1e6, 4e12, 8e14) == (1.0, "memory")
    assert floor(4e6, 8e9, 4e12, 8e14) == (10.0, "arithmetic")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"presets": ("big",)}, "unknown preset 'big'"),
        ({"ops": ("nope",)}, "unknown ops .*nope"),
        ({"tokens": 9000}, "tokens is 9000, expected 1 to the context, 8192"),
    ],
)
def test_wrong_wishes_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Wished(**given)
