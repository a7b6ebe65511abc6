"""Penalties and biases against plain Python, one float32 operation at a time; what they leave alone."""

import math
import struct
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.engine.request import MAX_BIAS as REQUEST_BIAS
from dsv4.ops.sample.cpu import HISTORY, MAX_BIAS, choose, pack, pack_penalties, penalised, unpack

LARGEST = 3.4028234663852886e38
VOCAB = 40
Bias, How = dict[int, float], dict[str, float]


def f32(value: float) -> float:
    """Rounded to float32: after one + - * or / of two float32 in double, what float32 itself would give."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, value)


def oracle(logits: list[float], prompt: list[int], generated: list[int], bias: Bias, how: How) -> list[float]:
    presence, frequency, repetition = (f32(how[key]) for key in ("presence", "frequency", "repetition"))
    count, out = Counter(generated), []
    for id, logit in enumerate(logits):
        v = f32(logit + f32(bias[id])) if id in bias else logit
        if id in count or id in prompt:
            v = f32(v / repetition) if v > 0 else f32(v * repetition)
        if id in count:
            v = f32(f32(v - f32(frequency * count[id])) - presence)
        out.append(v if logit == -math.inf else min(max(v, -LARGEST), LARGEST))
    return out


def table_of(prompt: list[int], generated: list[int], bias: Bias, how: How) -> Tensor:
    """A table of three slots; the second has these penalties, and ids after its tokens that do not count."""
    row = pack_penalties(
        **how, bias=list(bias.items()), num_prompt=len(prompt), ids=[*prompt, *generated, 1, 1, 1]
    )
    table = torch.full((3, len(row)), 0x7FFFFFFF, dtype=torch.int32)
    table[1] = torch.tensor(row)
    return table


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
LOGITS = st.lists(
    st.one_of(
        st.floats(-40, 40, width=32),
        st.integers(-3, 3).map(float),
        st.sampled_from([-math.inf, LARGEST, -LARGEST, 1e-45, -1e-45]),
    ),
    min_size=VOCAB,
    max_size=VOCAB,
)
BIAS = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=20)
HOW = st.fixed_dictionaries(
    {
        "presence": st.one_of(st.just(0.0), st.floats(-2, 2)),
        "frequency": st.one_of(st.just(0.0), st.floats(-2, 2)),
        "repetition": st.one_of(st.just(1.0), st.floats(0.01, 100)),
    }
)


@settings(max_examples=150, deadline=None)
@given(logits=LOGITS, prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), generated=IDS,
       bias=BIAS, how=HOW)  # fmt: skip
def test_plain_python_agrees(
    logits: list[float], prompt: list[int], generated: list[int], bias: Bias, how: How
) -> None:
    table, given_logits = table_of(prompt, generated, bias, how), torch.tensor(logits)
    got = penalised(given_logits, table[1], len(generated))
    assert got.tolist() == oracle(given_logits.tolist(), prompt, generated, bias, how)


@settings(max_examples=150, deadline=None)
@given(logits=LOGITS, generated=IDS, bias=BIAS, how=HOW, seed=st.integers(0, 99), data=st.data())
def test_choices_are_those_of_the_penalised_logits(
    logits: list[float],
    generated: list[int],
    bias: Bias,
    how: How,
    seed: int,
    data: st.DataObject,
) -> None:
    """Temperature, filters and masks come after them; log-probabilities know nothing of them."""
    prompt = [3, 3, 5]
    table, raw = table_of(prompt, generated, bias, how), torch.tensor([logits])
    changed = torch.tensor([oracle(raw[0].tolist(), prompt, generated, bias, how)])
    rest = {
        "temperature": data.draw(st.sampled_from([0.0, 0.7, 2.0])),
        "top_k": data.draw(st.sampled_from([0, 1, 5])),
        "top_p": data.draw(st.sampled_from([1.0, 0.8])),
        "seed": seed,
        "index": len(generated),
        "has_mask": data.draw(st.booleans()),
    }
    mask = torch.tensor([[0x5A5A5A5A, -1]], dtype=torch.int32)
    got = choose(raw, torch.tensor([pack(**rest, num_top=5, penalties=1)]), mask, table)[0].tolist()
    want = choose(changed, torch.tensor([pack(**rest)]), mask)[0].tolist()
    assert (got[0], got[2]) == (want[0], want[2])
    if got[0] >= 0:
        shown = choose(raw, torch.tensor([pack(forced=got[0], num_top=5)]), None)[0].tolist()
        assert unpack(got) == unpack(shown)


def test_a_row_depends_on_its_own_penalties_alone() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    ids, bias = (
        [[1, 2, 3], [4] * 5, [7, 8], [9]],
        [{}, {3: 100.0}, {int(logits[2].argmax()): -100.0}, {5: 1.0}],
    )
    table = torch.zeros(4, HISTORY + 9, dtype=torch.int32)
    for slot in range(4):
        row = pack_penalties(0.5, 0.5, 1.2, list(bias[slot].items()), 1, ids[slot])
        table[slot, : len(row)] = torch.tensor(row)
    rows = torch.tensor([pack(index=len(ids[slot]) - 1, penalties=slot) for slot in range(4)])
    whole = choose(logits, rows, None, table)
    assert whole[1, 0] == 3 and whole[2, 0] != logits[2].argmax()
    for i in range(4):
        assert torch.equal(choose(logits[i : i + 1], rows[i : i + 1], None, table)[0], whole[i])
    plain = torch.tensor([pack()] * 4)
    assert torch.equal(choose(logits, plain, None, table), choose(logits, plain, None))


def test_limits_agree() -> None:
    assert MAX_BIAS == REQUEST_BIAS
