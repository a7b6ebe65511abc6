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
    value = _plan(kind).settled(value, where, ignored, False)  # type: ignore[arg-type]
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


class _Object:
    """What is to be done with the objects of a type."""

    def __init__(self, struct: inspect.StructType) -> None:
        self.cls, self.tag_field = struct.cls, struct.tag_field
        self.comes_back = bool(getattr(struct.cls, "comes_back", False))
        self.table, self.aliases = rows(struct.cls), aliases(struct.cls)
        self.fields = {field.encode_name: _Plan.of(field.type) for field in struct.fields}
        self.fields |= {self.tag_field: None} if self.tag_field else {}


class _Plan:
    """What is to be done with the values of a field's type, found once: bodies have many small objects."""

    def __init__(self, ways: list[inspect.Type]) -> None:
        structs = [way for way in ways if isinstance(way, inspect.StructType)]
        self.tag_field = structs[0].tag_field if structs else None
        self.objects = {struct.tag: _object(struct.cls) for struct in structs}
        lists = [way.item_type for way in ways if isinstance(way, inspect.ListType)]
        self.items = _Plan.of(lists[0]) if lists else None
        kinds = {type(way) for way in ways}
        self.is_whole = inspect.IntType in kinds and inspect.FloatType not in kinds

    @classmethod
    def of(cls, info: inspect.Type) -> "_Plan | None":
        """None: nothing, whatever the value."""
        plan = cls(_ways([info]))
        return plan if plan.objects or plan.items or plan.is_whole else None

    def settled(self, value: Any, where: "_Place", ignored: list[str] | None, lax: bool) -> Any:
        """Without what asks for nothing; `lax`: within a message that comes back."""
        kind = type(value)
        if kind is dict and self.objects:
            tag = value.get(self.tag_field) if self.tag_field else None
            struct = self.objects.get(tag) if isinstance(tag, str | None) else None
            return value if struct is None else _settled_object(struct, value, where, ignored, lax)
        if kind is list and self.items is not None:
            settled = self.items.settled
            return [settled(item, (where, at), ignored, lax) for at, item in enumerate(value)]
        return int(value) if kind is float and self.is_whole and value.is_integer() else value


@cache
def _object(kind: type) -> _Object:
    info = _info(kind)
    assert isinstance(info, inspect.StructType)
    return _Object(info)


@cache
def _plan(kind: Hashable) -> _Plan:
    return _Plan(_ways([_info(kind)]))


# Where a value stands: what it is in, and its name or number there. Spelled out only in errors.
_Place = tuple[Any, str | int] | str


def _spelled(place: _Place) -> str:
    if isinstance(place, str):
        return place
    outer, name = _spelled(place[0]), place[1]
    return f"{outer}[{name}]" if isinstance(name, int) else f"{outer}.{name[:60]}" if outer else name[:60]


def _settled_object(
    struct: _Object, value: dict[str, Any], where: _Place, ignored: list[str] | None, lax: bool
) -> dict[str, Any]:
    lax = lax or struct.comes_back
    fields, table = struct.fields, struct.table
    out: dict[str, Any] = {}
    for name, item in (_renamed(struct.aliases, value, lax) if struct.aliases else value).items():
        if item is None:
            continue
        if name in fields:
            plan = fields[name]
            out[name] = item if plan is None else plan.settled(item, (where, name), ignored, lax)
        elif name in table:
            if not table[name].passes(item, value):
                at = _spelled((where, name))
                why = f"'{at}': {_shown(item)} is not supported; {table[name].expected}"
                raise BadField(why, at, "unsupported_value")
        elif lax:
            continue
        elif ignored is not None:
            ignored.append(_spelled((where, name)))
        else:
            at = _spelled((where, name))
            near = get_close_matches(name[:60], [*fields, *table], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BadField(f"Unrecognized request argument supplied: {at}{hint}", at, "unknown_parameter")
    return out


def _renamed(names: Mapping[str, str], value: dict[str, Any], lax: bool) -> dict[str, Any]:
    """With our names for those of others."""
    for theirs, ours in names.items():
        if value.get(theirs) is None:
            continue
        value = dict(value)
        item, (outer, _, inner) = value.pop(theirs), ours.partition(".")
        given = value.get(outer)
        if inner and isinstance(given, dict | None):
            item = {**(given or {}), inner: item}
        elif given not in (None, item):
            if lax:
                continue
            raise BadField(f"give {theirs} or {outer}, not both", theirs)
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
