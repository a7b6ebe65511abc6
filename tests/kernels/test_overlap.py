"""What a step's launches read before their PDL wait: the check refuses what is unsafe, and the declarations
are what the kernels' sources say."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_support import IS_INTERPRETED
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from bench.echo import Echo, echo_peers
from dsv4.cache.store import Cache
from dsv4.config import Activations, ModelConfig, preset
from dsv4.engine.spill import Split, make_placement
from dsv4.gpu import build
from dsv4.gpu.pdl import Launch, Launcher, Names, check
from dsv4.gpu.shapes import Form
from dsv4.lab.bench.decode import Wanted
from dsv4.lab.synthetic import make_weights, num_stages, with_stages
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.attention import decode as attention
from dsv4.ops.attention import decode_any, prepare
from dsv4.ops.draft import decode as draft
from dsv4.ops.draft import round as rounds
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.experts.placement import Placement
from dsv4.ops.index import decode as index
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.index import prefill as index_op
from dsv4.ops.linear import decode as matvec
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.route import decode as routing
from dsv4.ops.rows import quantize
from dsv4.ops.sample import decode as sample
from dsv4.ops.sample import prefill as sample_op
from dsv4.parallel.mesh import Mesh
from dsv4.quant.formats import Format, empty_rows
from dsv4.step.round import PARTS, Round
from dsv4.step.run import Decoder
from tests.support.cuda_source import COMMENT, WAIT, functions, until_wait
from tests.support.dry import planned
from tests.support.triton_source import read

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="about sources, not about how they run")
TINY = preset("tiny")  # every layer kind, hash and learned routing, entries that are selected


def step(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    activations: Activations = "a16",
    placement: Placement | None = None,
    ranks: int = 1,
    whole_experts: bool = False,
    sums: bool = True,
    config: ModelConfig = TINY,
) -> Decoder:
    """The real list of launches; none can be launched here. `ranks`: of one of so many; `sums`: with its
    all-reduces."""
    sizes = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
    weights = make_weights(
        config=config,
        layout="modelopt",
        device="cpu",
        placement=placement,
        ranks=ranks,
        whole_experts=whole_experts,
        draft_blocks=num_stages(config),
    )
    mesh = Mesh() if ranks == 1 else Mesh(0, ranks, Echo(ranks), whole_experts)
    bundle = Bundle(config, weights, ops, Numerics(torch.bfloat16, activations, True), mesh)
    peers = echo_peers(TINY, ranks, rows, torch.device("cpu")) if ranks > 1 and sums else None
    layout = Wanted(600, rows).layout(config)
    cache = Cache(layout, "cpu", torch.bfloat16)
    counts = torch.zeros(TINY.num_layers, TINY.num_experts, dtype=torch.int32)
    model = Model(bundle, layout.max_context, "cpu", copies_ahead=False)
    return Decoder(bundle, model, cache, rows, counts=counts, peers=peers, sums=sums)


def test_places_are_read_by_products_of_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table may change between two steps: a step that reads it early has been checked with that."""
    names = [f"layers.{layer}.ffn.experts" for layer in range(TINY.num_layers)]
    split = Split(Form(Format.NVFP4, TINY.expert_width, TINY.hidden_size), tuple(names), TINY.num_experts, 9)
    made = step(monkeypatch, 1, placement=make_placement(split, None, "cpu"))
    readers = {launch.name for launch in made.launches if "places" in (*launch.reads, *launch.reads_early)}
    assert readers == {"experts up", "experts down"}
    assert not any("places" in launch.writes for launch in made.launches)


