"""What an answer must look like, as a grammar: JSON of a schema, calls of declared tools. Knows no engine.

The grammar covers the whole output, reasoning included. Reasoning and free content are any text, which no
special token is part of; arguments have the types of their schemas, in the schema's order.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.serve.schema import INPUT_FORM, BadField
from dsv4.text.tokenizer import Tokenizer

# The spelling of JSON that the model was shown (`text.messages.to_json`).
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "type"))
# What the schema of all arguments of a call may say; a parameter's own may say what llguidance understands.
_SHARED = ("$defs", "definitions")
_OBJECT = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$schema", "$id", *_SHARED}
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
_MAX_ALTERNATIVES = 32
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# What a string's format means where a call is strict; calls have it without JSON's quotes.
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,63}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}


@dataclass(frozen=True)
class Form:
    """The form of an answer: of its content (one of four), of the calls that may or must be made."""

    schema: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: bool = False
    many_calls: bool = True
    regex: str | None = None
    choice: Sequence[str] | None = None
    lark: str | None = None
    max_thinking: int | None = None  # tokens
    is_free: bool = False  # the answer itself is held to nothing

    @property
    def content(self) -> str | None:
        if self.schema is not None:
            return _json(self.schema)
        if self.regex is not None:
            return _regex(self.regex)
        if self.choice is not None:
            return f"({' | '.join(map(_quoted, self.choice))})"
        return f"%lark {{\n{self.lark}\n}}" if self.lark is not None else None

    def grammar(self, tokenizer: Tokenizer, thinking: bool) -> str:
        dsml = tokenizer.dsml_id if self.tools or self.is_free else 0
        return _Writer(tokenizer.end_think_id if thinking else 0, dsml).grammar(self, thinking)


@dataclass(frozen=True)
class _Arguments:
    """One way to call a function; `extra` is the schema of arguments that are not declared, if any may be."""

    properties: Mapping[str, Any]
    required: frozenset[str] = frozenset()
    extra: Any = None


class _CannotHold(Exception):
    """The schema of all arguments says what a grammar of parameters cannot; why, in words."""


class _Writer:
    def __init__(self, end_think: int, dsml: int) -> None:
        self._end_think, self._dsml = f"<[{end_think}]>", f"<[{dsml}]>"
        self._rules: list[str] = []

    def grammar(self, form: Form, thinking: bool) -> str:
        bodies = []
        if form.is_free:
            bodies.append(f"TEXT? ({self._dsml} TEXT?)*")
        elif form.tools:
            self._write_calls(form)
            # Free content ends in the `<` of the call block's tag, or has none.
            bodies.append(
                "CALLS_LEAD calls" if not form.must_call and form.content is None else '"\\n\\n<" calls'
            )
        if not form.must_call and not form.is_free:
            bodies.append(form.content or "TEXT?")
        start = f"thought? {self._end_think} body" if thinking else "body"
        if thinking:
            limit = f"[max_tokens={form.max_thinking}]" if form.max_thinking is not None else ""
            self._rules.append(f"thought{limit}: TEXT")
        texts = [r"TEXT: /(?s:.+)/", r"CALLS_LEAD: /(?s:.*)</", r"STRING_END: /(?s:.*)<\//"]
        texts.append(r'KEY: /[^"<>\n]+/')
        return "\n".join([f"start: {start}", f"body: {' | '.join(bodies)}", *self._rules, *texts, ""])

    def _write_calls(self, form: Form) -> None:
        invokes = [rule for at, tool in enumerate(form.tools) for rule in self._invokes(at, tool["function"])]
        d, more = self._dsml, "+" if form.many_calls else ""
        self._rules.append(f'calls: {d} "tool_calls>\\n" invoke{more} "</" {d} "tool_calls>"')
        self._rules.append(f"invoke: {' | '.join(invokes)}")

    def _invokes(self, number: int, function: Mapping[str, Any]) -> Iterator[str]:
        """Rules for a function, one for each way to call it."""
        where, strict = f"tools[{number}]", bool(function.get("strict"))
        schema = function.get("parameters")
        try:
            ways = _ways({} if schema is None else schema, schema, where)
            if strict and any(way.extra is not None for way in ways):
                raise _CannotHold("additionalProperties other than false")
        except _CannotHold as error:
            if strict:
                raise BadField(
                    f"{where}: {error} cannot be enforced; leave it out or strict", "tools"
                ) from None
            ways = [_Arguments({}, extra={})]
        opening = _quoted(f'invoke name="{_tag_name(function["name"], where)}">')
        shared = {key: schema[key] for key in _SHARED if schema and key in schema}
        for way in ways:
            rule, parts = self._new_rule("invoke"), []
            for key in (*way.properties, *sorted(way.required - way.properties.keys())):
                value, at = way.properties.get(key, {}), f"{where}, parameter {key!r}"
                tag_name = _quoted(f'parameter name="{_tag_name(key, at)}" string=')
                if form := function.get(INPUT_FORM):
                    value = {"type": "string", INPUT_FORM: form}
                parts.append(self._parameter(tag_name, value, shared, strict, at))
                parts[-1] += "" if key in way.required else "?"
            if way.extra is not None:
                tag_name = '"parameter name=\\"" KEY "\\" string="'
                parts.append(self._parameter(tag_name, way.extra, shared, False, where) + "*")
            body = " ".join(parts) or '"\\n"?'  # without any, April's models write an empty line
            d = self._dsml
            self._rules.append(f'{rule}: "<" {d} {opening} {body} "\\n</" {d} "invoke>\\n"')
            yield rule

    def _parameter(self, tag: str, schema: Any, shared: Mapping[str, Any], strict: bool, at: str) -> str:
        """A rule for a parameter, as a string or as JSON, whichever its schema allows."""
        if not isinstance(schema, Mapping | bool):
            raise BadField(f"{at}: the schema is not an object", "tools")
        schema = {} if schema is True else {"not": {}} if schema is False else schema
        values = []
        if _may_be_string(schema):
            values.append(f'{self._dsml} {tag} "\\"true\\">" {self._raw(schema, strict, at)}')
        if schema.get("type") != "string":
            values.append(f'{self._dsml} {tag} "\\"false\\">" {_json({**shared, **schema})} "</"')
        rule = self._new_rule("parameter")
        self._rules.append(f'{rule}: "\\n<" ({" | ".join(values)}) {self._dsml} "parameter>"')
        return rule

    def _raw(self, schema: Mapping[str, Any], strict: bool, at: str) -> str:
        """A string as it is, up to the `</` before the closing tag's mark."""
        if isinstance(form := schema.get(INPUT_FORM), Mapping):
            rule = self._new_rule("form")
            content = Form(lark=form.get("lark"), regex=form.get("regex")).content
            self._rules.append(f'{rule}: {content} "</"')
            return rule
        known = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(known, list):
            texts = [_quoted(value + "</") for value in known if isinstance(value, str)]
            return f"({' | '.join(texts)})" if texts else "STRING_END"
        limits = []
        if "minLength" in schema or "maxLength" in schema:
            low, high = schema.get("minLength", 0), schema.get("maxLength", "")
            if not isinstance(low, int) or not (high == "" or isinstance(high, int)):
                raise BadField(f"{at}: minLength or maxLength is not a whole number", "tools")
            limits.append(f"/(?s:.{{{low},{high}}})/")
        if strict and "pattern" in schema:
            limits.append(_regex(_whole_pattern(schema["pattern"], at)))
        if strict and "format" in schema:
            if str(schema["format"]) not in _FORMATS:
                raise BadField(
                    f"{at}: format {schema['format']!r} cannot be enforced, expected one of "
                    f"{', '.join(_FORMATS)}; leave it out or strict",
                    "tools",
                )
            limits.append(_regex(_FORMATS[str(schema["format"])]))
        if not limits:
            return "STRING_END"
        terminal = self._new_rule("LIMITED")
        self._rules.append(f'{terminal}: ({" & ".join(limits)}) "</"')
        return terminal

    def _new_rule(self, kind: str) -> str:
        return f"{kind}_{len(self._rules)}" if kind.islower() else f"{kind}{len(self._rules)}"


