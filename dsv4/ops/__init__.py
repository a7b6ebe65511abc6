"""The kernel table: which op has which backend, and which module each op gets on a given machine."""

from dataclasses import dataclass, fields
from importlib import import_module
from inspect import isfunction
from types import ModuleType

from dsv4.errors import ConfigError

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "linear": ("cpu", "gpu"),
    "experts": ("cpu", "gpu"),
    "route": ("cpu", "gpu"),
    "rows": ("cpu", "gpu"),
    "mhc": ("cpu", "gpu"),
    "index": ("cpu", "gpu"),
    "attention": ("cpu", "gpu"),
    "sample": ("cpu", "gpu"),
}
# Best first, by the machine's kind as device.py names it.
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("gpu", "cpu")}
# A backend's file in an op's room. Decode steps launch what lies beside it, by step/launches.py.
FILE_OF = {"cpu": "cpu", "gpu": "prefill"}


def backend_module(op: str, backend: str) -> ModuleType:
    return import_module(f"dsv4.ops.{op}.{FILE_OF[backend]}")


@dataclass(frozen=True)
class Ops:
    """One chosen module per op. A model is built with an Ops; it never chooses for itself."""

    linear: ModuleType
    experts: ModuleType
    route: ModuleType
    rows: ModuleType
    mhc: ModuleType
    index: ModuleType
    attention: ModuleType
    sample: ModuleType

    @classmethod
    def choose(cls, machine: str, /, **override: str) -> "Ops":
        """The best backend of every op for `machine`, except where `override` names another.

        A name with a dot is a module from elsewhere, such as an experiment, with the functions of `cpu.py`.
        """
        if unknown := sorted(override.keys() - IMPLEMENTATIONS.keys()):
            raise ConfigError(f"unknown ops {unknown}; the ops are {', '.join(IMPLEMENTATIONS)}")
        chosen = {}
        for op, backends in IMPLEMENTATIONS.items():
            name = override.get(op) or next(b for b in PREFERENCE[machine] if b in backends)
            if "." in name:
                chosen[op] = _foreign(op, name)
            elif name in backends:
                chosen[op] = backend_module(op, name)
            else:
                raise ConfigError(f"op {op} has no backend {name!r}; it has {', '.join(backends)}")
        return cls(**chosen)

    def names(self) -> dict[str, str]:
        """op -> backend, as shown by `dsv4 info`."""
        modules = {field.name: getattr(self, field.name).__name__ for field in fields(self)}
        files = {op: name.removeprefix(f"dsv4.ops.{op}.") for op, name in modules.items()}
        backends = {file: backend for backend, file in FILE_OF.items()}
        return {op: backends.get(file, file) for op, file in files.items()}


def _foreign(op: str, name: str) -> ModuleType:
    """The module of that dotted name, if it has every public function of the op's reference."""
    try:
        module = import_module(name)
    # TypeError, ValueError: a name such as `.x` or `a..b`, which is no module's.
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"op {op}: the module {name!r} cannot be imported ({error})") from None
    reference = backend_module(op, "cpu")
    needed = [
        key
        for key, value in vars(reference).items()
        if isfunction(value) and value.__module__ == reference.__name__
    ]
    if lacking := [key for key in needed if not key.startswith("_") and not hasattr(module, key)]:
        raise ConfigError(
            f"op {op}: the module {name!r} lacks {', '.join(lacking)}; "
            f"it needs the functions of dsv4/ops/{op}/cpu.py"
        )
    return module
