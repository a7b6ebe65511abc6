"""A body from its bytes: settled by the rule for fields, then checked against its type. Knows no routes."""

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as inspect

from dsv4.serve.fields import aliases, rows
from dsv4.serve.schema import BadField

Kind = TypeVar("Kind")
# Tools that OpenAI's and Anthropic's own machines run: without them an agent still works.
SERVER_TOOLS = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    *("web_fetch", "code_execution"),
)


@dataclass
class Notes:
    """What of a body was left out: unknown fields (None: they are refused), other machines' tools."""

    ignored: list[str] | None = None
    dropped: list[str] = field(default_factory=list)


_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def parse(kind: type[Kind], data: bytes | bytearray, ignored: list[str] | None = None) -> Kind:
    """The body, or a BadField that names what is wrong. `ignored` takes the names of unknown fields."""
    try:
        value = msgspec.json.decode(data)
    except msgspec.ValidationError as error:  # a number that no float holds, such as 1e999
        what = str(error).partition(" - at ")[0].lower()
        raise BadField(
            f"the body: {what}; expected numbers of at most 64 bits", code="invalid_type"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField(f"the body is not valid JSON ({error}); check it and its encoding (UTF-8)") from None
    return checked(kind, value, "", ignored)


def checked(kind: type[Kind], value: Any, where: str = "", ignored: list[str] | None = None) -> Kind:
    """The same from JSON values; `where` is their place in the body."""
    value = _settled(_info(kind), value, where, ignored, False)  # type: ignore[arg-type]
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refusal(kind, value, where, str(error)) from None


def checked_each(
    kinds: Mapping[str, type], default: str, values: list[dict[str, Any]], where: str, notes: Notes
) -> Iterator[Any]:
    """Objects whose type tells what they are; those of other machines' tools are left out, and noted."""
    for at, value in enumerate(values):
        name = value.get("type") or default
        if isinstance(name, str) and name.startswith(SERVER_TOOLS) and where.endswith("tools"):
            notes.dropped.append(name)
            continue
        kind = kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            why = f"{where}[{at}]: type is {name!r}; use one of {', '.join(kinds)}"
            raise BadField(why, where, "invalid_type")
        yield checked(kind, value, f"{where}[{at}]", notes.ignored)


@cache
def _info(kind: Hashable) -> inspect.Type:
    return inspect.type_info(kind)


def _settled(info: inspect.Type, value: Any, where: str, ignored: list[str] | None, lax: bool) -> Any:
    """Without what asks for nothing; `lax`: within a message that comes back."""
    if isinstance(value, dict):
        struct = _struct(info, value)
        return value if struct is None else _settled_object(struct, value, where, ignored, lax)
    if isinstance(value, list):
        items = next((each.item_type for each in _ways([info]) if isinstance(each, inspect.ListType)), None)
        if items is None or isinstance(items, inspect.IntType | inspect.AnyType):
            return value
        return [_settled(items, item, f"{where}[{at}]", ignored, lax) for at, item in enumerate(value)]
    if isinstance(value, float) and value.is_integer():
        kinds = {type(each) for each in _ways([info])}
        return int(value) if inspect.IntType in kinds and inspect.FloatType not in kinds else value
    return value


def _struct(info: inspect.Type, value: dict[str, Any]) -> inspect.StructType | None:
    """The type that the object is of, told by its tag where there are several."""
    for each in _ways([info]):
        if isinstance(each, inspect.StructType) and (
            each.tag_field is None or value.get(each.tag_field) == each.tag
        ):
            return each
    return None


def _settled_object(
    struct: inspect.StructType, value: dict[str, Any], where: str, ignored: list[str] | None, lax: bool
) -> dict[str, Any]:
    lax = lax or getattr(struct.cls, "comes_back", False)
    fields, table = _fields(struct.cls), rows(struct.cls)
    out: dict[str, Any] = {}
    for name, item in _renamed(struct.cls, value, lax).items():
        at = f"{where}.{name}" if where else name
        if item is None:
            continue
        if name == struct.tag_field:
            out[name] = item
        elif name in fields:
            out[name] = _settled(fields[name], item, at, ignored, lax)
        elif name in table:
            if not table[name].passes(item, value):
                why = f"'{at}': {_shown(item)} is not supported; {table[name].expected}"
                raise BadField(why, at, "unsupported_value")
        elif lax:
            continue
        elif ignored is not None:
            ignored.append(at)
        else:
            near = get_close_matches(name, [*fields, *table], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BadField(f"Unrecognized request argument supplied: {at}{hint}", at, "unknown_parameter")
    return out


@cache
def _fields(kind: type) -> dict[str, inspect.Type]:
    info = _info(kind)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def _renamed(kind: type, value: dict[str, Any], lax: bool) -> dict[str, Any]:
    """With our names for those of others."""
    for theirs, ours in aliases(kind).items():
        if value.get(theirs) is None:
            continue
        value = dict(value)
        item, (outer, _, inner) = value.pop(theirs), ours.partition(".")
        item = {**(value.get(outer) or {}), inner: item} if inner else item
        if not inner and value.get(outer) not in (None, item):
            if lax:
                continue
            raise BadField(f"give {theirs} or {ours}, not both", theirs)
        value[outer] = item
    return value


def _refusal(kind: Any, value: Any, where: str, error: str) -> BadField:
    message, _, path = error.partition(" - at `")
    if path.startswith("key` in `"):
        message, path = message.replace("Expected", "Expected keys of", 1), path.removeprefix("key` in `")
    inside = path.rstrip("`").removeprefix("$")
    param = f"{where}{inside}".removeprefix(".") or None
    if message.startswith("Object missing required field `"):
        name = message.split("`")[1]
        param = f"{param}.{name}" if param else name
        return BadField(f"you must provide a {param!r} parameter", param, "missing_required_parameter")
    said = f"'{param}': " if param else "the body: "
    found = "" if "got `" in message or message.startswith("Invalid ") else _found(value, inside)
    if message.startswith("Invalid ") and (choices := _choices(kind, inside)):
        found = f", expected {', '.join(choices[:-1])}{' or ' if choices[1:] else ''}{choices[-1]}"
    return BadField(f"{said}{message[:1].lower()}{message[1:]}{found}", param, "invalid_type")


def _choices(kind: Any, path: str) -> list[str]:
    """The texts allowed at a path such as `.messages[0].role`: a literal's, or the tags of messages."""
    here = _ways([_info(kind)])
    for name, _ in _STEP.findall(path):
        here = _ways([below for each in here for below in _below(each, name)])
    said = (value for each in here if isinstance(each, inspect.LiteralType) for value in each.values)
    return list(dict.fromkeys(repr(value) for value in said))


def _ways(types: list[inspect.Type]) -> list[inspect.Type]:
    """Without unions and limits around them."""
    out: list[inspect.Type] = []
    for each in types:
        if isinstance(each, inspect.Metadata):
            out += _ways([each.type])
        else:
            out += _ways(list(each.types)) if isinstance(each, inspect.UnionType) else [each]
    return out


def _below(each: inspect.Type, name: str) -> list[inspect.Type]:
    """One step into an object's field, or with no name into a list."""
    if isinstance(each, inspect.ListType):
        return [] if name else [each.item_type]
    if not isinstance(each, inspect.StructType):
        return []
    if name == each.tag_field:
        return [inspect.LiteralType((each.tag,))]
    return [field.type for field in each.fields if field.encode_name == name]


def _found(value: Any, path: str) -> str:
    """The value at a path such as `.messages[0].role`; of a list or a long text its length."""
    for name, index in _STEP.findall(path):
        value = value[name] if name else value[int(index)]
    is_long = isinstance(value, list | str) and len(repr(value)) > 60
    return f", found one of length {len(value)}" if is_long else f", found {_shown(value)}"


def _shown(value: Any) -> str:
    return repr(value)[:60]
