"""Runs an evaluation set through the engine and counts: answers, endings, bits per byte, accepted drafts."""

import json
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dsv4 import disk
from dsv4.engine.engine import Engine
from dsv4.engine.request import SamplingParams
from dsv4.engine.trial import Trial
from dsv4.errors import RequestError
from dsv4.lab.evalset import TEXT, Item
from dsv4.lab.judge import Rate, admits, as_number, last_number, same_calls, same_json, says, uses
from dsv4.lab.score import Progress, TextScore, score_text
from dsv4.text.chat import encode
from dsv4.text.deltas import Message
from dsv4.text.stream import parse
from dsv4.text.tokenizer import Tokenizer

SMALLEST_BIN = 128


@dataclass(frozen=True)
class Answer:
    """What the model made of one prompt, chosen greedily."""

    item: Item
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    message: Message
    is_ended: bool  # by the model itself
    step: int = 0  # of those a conversation with tools should take: the last one taken

    @property
    def words_used(self) -> list[bool]:
        """Of each requested word of a story, whether it is there."""
        return [uses(self.message.content, word) for word in self.item.expected]

    @property
    def is_right(self) -> bool | None:
        """None where nothing is expected but that the answer ends."""
        expected, content = self.item.expected, self.message.content
        if self.item.suite == "unknown":
            return admits(content)
        if expected is None:
            return None
        if self.item.suite == "stories":
            return all(self.words_used)
        if self.item.suite == "sums":
            return last_number(content) == as_number(expected)
        if self.item.suite == "tools":
            return self.step + 1 == len(expected) and self.is_step_right
        if self.item.suite == "json":
            return same_json(content, expected)
        return says(content, expected)

    @property
    def is_step_right(self) -> bool:
        """Whether this is what the step of a conversation with tools asks for."""
        step, message = self.item.expected[self.step], self.message
        made = [(call.name, call.arguments) for call in message.tool_calls]
        return same_calls(made, step.get("calls", [])) and all(
            says(message.content, word) for word in step.get("says", ())
        )

    def as_dict(self) -> dict[str, Any]:
        item = self.item
        return {
            **{"suite": item.suite, "kind": item.kind, "thinking": item.thinking},
            "prompt": item.messages[-1]["content"],
            **{"distance_tokens": item.distance_tokens, "context_tokens": item.context_tokens},
            **{"expected": item.expected, "right": self.is_right, "ended": self.is_ended},
            **{"reasoning": self.message.reasoning, "content": self.message.content},
        }


@dataclass
class Outcome:
    """All that was measured. `notes` say what is not there, and why."""

    answers: list[Answer] = field(default_factory=list)
    texts: list[tuple[Item, TextScore]] = field(default_factory=list)
    drafts: Rate | None = None
    notes: list[str] = field(default_factory=list)
    is_complete: bool = True


