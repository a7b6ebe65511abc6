"""Requests of the three APIs to prompts, as DeepSeek's own package makes them of the same bodies."""

import json
import shutil
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
from safetensors.torch import load_file, save_file
from serve_support import Server

from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.models import embedded
from dsv4.serve.anthropic import MessagesBody
from dsv4.serve.app import segments_of
from dsv4.serve.ask import Usual, ask_chat
from dsv4.serve.parse import Notes, parse
from dsv4.serve.responses import ResponsesBody
from dsv4.serve.schema import ChatBody
from dsv4.text.chat import join
from dsv4.text.tokenizer import Tokenizer

CLIENTS = Path(__file__).parents[1] / "data" / "clients"
USUAL = Usual(release="0731")
TOKENIZER = Tokenizer.load(embedded())
KINDS: dict[str, Any] = {
    "/v1/chat/completions": recipe.ChatCompletionRequest,
    "/v1/messages": recipe.MessagesRequest,
    "/v1/responses": recipe.ResponsesRequest,
}


def ours(path: str, data: bytes) -> str:
    notes = Notes()
    if path == "/v1/messages":
        chat = parse(MessagesBody, data).chat(notes)
    elif path == "/v1/responses":
        body = parse(ResponsesBody, data)
        chat = body.chat(body.items, body.declared(notes), notes)
    else:
        chat = parse(ChatBody, data)
    asked = ask_chat(chat, TOKENIZER, USUAL)
    return join(segments_of(chat.messages, chat.offered, asked, "0731"))


def theirs(path: str, data: bytes) -> str:
    # Who asks Anthropic for a message asks for no thought, unless he says so.
    options = recipe.ConversionOptions(default_thinking_mode=path != "/v1/messages")
    request = KINDS[path](data).convert(options)
    return recipe.DeepseekV4Encoding().render_conversation(request.conversation).prompt


# What the package refuses and we take, by what it says.
# And a tool that a client defers is shown when a result names it, not before.
TAKEN = ("does not support this tool_choice", "content or tool_calls must be set", "names must be unique")
TAKEN += ("server tools are not supported",)  # those of LiteLLM, which are custom and have a type


def recorded() -> list[Any]:
    found = []
    for file in sorted(CLIENTS.glob("*.json")):
        seen = json.loads(file.read_text())
        for at, one in enumerate(seen if isinstance(seen, list) else [seen]):
            path = one["path"].partition("?")[0]
            found.append(pytest.param(path, one["body"], id=f"{one['client']}-{at}"))
    return [one for one in found if one.values[0] in KINDS]


@pytest.mark.parametrize(("path", "body"), recorded())
def test_recorded_bodies(path: str, body: dict[str, Any]) -> None:
    text = json.dumps({**body, "model": "DeepSeek-V4-Pro"})
    data = text.replace('"https:/x"', '"https://json-schema.org/draft/2020-12/schema"').encode()
    try:
        expected = theirs(path, data)
    except recipe.ConversionError as error:
        assert any(why in error.body for why in TAKEN), error.body
        ours(path, data)
    else:
        assert ours(path, data) == expected or any("defer_loading" in tool for tool in body["tools"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT: list[dict[str, Any]] = [
    *({"messages": [user("x")], "reasoning_effort": each} for each in ("none", "minimal", "low", "medium")),
    *({"messages": [user("x")], "reasoning_effort": each} for each in ("high", "xhigh", "max")),
    {"messages": [user("give JSON")], "response_format": {"type": "json_object"}},
    {"messages": [user("a"), {"role": "system", "content": "late"}, user("b")]},
    {
        "messages": [
            user("a"),
            {"role": "assistant", "content": "be", "reasoning_content": "r", "prefix": True},
        ]
    },
    {"messages": [user("a"), {"role": "assistant", "content": "", "reasoning_content": "r", "prefix": True}]},
    {
        "messages": [
            *(
                user("a"),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{**CALL, "id": "1"}, {**CALL, "id": "2"}],
                },
            ),
            *({"role": "tool", "tool_call_id": each, "content": each} for each in "21"),
        ],
        "tools": [{"type": "function", "function": {**TOOL, "strict": False}}],
    },
]
BLOCKS = [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "a"}]
MESSAGES: list[dict[str, Any]] = [
    {
        "messages": [user("a"), {"role": "system", "content": "now"}],
        "system": [{"type": "text", "text": "s"}],
    },
    {
        "messages": [
            user("a"),
            {"role": "assistant", "content": [*BLOCKS, {"type": "text", "text": "b"}]},
            user("c"),
            {
                "role": "assistant",
                "content": [*BLOCKS, {"type": "tool_use", "id": "1", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}, BLOCKS[1]],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "thinking": {"type": "adaptive"},
    },
]
ITEMS = [
    user("a"),
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
]
RESPONSES: list[dict[str, Any]] = [
    {"input": [{"role": "developer", "content": "d"}, user("a"), {"role": "system", "content": "s"}]},
    {
        "input": [
            *ITEMS,
            {"type": "function_call", "call_id": "1", "name": "g", "namespace": "n", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "o"}]},
            {"role": "developer", "content": "d"},
        ],
        "instructions": "i",
        "tools": [
            {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", **TOOL}]}
        ],
    },
]
CASES = [("/v1/chat/completions", each) for each in CHAT]
CASES += [("/v1/messages", {"max_tokens": 9, **each}) for each in MESSAGES]
CASES += [("/v1/responses", each) for each in RESPONSES]


@pytest.mark.parametrize(("path", "body"), CASES)
def test_bodies_by_hand(path: str, body: dict[str, Any]) -> None:
    data = json.dumps({**body, "model": "DeepSeek-V4-Pro"}).encode()
    assert ours(path, data) == theirs(path, data)


def test_a_model_since_july_is_served_by_its_rules(tmp_path: Path) -> None:
    folder = tmp_path / "july"
    shutil.copytree(embedded(), folder)
    weights = folder / "model.safetensors"  # whose MTP block is no DSpark stage
    save_file({name: held for name, held in load_file(weights).items() if name[:4] != "mtp."}, weights)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dspark_block_size": 5, "dspark_noise_token_id": 2, "dspark_markov_rank": 8}
    (folder / "config.json").write_text(json.dumps({**config, "dspark_target_layer_ids": [0]}))
    body = {"messages": [user("a"), {"role": "assistant", "content": "b"}, user("c")]}
    expected = theirs("/v1/chat/completions", json.dumps({**body, "model": "DeepSeek-V4-Pro"}).encode())
    with Server(tmp_path, "--model", folder) as server:
        ids = server.post("/tokenize", body)[1]["tokens"]
        assert server.post("/detokenize", {"tokens": ids})[1]["prompt"] == expected
        begun = {"role": "assistant", "content": "", "reasoning_content": "We add", "prefix": True}
        answer = server.post(
            "/v1/chat/completions", {"messages": [user("What is 2 + 3?"), begun], "max_tokens": 3}
        )[1]
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] and not message["content"]  # the thought goes on
    with Engine.load(folder, EngineConfig(max_context=1024)) as engine:
        assert engine.chat(body["messages"], SamplingParams(max_tokens=1)).prompt_tokens == len(ids)
