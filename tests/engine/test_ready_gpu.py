"""An engine that is ready compiles and loads nothing more, whatever is asked of it."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.lab.init import make
from tests.conftest import small_config
from tests.support.compiling import no_compilation

pytestmark = pytest.mark.gpu
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 100, 300, 513, 4096, 5000)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", ["modelopt", "official", "bf16", "ct", "hfnvfp4"])
def test_nothing_is_compiled_after_the_start(
    format: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in make(tmp_path / "model", replace(small_config(), max_positions=8192), format, seed=3):
        pass
    options = {"device": "cuda", "compute_dtype": dtype, "max_context": 8192, "max_batch": 8}
    engine = Engine.load(tmp_path / "model", EngineConfig(**options))  # type: ignore[arg-type]
    r = random.Random(1)
    prompts = [[r.randrange(300) for _ in range(length)] for length in LENGTHS]
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with no_compilation(monkeypatch):
        for prompt in prompts:
            engine.generate([prompt], greedy)
        engine.generate([prompts[8]], replace(greedy, logprobs=5, prompt_logprobs=3))
        engine.generate([prompts[-1] + prompts[3]], greedy)  # a hit in the prefix cache
        for count in (2, 3, 5, 8):
            engine.generate([prompt[:400] for prompt in prompts[:count]], replace(greedy, temperature=0.7))
        engine.generate(prompts, greedy)
