"""Evaluation on random models and on answers written by hand: every figure is what counting gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_file, write_file

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.errors import RequestError
from dsv4.lab.evalset import Item
from dsv4.lab.evaluate import Answer, Outcome, _turns, draft_hits, evaluate, figures, settings
from dsv4.lab.judge import Rate
from dsv4.lab.score import TextScore, score_ids, score_text
from dsv4.text.deltas import Message, ToolCall


def ask(suite: str, text: str, expected: Any, thinking: bool = False, **more: Any) -> Item:
    kind = more.pop("kind", "kind")
    return Item(suite, kind, ({"role": "user", "content": text},), thinking, expected, **more)


ITEMS = [
    ask("stories", "Tell me of a cat.", ["cat", "hat"]),
    ask("stories", "A story, please.", ["hat"], thinking=True),
    ask("sums", "What is 1 + 1?", "2"),
    ask("recall", "Ann is in the park. Where is Ann?", "park", distance_tokens=30, context_tokens=40),
    ask("chat", "Hello!", None),
    Item("text", "books", text="Once upon a time."),
    Item("text", "tales", text="There was a king."),
]


@pytest.fixture(scope="module")
def engine(engine_for: Callable[..., Engine]) -> Engine:
    return engine_for()


def test_answers_are_the_engines_greedy_ones(engine: Engine) -> None:
    """Whatever runs beside them; and the progress reaches its end."""
    calls: list[tuple[int, int]] = []
    outcome = evaluate(engine, ITEMS, 8, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (9, 9) and calls == sorted(calls), "7 items and the drafts of 2 stories"
    assert [answer.item for answer in outcome.answers] == ITEMS[:5] and outcome.is_complete
    assert not outcome.notes and engine.num_unfinished == 0
    for answer in outcome.answers:
        done = engine.generate([list(answer.prompt_ids)], SamplingParams(max_tokens=8, temperature=0))[0]
        assert tuple(done.ids) == answer.ids and answer.is_ended == (done.finish_reason == "stop")
    assert outcome.answers[1].message.reasoning and not outcome.answers[1].message.content, "still thinking"
    assert outcome.answers[0].message.content and not outcome.answers[0].message.reasoning
    scores = [score_text(engine, item.text) for item in ITEMS[5:]]
    found = figures(outcome)
    assert found["text"]["bytes"] == 34 and found["text"]["tokens"] == 34
    nats = sum(score.nats for score in scores)
    assert found["text"]["bits_per_byte"] == pytest.approx(nats / 34 / 0.6931471805599453)
    assert found["text"]["by_kind"]["tales"]["bits_per_byte"] == pytest.approx(scores[1].bits_per_byte)
    assert found["mtp_acceptance"]["total"] == sum(len(a.ids) - 1 for a in outcome.answers[:2])


def test_draft_hits_against_the_scores(engine: Engine, engine_for: Callable[..., Engine]) -> None:
    """score's mtp_logits at i foretell i + 2; chunks do not matter. An answer made of drafts is all hits."""
    prompt = tuple(range(30, 75))
    answer = tuple(engine.generate([list(prompt)], SamplingParams(max_tokens=40, temperature=0))[0].ids)
    ids = [*prompt, *answer]
    logits = score_ids(engine, ids, len(ids) - 1, mtp=True)["mtp_logits"]
    want = [int(logits[at - 2].argmax()) == ids[at] for at in range(len(prompt) + 1, len(ids))]
    assert draft_hits(engine, prompt, answer) == want and len(want) == len(answer) - 1
    assert draft_hits(engine_for(chunk=7), prompt, answer) == want
    foretold = [answer[0]]
    for _ in range(5):
        known = [*prompt, *foretold]
        logits = score_ids(engine, known, len(known) - 1, mtp=True)["mtp_logits"]
        foretold.append(int(logits[-1].argmax()))
    assert draft_hits(engine, prompt, tuple(foretold)) == [True] * 5
    foretold[3] = (foretold[3] + 1) % 300
    assert draft_hits(engine, prompt, tuple(foretold[:4])) == [True, True, False]
    assert draft_hits(engine, prompt, answer[:1]) == []


