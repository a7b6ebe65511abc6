"""The API's description in OpenAPI, made from the bodies' types. Knows no routes' code, only their names."""

from typing import Any

import msgspec

from dsv4.serve.schema import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

_POSTS = {
    "/v1/chat/completions": (ChatBody, "The assistant's next turn."),
    "/v1/completions": (CompletionBody, "The continuation of a text, or of several."),
    "/tokenize": (TokenizeBody, "A text's or a conversation's token ids."),
    "/detokenize": (DetokenizeBody, "The text of token ids."),
}
_GETS = {
    "/v1/models": "The model.",
    "/health": "Whether the server is alive.",
    "/ready": "Whether a model is loaded.",
    "/metrics": "Counters, for Prometheus.",
}
_TEXT = {"type": "string"}
_TOOL_CALL = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "arguments": _TEXT},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "description": _TEXT, "parameters": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}


def _message(role: str, needed: list[str], **fields: Any) -> dict[str, Any]:
    properties = {"role": {"enum": [role]}, **fields}
    return {"type": "object", "properties": properties, "required": ["role", *needed]}


_MESSAGE = {
    "anyOf": [
        _message("system", ["content"], content=_TEXT),
        _message("user", ["content"], content=_TEXT),
        _message(
            "assistant",
            ["content"],
            content=_TEXT,
            reasoning_content=_TEXT,
            tool_calls={"type": "array", "items": _TOOL_CALL},
        ),
        _message("tool", ["content", "tool_call_id"], content=_TEXT, tool_call_id=_TEXT),
    ]
}
# What the types do not say; the server's own checks say it again, with the numbers.
_LIMITS: dict[str, dict[str, Any]] = {
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 64) - 1},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": 0},
    "min_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "logprobs": {"maximum": MAX_TOP_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "stop": {"maxItems": MAX_STOPS, "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
    "messages": {"minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE},
    "tools": {"maxItems": MAX_TOOLS, "items": _TOOL},
}


def openapi(name: str, max_context: int, vocab_size: int) -> dict[str, Any]:
    kinds = [kind for kind, _ in _POSTS.values()]
    bodies, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        for field, limits in (_LIMITS | _of_model(name, max_context, vocab_size)).items():
            _limit(components[kind.__name__]["properties"].get(field), limits)
    components[CompletionBody.__name__]["properties"]["prompt"] = _prompt(max_context, vocab_size)
    paths: dict[str, Any] = {path: {"get": _operation(says)} for path, says in _GETS.items()}
    for (path, (_, says)), body in zip(_POSTS.items(), bodies, strict=True):
        content = {"required": True, "content": {"application/json": {"schema": body}}}
        paths[path] = {"post": {**_operation(says), "requestBody": content}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"dsv4: {name}", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _of_model(name: str, max_context: int, vocab_size: int) -> dict[str, dict[str, Any]]:
    length = {"minimum": 1, "maximum": max_context}
    tokens = {"items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    limits: dict[str, dict[str, Any]] = {"max_tokens": length, "max_completion_tokens": length}
    return {**limits, "tokens": tokens, "model": {"enum": [name]}}


def _prompt(max_context: int, vocab_size: int) -> dict[str, Any]:
    id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids = {"type": "array", "items": id, "minItems": 1, "maxItems": max_context}
    many = [{"type": "array", "items": kind, "minItems": 1} for kind in (_TEXT, ids)]
    return {"anyOf": [_TEXT, ids, *many]}


def _limit(schema: dict[str, Any] | None, limits: dict[str, Any]) -> None:
    for part in (schema or {}).get("anyOf", [schema]):
        if part is not None and part.get("type") != "null":
            part |= limits


def _operation(says: str) -> dict[str, Any]:
    error = {"description": "an error in OpenAI's shape"}
    return {"summary": says, "responses": {"200": {"description": "done"}, "default": error}}