def evaluate(
    engine: Engine,
    items: list[Item],
    max_tokens: int,
    progress: Progress | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Greedy answers of at most `max_tokens` to every prompt, run together; texts and drafts after that.

    `stopped` is asked between steps; what is finished by then is in the outcome.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError("the model folder has no tokenizer.json; an evaluation set is text and needs one")
    if not items:
        raise RequestError("the evaluation set holds nothing of this suite; choose another suite or set")
    outcome = Outcome()
    prompts = [item for item in items if item.suite != TEXT]
    texts = [item for item in items if item.suite == TEXT]
    num_stories = sum(item.suite == "stories" for item in prompts)
    total = len(items) + (num_stories if engine.model.mtp else 0)

    def report(done: int) -> None:
        if progress:
            progress(done, total)

    outcome.answers = _answer_all(engine, tokenizer, prompts, max_tokens, outcome.notes, report, stopped)
    done = len(prompts)
    for item in texts:
        if stopped():
            break
        outcome.texts.append((item, score_text(engine, item.text)))
        done += 1
        report(done)
    if engine.model.dspark:
        outcome.notes.append(f"DSpark: {engine.counts or 'no drafts were made'}")
    elif num_stories and not engine.model.mtp:
        outcome.notes.append("the checkpoint has no draft block (mtp.*), so there is no MTP acceptance")
    elif num_stories:
        outcome.drafts = _drafts(engine, outcome.answers, lambda count: report(done + count), stopped)
    if stopped():
        outcome.is_complete = False
        finished = len(outcome.answers) + len(outcome.texts)
        outcome.notes.append(f"stopped after {finished} of {len(items)} prompts and texts")
    return outcome


def _answer_all(
    engine: Engine,
    tokenizer: Tokenizer,
    items: list[Item],
    max_tokens: int,
    notes: list[str],
    report: Callable[[int], None],
    stopped: Callable[[], bool],
) -> list[Answer]:
    max_context, left_out, done = engine.settings.max_context, 0, 0
    answers: dict[int, Answer] = {}
    # Number of the item, its step and the conversation up to there; each round answers one step of all.
    waiting = [(number, 0, list(item.messages)) for number, item in enumerate(items)]
    while waiting and not stopped():
        requests = []
        for number, step, messages in waiting:
            item = items[number]
            segments = encode(
                messages,
                thinking=item.thinking,
                tools=item.tools or None,
                response_format=item.schema,
                release=engine.model_config.release,
            )
            ids = tokenizer.encode_prompt(segments)
            if (room := max_context - len(ids)) < 1:
                left_out += 1
                continue
            params = SamplingParams(max_tokens=min(room, max_tokens), temperature=0)
            requests.append((number, step, messages, engine.request(ids, params)))
        waiting = []
        with ExitStack() as stack:
            streams = [stack.enter_context(engine.stream(request)) for *_, request in requests]
            while engine.num_unfinished and not stopped():
                engine.step()
                report(min(len(items), max(done, len(items) - engine.num_unfinished)))
            for (number, step, messages, request), stream in zip(requests, streams, strict=True):
                stream.close()
                found = stream.completion()
                if found.finish_reason == "cancelled":
                    continue
                item = items[number]
                message = parse(
                    found.ids, thinking=item.thinking, tokenizer=tokenizer, reason=found.finish_reason
                )
                answer = Answer(
                    item, request.ids, tuple(found.ids), message, found.finish_reason == "stop", step
                )
                answers[number] = answer
                if item.suite == "tools" and step + 1 < len(item.expected) and answer.is_step_right:
                    waiting.append(
                        (number, step + 1, [*messages, *_turns(message, item.expected[step]["results"])])
                    )
        done = len(items)
    if left_out:
        notes.append(f"{left_out} prompts were left out: they do not fit max_context {max_context}")
    return [answers[number] for number in sorted(answers)]


def _turns(message: Message, results: list[str]) -> list[dict[str, Any]]:
    """The model's turn with its calls, and what they gave."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    said = {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning}
    given = zip(message.tool_calls, results, strict=True)
    return [
        {**said, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": c.id, "content": r} for c, r in given),
    ]


def _drafts(
    engine: Engine, answers: list[Answer], report: Callable[[int], None], stopped: Callable[[], bool]
) -> Rate | None:
    """How often the draft block's first token is the one the trunk then chose, in the stories' answers."""
    hits = total = 0
    for count, answer in enumerate((a for a in answers if a.item.suite == "stories"), 1):
        if stopped():
            break
        accepted = draft_hits(engine, answer.prompt_ids, answer.ids)
        hits, total = hits + sum(accepted), total + len(accepted)
        report(count)
    return Rate(hits, total) if total else None


def draft_hits(engine: Engine, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[bool]:
    """For each token of a greedy answer but the first: whether the draft block foretold it.

    The block sees the trunk's streams up to two tokens before, and the token before.
    """
    ids = [*prompt, *answer]
    end = len(ids) - 2
    drafted: list[int] = []
    with Trial(engine, len(ids)) as trial:
        for start in range(0, end, engine.settings.chunk):
            stop = min(end, start + engine.settings.chunk)
            _, logits = trial.read(ids[start:stop], ids[start + 1 : stop + 1])
            assert logits is not None
            drafted += logits.sort(descending=True, stable=True).indices[:, 0].tolist()
    first = len(prompt) + 1
    return [drafted[at - 2] == ids[at] for at in range(first, len(ids))]


def figures(outcome: Outcome) -> dict[str, Any]:
    """Every figure as plain data; a suite that was not asked for has none."""
    out: dict[str, Any] = {}
    of: dict[str, list[Answer]] = {}
    for answer in outcome.answers:
        of.setdefault(answer.item.suite, []).append(answer)
    if outcome.texts:
        sources = dict.fromkeys(item.kind for item, _ in outcome.texts)
        out["text"] = _bits([score for _, score in outcome.texts])
        out["text"]["by_kind"] = {
            kind: _bits([score for item, score in outcome.texts if item.kind == kind]) for kind in sources
        }
    if stories := of.get("stories"):
        words = [used for answer in stories for used in answer.words_used]
        out["stories"] = {"words_used": Rate.of(words).as_dict(), "all_words": _rate(stories)}
    if sums := of.get("sums"):
        out["sums"] = {"exact": _rate(sums), "by_kind": _by_kind(sums)}
    if recall := of.get("recall"):
        out["recall"] = {
            "found": _rate(recall),
            "by_distance": _bins(recall, lambda item: item.distance_tokens),
            "by_context": _bins(recall, lambda item: item.context_tokens),
            "by_kind": _by_kind(recall),
        }
    for suite in ("tools", "json", "unknown"):
        if found := of.get(suite):
            out[suite] = {"right": _rate(found), "by_kind": _by_kind(found)}
    if chat := [answer for answer in of.get("chat", []) if answer.is_right is not None]:
        out["chat"] = {"matches": _rate(chat), "by_kind": _by_kind(chat)}
    if outcome.answers:
        ended = {suite: Rate.of([a.is_ended for a in answers]).as_dict() for suite, answers in of.items()}
        out["ended"] = Rate.of([a.is_ended for a in outcome.answers]).as_dict() | {"by_suite": ended}
    if outcome.drafts:
        out["mtp_acceptance"] = outcome.drafts.as_dict()
    return out


def write_answers(path: Path, answers: list[Answer]) -> None:
    """One JSON object a line, in the order of the set."""
    lines = [json.dumps(answer.as_dict(), ensure_ascii=False) + "\n" for answer in answers]
    with disk.result(path) as part:
        part.write_text("".join(lines), encoding="utf-8")


def settings(engine: Engine) -> dict[str, Any]:
    """What the figures were made with, every `auto` settled."""
    s, c = engine.settings, engine.config
    return {
        **{"device": s.device.torch_name, "device_name": s.device.name, "threads": s.threads},
        **{"activations": c.activations, "qat": c.qat, "compute_dtype": str(s.dtype).removeprefix("torch.")},
        **{"cache": str(s.kv_format), "index_keys": str(s.key_format)},
        **{"weights": "tiled" if s.tiled else "dense" if s.dense else "packed", "max_context": s.max_context},
        **{"max_batch": c.max_batch, "chunk": s.chunk, "ops": s.ops.names()},
        **{"torch": torch.__version__, "python": platform.python_version()},
    }


def _rate(answers: list[Answer]) -> dict[str, Any]:
    return Rate.of([bool(answer.is_right) for answer in answers]).as_dict()


def _by_kind(answers: list[Answer]) -> dict[str, Any]:
    kinds = sorted({answer.item.kind for answer in answers})
    return {kind: _rate([answer for answer in answers if answer.item.kind == kind]) for kind in kinds}


def _bits(scores: list[TextScore]) -> dict[str, Any]:
    whole = TextScore(*(sum(getattr(s, name) for s in scores) for name in ("tokens", "bytes", "nats")))
    return {"bits_per_byte": whole.bits_per_byte, "tokens": whole.tokens, "bytes": whole.bytes}


def _bins(answers: list[Answer], tokens: Callable[[Item], int]) -> list[dict[str, Any]]:
    """By numbers of tokens up to 128, 256, 512, ...; a bin without an answer is left out."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        end = SMALLEST_BIN
        while end < tokens(answer.item):
            end *= 2
        groups.setdefault(end, []).append(answer)
    out = []
    for end, group in sorted(groups.items()):
        mean = sum(tokens(answer.item) for answer in group) / len(group)
        first = 1 if end == SMALLEST_BIN else end // 2 + 1
        out.append({"from": first, "to": end, "mean": mean, **_rate(group)})
    return out