def with_head(model: Path, folder: Path, keep: Callable[[int], bool]) -> Path:
    """The model with the head's rows of other ids zeroed: their logits are 0, and ties go to the lower id."""
    for file in ("config.json", "tokenizer.json"):
        (folder / file).symlink_to(model / file)
    tensors = read_file(model / "model.safetensors")
    head = tensors["head.weight"]
    row = len(head.data) // head.shape[0]
    for id in range(head.shape[0]):
        if not keep(id):
            head.data[id * row : (id + 1) * row] = bytes(row)
    write_file(folder / "model.safetensors", tensors)
    return folder


def test_endings(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """With a head of zeros the first token is id 0, which ends the turn; without any end it goes on."""
    for name, keep, want in (("ends", lambda id: False, 1.0), ("endless", lambda id: id > 4, 0.0)):
        (tmp_path / name).mkdir()
        folder = with_head(checkpoint(), tmp_path / name, keep)
        outcome = evaluate(Engine.load(folder, EngineConfig(max_context=256)), ITEMS, 8)
        found = figures(outcome)
        assert found["ended"]["share"] == want and found["ended"]["total"] == 5
        assert {rate["share"] for rate in found["ended"]["by_suite"].values()} == {want}
        assert ("mtp_acceptance" in found) == (not want), "an answer of one token has nothing drafted"


def test_what_does_not_fit_is_left_out_and_said(engine_for: Callable[..., Engine]) -> None:
    engine = engine_for(max_context=64)
    long = [ask("sums", "x" * 100, "2"), ask("sums", "y" * 57, "2"), *ITEMS]
    outcome = evaluate(engine, long, 20)
    assert outcome.notes == ["1 prompts were left out: they do not fit max_context 64"]
    assert len(outcome.answers) == 6 and len(outcome.answers[0].ids) <= 64 - len(
        outcome.answers[0].prompt_ids
    )


def test_stopped_early(engine: Engine) -> None:
    """What is finished is counted, what is not is given back to the cache."""
    for steps in (0, 12, 20):
        asked = 0

        def stopped(steps: int = steps) -> bool:
            nonlocal asked
            asked += 1
            return asked > steps

        items = [*ITEMS, *[ask("sums", f"What is {n} + {n}?", "2") for n in range(12)]]
        outcome = evaluate(engine, items, 8, stopped=stopped)
        assert not outcome.is_complete and engine.num_unfinished == 0
        assert outcome.notes[-1] == f"stopped after {len(outcome.answers)} of 19 prompts and texts"
        assert (len(outcome.answers) > 0) == (steps > 0) and len(outcome.answers) < 17
        assert figures(outcome) if steps else figures(outcome) == {}
    assert evaluate(engine, ITEMS, 4).is_complete, "and the engine can go on"


def test_models_that_lack_something(
    engine_for: Callable[..., Engine], checkpoint: Callable[..., Path]
) -> None:
    outcome = evaluate(engine_for("hf-bf16"), ITEMS, 4)
    assert outcome.drafts is None and "mtp_acceptance" not in figures(outcome)
    assert outcome.notes == ["the checkpoint has no draft block (mtp.*), so there is no MTP acceptance"]
    assert not evaluate(engine_for("hf-bf16"), ITEMS[2:], 4).notes, "nothing was to be drafted"
    engine = engine_for()
    with pytest.raises(RequestError, match="holds nothing of this suite"):
        evaluate(engine, [], 4)
    engine.tokenizer = None
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        evaluate(engine, ITEMS, 4)


def said(item: Item, content: str, ended: bool = True) -> Answer:
    return Answer(item, (0,), (1, 2), Message("", content, (), "stop", (), ""), ended)


def recalled(distance: int, context: int, right: bool, kind: str = "one step") -> Answer:
    item = ask("recall", "?", "park", distance_tokens=distance, context_tokens=context, kind=kind)
    return said(item, "In the park." if right else "In the parking lot.", ended=right)


def test_figures_of_answers_written_by_hand() -> None:
    outcome = Outcome(
        [
            said(ITEMS[0], "The cats had a hat."),
            said(ITEMS[1], "No such thing", ended=False),
            said(ask("sums", "?", "2", kind="+"), "1 + 1 = 2."),
            said(ask("sums", "?", "2", kind="+"), "2 is not 3."),
            said(ask("sums", "?", "1024", kind="x"), "1,024"),
            said(ITEMS[4], "anything"),
            said(ask("chat", "?", "8 4 5", kind="copy"), "8 4 5"),
            *[recalled(1, 300, True), recalled(128, 400, True), recalled(129, 512, False)],
            *[recalled(300, 513, True), recalled(3000, 4000, False, "two steps")],
        ],
        [(ITEMS[5], TextScore(4, 10, 6.931471805599453)), (ITEMS[6], TextScore(4, 30, 6.931471805599453))],
        Rate(3, 4),
    )
    found = figures(outcome)
    assert found["text"]["bits_per_byte"] == pytest.approx(0.5)
    assert found["text"]["by_kind"]["books"]["bits_per_byte"] == pytest.approx(1.0)
    assert counts(found["stories"]["words_used"]) == (2, 3) and counts(found["stories"]["all_words"]) == (
        1,
        2,
    )
    assert counts(found["sums"]["exact"]) == (2, 3)
    assert {kind: counts(rate) for kind, rate in found["sums"]["by_kind"].items()} == {
        "+": (1, 2),
        "x": (1, 1),
    }
    assert counts(found["recall"]["found"]) == (3, 5)
    bins = [(one["from"], one["to"], one["mean"], *counts(one)) for one in found["recall"]["by_distance"]]
    assert bins == [
        (1, 128, 64.5, 2, 2),
        (129, 256, 129, 0, 1),
        (257, 512, 300, 1, 1),
        (2049, 4096, 3000, 0, 1),
    ]
    bins = [(one["from"], one["to"], *counts(one)) for one in found["recall"]["by_context"]]
    assert bins == [(257, 512, 2, 3), (513, 1024, 1, 1), (2049, 4096, 0, 1)]
    assert found["recall"]["by_kind"].keys() == {"one step", "two steps"}
    assert counts(found["chat"]["matches"]) == (1, 1) and found["chat"]["by_kind"].keys() == {"copy"}
    assert counts(found["ended"]) == (9, 12) and counts(found["ended"]["by_suite"]["recall"]) == (3, 5)
    assert counts(found["mtp_acceptance"]) == (3, 4)


def test_steps_of_a_conversation_with_tools() -> None:
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    steps = [{"calls": [call], "results": ["3"]}, {"says": ["3"]}]
    item = ask("tools", "1 + 2?", steps, tools=({"type": "function"},))
    made = Message("", "", (ToolCall("c", "add", '{"a": 1, "b": 2}'),), "tool_calls", (), "")
    first = Answer(item, (0,), (1,), made, True)
    assert first.is_step_right and not first.is_right, "the answer from the result is missing"
    assert [turn["role"] for turn in _turns(made, ["3"])] == ["assistant", "tool"]
    told = Message("", "It is 3.", (), "stop", (), "")
    assert Answer(item, (0,), (1,), told, True, step=1).is_right
    assert not Answer(item, (0,), (1,), told, True).is_right
    assert not Answer(item, (0,), (1,), made, True, step=1).is_right
    found = figures(Outcome([first, said(ask("json", "?", {"a": 1}), '{"a": 1}')]))
    assert counts(found["tools"]["right"]) == (0, 1) and counts(found["json"]["right"]) == (1, 1)
    assert said(ask("unknown", "?", None), "I do not know.").is_right
    assert not said(ask("unknown", "?", None), "Paris.").is_right


def counts(rate: dict[str, Any]) -> tuple[int, int]:
    return rate["hits"], rate["total"]


def test_settings_are_the_settled_ones(engine_for: Callable[..., Engine]) -> None:
    found = settings(
        engine_for(activations="a8", cache="bf16", ops=(("index", "recipes.ablations.index_dense"),))
    )
    assert found["activations"] == "a8" and found["cache"] == found["index_keys"] == "bf16"
    assert found["compute_dtype"] == "float32" and found["device"] == "cpu" and found["weights"] == "dense"
    assert found["ops"]["index"] == "recipes.ablations.index_dense" and found["torch"] == torch.__version__
