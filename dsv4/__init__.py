"""dsv4: a small, fast, exact inference engine for DeepSeek-V4. The public API is these three names."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.config import EngineConfig
    from dsv4.engine.engine import Engine
    from dsv4.engine.request import SamplingParams

__all__ = ["Engine", "EngineConfig", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported on first use: `dsv4 --help` and the text package should not wait for torch.
    if name == "Engine":
        from dsv4.engine.engine import Engine

        return Engine
    if name == "EngineConfig":
        from dsv4.config import EngineConfig

        return EngineConfig
    if name == "SamplingParams":
        from dsv4.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
