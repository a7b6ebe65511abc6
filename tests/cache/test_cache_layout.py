"""Bytes of the cache: the published table to the byte, and the allocation against real tensors."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import LayerSpec, preset
from dsv4.quant.formats import Format


def layout(
    name: str, kv: Format, key: Format, mtp: int = 1, context: int = 256, slots: int = 1, itemsize: int = 2
) -> CacheLayout:
    return CacheLayout(preset(name), kv, key, itemsize, context, slots, mtp)


# One sequence, windows for all layers and the draft block. Columns: BF16; FP8 entries with FP4 keys.
SIZES = [
    ("flash", 8192, 74_334_208, 44_283_904),
    ("flash", 131_072, 919_748_608, 476_114_944),
    ("flash", 1_048_576, 7_232_176_128, 3_700_453_376),
    ("pro", 8192, 107_511_808, 64_562_688),
    ("pro", 131_072, 1_317_634_048, 682_825_728),
    ("pro", 1_048_576, 10_353_213_440, 5_299_189_760),
]


@pytest.mark.parametrize(("name", "tokens", "bf16", "fp8"), SIZES)
def test_sequence_bytes(name: str, tokens: int, bf16: int, fp8: int) -> None:
    assert layout(name, Format.BF16, Format.BF16).sequence_bytes(tokens) == bf16
    assert layout(name, Format.KV8, Format.MXFP4).sequence_bytes(tokens) == fp8


@pytest.mark.parametrize(("name", "bf16", "fp8"), [("flash", 6880, 3514), ("pro", 9848, 5031)])
def test_growth_per_token(name: str, bf16: int, fp8: int) -> None:
    """Over 128 tokens every layer closes whole blocks; the published figures are rounded down to a byte."""
    for kv, key, want in ((Format.BF16, Format.BF16, bf16), (Format.KV8, Format.MXFP4, fp8)):
        one = layout(name, kv, key)
        assert (one.sequence_bytes(4096 + 128) - one.sequence_bytes(4096)) // 128 == want


def test_sequence_bytes_count_whole_blocks_only() -> None:
    one = layout("tiny", Format.KV8, Format.MXFP4)
    empty = one.sequence_bytes(0)
    assert one.sequence_bytes(3) == empty
    # Two CSA layers close a block at 4: an entry and a key each.
    per_block = 2 * (one.entry_bytes + one.key_bytes)
    assert one.sequence_bytes(4) == empty + per_block
    assert one.sequence_bytes(127) == empty + 31 * per_block
    assert one.sequence_bytes(128) == empty + 32 * per_block + one.entry_bytes


@pytest.mark.parametrize(("name", "tails"), [("flash", 12_206_080), ("pro", 18_710_528)])
def test_tail_bytes(name: str, tails: int) -> None:
    assert layout(name, Format.KV8, Format.MXFP4).tail_bytes() == tails


def test_bytes_per_entry_and_key() -> None:
    assert layout("flash", Format.KV8, Format.MXFP4).entry_bytes == 584
    assert layout("flash", Format.KV8, Format.MXFP4, itemsize=4).entry_bytes == 584 + 128
    assert layout("flash", Format.BF16, Format.BF16).entry_bytes == 1024
    assert layout("flash", Format.F32, Format.F32).entry_bytes == 2048
    assert layout("flash", Format.KV8, Format.MXFP4).key_bytes == 68
    assert layout("flash", Format.BF16, Format.BF16).key_bytes == 256
    assert layout("flash", Format.F32, Format.F32).key_bytes == 512


def tensors(value: object) -> Iterator[Tensor]:
    """Every tensor inside dataclasses, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


FORMATS = [
    (Format.KV8, Format.MXFP4, torch.float32),
    (Format.KV8, Format.MXFP4, torch.bfloat16),
    (Format.BF16, Format.BF16, torch.bfloat16),
    (Format.F32, Format.F32, torch.float32),
]


@pytest.mark.parametrize(("kv", "key", "dtype"), FORMATS)
@pytest.mark.parametrize(("context", "slots"), [(256, 1), (1000, 3)])
def test_store_bytes_are_what_a_cache_allocates(
    kv: Format, key: Format, dtype: torch.dtype, context: int, slots: int
) -> None:
    one = layout("tiny", kv, key, context=context, slots=slots, itemsize=dtype.itemsize)
    cache = Cache(one, "cpu", dtype)
    held = [*tensors(cache.layers), cache.page_table]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
    assert one.store_bytes() == sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("ratios", "page_tokens"),
    [([], 256), ([4, 128], 256), ([4, 512], 512), ([4, 96], 768), ([3, 5], 3840)],
)
def test_pages_hold_whole_blocks_of_every_layer(ratios: list[int], page_tokens: int) -> None:
    layers = tuple(LayerSpec("csa" if r == 4 else "hca", r, False) for r in ratios)
    config = replace(preset("tiny"), layers=(LayerSpec("sliding", 0, False), *layers))
    one = CacheLayout(config, Format.F32, Format.F32, 4, 1000, 2, 0)
    assert one.page_tokens == page_tokens
    assert one.pages_per_sequence == -(-1000 // page_tokens)
    assert [one.page_entries(layer) * layer.ratio for layer in layers] == [page_tokens] * len(layers)


# (b) windows and (d) previous halves at a multiple of 128, trunk only.
SNAPSHOTS = [
    ("flash", 43 * 127 * 584, 21 * (4 * 512 * 2 * 4 + 4 * 128 * 2 * 4), 3_189_224, 430_080),
    ("pro", 61 * 127 * 584, 30 * 20_480, 4_524_248, 614_400),
]


@pytest.mark.parametrize(("name", "windows", "tails", "printed_windows", "printed_tails"), SNAPSHOTS)
def test_snapshot_bytes(
    name: str, windows: int, tails: int, printed_windows: int, printed_tails: int
) -> None:
    assert (windows, tails) == (printed_windows, printed_tails)
    cache = Cache(layout(name, Format.KV8, Format.MXFP4, mtp=0), "cpu", torch.bfloat16)
    for handle, position in enumerate((128, 256, 134)):
        cache.save(handle, 0, position)
    assert cache.snapshots[0].num_bytes == cache.snapshots[1].num_bytes == windows + tails
    # Off the multiple the open blocks are kept too: HCA rows from 128 on, CSA rows of the started block.
    spec = cache.layout.config
    hca, csa = (sum(layer.kind == kind for layer in spec.layers) for kind in ("hca", "csa"))
    open_rows = hca * 6 * 512 * 2 * 4 + csa * 2 * (1024 + 256) * 2 * 4
    assert cache.snapshots[2].num_bytes == windows + tails + open_rows
