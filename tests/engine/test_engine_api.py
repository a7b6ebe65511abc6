"""The public API, from outside: requests in, tokens out, refusals with their numbers, nothing left behind."""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.errors import ConfigError, RequestError
from dsv4.lab.byte_tokenizer import byte_tokenizer_json
from dsv4.lab.score import score_ids
from dsv4.ops.sample.cpu import choose, pack, unpack

VOCAB = 300
STOPS = {0, 1, 3, 4}  # the end of a turn, and what can only begin the next one
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = ["Once upon a time", "x", "", "Grüße, 世界 🌍", "a longer prompt " * 9]


def sampled(seed: int, count: int = 40, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "seed": seed, "ignore_eos": True} | more)


def is_idle(engine: Engine) -> bool:
    pool = engine.slots.pool
    free = pool.num_available == pool.num_pages and engine.slots.num_free == engine.config.max_batch
    return free and engine.num_unfinished == 0


@pytest.fixture(scope="module")
def shared(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("modelopt", max_batch=4, chunk=32)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """Whatever a test does, nothing of it may be left in the engine."""
    assert is_idle(shared)
    yield shared
    assert is_idle(shared)


@pytest.fixture(scope="module")
def single(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for("modelopt", max_batch=1, max_context=64)


def test_generate_keeps_the_order_and_equals_the_stream(engine: Engine) -> None:
    together = engine.generate(PROMPTS, GREEDY)
    assert [done.prompt_tokens for done in together] == [len(p.encode()) + 1 for p in PROMPTS]
    for prompt, done in zip(PROMPTS, together, strict=True):
        deltas = list(engine.stream(engine.request(prompt, GREEDY)))
        assert [d.token.id for d in deltas if d.token] == done.ids
        assert "".join(d.text for d in deltas) == done.text
        assert [d.finish_reason for d in deltas] == [None] * 11 + ["length"]
    assert len({tuple(done.ids) for done in together}) == len(PROMPTS)
    ids = [[0, 17, 42], [9]]
    assert [done.ids for done in engine.generate(ids, GREEDY)] == [
        engine.generate([i], GREEDY)[0].ids for i in ids
    ]
    assert engine.generate([]) == []
    assert engine.generate([torch.tensor(ids[0])], GREEDY)[0].ids == engine.generate(ids, GREEDY)[0].ids


def test_text_is_what_the_tokenizer_makes_of_the_ids(engine: Engine) -> None:
    assert engine.tokenizer is not None
    for done in engine.generate([engine.request("bytes", sampled(seed, 40)) for seed in range(3)]):
        assert done.text == engine.tokenizer.decode(done.ids)


def test_streams_read_in_turns(engine: Engine) -> None:
    """Six streams on four places; each is read at its own pace and equals its run alone."""
    params = [sampled(seed, 3 + 2 * seed) for seed in range(6)]
    prompts = [list(range(20 + i, 30 + 7 * i)) for i in range(6)]
    alone = [engine.generate([ids], p)[0] for ids, p in zip(prompts, params, strict=True)]
    streams = [engine.stream(engine.request(ids, p)) for ids, p in zip(prompts, params, strict=True)]
    got: list[list[int]] = [[] for _ in streams]
    rng = random.Random(0)
    open_streams = list(range(6))
    while open_streams:
        i = rng.choice(open_streams)
        delta = next(streams[i], None)
        if delta is None:
            open_streams.remove(i)
        elif delta.token:
            got[i].append(delta.token.id)
    assert got == [done.ids for done in alone]
    assert all(stream.is_done and list(stream) == [] for stream in streams)


def test_advance_is_one_step(engine: Engine) -> None:
    """chunk 32: a prompt of 70 ids takes three steps before its first token."""
    with engine.stream(engine.request(list(range(70)), GREEDY)) as stream:
        assert [len(stream.advance()) for _ in range(5)] == [0, 0, 1, 1, 1]


def test_max_tokens(engine: Engine, single: Engine) -> None:
    for count in (1, 2, 9):
        done = engine.generate([[5, 6]], sampled(1, count))[0]
        assert len(done.tokens) == count and done.finish_reason == "length"
    done = single.generate([[5, 6, 7]], SamplingParams(temperature=0, ignore_eos=True))[0]
    assert len(done.tokens) == 64 - 3 and done.finish_reason == "length"
    assert single.generate([[5] * 63], SamplingParams(ignore_eos=True))[0].prompt_tokens == 63
    assert is_idle(single)


def test_stop_ids_end_after_the_token(engine: Engine) -> None:
    assert engine.tokenizer is not None
    whole = engine.generate([[5, 6]], sampled(3, 20))[0]
    unused = next(id for id in range(10, VOCAB) if id not in whole.ids)
    for at in (0, 4, 19):
        stop_id = whole.ids[at]
        first = whole.ids.index(stop_id)
        done = engine.generate([[5, 6]], sampled(3, 20, stop_ids=(stop_id, unused)))[0]
        assert done.finish_reason == "stop" and done.ids == whole.ids[: first + 1]
        assert done.text == engine.tokenizer.decode(whole.ids[:first])


@pytest.mark.parametrize("turn_end", sorted(STOPS))
def test_turn_ends_stop_unless_ignored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, turn_end: int
) -> None:
    """With that id made likely: ignored, it is a token like others; else the first one is the last token."""
    model, logits = engine.model, type(engine.model).logits
    bias = torch.zeros(VOCAB).index_fill(0, torch.tensor([turn_end]), 4.0)
    monkeypatch.setattr(model, "logits", lambda streams: logits(model, streams) + bias)
    requests = [engine.request([5, 6], sampled(seed, 12)) for seed in range(4)]
    for request, whole in zip(requests, engine.generate(requests), strict=True):
        ends = [i for i, id in enumerate(whole.ids) if id in STOPS]
        done = engine.generate([[5, 6]], sampled(request.params.seed or 0, 12, ignore_eos=False))[0]
        assert done.ids == (whole.ids[: ends[0] + 1] if ends else whole.ids)
        assert done.finish_reason == ("stop" if ends else "length")
        if ends and done.ids[-1] == turn_end and len(done.ids) > 1:
            return
    raise AssertionError("no run met the id; raise its bias")


def test_stop_strings_span_tokens(engine: Engine) -> None:
    """Every token is one byte or one placeholder, so two characters are at least two tokens."""
    whole = engine.generate(["hi"], sampled(4, 30))[0]
    for start, length in ((0, 1), (0, 3), (6, 1), (6, 2), (6, 9)):
        stop = whole.text[start : start + length]
        at = whole.text.index(stop)
        deltas = list(engine.stream(engine.request("hi", sampled(4, 30, stop=("no such text", stop)))))
        assert "".join(d.text for d in deltas) == whole.text[:at]
        assert deltas[-1].finish_reason == "stop" and all(d.finish_reason is None for d in deltas[:-1])
        assert len(deltas) < 30


def test_the_first_stop_string_to_be_complete_wins(engine: Engine) -> None:
    whole = engine.generate(["hi"], sampled(4, 30))[0].text
    late, early = whole[12:15], whole[4:7]
    done = engine.generate(["hi"], sampled(4, 30, stop=(late, early)))[0]
    assert done.text == whole[: min(whole.index(late), whole.index(early))]


def test_what_a_stop_string_holds_back_is_given_at_the_end(engine: Engine) -> None:
    whole = engine.generate(["hi"], sampled(4, 12))[0].text
    almost = whole[-3:] + "never"
    deltas = list(engine.stream(engine.request("hi", sampled(4, 12, stop=(almost,)))))
    assert "".join(d.text for d in deltas) == whole and deltas[-1].finish_reason == "length"
    assert deltas[-1].text.endswith(whole[-3:])


def test_seeds(engine: Engine) -> None:
    first, again, other = (engine.generate(["s"], sampled(s, 10))[0] for s in (1, 1, 2))
    assert first.ids == again.ids != other.ids and (first.seed, other.seed) == (1, 2)
    drawn = engine.generate(["s", "s"], SamplingParams(max_tokens=10, ignore_eos=True))
    assert drawn[0].seed != drawn[1].seed and drawn[0].ids != drawn[1].ids
    for done in drawn:
        repeated = engine.generate(["s"], sampled(done.seed, 10))[0]
        assert repeated.ids == done.ids, "the reported seed repeats it"
    assert engine.generate(["s"], sampled(2**64 - 1, 1))[0].seed == 2**64 - 1


def test_each_token_is_drawn_with_its_own_number(engine: Engine) -> None:
    """A sampled token follows from the logits, the filters, the seed and its index, and nothing else."""
    filters = {"temperature": 1.3, "top_k": 200, "top_p": 0.95, "min_p": 0.01}
    prompt, done = [3, 1, 4], engine.generate([[3, 1, 4]], sampled(9, 10, **filters))[0]
    ids = prompt + done.ids
    logits = score_ids(engine, ids, len(ids))["prefill_logits"][2:-1]
    for index, (row, id) in enumerate(zip(logits, done.ids, strict=True)):
        settings = torch.tensor([pack(**filters, seed=9, index=index)])
        assert unpack(choose(row.unsqueeze(0), settings, None)[0].tolist()).id == id


def test_logprobs_are_of_the_models_own_distribution(engine: Engine) -> None:
    prompt = [3, 1, 4, 1, 5]
    params = sampled(2, 6, temperature=0.5, top_k=3, logprobs=4)
    done = engine.generate([prompt], params)[0]
    ids = prompt + done.ids
    want = score_ids(engine, ids, len(ids))["prefill_logits"].double().log_softmax(-1)
    for index, token in enumerate(done.tokens):
        row = want[len(prompt) - 1 + index]
        assert token.logprob == pytest.approx(float(row[token.id]), abs=2e-6)
        best = row.sort(descending=True, stable=True).indices[:4].tolist()
        assert [id for id, _ in token.top] == best
        assert [p for _, p in token.top] == pytest.approx([float(row[id]) for id in best], abs=2e-6)
    greedy = engine.generate([prompt], SamplingParams(max_tokens=4, temperature=0, logprobs=VOCAB))[0]
    for token in greedy.tokens:
        assert token.top[0] == (token.id, token.logprob) and len(token.top) == VOCAB
        assert math.fsum(math.exp(p) for _, p in token.top) == pytest.approx(1, abs=VOCAB * 2.0**-23)
    none = engine.generate([prompt], sampled(2, 2, logprobs=0))[0].tokens[0]
    assert none.top == () and none.logprob is not None
    assert engine.generate([prompt], sampled(2, 2))[0].tokens[0].logprob is None


def test_cancel_frees_slot_and_pages_at_once(single: Engine) -> None:
    running = single.stream(single.request([1, 2, 3], sampled(0, 50)))
    waiting = single.stream(single.request([4, 5], sampled(0, 50)))
    next_one = single.stream(single.request([7, 8], sampled(5, 4)))
    next(running)
    assert single.slots.num_free == 0 and single.slots.pool.num_free < single.slots.pool.num_pages
    single.cancel(waiting.output.sequence.request.id)
    assert [(d.token, d.finish_reason) for d in waiting] == [(None, "cancelled")]
    single.cancel(running.output.sequence.request.id)
    assert single.slots.num_free == 1 and single.slots.pool.num_free == single.slots.pool.num_pages
    assert [(d.token, d.finish_reason) for d in running] == [(None, "cancelled")]
    after = [d.token.id for d in next_one if d.token]
    assert after == single.generate([[7, 8]], sampled(5, 4))[0].ids, "nothing of the cancelled ones is left"
    for stream in (running, waiting, next_one):
        with pytest.raises(RequestError, match="is not running"):
            single.cancel(stream.output.sequence.request.id)
    assert is_idle(single)


def test_cancel_gives_out_the_text_held_back(engine: Engine) -> None:
    whole = engine.generate(["hi"], sampled(4, 12))[0].text
    stream = engine.stream(engine.request("hi", sampled(4, 30, stop=(whole[:40] + "never",))))
    text = "".join(next(stream).text for _ in range(2))
    stream.close()
    assert whole.startswith(text + "".join(d.text for d in stream)) and text == ""


def test_closing_a_stream_cancels(engine: Engine) -> None:
    stream = engine.stream(engine.request([1], sampled(0)))
    next(stream)
    assert not is_idle(engine)
    stream.close()
    assert is_idle(engine)
    stream.close()
    with pytest.raises(KeyError), engine.stream(engine.request([1], sampled(0))) as stream:
        next(stream)
        raise KeyError
    assert is_idle(engine)


def test_a_refused_prompt_takes_its_companions_along(engine: Engine) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.generate([[1], [2], [VOCAB]], GREEDY)
    assert is_idle(engine)


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([5] * 512, {}, "prompt of 512 tokens + max_tokens 1 = 513 exceeds max_context 512"),
        ([5] * 9000, {}, "prompt of 9000 tokens + max_tokens 1 = 9001 exceeds max_context 512"),
        ([5] * 500, {"max_tokens": 13}, "prompt of 500 tokens + max_tokens 13 = 513 exceeds max_context 512"),
        ([], {}, "the prompt is empty; give at least one token"),
        ([1, VOCAB], {}, "prompt id 300 is outside the vocabulary of 300"),
        ([1, -1], {}, "prompt id -1 is outside the vocabulary of 300"),
        ([1, 1.5], {}, "a prompt is a text or a list of token ids ('float' object cannot"),
        (7, {}, "a prompt is a text or a list of token ids ('int' object is not iterable)"),
        ([1], {"logprobs": 301}, "logprobs asks for 301 alternatives of a vocabulary of 300"),
        ([1], {"stop_ids": (2, 300)}, "stop id 300 is outside the vocabulary of 300"),
    ],
)
def test_refusals_give_the_numbers(engine: Engine, ids: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.submit(engine.request(ids, SamplingParams(**params)))


def test_the_longest_request_that_fits(engine: Engine) -> None:
    with engine.stream(engine.request([5] * 500, SamplingParams(max_tokens=12))) as stream:
        assert next(stream).token is not None


def test_a_request_id_can_run_once_at_a_time(engine: Engine) -> None:
    request = engine.request([1, 2], GREEDY)
    with engine.stream(request), pytest.raises(RequestError, match=f"{request.id!r} is already running"):
        engine.submit(request)
    assert engine.generate([request])[0].request_id == request.id


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", (0, -1, 1.5, "8", True)),
        ("temperature", (-0.1, math.nan, math.inf, "1", None, True)),
        ("top_k", (-1, 0.5, None, "3")),
        ("top_p", (0, -0.1, 1.01, math.nan, None)),
        ("min_p", (-0.1, 1.01, math.nan, None)),
        ("seed", (-1, 2**64, 0.5, "0", True)),
        ("logprobs", (-1, 1.5, True)),
        ("stop_ids", ((-1,), (1.5,), "1", 1, None)),
        ("stop", (("",), "word", (1,), None, ("ok", ""))),
    ],
)
def test_bad_sampling_params(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{name} is .*, expected "):
            SamplingParams(**{name: value})


def test_good_sampling_params() -> None:
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=0, logprobs=0)
    SamplingParams(temperature=2.5, top_p=1e-9, min_p=1.0, stop_ids=[0], stop=["\n"])  # type: ignore[arg-type]


