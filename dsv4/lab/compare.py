"""The same tokens through two engines, layer by layer: where do they part, and in which op."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.engine import Engine
from dsv4.engine.trial import Trial
from dsv4.errors import ConfigError, RequestError
from dsv4.lab.difference import Agreement, Difference, Predictions, first_not_finite, routing_matrix
from dsv4.model.step import Tap

# What is looked at in a layer, in the order it is computed -> the op that made it, and what it is.
PARTS = {
    "hc_attn.x": ("mhc.pre", "input of attention"),
    "hc_attn.gate": ("mhc.pre", "gate of attention's output"),
    "hc_attn.comb": ("mhc.pre", "mixing matrix at attention"),
    "attn.q": ("qkv.queries", "queries (wq_a, q_norm, wq_b, rotation)"),
    "attn.kv": ("qkv.entries", "raw keys (wkv, kv_norm, rotation)"),
    "attn.compressor.pooled": ("compress.pool", "pooled entries (wkv, wgate, ape)"),
    "attn.indexer.compressor.pooled": ("compress.pool", "pooled index keys (wkv, wgate, ape)"),
    "attn.indexer.selected": ("index.select", "selected entries (wq_b, weights_proj, keys)"),
    "attn.o": ("attend.attend", "attention before its output projection"),
    "attn.out": ("linear", "attention output (wo_a, wo_b)"),
    "hc_attn.streams": ("mhc.post", "streams after attention"),
    "hc_ffn.x": ("mhc.pre", "input of the experts"),
    "hc_ffn.gate": ("mhc.pre", "gate of the experts' output"),
    "hc_ffn.comb": ("mhc.pre", "mixing matrix at the experts"),
    "ffn.weights": ("route", "routing (gate, bias or hash table)"),
    "ffn.routed": ("experts.routed", "routed experts"),
    "ffn.shared": ("experts.ffn", "shared expert"),
    "ffn.out": ("experts", "sum of routed and shared experts"),
    "hc_ffn.streams": ("mhc.post", "streams after the experts"),
}
_LOGITS = {"logits": ("linear", "logits (hc_head, norm, head)")}
LAST_PART = "hc_ffn.streams"
MAX_TOKENS = 1 << 20
# Settings of the engine that change no value: not for a comparison.
_ALIKE = {"ops", "max_context", "max_batch", "chunk", "max_stall_ms"}


@dataclass(frozen=True)
class Seen:
    """One intermediate result: `layer` is `layers.3` or `mtp.0`, `part` a key of PARTS or a list of ids."""

    layer: str
    part: str
    value: Tensor

    @classmethod
    def of(cls, name: str, part: str, value: Tensor) -> "Seen":
        kind, number, rest = name.split(".", 2)
        return cls(f"{kind}.{number}", f"{rest}.{part}", value.detach().cpu())


@dataclass(frozen=True)
class Recording:
    """Everything that was seen of one engine, step by step, and the logits of each step."""

    config: ModelConfig
    seen: list[Seen]
    logits: list[Tensor]


@dataclass
class Layer:
    """What was found in one layer."""

    name: str
    kind: str
    parts: dict[str, Difference] = field(default_factory=dict)
    routing: Agreement = field(default_factory=Agreement)
    selection: Agreement = field(default_factory=Agreement)

    def as_dict(self) -> dict[str, Any]:
        return {
            **{"name": self.name, "kind": self.kind},
            "parts": {part: difference.as_dict() for part, difference in self.parts.items()},
            "routing_agreement": self.routing.share,
            "selection_overlap": self.selection.share if self.selection.chosen else None,
        }


@dataclass(frozen=True)
class Departure:
    """The first place where the two differ by more than the limit, or where one is not finite."""

    layer: str
    part: str
    op: str
    what: str
    relative: float | None
    token: int
    detail: str


@dataclass
class Comparison:
    layers: dict[str, Layer]
    logits: Predictions
    departure: Departure | None = None

    def report(self) -> dict[str, Any]:
        """Everything as plain data, for `--json`. Numbers that are not finite become null."""
        return _finite_only(
            {
                "layers": [layer.as_dict() for layer in self.layers.values()],
                "logits": self.logits.as_dict() if self.logits.divergences else None,
                "departure": vars(self.departure) if self.departure else None,
                "jump": vars(jump) if (jump := self.largest_jump()) else None,
            }
        )

    def largest_jump(self) -> "Jump | None":
        """Where the relative error grew most over the largest one before it in the computation."""
        best, before = None, 0.0
        for layer in self.layers.values():
            for part in PARTS:
                if part not in layer.parts:
                    continue
                now = layer.parts[part].relative
                growth = now - before
                if best is None or growth > best.after - best.before:
                    best = Jump(layer.name, part, *PARTS[part], before, now)
                before = max(before, now)
        return best if best and best.after > best.before else None


@dataclass(frozen=True)
class Jump:
    layer: str
    part: str
    op: str
    what: str
    before: float
    after: float


class _Stop(Exception):
    """Ends B's pass at the end of the layer in which it parted."""


