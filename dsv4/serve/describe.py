"""The API's description in OpenAPI, made from the routes: their bodies' types, their first lines."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dsv4.serve.fields import described
from dsv4.serve.wire import Ready


def openapi(
    name: str, ready: Ready, posts: Mapping[str, Callable[..., Any]], gets: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """`posts` have a `body`; a route without a first line is not for clients."""
    kinds = {path: handler.__annotations__["body"] for path, handler in posts.items()}
    template = "#/components/schemas/{name}"
    bodies, components = msgspec.json.schema_components(list(kinds.values()), ref_template=template)
    length = {"type": "integer", "minimum": 1, "maximum": ready.max_context}
    id = {"type": "integer", "minimum": 0, "maximum": ready.vocab_size - 1}
    ids = {"type": "array", "items": id, "minItems": 1, "maxItems": ready.max_context}
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    # What the types cannot say: it is the model's, or not there.
    own: dict[str, Any] = {
        "model": {"enum": [name]},
        "max_tokens": length,
        "max_completion_tokens": length,
        "max_output_tokens": length,
        "tokens": ids,
        "prompt": {"anyOf": [{"type": "string"}, ids, texts, {"type": "array", "items": ids, "minItems": 1}]},
    }
    for kind in kinds.values():
        properties = components[kind.__name__]["properties"]
        properties |= {field: schema for field, schema in own.items() if field in properties}
        properties |= dict(described(kind))
    components[kinds["/tokenize"].__name__]["properties"]["prompt"] = {"type": "string"}
    paths: dict[str, Any] = {
        path: {"get": _operation(get.__doc__)} for path, get in gets.items() if get.__doc__
    }
    for (path, post), body in zip(posts.items(), bodies, strict=True):
        content = {"required": True, "content": {"application/json": {"schema": body}}}
        paths[path] = {"post": {**_operation(post.__doc__), "requestBody": content}}
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


def _operation(says: str | None) -> dict[str, Any]:
    error = {"description": "an error in OpenAI's shape"}
    return {"summary": says, "responses": {"200": {"description": "done"}, "default": error}}
