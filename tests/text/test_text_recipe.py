"""DeepSeek's own package as the oracle: prompts, token ids and answers of the releases since 31 July 2026.

Differences that stay, on purpose: integers beyond 64 bits stay exact, exponents are spelled as Python does;
line breaks around a thought are kept, so that an answer that comes back has the tokens that are cached; a
call that is no call (its JSON broken, its tags cut) is text, where the package gives out JSON that nobody
can read, or drops it.
"""

import json
import random
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
import text_support
from text_support import some_arguments, some_name, some_text

from dsv4.text.chat import encode, join
from dsv4.text.stream import parse
from dsv4.text.tokenizer import Tokenizer

ENCODING = recipe.DeepseekV4Encoding()


def some_conversation(rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
    """As clients send them: each call has its result, and the user or a tool has the last word."""
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randrange(1, 5)):
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": some_text(rng)})
        if rng.random() < 0.2:
            messages.append({"role": "latest_reminder", "content": some_text(rng)})
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            messages.append({"role": "user", "content": "u" + some_text(rng)})
        for _ in range(rng.randrange(3)):
            messages += some_turn(rng, thinking)
    return [*messages, {"role": "user", "content": "u" + some_text(rng)}]


def some_turn(rng: random.Random, thinking: bool) -> list[dict[str, Any]]:
    turn: dict[str, Any] = {"role": "assistant", "content": some_text(rng)}
    if thinking:
        turn["reasoning_content"] = some_text(rng)
    names = [f"c{at}" for at in range(rng.choice((0, 0, 1, 2, 3)))]
    if names:
        # Numbers that Python and Rust write differently.
        arguments = (some_arguments(rng).replace("e-09", "").replace(str(10**20), "20") for _ in names)
        calls = [{"name": some_name(rng), "arguments": each} for each in arguments]
        turn["tool_calls"] = [{"id": id, "function": call} for id, call in zip(names, calls, strict=True)]
    rng.shuffle(names)
    return [turn, *({"role": "tool", "content": some_text(rng), "tool_call_id": id} for id in names)]


def some_tool(rng: random.Random) -> dict[str, Any]:
    function: dict[str, Any] = {"parameters": {"type": "object", "é": [1, {"z": None, "a": 0.5}]}}
    function |= {"description": some_text(rng)} if rng.random() < 0.7 else {}
    return {"type": "function", "function": {**function, "name": some_name(rng)}}


def theirs(messages: list[dict[str, Any]], tools: list[dict[str, Any]], **options: Any) -> Any:
    kinds = {
        "system": lambda m: recipe.SystemMessage(m["content"]),
        "user": lambda m: recipe.UserMessage(m["content"]),
        "latest_reminder": lambda m: recipe.LatestReminderMessage(m["content"]),
        "tool": lambda m: recipe.ToolMessage(m["content"], m["tool_call_id"]),
        "assistant": lambda m: recipe.AssistantMessage(
            m["content"],
            m.get("reasoning_content"),
            [recipe.ToolCall(call["id"], **call["function"]) for call in m.get("tool_calls", ())] or None,
            m.get("wo_eos", False),
        ),
    }
    functions = [tool["function"] for tool in tools]
    declared = [recipe.ToolDefinition(f["name"], f.get("description"), f["parameters"]) for f in functions]
    return recipe.Conversation([kinds[m["role"]](m) for m in messages], tools=declared, **options)


@pytest.mark.parametrize("count", [1500, pytest.param(30_000, marks=pytest.mark.slow)])
def test_prompts_and_token_ids(count: int, v4: Tokenizer, v4_path: Path) -> None:
    rng = random.Random(20261020)
    encoding = ENCODING.with_tokenizer(recipe.Tokenizer.from_file(str(v4_path)))
    for at in range(count):
        thinking = rng.random() < 0.6
        messages = some_conversation(rng, thinking)
        if rng.random() < 0.2:
            messages += some_turn(rng, thinking)[:1]
            messages[-1] |= {"wo_eos": True}
            messages[-1].pop("tool_calls", None)
        tools = [some_tool(rng) for _ in range(rng.choice((0, 0, 1, 2)))]
        effort = rng.choice((None, "low", "high", "max"))
        schema: Any = rng.choice((None, None, {"type": "array", "é": 1}))
        wishes = {"thinking_mode": thinking, "reasoning_effort": effort, "response_schema": schema}
        other = theirs(messages, tools, **wishes)
        segments = encode(
            messages,
            thinking=thinking,
            reasoning_effort=effort,
            tools=tools,
            response_format=schema,
            release="0731",
        )
        assert join(segments) == encoding.render_conversation(other).prompt, messages
        if at % 5 == 0:
            assert v4.encode_prompt(segments) == encoding.encode(other)


def their_message(ids: list[int], thinking: bool, tokenizer: Any) -> dict[str, Any]:
    """Token by token through the package's stream, then put together."""
    request = recipe.ConversationRequest(recipe.Conversation(), recipe.ModelVersion.DeepseekV4Pro)
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinking else None
    options = recipe.ParsingOptions(thinking_initial_stage=stage)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "model")
    stream = recipe.StreamProcessor(generator, options, tokenizer)
    finish = recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)
    pushed = [recipe.InferenceChunk.ready(), *(recipe.InferenceChunk.tokens([id]) for id in ids), finish]
    response = recipe.ChatCompletionResponse("id", "model", 0, 0, 0)
    for chunk in [*(out for each in pushed for out in stream.push(each)), *stream.finish()]:
        response.accumulate(chunk)
    return json.loads(response.to_json())["choices"][0]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_answers_token_by_token(
    count: int, v4: Tokenizer, v4_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (globals(), vars(text_support)):  # names that the package can read, too
        monkeypatch.setitem(module, "some_name", lambda rng: rng.choice(("a", "bé", "c_1", "d")))
    rng, tokenizer = random.Random(20261120), recipe.Tokenizer.from_file(str(v4_path))
    num_calls = 0
    for _ in range(count):
        thinking = rng.random() < 0.5
        turn, question = some_turn(rng, thinking)[0], {"role": "user", "content": "u"}
        options: dict[str, Any] = {"thinking": thinking, "drop_thinking": False, "release": "0731"}
        prompt = encode([question], **options)
        ids = v4.encode_prompt(encode([question, {**turn, "wo_eos": True}], **options)[len(prompt) :])
        ours = parse([*ids, v4.eos_id], thinking=thinking, tokenizer=v4)
        theirs = their_message(ids, thinking, tokenizer)
        message = theirs["message"]
        assert ours.finish_reason == theirs["finish_reason"]
        assert ours.reasoning.strip("\n") == (message.get("reasoning_content") or "").strip("\n")
        assert ours.content.strip("\n") == (message.get("content") or "").strip("\n")
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        assert [{"name": c.name, "arguments": c.arguments} for c in ours.tool_calls] == calls
        num_calls += len(calls)
    assert num_calls > count / 2
