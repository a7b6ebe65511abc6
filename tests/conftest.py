"""Shared by all tests: one thread per process, and tiny checkpoints made once per run."""

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4 import Engine, EngineConfig
from dsv4.config import Dspark, ModelConfig, preset
from dsv4.lab.init import make
from dsv4.ops._memory import recall

# tests/test_machines.py runs some of the tests with two.
THREADS = int(os.environ.get("DSV4_TEST_THREADS", "1"))
torch.set_num_threads(THREADS)
# The longest single tests begin first: one that began last would leave the other core idle.
FIRST = ("test_step_interpreted.py", "test_gpu_all.py", "test_machines.py", "test_gpu_compile.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there when the tests begin stays: nobody looks for garbage among it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("slow") and config.getoption("-m") != "slow":
            item.add_marker(pytest.mark.skip(reason="minutes: run it with -m slow"))
        if item.get_closest_marker("ray") and config.getoption("-m") != "ray":
            item.add_marker(pytest.mark.skip(reason="needs Ray: make test-ray"))


def pytest_runtest_setup() -> None:
    """What another worker has measured of this machine meanwhile is not measured again."""
    recall.cache_clear()


def small_config() -> ModelConfig:
    """Every layer kind and routing once, sizes that are not powers of two where the model allows it."""
    return replace(
        preset("tiny"),
        **{"hidden_size": 96, "vocab_size": 300, "num_heads": 6, "head_dim": 80, "rope_dim": 16},
        **{"q_rank": 48},
        **{"o_groups": 3, "o_rank": 32, "window": 40, "index_heads": 16, "index_dim": 32, "index_topk": 12},
        **{"num_experts": 7, "experts_per_token": 3, "expert_width": 64, "max_positions": 4096},
        sinkhorn_iters=4,
        layers=preset("tiny").layers[:3],
    )


def dspark_config() -> ModelConfig:
    """The same with three DSpark stages instead of an MTP block."""
    return replace(small_config(), num_mtp_layers=3, dspark=Dspark(5, 298, (0, 2), 24))


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads change hands as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(format) -> folder of a random model of the small config; `dspark-format`: with DSpark."""
    made: dict[str, Path] = {}

    def get(format: str = "modelopt") -> Path:
        if format not in made:
            made[format] = tmp_path_factory.mktemp(format) / "model"
            config, style = small_config(), format.removeprefix("dspark-")
            config = dspark_config() if style != format else config
            for _ in make(made[format], config, style, seed=3):
                pass
        return made[format]

    return get


@pytest.fixture(scope="session")
def engine_for(checkpoint: Callable[..., Path]) -> Callable[..., Engine]:
    """engine_for(format, **engine options) -> a new engine on that random model."""

    def get(format: str = "modelopt", **options: object) -> Engine:
        options.setdefault("max_context", 512)
        options.setdefault("threads", THREADS)
        return Engine.load(checkpoint(format), EngineConfig(**options))  # type: ignore[arg-type]

    return get
