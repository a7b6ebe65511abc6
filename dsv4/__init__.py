"""dsv4: a small, fast, exact inference engine for DeepSeek-V4. The public API is the names of `__all__`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.config import EngineConfig
    from dsv4.engine.chat import ChatCompletion
    from dsv4.engine.engine import Engine
    from dsv4.engine.request import Completion, SamplingParams
    from dsv4.errors import Dsv4Error, RequestError

__all__ = [
    "ChatCompletion",
    "Completion",
    "Dsv4Error",
    "Engine",
    "EngineConfig",
    "RequestError",
    "SamplingParams",
]
__version__ = "0.1.0"
_MODULES = {
    "ChatCompletion": "dsv4.engine.chat",
    "Completion": "dsv4.engine.request",
    "Dsv4Error": "dsv4.errors",
    "Engine": "dsv4.engine.engine",
    "EngineConfig": "dsv4.config",
    "RequestError": "dsv4.errors",
    "SamplingParams": "dsv4.engine.request",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: `dsv4 --help` and the text package should not wait for torch.
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'dsv4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