@pytest.fixture(params=[(1, "a16"), (4, "a16"), (1, "a4"), (4, "a4")], ids=lambda p: f"{p[0]}-{p[1]}")
def decoder(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Decoder:
    return step(monkeypatch, *request.param)


def checked(decoder: Decoder, change: Callable[[Launch], Launch]) -> None:
    state = [name for name in decoder.names.known if "#" not in name]
    check([change(launch) for launch in decoder.launches], between=state)


def toy(name: str, **more: Any) -> Launch:
    return Launch(name=name, run=lambda: None, **more)


def test_an_early_read_needs_a_late_trigger_after_its_writer() -> None:
    make, late = toy("make", writes=("a",)), toy("late", triggers_late=True)
    use = toy("use", reads_early=("a",))
    between, begin = toy("between"), toy("begin", triggers_late=True)
    check([begin, make, late, use])
    check([begin, make, late, between, between, use])
    for unsafe in (
        [begin, make, use],
        [begin, make, between, between, use],  # any number of launches may be under way at once
        [begin, late, make, use],
        [begin, replace(make, triggers_late=True), use],  # its own blocks write after they let `use` start
        [begin, make, between, use, late],
    ):
        with pytest.raises(AssertionError, match=r"use \(launch \d\) reads a .*, but make \(launch \d\)"):
            check(unsafe)


def test_the_step_before_counts() -> None:
    """What the last launches of a step write may be read early only after a late trigger of this step."""
    read_early, write = toy("first", reads_early=("a",)), toy("last", writes=("a",))
    check([toy("begin", triggers_late=True), read_early, write])
    with pytest.raises(AssertionError, match=r"first .* reads a .* last"):
        check([toy("begin"), read_early, write])
    with pytest.raises(AssertionError, match=r"first .* reads b .* what came before the step"):
        check([toy("begin"), toy("first", reads_early=("b",))], between=["b"])


def test_every_launch_waits() -> None:
    with pytest.raises(AssertionError, match="quick never waits"):
        check([toy("quick", waits=False)])


def test_the_step_is_safe(decoder: Decoder) -> None:
    checked(decoder, lambda launch: launch)
    late = {launch.name for launch in decoder.launches if launch.triggers_late}
    assert late == {"mhc open", "queries up", "gate, shared up", "experts up"}
    opens = [launch.triggers_late for launch in decoder.launches if launch.name == "mhc open"]
    assert opens == [True] + [False] * 2 * TINY.num_layers and decoder.launches[0].triggers_late


def launches(decoder: Decoder) -> list[str]:
    return [launch.name for launch in decoder.launches]


@pytest.mark.parametrize("rows", [1, 4])
def test_the_step_of_a_rank_is_safe(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """What one rank launches, but that the logits are gathered."""
    alone, decoder = step(monkeypatch, rows), step(monkeypatch, rows, ranks=2)
    checked(decoder, lambda launch: launch)
    assert launches(decoder) == [*launches(alone)[:-1], "gather", "sample"]
    late = [i for i, launch in enumerate(decoder.launches) if launch.triggers_late]
    assert late[0] == 0, "the first launch is the late one of the step"
    whole = step(monkeypatch, rows, ranks=2, whole_experts=True)
    checked(whole, lambda launch: launch)
    assert launches(whole) == launches(decoder)
    rounds = step(monkeypatch, rows, "a8", ranks=2, whole_experts=True)
    checked(rounds, lambda launch: launch)
    # Before wo_b, and for experts and the shared one, which are not as wide as each other.
    assert launches(rounds).count("round") == (0 if rows == 1 else 3 * TINY.num_layers)
    reads = [i for i, launch in enumerate(whole.launches) if "chosen" in launch.reads]
    assert len(reads) == TINY.num_layers and {whole.launches[i].name for i in reads} == {"mhc open"}
    with pytest.raises(AssertionError, match=r"reads .* before its PDL wait, but (sample|what came before)"):
        check([replace(decoder.launches[0], triggers_late=False), *decoder.launches[1:]], ["inputs"])


@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_without_its_all_reduces(monkeypatch: pytest.MonkeyPatch, whole_experts: bool) -> None:
    """Its other launches, with the same arguments; its logits lie where all are sampled."""
    given = {"ranks": 2, "whole_experts": whole_experts}
    whole, rest = step(monkeypatch, 2, **given), step(monkeypatch, 2, **given, sums=False)
    checked(rest, lambda launch: launch)
    assert launches(rest) == [name for name in launches(whole) if name != "gather"]
    assert not any("inbox" in (*it.reads, *it.writes) for it in rest.launches)

    def touched(it: Launch) -> list[list[str]]:
        buffers = (it.reads, it.reads_early, it.writes)
        return [[name for name in names if "#" not in name and name != "inbox"] for names in buffers]

    for a, b in zip([it for it in whole.launches if it.name != "gather"], rest.launches, strict=True):
        assert touched(a) == touched(b) or a.name == "head", a.name
    head = next(it for it in rest.launches if it.name == "head")
    sampled = next(it for it in rest.launches if it.name == "sample")
    assert "logits" in head.writes and "logits" in sampled.reads
    with pytest.raises(AssertionError):
        Decoder(rest.bundle, rest.model, rest.cache, 2)


def test_places_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two exchanges in the same place lies another, also from one step to the next (exchange.cuh)."""
    seen: list[int] = []
    tags: list[int] = []

    def note(source: str, kernel: str, device: torch.device, params: Any, **how: Any) -> None:
        if source in ("mhc/decode_open", "exchange/decode"):
            seen.append(params.first_place)
            tags.append(params.tag)

    for module in (exchange, mhc, routing, selecting, matvec, sample, quantize):
        monkeypatch.setattr(module, "call", note)
    for module in (prepare, index, decode_any):
        monkeypatch.setattr(module, "launch", lambda *arguments, **how: None)
    step(monkeypatch, 2, ranks=2).run()
    assert len(seen) == 2 * TINY.num_layers + 2 and len({*seen}) == 3
    assert all(a != b for a, b in zip(seen, [*seen[1:], seen[0]], strict=True)), seen
    assert len({*tags}) == len(tags), "two exchanges of a step that cannot be told apart"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mhc open", r"prepare .* reads .* before its PDL wait, but (sample|what came before the step)"),
        ("queries up", r"(attend|index scores).* reads layers\.\d\.(ring|keys) .* prepare"),
        ("experts up", r"experts down .* reads tasks .* route"),
        ("gate, shared up", r"experts up .* reads x(_in)? .* mhc close"),
    ],
)
def test_each_late_trigger_is_needed(decoder: Decoder, name: str, problem: str) -> None:
    if name == "gate, shared up" and decoder.buffers.rows > 1:
        return  # several rows are read after the wait
    with pytest.raises(AssertionError, match=problem):
        checked(decoder, lambda it: replace(it, triggers_late=it.triggers_late and it.name != name))


@pytest.mark.parametrize(
    ("name", "buffer", "writer"),
    [
        *(("projections", "x", "mhc close"), ("mhc open", "comb", "experts up|queries up")),
        *(("attend csa", "chosen_rows", "index select"), ("combine", "part_o", "attend")),
        *(("prepare", "kv", "projections"), ("experts down", "all_hidden", "experts up|round")),
        *(("head", "x", "mhc close"), ("sample", "logits", "head"), ("mhc open", "inputs", "sample|before")),
    ],
)
def test_a_planted_early_read_is_found(decoder: Decoder, name: str, buffer: str, writer: str) -> None:
    assert any(it.name == name and buffer in it.reads for it in decoder.launches), "no such read"

    def plant(it: Launch) -> Launch:
        is_reader = it.name == name and buffer in it.reads
        return replace(it, reads_early=(*it.reads_early, buffer)) if is_reader else it

    with pytest.raises(AssertionError, match=rf"{name} .* reads {buffer} .*({writer})"):
        checked(decoder, plant)


def hold_to_sources(
    launches: Sequence[Launch], names: Names, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch, with its own arguments, does what it declares; over all of them nothing is declared in
    vain. `kinds`: the kernels in Triton."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def note(kernel: Any, grid: Any, num_warps: int, overlap: bool, **arguments: Any) -> None:
        seen.append((kernel, arguments))

    for module in (prepare, index, decode_any, draft, rounds):
        monkeypatch.setattr(module, "launch", note)
    for module in (mhc, routing, selecting, matvec, sample, quantize):
        monkeypatch.setattr(module, "call", lambda *arguments, **how: None)
    written = {buffer for launch in launches for buffer in launch.writes}
    declared: dict[str, set[str]] = defaultdict(set)
    used: dict[str, set[str]] = defaultdict(set)
    for launch in launches:
        seen.clear()
        launch.run()
        if not seen:
            continue
        ((kernel, arguments),) = seen
        found = read(kernel, arguments, lambda value: isinstance(value, Tensor))

        def named(pointers: set[str], of: dict[str, Any] = arguments, by: str = launch.name) -> set[str]:
            return set(names.of([of[pointer] for pointer in sorted(pointers)], by))

        what = f"{launch.name}, {kernel.fn.__name__}"
        assert found.waits, f"{what}: a path without a wait"
        assert not found.stored_early, f"{what}: stores {found.stored_early} before the wait"
        assert found.triggers == {launch.triggers_late}, f"{what}: triggers {found.triggers}"
        assert named(found.early) <= set(launch.reads_early), f"{what}: undeclared early reads"
        assert named(found.late) <= {*launch.reads, *launch.reads_early}, f"{what}: undeclared reads"
        assert named(found.stored) <= set(launch.writes), f"{what}: undeclared writes"
        cached = named(found.through_l1) & (written | {"page_table"})
        assert not cached, f"{what}: {cached} come through L1 before the wait"
        kind = kernel.fn.__name__
        layer = re.compile(r"layers\.\d+\.| #\d+")  # alike in all layers
        for to, buffers in (
            *((used[kind], named(found.early)), (used[f"{kind} stores"], named(found.stored))),
            *((declared[kind], launch.reads_early), (declared[f"{kind} stores"], launch.writes)),
        ):
            to |= {layer.sub("", buffer) for buffer in buffers}
    assert used.keys() == {f"_{kind}_kernel{part}" for kind in kinds for part in ("", " stores")}
    assert used == declared, "declared in vain"


def test_declarations_are_what_triton_sources_do(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"prepare", "queries", "scores", "attend", "combine"}
    hold_to_sources(decoder.launches, decoder.names, kinds, monkeypatch)


@pytest.mark.parametrize("activations", ["a16", "a8"])
def test_declarations_of_a_round(activations: Activations, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step with its taps, what is accepted, and the next drafts."""
    its = step(monkeypatch, 2, activations, config=with_stages(TINY))
    state, costs = rounds.state_of(2, 5, "cpu"), torch.ones(4)
    made = Round(its.bundle, its.model, its.cache, 2, 3, state, costs)
    kinds = {"prepare", "queries", "scores", "attend", "combine", "begin", "fuse", "keep", "markov"}
    hold_to_sources(made.list(PARTS), made.decoder.names, {*kinds, "open", "accept"}, monkeypatch)


def test_every_tensor_of_a_launcher_is_declared() -> None:
    found = [
        value
        for module in (
            mhc,
            prepare,
            index,
            decode_any,
            draft,
            rounds,
            attention,
            routing,
            selecting,
            sample,
            quantize,
            exchange,
        )
        for value in vars(module).values()
        if isinstance(value, Launcher)
    ]
    assert len(found) >= 10
    for launcher in found:
        paths = (*launcher.reads, *launcher.reads_early, *launcher.writes)
        declared = {path.split(".")[0] for path in paths}
        hints = launcher.function.__annotations__
        tensors = {name for name, hint in hints.items() if re.search("Tensor|Pooling|Tasks|Peers", str(hint))}
        assert declared == tensors, launcher.function.__name__


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("route/decode", ["route_kernel"]),
        ("index/decode_select", ["select_few_kernel", "select_many_kernel"]),
        ("mhc/decode_mix", ["close_kernel"]),
        ("rows/quantize", ["rows_kernel"]),
        ("mhc/decode_open", ["open_kernel", "embed_kernel"]),
        ("exchange/decode", ["gather_kernel"]),
        ("linear/matvec", ["single_kernel", "batch_kernel"]),
        ("attention/decode", ["attention_kernel"]),
        ("index/decode", ["queries_kernel", "scores_kernel"]),
    ],
)
def test_cuda_kernels_are_the_known_ones(source: str, names: list[str]) -> None:
    """Whoever adds a kernel says below how it waits."""
    assert [name for name, text in functions(source).items() if "__global__" in text] == names