def run(engine: Engine, ids: Sequence[int], num_single: int, drafts: bool, tap: Tap) -> Iterator[Tensor]:
    """Logits of all but the last `num_single` ids (at least one) in one step; then of these one by one."""
    prompt = len(ids) - max(1, num_single)
    with Trial(engine, len(ids)) as trial:
        yield trial.read(ids[:prompt], ids[1 : prompt + 1] if drafts else None, tap)[0].cpu()
        for position in range(prompt, prompt + num_single):
            yield trial.read([ids[position]], tap=tap)[0].cpu()


def _can_draft(engine: Engine) -> bool:
    return bool(engine.model.mtp) or (engine.model.dspark is not None and engine.drafter is not None)


def record(engine: Engine, ids: Sequence[int], num_single: int = 0) -> Recording:
    """All intermediate results of A; they are kept in memory, so that A need not be."""
    seen: list[Seen] = []
    drafts = _can_draft(engine)
    logits = list(run(engine, ids, num_single, drafts, lambda *args: seen.append(Seen.of(*args))))
    return Recording(engine.model_config, seen, logits)


def compare(
    wanted: Recording, engine: Engine, ids: Sequence[int], num_single: int = 0, limit: float | None = None
) -> Comparison:
    """B against what was recorded of A; ends at the first layer with an error over `limit`, or a NaN."""
    check_alike(wanted.config, engine.model_config)
    # A drafter that only one of them has is not looked at.
    drafts = _can_draft(engine) and any(seen.layer == "mtp.0" for seen in wanted.seen)
    observer = _Observer(wanted, drafts, limit)
    logits = Predictions([])
    try:
        for a, b in zip(wanted.logits, run(engine, ids, num_single, drafts, observer), strict=True):
            observer.check_finite("logits", "logits", a, b)
            if observer.departure is None:
                logits.add(a, b)
            observer.start += len(a)
    except _Stop:
        pass
    return Comparison(observer.layers, logits, observer.departure)