def test_more_requests_than_places(engine_for: Callable[..., Engine]) -> None:
    """Twelve requests on two places: at most two run, first come first served, and all are served."""
    engine = engine_for("modelopt", max_batch=2, chunk=8)
    rng = random.Random(3)
    requests = [
        engine.request(
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))], sampled(i, rng.randrange(1, 6))
        )
        for i in range(12)
    ]
    for request in requests:
        engine.submit(request)
    started: list[str] = []
    finished: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.num_unfinished:
        deltas = engine.step()
        running = [s.request.id for s in engine.scheduler.running]
        assert len(running) <= 2
        started += [id for id in running if id not in started]
        for delta in deltas:
            assert delta.token is not None
            finished[delta.request_id].append(delta.token.id)
    assert is_idle(engine)
    order = [request.id for request in requests]
    assert started == [id for id in order if id in started], "in the order they came"
    for request in requests:
        assert finished[request.id] == engine.generate([request])[0].ids


def test_a_queue_that_can_never_move_is_an_error(single: Engine) -> None:
    """A slot taken outside the engine's own bookkeeping: waiting for it would be an endless loop."""
    slot = single.slots.claim(single.next_number(), 10)
    assert slot is not None
    with (
        single.stream(single.request([5], GREEDY)) as stream,
        pytest.raises(RequestError, match="1 requests wait for cache space"),
    ):
        next(stream)
    single.slots.release(slot)
    assert is_idle(single)


