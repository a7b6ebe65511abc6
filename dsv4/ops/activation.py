"""The input of a layer half: how its products read it, and its rows in these forms. Without Triton."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from dsv4.ops.linear.prefill_packed import Codes, Mode, Packed

if TYPE_CHECKING:
    from dsv4.ops.rows import quantize


@dataclass(frozen=True)
class Form:
    """How a product reads rows, rounded as `activations` says: as values, codes, or packed for a mode."""

    activations: str = "a16"
    mode: Mode | None = None
    is_codes: bool = False

    @property
    def source(self) -> "Form":
        """What it is packed from. FP8 is rounded on the way, NVFP4 codes come straight from the norm."""
        if self.is_codes and self.activations == "a4":
            return self
        is_fp8 = self.is_codes or (self.mode is not None and self.mode.is_fp8)
        return PLAIN if is_fp8 else Form(self.activations)


PLAIN = Form()


@dataclass(frozen=True)
class Norm:
    """RMSNorm by `weight` [K], and the forms in which its output is read, the first reader's first."""

    weight: Tensor
    eps: float
    forms: tuple[Form, ...] = (PLAIN,)


@dataclass(frozen=True)
class Activation:
    """Rows [T, K] in the forms that readers want. A reader without its form makes it of the plain rows."""

    like: Tensor  # of the same shape, type and device; the values may be others
    values: Mapping[str, Tensor] = field(default_factory=dict)  # by rounding; a16: the plain rows
    packed: Mapping[Form, Packed] = field(default_factory=dict)
    codes_8: Codes | None = None  # FP8
    codes_4: "quantize.Packed | None" = None  # NVFP4

    @property
    def plain(self) -> Tensor:
        assert "a16" in self.values, "the norm's forms name no reader of plain rows"
        return self.values["a16"]


Rows = Tensor | Activation  # what products take


def activation(x: Rows) -> Activation:
    return x if isinstance(x, Activation) else Activation(x, {"a16": x})
