"""Several ranks on a CPU give the bits of one: all formats, layers, chunks, batches, prefixes, cancels."""

from pathlib import Path

import pytest
import torch
from ranks_support import engine_on, rank_pids

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.engine.build import rank_devices
from dsv4.engine.trial import Trial
from dsv4.errors import ConfigError, RequestError
from dsv4.lab.score import score_ids
from dsv4.models import EMBEDDED
from tests.parallel.test_shards import RANKS, WIDE
from tests.support.checkpoints import write_model
from tests.support.stress import cases, stress, truth

IDS = [(7 * i + i // 9) % WIDE.vocab_size for i in range(150)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    return {style: write_model(root / style, style, WIDE) for style in RANKS}


def logits(engine: Engine) -> dict[str, torch.Tensor]:
    """Of a prompt in one chunk, tokens one by one, and the draft block."""
    return score_ids(engine, IDS, 140, mtp=bool(engine.model.mtp))


@pytest.mark.parametrize(
    ("style", "ranks", "options"),
    [
        ("bf16", 4, {}),
        pytest.param("modelopt", 2, {}, marks=pytest.mark.slow),  # test_random_arrivals has it too
        ("official", 2, {"activations": "a8"}),
        pytest.param("hfnvfp4", 2, {"weights": "packed"}, marks=pytest.mark.slow),
        ("fp8", 2, {"compute_dtype": "bfloat16", "weights": "packed"}),
    ],
)
def test_logits(folders: dict[str, Path], style: str, ranks: int, options: dict[str, object]) -> None:
    with engine_on(folders[style], 1, **options) as alone:
        want = logits(alone)
    with engine_on(folders[style], ranks, **options) as engine:
        assert len(rank_pids()) == ranks - 1
        got = logits(engine)
    assert rank_pids() == []
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_random_arrivals(folders: dict[str, Path]) -> None:
    """Batches, chunks, prefix hits, snapshots, pauses, cancels: each answer against its run alone."""
    options = {"chunk": 96, "max_context": 1280, "prefix_snapshots": 6, "cache_pages": 7}
    with engine_on(folders["modelopt"], 1, **options) as alone:
        wanted = cases(4, WIDE.vocab_size, page=256, longest=17)
        answers = truth(alone, wanted)
    with engine_on(folders["modelopt"], 2, **options) as engine:
        assert stress(engine, wanted, answers, requests=8) > 5
        assert engine.prefix.num_snapshots > 0
        with pytest.raises(RequestError, match="lies on 2 ranks"), Trial(engine, 16) as trial:
            trial.read([1, 2, 3], tap=lambda name, part, value: None)
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].ids, "the ranks are still there"


def test_every_way_to_choose() -> None:
    """Together, one cancelled amidst: the answers of one rank.

    A grammar's mask is computed on rank 0 and known to all.
    """
    pytest.importorskip("llguidance")
    kinds: list[dict[str, object]] = [
        {"max_tokens": 12, "temperature": 0.9, "ignore_eos": False, "grammar": 'start: /[ab]{9}/ "."'},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "logprobs": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {300: 5.0}, "prompt_logprobs": 2},
        {"temperature": 1.0, "top_p": 0.8, "presence_penalty": 0.5, "logprobs": 2},
        {"temperature": 0.0, "logprobs": 21, "max_tokens": 2},  # more alternatives than the op lists
    ]
    results = []
    for ranks in (1, 2):
        with engine_on(None, ranks, max_batch=7) as engine:
            made = [{"max_tokens": 6, "seed": 3, "ignore_eos": True, **kind} for kind in kinds]
            requests = [engine.request("Once upon a", SamplingParams(**kind)) for kind in made]  # type: ignore[arg-type]
            gone = engine.stream(engine.request("Once", SamplingParams(max_tokens=50, top_p=0.9)))
            streams = [engine.stream(request) for request in requests]
            while engine.num_unfinished:
                engine.step()
                if len(gone.output.sequence.tokens) == 2:
                    gone.close()
            done = [stream.completion() for stream in streams]
            results.append([(answer.text, answer.tokens, answer.prompt) for answer in done])
    assert results[0] == results[1]
    text = results[0][0][0]
    assert text.endswith(".") and set(text) <= set("ab.")


def test_refusals(folders: dict[str, Path]) -> None:
    for options, words in (
        ({"ranks": 4, "folder": EMBEDDED}, "o_groups 2 do not split over 4 ranks; use 1 or 2"),
        (
            {"ranks": 2, "expert_parallel": True},
            "3 experts do not split over 2 ranks, which would have 1.5 each",
        ),
        ({"ranks": 1, "expert_parallel": True}, "whole experts, and there is one rank; leave it out"),
        ({"ranks": 2, "activations": "a4"}, "activations a4 scale a row by all of it"),
        ({"ranks": 4, "activations": "a8"}, "expert_width 256 over 4 ranks makes 64 each"),
    ):
        folder, given = options.pop("folder", folders["bf16"]), dict(options)  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=words), engine_on(folder, given.pop("ranks"), **given):  # type: ignore[arg-type]
            pass
    assert rank_pids() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, ranks are asked for by --gpus")
def test_ranks_of_no_named_device_are_the_cpu() -> None:
    assert rank_devices(EngineConfig(ranks=2)) == ["cpu", "cpu"]
    assert rank_devices(EngineConfig()) == ["auto"]