def test_chunk_does_not_change_results(engine: Engine, engine_for: Callable[..., Engine]) -> None:
    params = sampled(7, 8, logprobs=2)
    prompts = [list(range(1, 70)), [8], list(range(60, 20, -1))]
    want = [(d.tokens, d.text) for d in engine.generate(prompts, params)]
    for chunk in (7, 512):
        got = engine_for("modelopt", chunk=chunk).generate(prompts, params)
        assert [(d.tokens, d.text) for d in got] == want


# What each option does to the logits. 140 ids reach past the window and close a block of 128.


def with_tokenizer(model: Path, folder: Path, tokenizer: str | None) -> Path:
    """The same model beside another tokenizer.json, or none."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def test_a_tokenizer_larger_than_the_model_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = with_tokenizer(checkpoint("modelopt"), tmp_path / "m", byte_tokenizer_json(VOCAB + 1))
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 301 ids, the model 300 rows"):
        Engine.load(folder)


def test_without_a_tokenizer_ids_work_and_text_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, engine: Engine
) -> None:
    folder = with_tokenizer(checkpoint("modelopt"), tmp_path / "m", None)
    plain = Engine.load(folder, EngineConfig(max_context=128, max_batch=1))
    done = plain.generate([[5, 6]], sampled(3, 30))[0]
    assert done.ids == engine.generate([[5, 6]], sampled(3, 30))[0].ids and done.text == ""
    with pytest.raises(RequestError, match=r"no tokenizer\.json; give token ids instead of text"):
        plain.request("text")
    with pytest.raises(RequestError, match=r"stop strings need a tokenizer\.json"):
        plain.generate([[5]], SamplingParams(stop=("x",)))
    assert is_idle(plain)


@pytest.mark.parametrize("hole", [False, True])
def test_ids_without_a_text_are_shown_as_unknown(
    checkpoint: Callable[..., Path], tmp_path: Path, engine: Engine, hole: bool
) -> None:
    """A vocabulary is padded to a round size, and its file may skip ids: such rows can still be sampled."""
    tokenizer = json.loads(byte_tokenizer_json(VOCAB if hole else 280))
    missing = set(range(280, VOCAB))
    if hole:
        missing.remove(VOCAB - 1)
        added = tokenizer["added_tokens"]
        names = {token["content"] for token in added if token["id"] in missing}
        tokenizer["added_tokens"] = [token for token in added if token["content"] not in names]
        tokenizer["model"]["vocab"] = {t: i for t, i in tokenizer["model"]["vocab"].items() if t not in names}
    folder = with_tokenizer(checkpoint("modelopt"), tmp_path / "m", json.dumps(tokenizer))
    padded = Engine.load(folder, EngineConfig(max_context=256, max_batch=1))
    done = padded.generate([[5, 6]], sampled(3, 40))[0]
    assert done.ids == engine.generate([[5, 6]], sampled(3, 40))[0].ids and missing & set(done.ids)
    assert engine.tokenizer is not None
    want, known = "", []
    for id in [*done.ids, None]:
        if id is None or id in missing:
            want += engine.tokenizer.decode(known) + ("" if id is None else "\ufffd")
            known = []
        else:
            known.append(id)
    assert done.text == want


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_end_that_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    """The broken request raises its own error; its neighbour, in the same steps, does not notice."""
    alone = engine.generate([[8, 9]], sampled(1, 10))[0].ids
    broken = engine.stream(engine.request([5, 6], sampled(0, 10)))
    healthy = engine.stream(engine.request([8, 9], sampled(1, 10)))
    ids = [next(healthy).token.id for _ in range(3)]  # type: ignore[union-attr]
    model, logits = engine.model, type(engine.model).logits

    def first_row_bad(streams: Tensor) -> Tensor:
        out = logits(model, streams).clone()
        if broken.output.sequence in engine.scheduler.running:
            out[0, 7] = bad
        return out

    monkeypatch.setattr(model, "logits", first_row_bad)
    assert len([next(broken) for _ in range(3)]) == 3, "what came before the damage is still given out"
    ids += [d.token.id for d in healthy if d.token]
    assert ids == alone
    with pytest.raises(RequestError, match="logits for position 5 hold NaN or infinity"):
        next(broken)
    assert list(broken) == [] and is_idle(engine)


def test_generate_raises_on_damage_and_the_engine_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = engine.generate([[5, 6]], GREEDY)[0].ids
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "logits", lambda streams: torch.full((len(streams), VOCAB), math.nan))
        with pytest.raises(RequestError, match="the weights are damaged"):
            engine.generate([[5, 6], [7], [8]], GREEDY)
        assert is_idle(engine)
        engine.submit(engine.request([5], GREEDY))
        (delta,) = engine.step()
        assert delta.token is None and delta.finish_reason == "error" and "position 1" in delta.error
    assert engine.generate([[5, 6]], GREEDY)[0].ids == want