class _Observer:
    """The tap of B: holds each result against A's."""

    def __init__(self, wanted: Recording, drafts: bool, limit: float | None) -> None:
        self.config, self.limit = wanted.config, limit
        self.expected = iter([s for s in wanted.seen if drafts or not s.layer.startswith("mtp.")])
        self.layers: dict[str, Layer] = {}
        self.departure: Departure | None = None
        self.chosen: tuple[Tensor, Tensor] | None = None
        self.start = 0  # position of the step's first token

    def __call__(self, name: str, part: str, value: Tensor) -> None:
        got, a = Seen.of(name, part, value), next(self.expected)
        assert (a.layer, a.part) == (got.layer, got.part), "both run the same graph"
        b = got.value
        layer = self.layers.setdefault(got.layer, Layer(got.layer, self._kind(got.layer)))
        if got.part == "ffn.chosen":
            self.chosen = (a.value, b)
            layer.routing.add(a.value, b)
        elif got.part == "attn.indexer.selected":
            self._selection(layer, a.value, b)
        else:
            self._values(layer, got.part, a.value, b)
        if got.part == LAST_PART and self.departure is not None:
            raise _Stop

    def _kind(self, layer: str) -> str:
        kind, number = layer.split(".")
        return self.config.layers[int(number)].kind if kind == "layers" else "draft"

    def _selection(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        # Below index_topk entries there is nothing to choose.
        full = (a >= 0).sum(1) >= self.config.index_topk
        now = Agreement()
        now.add(a[full], b[full])
        layer.selection.merge(now)
        if self.limit is not None and 1 - now.share > self.limit:
            missed = [len({*x} - {*y}) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
            detail = f"{now.share:.0%} of A's entries are among B's"
            worst = max(range(len(missed)), key=missed.__getitem__)
            self._depart(layer.name, "attn.indexer.selected", 1 - now.share, worst, detail)

    def _values(self, layer: Layer, part: str, a: Tensor, b: Tensor) -> None:
        if part == "ffn.weights":
            assert self.chosen is not None
            count = self.config.num_experts
            a = routing_matrix(self.chosen[0], a, count)
            b = routing_matrix(self.chosen[1], b, count)
        if not a.numel():
            return
        if self.check_finite(layer.name, part, a, b):
            return
        now = Difference()
        now.add(a, b)
        layer.parts.setdefault(part, Difference()).merge(now)
        if self.limit is not None and now.relative > self.limit:
            errors = (a.double() - b.double()).flatten(1).norm(dim=1)
            detail = self._expert(errors) if part == "ffn.routed" else ""
            self._depart(layer.name, part, now.relative, int(errors.argmax()), detail)

    def _expert(self, errors: Tensor) -> str:
        """The expert that all wrong tokens chose and no right one did, if there is one."""
        assert self.chosen is not None
        bad = errors > 0.1 * errors.max()
        chose = routing_matrix(self.chosen[0], torch.ones(self.chosen[0].shape), self.config.num_experts) > 0
        guilty = (chose == bad.unsqueeze(1)).all(0).nonzero().flatten().tolist()
        return f"all of it in tokens of expert {guilty[0]}" if len(guilty) == 1 else ""

    def check_finite(self, layer: str, part: str, a: Tensor, b: Tensor) -> bool:
        """Whether NaN or infinity was found, now or before, so that errors mean nothing."""
        places = {"A": first_not_finite(a), "B": first_not_finite(b)}
        bad = {side: place for side, place in places.items() if place is not None}
        if bad:
            where = ", ".join(f"{side} holds NaN or infinity at {place}" for side, place in bad.items())
            first = next(iter(bad.values()))
            self._depart(layer, part, None, first[0] if first else 0, where)
        return bool(bad)

    def _depart(self, layer: str, part: str, relative: float | None, row: int, detail: str) -> None:
        if self.departure is None:
            token = self._token(layer, part, row)
            self.departure = Departure(layer, part, *(PARTS | _LOGITS)[part], relative, token, detail)

    def _token(self, layer: str, part: str, row: int) -> int:
        """Where in the text a row of a step's result stands; a pooled one stands where its block ends."""
        if layer.startswith("mtp."):
            # Drafts are made once, for the first step, when the next one is already counted from.
            return row
        if part.endswith(".pooled"):
            ratio = self.config.layers[int(layer.split(".")[1])].ratio
            return (self.start // ratio + row + 1) * ratio - 1
        return self.start + row


def check_alike(a: ModelConfig, b: ModelConfig) -> None:
    """Two models can be compared layer by layer when all their sizes agree."""
    for each in fields(ModelConfig):
        if each.name in ("quantization", "num_mtp_layers", "dspark", "max_positions"):
            continue
        x, y = getattr(a, each.name), getattr(b, each.name)
        if x != y:
            raise ConfigError(
                f"the models differ in {each.name}: {_short(x)} and {_short(y)}; expected the same"
            )


def parse_settings(text: str) -> EngineConfig:
    """`activations=a8,op.attention=cpu` -> an EngineConfig; names are its fields, and op.NAME."""
    names = {each.name for each in fields(EngineConfig)} - _ALIKE
    values: dict[str, Any] = {}
    ops: list[tuple[str, str]] = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (word.strip() for word in item.partition("="))
        if not equals or not value:
            raise ConfigError(f"setting {item!r}: expected NAME=VALUE, for example activations=a8")
        if name.startswith("op."):
            ops.append((name[3:], value))
        elif name not in names:
            raise ConfigError(f"unknown setting {name!r}; use one of {', '.join(sorted(names))}, op.NAME")
        elif name in values:
            raise ConfigError(f"setting {name!r} is given twice; keep one")
        else:
            values[name] = _typed(name, value)
    return EngineConfig(**values, ops=tuple(ops))


def _typed(name: str, text: str) -> Any:
    """As the type of EngineConfig's field has it."""
    hint = get_type_hints(EngineConfig)[name]
    if hint is bool:
        if text not in ("true", "false"):
            raise ConfigError(f"{name} is {text!r}, expected true or false")
        return text == "true"
    number = next((kind for kind in (int, float) if kind in (hint, *get_args(hint))), None)
    try:
        return text if number is None else number(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, expected a number") from None


def random_ids(config: ModelConfig, count: int) -> list[int]:
    """The start token, then others in no order; the same on every machine."""
    check_count(count, config)
    mixed = ((2654435761 * (i + 1) % 4294967296 >> 9) for i in range(1, count))
    return [config.bos_id, *(number % config.vocab_size for number in mixed)]


def default_tokens(config: ModelConfig) -> int:
    """Enough to close a block of every kind and, where that is not many, to leave the indexer a choice."""
    enough = max([2 * layer.ratio for layer in config.layers if layer.kind == "hca"], default=0)
    chosen = max(
        [layer.ratio * (config.index_topk + 16) for layer in config.layers if layer.kind == "csa"], default=0
    )
    return min(max(256, enough, chosen if chosen <= 1024 else 0), config.max_positions)


def check_count(count: int, config: ModelConfig) -> None:
    if not 2 <= count <= min(config.max_positions, MAX_TOKENS):
        raise RequestError(f"{count} tokens given, expected 2 to {min(config.max_positions, MAX_TOKENS)}")


def check_ids(ids: Sequence[int], num_single: int, config: ModelConfig) -> None:
    check_count(len(ids), config)
    if not 0 <= num_single < len(ids):
        raise RequestError(f"{num_single} single tokens of {len(ids)}, expected 0 to {len(ids) - 1}")
    if bad := [id for id in ids if not 0 <= id < config.vocab_size]:
        raise RequestError(f"id {bad[0]} is outside the vocabulary of {config.vocab_size}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _finite_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_only(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite_only(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