def test_routing_waits() -> None:
    """At the outermost level, before any way out; no input of the step is read before but through L2."""
    early = until_wait(functions("route/decode")["route_kernel"])
    assert early.count("{") == early.count("}") + 1, "the wait is inside a branch"
    assert "return;" not in early and "launch_dependents();" in early and "p.logits" not in early
    assert not re.search(r"\b(ids|positions|counts|logits)\[", early), "through L1"


STEP_INPUT = r"\b(positions|slots|page_table|listed|pages|row_pages)\["  # not through __ldcg, so through L1


def test_attention_waits() -> None:
    """Once, whichever keys a block has: before it looks at the list, else after it asked for its keys."""
    found = functions("attention/decode")
    source = build.source_path("attention/decode")
    texts = [path.read_text() for path in (source, source.with_name("attention.cuh"))]
    kernel, row = found["attention_kernel"], COMMENT.sub("", "".join(texts))
    assert kernel.count(WAIT) == 2 and "return;" not in kernel
    first, rest = kernel.split(f"if (!is_known) {WAIT}")
    second, after = rest.split(f"if (is_known) {WAIT}")
    assert "is_known = !p.listed || keys.own == 0 || keys.in_ring(keys.own - 1);" in first
    assert "do {" in second and "if (begin == 0) {" in second, "in the first pass, which every block makes"
    assert "p.q" not in first + second and "p.q" in after and "p.out" not in first + second
    assert not re.search(STEP_INPUT, row)


