"""The API's description in OpenAPI, made from the bodies' types. Knows no routes' code, only their names."""

from typing import Any

import msgspec

from dsv4.serve.anthropic import CountBody, MessagesBody
from dsv4.serve.responses import ResponsesBody
from dsv4.serve.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_POSTS = {
    "/v1/chat/completions": (ChatBody, "The assistant's next turn."),
    "/v1/completions": (CompletionBody, "The continuation of a text, or of several."),
    "/v1/messages": (MessagesBody, "The assistant's next turn, as Anthropic's clients ask for it."),
    "/v1/messages/count_tokens": (CountBody, "How many tokens such a request has."),
    "/v1/responses": (ResponsesBody, "The assistant's next turn, as items."),
    "/tokenize": (TokenizeBody, "A text's or a conversation's token ids."),
    "/detokenize": (DetokenizeBody, "The text of token ids."),
}
_GETS = {
    "/v1/models": "The model.",
    "/health": "Whether the server is alive.",
    "/ready": "Whether a model is loaded.",
    "/metrics": "Counters, for Prometheus.",
}


def openapi(name: str, max_context: int, vocab_size: int) -> dict[str, Any]:
    kinds = [kind for kind, _ in _POSTS.values()]
    bodies, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    length = {"type": "integer", "minimum": 1, "maximum": max_context}
    id = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids = {"type": "array", "items": id, "minItems": 1, "maxItems": max_context}
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    # What the types cannot say: it is the model's, or not there.
    own: dict[str, Any] = {
        "previous_response_id": {"type": "null"},
        "model": {"enum": [name]},
        "max_tokens": length,
        "max_completion_tokens": length,
        "max_output_tokens": length,
        "tokens": ids,
        "prompt": {"anyOf": [{"type": "string"}, ids, texts, {"type": "array", "items": ids, "minItems": 1}]},
    }
    for kind in kinds:
        properties = components[kind.__name__]["properties"]
        properties |= {field: schema for field, schema in own.items() if field in properties}
    components[TokenizeBody.__name__]["properties"]["prompt"] = {"type": "string"}
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


def _operation(says: str) -> dict[str, Any]:
    error = {"description": "an error in OpenAI's shape"}
    return {"summary": says, "responses": {"200": {"description": "done"}, "default": error}}
