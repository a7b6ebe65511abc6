"""NaN and infinity in a step show where the reference shows them, in their own row alone."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from step_support import DTYPES, blank, moved, on_gpu, rand, runs, there
from torch import Tensor

from dsv4.ops.attention import cpu as attention
from dsv4.ops.index import cpu as index_cpu
from dsv4.quant.codec import decode, encode_kv, mxfp4_round
from dsv4.quant.formats import Format, QuantTensor, empty_rows

attend = pytest.importorskip("dsv4.ops.attention.decode_any", reason="Triton is not installed")
from dsv4.ops.attention import prepare  # noqa: E402
from dsv4.ops.index import decode as index  # noqa: E402

pytestmark = runs
EPS, LONGEST, RING, NAN, INF = 1e-6, 256, 48, float("nan"), float("inf")
D, ROPE, RANK, DI, RATIO, PAGE = 80, 16, 33, 32, 4, 4
SLOTS, POSITIONS = [2, 0, 1], [7, 3, 11]  # of the rows of test_prepare, each of which closes a block


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(LONGEST), 0.3 ** torch.arange(ROPE // 2).float())
    return angles.cos(), angles.sin()


def check_broken(got: Tensor, want: Tensor, what: str) -> None:
    """What is no number is so in the same places, and there is some; the rest is another test's."""
    broken = ~torch.isfinite(want)
    assert bool(broken.any()), f"{what}: the reference hides it"
    assert torch.equal(~torch.isfinite(got.cpu()), broken), f"{what}: hidden, or spread to other places"