@pytest.mark.parametrize("rows", [1, 4])
def test_the_step_of_flash_is_safe(rows: int) -> None:
    """Attention in one launch."""
    c = preset("flash")
    c = replace(c, layers=c.layers[:4], num_experts=16, vocab_size=512)
    decoder = planned(c, rows, context=4096)
    names = launches(decoder)
    assert "combine" not in names
    assert names.count("queries") == sum(layer.kind == "csa" for layer in c.layers)
    checked(decoder, lambda launch: launch)
    for reader in ("attend (sliding|hca)", "(attend csa|index scores)"):
        kind = {"sliding", "hca"} if "hca" in reader else {"csa"}
        late = [layer.kind in kind for layer in c.layers]

        def early(it: Launch, of: Iterator[bool]) -> Launch:
            return replace(it, triggers_late=False) if it.name == "queries up" and next(of) else it

        with pytest.raises(AssertionError, match=rf"{reader}.* reads layers\.\d\.(ring|keys) .* prepare"):
            checked(decoder, partial(early, of=iter(late)))


def test_mix_close_waits() -> None:
    """A block goes one of two ways; each waits first, and has read weights alone."""
    found = functions("mhc/decode_mix")
    early = until_wait(found["close_kernel"])
    assert early.count("return;") == 1
    assert re.search(r"next_output\([^;]*\);\s*return;", early), "the only other way is next_output"
    for text in (early, until_wait(found["next_output"])):
        assert "launch_dependents();" in text
        body = text[text.index("{") :]
        assert not re.search(r"__ldcg|\b(partial|streams)\[|read\((?!p\.weight)", body), (
            "reads its input early"
        )
    assert "return;" not in until_wait(found["next_output"])


