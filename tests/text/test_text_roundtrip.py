"""Random conversations: rendered as a second renderer does, and answers read back as they were written."""

import json
import random
from typing import Any

import pytest
from text_support import expected_parameters, plain_render, run, some_conversation, split_texts

from dsv4.text.chat import EFFORT_PREFIX, encode, join
from dsv4.text.stream import parse
from dsv4.text.tokenizer import EOS, Segment, Special, Tokenizer


def some_options(rng: random.Random) -> dict[str, Any]:
    return {
        "thinking": rng.random() < 0.5,
        "drop_thinking": rng.random() < 0.5,
        "reasoning_effort": rng.choice(list(EFFORT_PREFIX["april"])),
    }


def answer_of(whole: list[Segment], messages: list[dict[str, Any]], options: dict[str, Any]) -> list[Segment]:
    """What the model would have to write after the prompt, which must be a prefix of the whole."""
    prompt = encode(messages[:-1], **options)
    assert whole[: len(prompt)] == prompt
    assert prompt[-1] == Special("<think>" if options["thinking"] else "</think>")
    assert whole[-1] == Special(EOS)
    return whole[len(prompt) :]


def check_read_back(message: Any, written: dict[str, Any], thinking: bool) -> None:
    assert message.reasoning == ((written.get("reasoning_content") or "") if thinking else "")
    assert message.content == (written["content"] or "")
    found = [(call.name, call.arguments) for call in message.tool_calls]
    assert found == [
        (
            call["function"]["name"],
            json.dumps(expected_parameters(call["function"]["arguments"]), ensure_ascii=False),
        )
        for call in written.get("tool_calls") or []
    ]
    assert message.finish_reason == ("tool_calls" if found else "stop")
    assert message.problems == ()
    assert message.dropped == ""


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 2000), *(pytest.param(seed, 5000, marks=pytest.mark.slow) for seed in range(4))],
)
def test_random_conversations(seed: int, count: int) -> None:
    rng = random.Random(20260731 + seed)
    num_calls = 0
    for _ in range(count):
        messages, options = some_conversation(rng), some_options(rng)
        prefix = EFFORT_PREFIX["april"][options["reasoning_effort"]]
        expected = plain_render(messages, options["thinking"], options["drop_thinking"], prefix)
        whole = encode(messages, **options)
        assert join(whole) == expected
        answer = answer_of(whole, messages, options)
        message, _ = run(split_texts(rng, answer), thinking=options["thinking"])
        check_read_back(message, messages[-1], options["thinking"])
        num_calls += len(message.tool_calls)
    assert num_calls > count / 2


def test_random_conversations_through_token_ids(v4: Tokenizer) -> None:
    rng = random.Random(813)
    added = set(v4.special_ids.values())
    for _ in range(400):
        messages, options = some_conversation(rng), some_options(rng)
        segments = encode(messages, **options)
        ids = v4.encode_prompt(segments)
        assert v4.decode(ids) == join(segments)
        assert sum(id in added for id in ids) == sum(isinstance(segment, Special) for segment in segments)
        answer = v4.encode_prompt(answer_of(segments, messages, options))
        assert ids[-len(answer) :] == answer
        message = parse(answer, thinking=options["thinking"], tokenizer=v4)
        check_read_back(message, messages[-1], options["thinking"])
