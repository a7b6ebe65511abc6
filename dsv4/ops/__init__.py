"""The kernel table: which op has which backend, and which module each op gets on a given machine."""

from dataclasses import dataclass, fields
from importlib import import_module
from types import ModuleType

from dsv4.errors import ConfigError

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "linear": ("ref",),
    "experts": ("ref",),
    "route": ("ref",),
    "norm": ("ref",),
    "mhc": ("ref",),
    "qkv": ("ref",),
    "compress": ("ref",),
    "index": ("ref",),
    "attend": ("ref",),
    "sample": ("ref",),
}
# Best first, by the machine's kind as device.py names it.
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("ref",), "cuda": ("ref",)}


@dataclass(frozen=True)
class Ops:
    """One chosen module per op. A model is built with an Ops; it never chooses for itself."""

    linear: ModuleType
    experts: ModuleType
    route: ModuleType
    norm: ModuleType
    mhc: ModuleType
    qkv: ModuleType
    compress: ModuleType
    index: ModuleType
    attend: ModuleType
    sample: ModuleType

    @classmethod
    def choose(cls, machine: str, /, **override: str) -> "Ops":
        """The best backend of every op for `machine`, except where `override` names another."""
        if unknown := sorted(override.keys() - IMPLEMENTATIONS.keys()):
            raise ConfigError(f"unknown ops {unknown}; the ops are {', '.join(IMPLEMENTATIONS)}")
        chosen = {}
        for op, backends in IMPLEMENTATIONS.items():
            name = override.get(op) or next(b for b in PREFERENCE[machine] if b in backends)
            if name not in backends:
                raise ConfigError(f"op {op} has no backend {name!r}; it has {', '.join(backends)}")
            chosen[op] = import_module(f"dsv4.ops.{op}.{name}")
        return cls(**chosen)

    def names(self) -> dict[str, str]:
        """op -> backend, as shown by `dsv4 info`."""
        return {field.name: getattr(self, field.name).__name__.rsplit(".", 1)[1] for field in fields(self)}