def prepared(dtype: torch.dtype, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `prepare` makes of three rows."""
    slots, positions = torch.tensor(SLOTS), torch.tensor(POSITIONS)
    cos, sin = tables()
    page_table = torch.arange(3).int().view(3, 1)
    entries, keys = (
        prepare.Pooling(
            values=there(inputs[f"{name} values"]),
            scores=there(inputs[f"{name} scores"]),
            ape=there(rand(RATIO, 2 * d, seed=31)),
            tail_values=there(inputs[f"{name} tail"]),
            tail_scores=there(inputs[f"{name} tail scores"]),
            norm=there(rand(d, seed=32)),
            out=moved(out),
        )
        for name, d, out in (
            ("entry", D, empty_rows(Format.KV8, 3 * PAGE, D, ROPE, dtype)),
            ("key", DI, empty_rows(Format.MXFP4, 3 * PAGE, DI)),
        )
    )
    ring, q_low = moved(empty_rows(Format.KV8, 3 * RING, D, ROPE, dtype)), blank(3, RANK, dtype=dtype)
    prepare.prepare(
        q_low=there(inputs["q"]),
        q_norm=there(rand(RANK, seed=33)),
        q_low_out=q_low,
        kv=there(inputs["kv"]),
        kv_norm=there(rand(D, seed=34)),
        ring=ring,
        ring_rows=RING,
        cos=there(cos),
        sin=there(sin),
        slots=there(slots),
        positions=there(positions),
        eps=EPS,
        page_table=there(page_table),
        page_entries=PAGE,
        ratio=RATIO,
        entries=entries,
        keys=keys,
    )
    at = slots * RING + positions
    pool_at = slots * PAGE + positions // RATIO
    found = {"q": q_low.cpu(), "kv": decode(on_cpu(ring).take(at))}
    for name, pooling in (("entry", entries), ("key", keys)):
        found[name] = decode(on_cpu(pooling.out).take(pool_at))
    return found


def on_cpu(store: QuantTensor) -> QuantTensor:
    assert store.scale is not None
    return replace(store, data=store.data.cpu(), scale=store.scale.cpu())


def prepare_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = {"q": rand(3, RANK, seed=1, dtype=dtype), "kv": rand(3, D, seed=2, dtype=dtype)}
    for seed, (name, d) in enumerate((("entry", D), ("key", DI))):
        for part in ("values", "scores"):
            inputs[f"{name} {part}"] = rand(3, 2 * d, seed=10 + seed)
        for part in ("tail", "tail scores"):
            inputs[f"{name} {part}"] = rand(3, RATIO * 2 + 8, 2 * d, seed=20 + seed)
    return inputs


@cache
def untouched(dtype: torch.dtype) -> dict[str, Tensor]:
    return prepared(dtype, prepare_inputs(dtype))


# Which row each result is broken in, in four launches: any two are in different rows in one of them.
BROKEN_ROWS = {"q": (0, 1, 2, 0), "kv": (1, 2, 0, 1), "entry": (2, 0, 1, 2), "key": (0, 2, 1, 0)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(("launch", "part"), list(enumerate(("values", "scores", "tail", "tail scores"))))
def test_prepare(launch: int, part: str, value: float, dtype: torch.dtype) -> None:
    """One number of a row: everything that the row stores from it is NaN, nothing else changes."""
    inputs, clean = prepare_inputs(dtype), untouched(dtype)
    rows = {shows: at[launch] for shows, at in BROKEN_ROWS.items()}
    for shows, row in rows.items():
        where = f"{shows} {part}" if shows in ("entry", "key") else shows
        # The own half of a fresh row; of a tail, the row before it.
        channel = inputs[where].shape[-1] // 2 + 3
        at = (SLOTS[row], POSITIONS[row] - 1, channel) if "tail" in where else (row, channel)
        inputs[where][at] = value
    found = prepared(dtype, inputs)
    for name, got in found.items():
        row = rows[name]
        # A norm that divides by infinity leaves zeros in the blocks beside.
        show = ~torch.isfinite(got[row])
        assert bool(show.all() if value != INF else show.any()), f"{name}: {got[row]}"
        others = [at for at in range(3) if at != row]
        assert torch.equal(got[others], clean[name][others]), f"{name} changed"
    cos, sin = (table[POSITIONS] for table in tables())
    fresh = attention.entries(inputs["kv"], rand(D, seed=34), cos, sin, EPS)
    check_broken(found["kv"], decode(attention.store(fresh, ROPE, Format.KV8, True)), "kv")
    if "tail" not in part:
        scores = inputs["entry scores"] + rand(RATIO, 2 * D, seed=31)[3]
        slots, positions = torch.tensor(SLOTS), torch.tensor(POSITIONS)
        pooled = attention.pool(
            *(inputs["entry values"], scores, inputs["entry tail"], inputs["entry tail scores"]),
            *(torch.arange(3), slots, positions, positions, RATIO, True),
        )
        assert not bool(torch.isfinite(pooled[rows["entry"]]).all()), "the reference hides it"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF])
def test_queries(value: float, dtype: torch.dtype) -> None:
    positions, (cos, sin) = torch.tensor([5, 9]), tables()
    q, iq = rand(2, 3, D, seed=1, dtype=dtype), rand(2, 3, DI, seed=2, dtype=dtype)
    q[1, 2, 70], iq[0, 1, 4] = value, value
    held, iheld = there(q), there(iq)
    prepare.queries(held, iheld, there(cos), there(sin), there(positions), EPS)
    check_broken(held, attention.queries(q, cos[positions], sin[positions], EPS), "q")
    check_broken(iheld, index_cpu.queries(iq, cos[positions], sin[positions], True), "iq")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["query", "key scale", "huge key", "weight"])
def test_index_scores(where: str, dtype: torch.dtype) -> None:
    count, heads, factor = 150, 3, 0.1
    keys = encode_kv(rand(count, DI, seed=1), 0, Format.MXFP4)
    assert keys.scale is not None
    iq, weights = mxfp4_round(rand(2, heads, DI, seed=2)).to(dtype), rand(2, heads, seed=3, dtype=dtype)
    if where == "query":
        iq[1, 2] = NAN  # rounding makes a block of 32 NaN at once
    elif where == "weight":
        weights[1, 0] = NAN
    else:
        keys.scale[131, 0] = 255 if where == "key scale" else 200
    out = blank(2, count)
    index.scores(
        iq=there(iq),
        weights=there(weights),
        keys=moved(keys),
        page_table=there(torch.zeros(2, 1, dtype=torch.int32)),
        slots=there(torch.tensor([0, 1])),
        positions=there(torch.tensor([4 * count - 1] * 2)),
        out=out,
        ratio=4,
        page_entries=count,
        factor=factor,
    )
    got = torch.isnan(out.cpu())
    want = torch.zeros(2, count, dtype=torch.bool)
    if where in ("query", "weight"):
        want[1] = True
        dots = (iq.float() @ decode(keys).t()).relu()
        assert torch.equal(torch.isnan((dots * weights.float().unsqueeze(2)).sum(1)), want)
    else:
        want[:, 131] = True
    assert torch.equal(got, want), where


def attended(
    q: Tensor, ring: QuantTensor, window: int, entries: QuantTensor | None, sinks: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """What the kernels give, and the reference."""
    tokens, heads, d = q.shape
    cos, sin = tables()
    slots, count = torch.arange(tokens), 0 if entries is None else 2
    chunks = attend.num_chunks(q.dtype, window, count)
    part_o, part_ml = blank(tokens, chunks, heads, d), blank(tokens, chunks, heads, 2)
    rows = torch.arange(tokens * count).view(tokens, count).int() if count else None
    attend.attend(
        q=there(q),
        ring=moved(ring),
        ring_rows=window + 8,
        window=window,
        entries=None if entries is None else moved(entries),
        rows=None if rows is None else there(rows),
        page_table=None,
        page_entries=0,
        ratio=4 if count else 0,
        slots=there(slots),
        positions=there(positions),
        part_o=part_o,
        part_ml=part_ml,
    )
    out = blank(tokens, heads * d, dtype=q.dtype)
    attend.combine(part_o, part_ml, there(sinks), there(cos), there(sin), there(positions), out)
    fresh = ring.take(slots * (window + 8) + positions % (window + 8))
    want = attention.attend(
        *(q, fresh, ring, slots, positions, positions, window, window + 8, entries),
        *(None if rows is None else rows.long(), sinks, cos[positions], sin[positions]),
    )
    return out.view(tokens, heads, d), want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "where",
    [
        *("query", "scale", "rotary", "infinite", "entry", "only key", "sink"),
        pytest.param("code", marks=on_gpu),  # the interpreter takes E4M3's NaN for 480
    ],
)
def test_attend(where: str, dtype: torch.dtype) -> None:
    d, window, heads = 64 + ROPE, 40, 2
    q, sinks = rand(3, heads, d, seed=1, dtype=dtype), rand(heads, seed=2)
    ring = encode_kv(rand(3 * (window + 8), d, seed=3, dtype=dtype), ROPE, Format.KV8)
    entries = encode_kv(rand(6, d, seed=4, dtype=dtype), ROPE, Format.KV8)
    assert ring.scale is not None and entries.scale is not None
    positions = torch.tensor([100, 37, 0 if where == "only key" else 60])
    key = 2 * (window + 8) + int(positions[2]) % (window + 8)
    rotary = ring.data[:, 64:].view(dtype)
    if where == "query":
        q[2, 1, 5] = NAN
    elif where in ("scale", "only key"):
        ring.scale[key, 0] = 255
    elif where == "code":
        ring.data[key - 7, 9] = 127
    elif where in ("rotary", "infinite"):
        rotary[key - 12, 3] = NAN if where == "rotary" else INF
    elif where == "entry":
        entries.scale[5, 0] = 255
    else:
        sinks[1] = NAN
    got, want = attended(q, ring, window, None if where == "only key" else entries, sinks, positions)
    check_broken(got, want, where)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_without_weight_shows_its_nan(dtype: torch.dtype) -> None:
    """An infinite key with a score of -inf: no weight, but its value times none is NaN, also in a chunk that
    other keys outweigh by more than float32 can say."""
    d, window = 64 + ROPE, 128
    q, values = torch.zeros(1, 1, d, dtype=dtype), torch.zeros(window + 8, d, dtype=dtype)
    q[0, 0, 0], q[0, 0, 64 + 3] = 40.0, -1.0
    values[120, 0] = 400.0
    ring = encode_kv(values, ROPE, Format.KV8)
    ring.data[:, 64:].view(dtype)[5, 3] = INF
    got, want = attended(q, ring, window, None, torch.zeros(1), torch.tensor([127]))
    check_broken(got, want, "an infinite key")
