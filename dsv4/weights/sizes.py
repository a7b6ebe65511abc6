"""What a stored weight takes in memory, held for the reference or for the GPU kernels. Without torch."""

import math

from dsv4.gpu.shapes import tile_bytes
from dsv4.quant.formats import FP8_TILE, MX_BLOCK, NV_BLOCK, Format
from dsv4.weights.detect import Source


def held_bytes(source: Source, dense: bool) -> int:
    """Memory of one parameter as `load` holds it: decoded to float32, or as stored with its block scales."""
    kind, count = source.param.kind, math.prod(source.param.shape)
    if kind == "table":
        return 8 * count
    if kind == "plain" or (dense and not source.param.is_embedding):
        return 4 * count
    if kind == "grouped" and source.format is Format.FP8:
        return 2 * count
    rows, cols = source.param.shape
    if source.format is Format.FP8:
        assert source.scale is not None
        tiles = -(-rows // FP8_TILE) * -(-cols // FP8_TILE)
        return count + tiles * (1 if source.scale.dtype == "F8_E8M0" else 4)
    if source.format is Format.MXFP4:
        return count // 2 + rows * -(-cols // MX_BLOCK)
    if source.format is Format.NVFP4:
        return count // 2 + rows * -(-cols // NV_BLOCK)
    return count * (2 if source.format is Format.BF16 else 4)


def tiled_source_bytes(source: Source) -> int:
    shape, kind = source.param.shape, source.param.kind
    if kind in ("plain", "table") or source.param.stays_in_rows:
        return held_bytes(source, dense=False)
    return tile_bytes(tiled_format(source), (shape[0], shape[1]))


def tiled_format(source: Source) -> Format:
    """F32 linears are refused where their values do not fit BF16, so they are held in that."""
    assert source.format is not None
    if source.format is Format.F32 or (
        source.param.kind == "grouped" and not _is_power_of_two_scaled(source)
    ):
        return Format.BF16
    return source.format


def _is_power_of_two_scaled(source: Source) -> bool:
    return source.format is not Format.FP8 or source.scale is None or source.scale.dtype == "F8_E8M0"
