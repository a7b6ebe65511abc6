"""Sizes that the GPU kernels cannot take are refused by name; whatever is not refused can be planned: decode
steps and prompts, on every GPU that kernels are built for, alone or as one of several ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

from dsv4.config import Activations, LayerSpec, ModelConfig, preset
from dsv4.engine import sizes
from dsv4.engine.sizes import check_sizes, problems
from dsv4.errors import ConfigError
from dsv4.gpu.architectures import ARCHITECTURES
from dsv4.lab.synthetic import with_stages
from dsv4.model.params import num_parts
from dsv4.ops.activation import PLAIN, Form
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.linear import decode as matvec
from dsv4.ops.linear.prefill_packed import FP8_CODES, IN_16_BITS
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.route import decode as routing
from dsv4.ops.sample import decode as sample
from dsv4.quant.formats import Format
from dsv4.step.buffers import ROWS
from tests.support.dry import planned

# A layer of each kind and routing, small in everything that is not drawn.
BASE = replace(
    preset("tiny"),
    layers=(LayerSpec("sliding", 0, True), LayerSpec("csa", 4, False), LayerSpec("hca", 128, False)),
    num_mtp_layers=0,
)
SELECTING = 4  # tokens of an entry: with more of them than this times `index_topk` entries are selected
# Field: the last value that runs, the first beyond it, what is said of that. The others are BASE's.
EDGES: list[tuple[dict[str, int], dict[str, int], str]] = [
    ({"num_streams": 4}, {"num_streams": 5}, "5 streams, expected 4"),
    ({"hidden_size": 8192}, {"hidden_size": 8200}, "hidden size 8200, expected a multiple of 8 up to 8192"),
    ({"hidden_size": 264}, {"hidden_size": 260}, "hidden size 260, expected a multiple of 8 up to 8192"),
    ({"q_rank": 8192}, {"q_rank": 8196}, "query rank 8196, expected a multiple of 4 up to 8192"),
    ({"q_rank": 100}, {"q_rank": 102}, "query rank 102, expected a multiple of 4 up to 8192"),
    (
        {"expert_width": 8192},
        {"expert_width": 8196},
        "expert width 8196, expected a multiple of 4 up to 8192",
    ),
    ({"num_heads": 128}, {"num_heads": 130}, "heads of an output group with 8320 channels together"),
    ({"o_rank": 48}, {"o_rank": 56}, "output rank 56, expected a multiple of 16"),
    (
        {"o_groups": 16, "num_heads": 32},
        {"o_groups": 17, "num_heads": 34},
        "17 output groups, expected at most 16",
    ),
    ({"o_rank": 32768}, {"o_rank": 32784}, "output groups of 65568 ranks together, expected at most 65536"),
    ({"head_dim": 512}, {"head_dim": 516}, "heads of 516 channels, expected at most 512"),
    ({"rope_dim": 64}, {"rope_dim": 62}, "66 channels of a head without rotation, expected a multiple of 4"),
    ({"num_experts": 512}, {"num_experts": 513}, "513 experts, expected at most 512"),
    (
        {"num_experts": 40, "experts_per_token": 32},
        {"num_experts": 40, "experts_per_token": 33},
        "33 experts per token, expected at most 32",
    ),
    (
        {"num_experts": 31, "experts_per_token": 31},
        {"num_experts": 31, "experts_per_token": 32},
        "32 experts per token, expected at most 31",
    ),
    (
        {"index_dim": 128},
        {"index_dim": 256},
        "index keys of 256 channels, expected a power of two from 64 to 128",
    ),
    (
        {"index_dim": 64},
        {"index_dim": 96},
        "index keys of 96 channels, expected a power of two from 64 to 128",
    ),
    ({"index_heads": 64}, {"index_heads": 65}, "65 index heads, expected at most 64"),
    ({"index_topk": 8192}, {"index_topk": 8193}, "8193 entries to select, expected at most 8192"),
    (
        {"vocab_size": 1 << 18},
        {"vocab_size": (1 << 18) + 1},
        "a vocabulary of 262145, expected at most 262144",
    ),
]


def ids_of(edge: Any) -> str:
    return "-".join(f"{k}={v}" for k, v in edge.items()) if isinstance(edge, dict) else ""


@pytest.mark.parametrize(("last", "beyond", "said"), EDGES, ids=ids_of)
def test_the_last_size_is_planned_and_the_next_refused(
    last: dict[str, int], beyond: dict[str, int], said: str
) -> None:
    fits, too_much = replace(BASE, **last), replace(BASE, **beyond)  # type: ignore[arg-type]
    context = SELECTING * fits.index_topk + 300
    check_sizes(fits, context)
    for rows, dtype in ((1, torch.bfloat16), (32, torch.bfloat16), (8, torch.float32)):
        assert planned(fits, rows, dtype, context, prompts=(33,)).buffers.selects
    with pytest.raises(ConfigError, match=f"a model of {said}.*use --device cpu") as told:
        check_sizes(too_much)
    assert "\n" not in str(told.value)


def test_blocks_of_tokens_that_one_program_pools() -> None:
    """An entry of a CSA layer is made of twice its ratio of tokens."""
    for kind, ratio in (("csa", 2048), ("hca", 4096)):
        c = replace(BASE, layers=(LayerSpec(kind, ratio, False),), index_topk=4)  # type: ignore[arg-type]
        planned(c, 2, context=5 * ratio, prompts=(33,))
        check_sizes(c)
        with pytest.raises(ConfigError, match=r"entries made of 409[78] tokens, expected at most 4096"):
            check_sizes(replace(c, layers=(replace(c.layers[0], ratio=ratio + 1),)))


def test_ranks_share_widths_that_products_take() -> None:
    c = replace(BASE, expert_width=72)
    check_sizes(c, ranks=2)
    planned(c, 8, ranks=2, prompts=(33,))
    with pytest.raises(ConfigError, match="expert width 72 over 8 ranks, 9 each, expected a multiple of 4;"):
        check_sizes(replace(c, o_groups=8, num_heads=8), ranks=8)


def test_ranks_need_multiprocessors_that_hold_all_their_blocks() -> None:
    c = replace(BASE, hidden_size=2560)
    check_sizes(c, multiprocessors=20, ranks=2)
    planned(c, 8, multiprocessors=20, ranks=2)
    wide = replace(c, hidden_size=2568)
    check_sizes(wide, multiprocessors=20)
    planned(wide, 8, multiprocessors=20)
    with pytest.raises(ConfigError, match="hidden size 2568 over 2 ranks, expected at most 2560 with 20"):
        check_sizes(wide, multiprocessors=20, ranks=2)


@pytest.mark.parametrize("multiprocessors", [8, 20, 132])
def test_few_multiprocessors_have_longer_runs(multiprocessors: int) -> None:
    """The most rows that a weight may have, of which a block takes a limited number."""
    c = replace(BASE, vocab_size=1 << 18, o_groups=16, num_heads=1024)
    check_sizes(c, multiprocessors=multiprocessors)
    planned(c, 32, torch.float32, multiprocessors=multiprocessors)


def test_experts_whose_width_is_not_one_of_whole_blocks() -> None:
    """FP4 tensor cores multiply blocks of 16: then neither of an expert's products goes there."""
    c = replace(BASE, expert_width=520)
    planned(c, 8, layout="nvfp4", activations="a4", capability=120, prompts=(1, 300))


