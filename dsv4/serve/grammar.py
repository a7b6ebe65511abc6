"""What an answer must look like, as a grammar: JSON of a schema, calls of declared tools. Knows no engine.

The grammar covers the whole output, reasoning included. Reasoning and free content are any text, which no
special token is part of; arguments have the types of their schemas, in the schema's order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.serve.schema import BadField
from dsv4.text.tokenizer import Tokenizer

# The spelling of JSON that the model was shown (`text.messages.to_json`).
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What a string that stands as it is, without quotes, cannot be held to.
_STRING_RULES = ("pattern", "format", "minLength", "maxLength")
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "type"))


@dataclass(frozen=True)
class Form:
    """The form of an answer: `schema` for its content, calls of `tools` that may or must be made."""

    schema: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    many_calls: bool = True

    def grammar(self, tokenizer: Tokenizer, thinking: bool) -> str:
        return _Writer(tokenizer.end_think_id, tokenizer.dsml_id if self.tools else 0).grammar(self, thinking)


class _Writer:
    def __init__(self, end_think: int, dsml: int) -> None:
        self._end_think, self._dsml = f"<[{end_think}]>", f"<[{dsml}]>"
        self._rules: list[str] = []

    def grammar(self, form: Form, thinking: bool) -> str:
        bodies = []
        if form.tools:
            self._write_calls(form)
            # Free content ends in the `<` of the call block's tag, or has none.
            bodies.append(
                "CALLS_LEAD calls" if not form.must_call and form.schema is None else '"\\n\\n<" calls'
            )
        if not form.must_call:
            bodies.append("TEXT?" if form.schema is None else _json(form.schema))
        start = f"TEXT? {self._end_think} body" if thinking else "body"
        texts = [r"TEXT: /(?s:.+)/", r"CALLS_LEAD: /(?s:.*)</", r"STRING_END: /(?s:.*)<\//"]
        return "\n".join([f"start: {start}", f"body: {' | '.join(bodies)}", *self._rules, *texts, ""])

    def _write_calls(self, form: Form) -> None:
        invokes = [self._write_invoke(number, tool["function"]) for number, tool in enumerate(form.tools)]
        d, more = self._dsml, "+" if form.many_calls else ""
        self._rules.append(f'calls: {d} "tool_calls>\\n" invoke{more} "</" {d} "tool_calls>"')
        self._rules.append(f"invoke: {' | '.join(invokes)}")

    def _write_invoke(self, number: int, function: Mapping[str, Any]) -> str:
        name, where = function["name"], f"tools[{number}]"
        schema = function.get("parameters")
        schema = {} if schema is None else schema
        properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            raise BadField(f"{where}: parameters is not an object with properties", "tools")
        needed, d = schema.get("required", ()), self._dsml
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for position, (key, value) in enumerate(properties.items()):
            rule = f"p{number}_{position}"
            at = f"{where}, parameter {key!r}"
            self._rules.append(
                f"{rule}: {self._parameter(key, value, shared, bool(function.get('strict')), at)}"
            )
            parts.append(rule if key in needed else f"{rule}?")
        blank = "" if parts else "\\n"
        rule = f"invoke{number}"
        opening = _quoted(f'invoke name="{_tag_name(name, where)}">')
        self._rules.append(f'{rule}: "<" {d} {opening} {" ".join(parts)} "{blank}\\n</" {d} "invoke>\\n"')
        return rule

    def _parameter(self, key: str, schema: Any, shared: Mapping[str, Any], strict: bool, at: str) -> str:
        if not isinstance(schema, Mapping | bool):
            raise BadField(f"{at}: the schema is not an object", "tools")
        schema = {} if schema is True else {"not": {}} if schema is False else schema
        values = []
        if _may_be_string(schema):
            values.append(f"{self._tag(key, True, at)} {self._raw(schema, strict, at)}")
        if schema.get("type") != "string":
            values.append(f'{self._tag(key, False, at)} {_json({**shared, **schema})} "</"')
        return f'"\\n<" ({" | ".join(values)}) {self._dsml} "parameter>"'

    def _tag(self, key: str, is_string: bool, at: str) -> str:
        text = f'parameter name="{_tag_name(key, at)}" string="{str(is_string).lower()}">'
        return f"{self._dsml} {_quoted(text)}"

    def _raw(self, schema: Mapping[str, Any], strict: bool, at: str) -> str:
        """A string as it is, up to the `</` before the closing tag's mark."""
        if strict and (rules := [rule for rule in _STRING_RULES if rule in schema]):
            raise BadField(
                f"{at}: {', '.join(rules)} cannot be enforced on a string argument; leave it out or strict",
                "tools",
            )
        known = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(known, list):
            return "STRING_END"
        texts = [_quoted(value + "</") for value in known if isinstance(value, str)]
        return f"({' | '.join(texts)})" if texts else "STRING_END"


def _may_be_string(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    if kinds is None:
        return not schema.keys() - _ANNOTATIONS or any(
            isinstance(value, str) for value in (*_list(schema.get("enum")), schema.get("const"))
        )
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tag_name(name: str, at: str) -> str:
    if not name or any(mark in name for mark in '"<>\n'):
        raise BadField(
            f'{at}: the name {name!r} is empty or holds ", <, > or a new line, which a call cannot', "tools"
        )
    return name


def _quoted(text: str) -> str:
    return json.dumps(text)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPELLING})}"