def test_rows_wait() -> None:
    """Before they read anything, at the outermost level."""
    early = until_wait(functions("rows/quantize")["rows_kernel"])
    assert "launch_dependents();" in early and not re.search(r"return|p\.|if \(", early[early.index("{") :])


def test_a_single_row_is_rounded_by_who_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows by a launch of their own, in place."""
    for rows, count in ((1, 0), (2, 2 * TINY.num_layers)):
        made = step(monkeypatch, rows, "a4")
        assert launches(made).count("round") == count
        for name, buffer in (("output b", "u"), ("experts down", "all_hidden")):
            assert all(buffer in it.reads for it in made.launches if it.name == name)
    single = step(monkeypatch, 1, "a4")
    touched = [
        (it.name, "u_top" in it.reads, "u_top" in it.writes)
        for it in single.launches
        if "u_top" in (*it.reads, *it.reads_early, *it.writes)
    ]
    cleared, raised, read = ("queries up", False, True), ("output a", True, True), ("output b", True, False)
    assert touched == [cleared, raised, read] * TINY.num_layers
    assert not any("u_top" in it.reads_early for it in single.launches)


def test_exchanges_wait() -> None:
    """Before they push, take or read anything but `fn`: reuse of places rests on it."""
    found = functions("mhc/decode_open")
    early = until_wait(found["open"])
    assert "return;" not in early and re.findall(r"\bload\w*\(([\w.]+)", early) == ["p.fn"]
    for launcher in (mhc.mix_open, mhc.embed_open):
        assert launcher.reads_early == ("fn",) and {"streams", "partial", "peers.inbox"} == {*launcher.writes}
    assert not re.search(r"__ld|\bread\(|share\(|reduce\(|store\(", early)
    assert "if (!Its::BEGINS) launch_dependents();" in early
    assert "if (Its::BEGINS) launch_dependents();" in found["open"][len(early) :]
    rows = COMMENT.sub("", build.source_path("mhc/decode_open").read_text()).split("struct Row")[1:]
    assert [text.count(f"BEGINS = {its};") for text, its in zip(rows, ("false", "true"), strict=True)] == [
        1,
        1,
    ]
    assert "struct Token {}" in rows[0] and rows[1].startswith("<Act, Token>"), "which of them begins a step"
    # A row is made before the wait, and has read nothing then.
    for text in rows:
        made = text[text.index("Row(") : text.index("void read(")]
        assert not re.search(r"load|__ld|\*p\.|\[row\]|\bread\(|share\(", made[made.index(")") :])
    for text in (early, until_wait(functions("exchange/decode")["gather"])):
        assert not re.search(r"push|take|packet|streams\[|p\.share", text[text.index("{") :])


def test_products_wait() -> None:
    found = {**functions("linear/matvec"), **functions("single.cuh"), **functions("batch.cuh")}
    # The block that mixes waits; every other with a share goes on to its products. "up" reads its tasks to
    # know.
    assert re.search(r"if \(work\.x < 0\) \{\s*wait_for_prerequisites\(\);", found["begin"])
    for kernel, products in (("single_kernel", "multiply_row<"), ("batch_kernel", "multiply_rows<")):
        body = found[kernel]
        assert body.count("return;") == 1 and "if (!begin(p, work)) return;" in body
        assert body.count(products) == 4
    batch = found["batch_kernel"]
    shared = batch[batch.index("if (is_shared) {") : batch.index("task_expert")]
    assert re.search(r"if \(p\.segments\[0\]\.routed == 1\) \{\s*wait_for_prerequisites\(\);", shared)
    for name in ("multiply_row", "multiply_rows"):
        run = found[name]
        # "up" waits first, the others later; late triggers come after the wait.
        first = re.search(
            r"if \(s\.routed == 1\) \{[^}]*wait_for_prerequisites\(\);\s*launch_dependents\(\);", run
        )
        second = re.search(
            r"if \(s\.routed != 1\) \{\s*wait_for_prerequisites\(\);\s*"
            r"if \(p\.triggers_late\) launch_dependents",
            run,
        )
        assert first and second and run.count(WAIT) == 2
        early = run[: second.start()]
        # The one way out before the wait: a block of "down" without an expert. It has read its task alone
        # and written nothing, and its launch has other blocks that wait, those of the shared expert.
        assert early.count("return;") == 1 and "if (expert < 0) return;" in early
        after_x = early[early.index("const uint32_t stage") :]
        assert not re.search(r"take_turns|s\.y|put_slice\(|p\.weights|bring_row|bring\(|bring_x\(", after_x)
        reads = ["read_slice(warp, 0, some);"] if name == "multiply_row" else []
        assert re.findall(r"read_slice\(.*", after_x) == reads
    pieces = "".join(functions("single.cuh")["fetch_early"])
    assert WAIT not in pieces and not re.search(r"s\.[xy]\b|p\.weights", pieces)


def test_prompts_are_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt launches of the decode kernels starts when the launch before it has ended."""
    seen: list[Any] = []
    monkeypatch.setattr(sample, "call", lambda *arguments, overlap, **how: seen.append(overlap))
    monkeypatch.setattr(selecting, "call", lambda *arguments, overlap, **how: seen.append(overlap))
    sample_op.choose(torch.zeros(2, 40), torch.zeros(2, sample.WIDTH, dtype=torch.long), None)
    monkeypatch.setattr(index_op, "_scores", lambda *arguments: None)
    keys = empty_rows(Format.MXFP4, 64, 32)
    longs, table = torch.zeros(2, dtype=torch.long), torch.zeros(1, 4, dtype=torch.int32)
    index_op.select(torch.zeros(2, 3, 32), torch.zeros(2, 3), keys, table, longs, longs, 4, 16, 5, 256)
    assert seen == [False, False]


def test_a_wait_that_moves_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The scan itself: a wait behind a condition, and an early way out."""
    text = build.source_path("route/decode").read_text()
    monkeypatch.setattr(build, "source_path", lambda name: tmp_path / "decode.cu")
    for old, new in ((WAIT, "if (blockIdx.x) { " + WAIT + " }"), (WAIT, "if (!blockIdx.x) return;\n" + WAIT)):
        (tmp_path / "decode.cu").write_text(text.replace(old, new))
        with pytest.raises(AssertionError):
            test_routing_waits()