def test_a_context_beyond_the_selection_is_refused() -> None:
    check_sizes(BASE, 1 << 20)
    with pytest.raises(ConfigError, match=r"2097152 compressed entries .*max_context 8388608"):
        check_sizes(BASE, 1 << 23)


SIZES = {
    "hidden_size": (128, 520, 4096, 4104, 7168, 8192),
    "q_rank": (48, 512, 1536, 4100, 8192),
    "expert_width": (64, 516, 3072, 4608, 8192),
    "head_dim": (80, 128, 448, 512),
    "rope_dim": (8, 16, 64),
    "o_groups": (1, 2, 3, 16),
    "o_rank": (16, 64, 1024),
    "num_experts": (32, 257, 384, 512),
    "experts_per_token": (1, 6, 32),
    "index_dim": (64, 128),
    "index_heads": (1, 2, 64),
    "index_topk": (4, 32, 200, 1024, 8192),
    "vocab_size": (60, 512),
}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Published sizes and limits in any combination; every other time one of them is a little off."""
    drawn = {name: draw(st.sampled_from(values)) for name, values in SIZES.items()}
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(SIZES)))
        drawn[name] = max(1, drawn[name] + draw(st.sampled_from((-8, -4, -1, 1, 2, 4, 8, 16))))
    heads = drawn["o_groups"] * draw(st.sampled_from((1, 3, 8, 16)))
    return replace(BASE, num_heads=heads, **drawn)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    c=configs(),
    rows=st.sampled_from((1, 2, 32)),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    layout=st.sampled_from(("modelopt", "official", "nvfp4")),
    activations=st.sampled_from(("a16", "a8", "a4")),
    capability=st.sampled_from(sorted(ARCHITECTURES)),
    multiprocessors=st.sampled_from((16, 78, 132, 188)),
    ranks=st.sampled_from((1, 1, 2, 8)),
)
def test_what_is_let_through_can_be_planned(
    c: ModelConfig,
    rows: int,
    dtype: torch.dtype,
    layout: str,
    activations: Activations,
    capability: int,
    multiprocessors: int,
    ranks: int,
) -> None:
    context, ranks = SELECTING * c.index_topk + 300, min(ranks, num_parts(c))
    found = problems(c, context, capability, multiprocessors, ranks)
    for text in found:
        assert any(str(number) in text for number in _numbers(c)), text
    if not found:
        made = planned(
            c=c,
            rows=rows,
            dtype=dtype,
            context=context,
            layout=layout,
            activations="a16" if ranks > 1 else activations,
            capability=capability,
            multiprocessors=multiprocessors,
            ranks=ranks,
            prompts=(1, 33),
        )
        assert made.buffers.selects


def _numbers(c: ModelConfig) -> list[int]:
    found = [value for value in vars(c).values() if type(value) is int]
    return [*found, c.heads_per_group * c.head_dim, c.o_groups * c.o_rank, c.nope_dim]


@pytest.mark.parametrize("name", ["flash", "pro", "tiny"])
@pytest.mark.parametrize("rows", [1, 32])
def test_published_models_are_planned(name: str, rows: int) -> None:
    """Every second kind of layer at least once; two passes over K where hidden states are wide."""
    c = preset(name)
    layers = tuple(dict.fromkeys(c.layers))
    check_sizes(c, c.max_positions)
    context = SELECTING * c.index_topk + 300
    decoder = planned(replace(c, layers=layers, vocab_size=512), rows, context=context)
    assert decoder.buffers.selects
    assert (decoder.buffers.carry.numel() > 0) == (name == "pro")


def test_ratios_that_are_no_powers_of_two_attend_in_parts() -> None:
    c = preset("flash")
    layers = tuple(replace(c.layers[i], ratio=ratio) for i, ratio in ((0, 0), (2, 6), (3, 96)))
    decoder = planned(replace(c, layers=layers, vocab_size=512), rows=1, context=1024)
    assert not decoder.buffers.attends_in_one


def test_limits_are_those_of_the_launchers() -> None:
    """Stated twice, so that a plan needs no torch."""
    assert (sizes.MAX_DEPTH, sizes.MAX_SEGMENTS) == (matvec.MAX_DEPTH, matvec.MAX_SEGMENTS)
    assert sizes.DEEPEST == matvec.MAX_SEGMENTS * matvec.MAX_SLICES * matvec.SLICE
    for name in ("MAX_EXPERTS", "MAX_CHOICES", "MAX_PAIRS"):
        assert getattr(sizes, name) == getattr(routing, name), name
    for name in ("MAX_TOPK", "CLUSTER"):
        assert getattr(sizes, name) == getattr(selecting, name), name
    assert sizes.CLUSTER_SHARED == selecting.MANY_SHARED
    for name in ("STREAMS", "ITEM", "MAX_CHANNELS", "SHARED_BLOCKS"):
        assert getattr(sizes, name) == getattr(mhc, name), name
    assert (sample.MAX_VOCAB, ROWS[-1]) == (sizes.MAX_VOCAB, sizes.MAX_ROWS)


def test_norms_make_the_forms_that_products_read() -> None:
    """On Hopper plain rows are made where experts pack them by choice in 16 bits, and for nobody else."""
    c = preset("flash")
    c = replace(c, layers=tuple(dict.fromkeys(c.layers)), vocab_size=512)
    bf16, fp8 = Form(mode=IN_16_BITS[Format.BF16]), Form("a8", FP8_CODES)
    codes = Form("a8", is_codes=True)
    for layout, experts in (("official", codes), ("modelopt", PLAIN)):
        for block in planned(c, 1, layout=layout, activations="a8").model.blocks:
            assert block.ffn_norm.forms == (fp8, bf16, experts)
            assert block.attn_norm.forms == ((fp8, bf16) if block.attention.compressor else (fp8,))
            assert block.attention.q_norm.forms == (fp8,)
    held = planned(c, 1, layout="nvfp4", activations="a4", capability=120).model.blocks[0].ffn_norm.forms
    assert held == (Form("a4", is_codes=True), PLAIN)


@pytest.mark.parametrize(("name", "activations"), [("flash", "a16"), ("pro", "a8")])
def test_drafts_of_published_sizes(name: str, activations: Any) -> None:
    c = with_stages(replace(preset(name), layers=preset(name).layers[:3], num_experts=8))
    for rows in (1, 4):
        planned(c, rows, activations=activations)