def _ways(schema: Any, root: Any, where: str, depth: int = 0) -> list[_Arguments]:
    """The ways to call a function whose arguments have this schema."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties", {}), Mapping):
        raise BadField(f"{where}: parameters is not an object with properties", "tools")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadField(f"{where}: required is {required!r}, expected a list of names", "tools")
    if depth > len(_COMBINING):
        raise _CannotHold("a schema that refers to itself")
    if unknown := sorted(schema.keys() - _OBJECT - set(_COMBINING)):
        raise _CannotHold(" and ".join(unknown))
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise _CannotHold(f"parameters of type {kinds!r}")
    given = schema.get("additionalProperties", False)
    extra = None if given is False else {} if given is True else given
    factors = [[_Arguments(schema.get("properties", {}), frozenset(required), extra)]]
    for key in _COMBINING[1:]:
        parts = schema.get(key, [])
        if not isinstance(parts, list) or (key in schema and not parts):
            raise BadField(f"{where}: {key} is not a list of schemas", "tools")
        each = [_ways(part, root, where, depth + 1) for part in parts]
        factors += each if key == "allOf" else [list(itertools.chain(*each))] if each else []
    if "$ref" in schema:
        factors.append(_ways(_referred(schema["$ref"], root, where), root, where, depth + 1))
    ways = [_joined(combination) for combination in itertools.islice(itertools.product(*factors), 33)]
    if len(ways) > _MAX_ALTERNATIVES:
        raise _CannotHold(f"more than {_MAX_ALTERNATIVES} alternatives")
    return ways


def _joined(parts: Sequence[_Arguments]) -> _Arguments:
    properties: dict[str, Any] = {}
    for part in parts:
        for key, value in part.properties.items():
            if properties.setdefault(key, value) != value:
                raise _CannotHold(f"two schemas for {key!r}")
    extra = next((part.extra for part in parts if part.extra is not None), None)
    return _Arguments(properties, frozenset().union(*(part.required for part in parts)), extra)


def _referred(reference: Any, root: Any, where: str) -> Any:
    found = root
    for name in str(reference).removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    if found is None or not str(reference).startswith("#/"):
        raise BadField(f"{where}: $ref {reference!r} leads nowhere in the parameters", "tools")
    return found


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


def _whole_pattern(pattern: Any, at: str) -> str:
    """A schema's pattern, which may match anywhere, for all of a string."""
    if not isinstance(pattern, str) or ("|" in pattern and not re.fullmatch(r"\^\([^()]*\)\$", pattern)):
        raise BadField(f"{at}: pattern {pattern!r} cannot be enforced; use ^(…)$ or leave it out", "tools")
    begin = pattern.removeprefix("^") if pattern.startswith("^") else f"(?s:.*){pattern}"
    return begin[:-1] if re.search(r"(?<!\\)\$$", begin) else f"{begin}(?s:.*)"


def _regex(pattern: str) -> str:
    """As a terminal; a slash would end it."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern).replace("\n", "\\n") + "/"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPELLING})}"
