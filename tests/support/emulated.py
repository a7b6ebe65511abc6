"""Whole decode steps of the GPU's path on a CPU: Triton's kernels interpreted, CUDA's as their twins, one
launch after the other. Several ranks take turns, but for what they exchange: there all run at once. What a
launch has not declared, or not for before its PDL wait, holds noise."""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bench.echo import Echo
from dsv4.cache.store import Cache
from dsv4.config import Activations, ModelConfig
from dsv4.engine.spill import Split, make_placement
from dsv4.gpu import architectures
from dsv4.gpu.pdl import Launch, Names, Touches, tensors_of
from dsv4.gpu.shapes import Form
from dsv4.lab.bench.decode import Wanted, fill
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.model.step import Step
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.attention import decode as attention
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.exchange.decode import Peers, inbox_places
from dsv4.ops.experts.placement import Placement
from dsv4.ops.index import decode as index
from dsv4.ops.index import decode_select as selecting
from dsv4.ops.linear import decode as matvec
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.route import decode as routing
from dsv4.ops.rows import quantize
from dsv4.ops.sample import decode as sample
from dsv4.ops.sample.cpu import HISTORY, pack
from dsv4.parallel.mesh import Mesh
from dsv4.quant.formats import Format
from dsv4.step.run import Decoder
from dsv4.weights.load import Checkpoint
from dsv4.weights.tiled import load_tiled
from tests.support.declared import Span, late, noise, spans_of, undeclared
from tests.support.interpreter import quicken
from tests.support.twin import of_source

MULTIPROCESSORS = 4  # so that a launch has few blocks
CUDA = (mhc, routing, selecting, matvec, sample, attention, index, exchange, quantize)


class _Range(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_int64))


_EVERYTHING = _Range(None, 1 << 62)  # whatever a copy reads is there


@dataclass
class Launches:
    """In the place of `build.call`. `ranks` that exchange wait until each has come."""

    folder: Path
    ranks: int = 1
    seed: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # of each source
    waiting: list[Any] = field(default_factory=list)
    late: list[Span] = field(default_factory=list)  # what the next launch touches only after its wait

    def __call__(
        self,
        source: str,
        kernel: str,
        device: torch.device,
        given: ctypes.Structure,
        blocks: int,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
        overlap: bool = True,
    ) -> None:
        self.counts[source] = self.counts.get(source, 0) + 1
        self.seed += 1
        twin = of_source(source, self.folder)
        at, kinds = ctypes.byref(given), re.findall(r"\w+", kernel.partition("<")[2])
        if source in ("mhc/decode_open", "exchange/decode"):
            self.waiting.append(given)
            if len(self.waiting) < (self.ranks if source == "exchange/decode" or kinds[-1] == "true" else 1):
                return
        unfinished = [_Range(begin, end - begin) for begin, end in self.late]
        self.late.clear()
        for it in unfinished if source != "linear/matvec" else []:
            twin.expect(ctypes.c_void_p(it.at), ctypes.c_size_t(it.bytes))
        match source:
            case "mhc/decode_open" | "exchange/decode":
                all_given = (ctypes.c_void_p * len(self.waiting))(*map(ctypes.addressof, self.waiting))
                said = self._run(twin.launched, kernel.encode(), len(all_given), all_given, blocks)
                self.waiting.clear()
            case "mhc/decode_mix":
                said = self._run(twin.launch, at, kinds[0] == "float", blocks)
            case "route/decode":
                said = self._run(twin.launch, at)
            case "index/decode_select":
                warps = int(kinds[0]) if "few" in kernel else 0
                rows = [self._run(twin.launch, at, row, warps, shared) for row in range(blocks // cluster)]
                said = next(filter(None, rows), "")
            case "index/decode":
                said = self._run(getattr(twin, kernel.removesuffix("_kernel")), at, blocks)
            case "attention/decode":
                said = self._run(twin.attend, blocks // cluster >> given.group_bits, at)
            case "sample/decode":
                said = self._run(twin.launch, at, blocks, shared)
            case "rows/quantize":
                wanted = ("PLAIN", "NORM", "SWIGLU").index(kinds[2])
                said = self._run(twin.launch, at, blocks, threads, int(kinds[0]), kinds[1] == "true", wanted)
            case "linear/matvec":
                late = (_Range * len(unfinished))(*unfinished)
                of = (blocks, threads, shared, late, len(late), ctypes.byref(_EVERYTHING), 1)
                said = self._run(twin.launch, at, kernel.encode(), *of)
            case _:
                raise AssertionError(f"{source} has no case here: say how its twin is launched")
        if source != "linear/matvec":
            twin.expect(None, ctypes.c_size_t(0))
        assert not said, f"{kernel}: {said}"

    def _run(self, function: Any, *arguments: Any) -> str:
        function.restype = ctypes.c_char_p
        return function(*arguments, self.seed).decode()


@contextmanager
def emulated(launches: Launches) -> Iterator[None]:
    """Inside, CPU tensors are a Hopper GPU's."""
    quicken()
    with pytest.MonkeyPatch.context() as patch:
        properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(architectures, "capability", lambda device: 90)
        for module in CUDA:
            patch.setattr(module, "call", launches)
        serves = lambda iq: iq.dtype == torch.bfloat16 and iq.shape[1:] == (64, 128)  # noqa: E731
        patch.setattr(index, "serves", serves)
        yield


@contextmanager
def noted() -> Iterator[list[Touches]]:
    """What launches touch that are named inside, in their order."""
    found: list[Touches] = []
    before = Names.launch

    def launch(self: Names, name: str, run: Callable[[], None], touches: Touches, *meant: Any) -> Launch:
        found.append(touches)
        return before(self, name, run, touches, *meant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Names, "launch", launch)
        yield found


def _placement(c: ModelConfig, spilled: int) -> Placement:
    names = tuple(f"layers.{layer}.ffn.experts" for layer in range(c.num_layers))
    form = Form(Format.NVFP4, c.expert_width, c.hidden_size)
    split = Split(form, names, c.num_experts, c.num_layers * (c.num_experts - spilled))
    return make_placement(split, None, "cpu")


def _peers(c: ModelConfig, ranks: int, rows: int) -> list[Peers | None]:
    if ranks == 1:
        return [None]
    vocab = c.vocab_size // ranks
    places = inbox_places(rows, c.hidden_size, vocab)
    inboxes = [torch.zeros(ranks, places, dtype=torch.int64) for _ in range(ranks)]
    return [
        Peers(
            rank=rank,
            rows=rows,
            hidden=c.hidden_size,
            vocab=vocab,
            inbox=inboxes[rank],
            addresses=tuple(inbox[rank].data_ptr() for inbox in inboxes),
            ended=torch.zeros(1, dtype=torch.int32),
            seconds=20.0,
        )
        for rank in range(ranks)
    ]


class Kept(NamedTuple):
    """What all decoders of an engine share."""

    latest: Tensor
    penalties: Tensor
    counts: Tensor


class Decoders:
    """A model's decoder on every rank, each with its own cache, filled alike; and the reference's."""

    def __init__(
        self,
        path: Path,
        launches: Launches,
        rows: int,
        context: int,
        dtype: torch.dtype = torch.float32,
        activations: Activations = "a16",
        whole_experts: bool = False,
        slots: int | None = None,
        spilled: int = 0,
        is_round: bool = False,
    ) -> None:
        """`slots` of the cache, None: as many as there are rows. `spilled`: experts of each layer that lie
        elsewhere. `is_round`: rows may be tokens of one sequence, so none is its slot's last choice."""
        self.launches, ranks, self.is_round = launches, launches.ranks, is_round
        numerics = Numerics(dtype, activations, True)
        checkpoint = Checkpoint.open(path)
        self.config = c = checkpoint.config
        stored = replace(Wanted(context, slots or rows).layout(c), rope_itemsize=dtype.itemsize)

        def cache() -> Cache:
            made = Cache(stored, "cpu", dtype)
            fill(made)
            return made

        bundle = Bundle(c, checkpoint.load(False, "cpu"), Ops.choose("cpu"), numerics)
        self.model, self.cache = Model(bundle, stored.max_context, "cpu"), cache()
        self.counts = torch.zeros(c.num_layers, c.num_experts, dtype=torch.int32)  # the reference's
        self.ranks: list[Decoder] = []
        self.kept: list[Kept] = []
        self._touches: list[list[Touches]] = []
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        with emulated(launches):
            for rank, peers in enumerate(_peers(c, ranks, rows)):
                share = Checkpoint.open(path).shard(rank, ranks, whole_experts)
                mesh = Mesh() if ranks == 1 else Mesh(rank, ranks, Echo(ranks), whole_experts)
                placement = _placement(c, spilled) if spilled else None
                own = Bundle(c, load_tiled(share, "cpu", placement=placement), ops, numerics, mesh)
                kept = Kept(
                    latest=torch.zeros(stored.num_slots, dtype=torch.long),
                    penalties=torch.zeros(stored.num_slots, HISTORY + stored.max_context, dtype=torch.int32),
                    counts=torch.zeros_like(self.counts),
                )
                model = Model(own, stored.max_context, "cpu", copies_ahead=False)
                with noted() as touches:
                    shared = kept._asdict() | ({"latest": None} if is_round else {})
                    made = Decoder(own, model, cache(), rows, peers=peers, **shared)
                self.ranks.append(made)
                self.kept.append(kept)
                self._touches.append(touches)

    def load(self, tokens: list[tuple[int, int, int]], settings: list[list[int]] | None = None) -> None:
        """(slot, position, id) of the first rows; of a negative id, its slot's last choice."""
        given = torch.tensor([pack()] * len(tokens) if settings is None else settings)
        for decoder in self.ranks:
            decoder.load(tokens, given, send=lambda staged: staged, take_latest=not self.is_round)

    @property
    def used(self) -> Tensor:
        """[rows]: those that are not padding."""
        return self.ranks[0].buffers.positions >= 0

    @torch.inference_mode()
    def step(self) -> Tensor:
        """[ranks, rows, V]: each launch on every rank, then the next one."""
        states = [self._state(decoder, of) for decoder, of in zip(self.ranks, self._touches, strict=True)]
        with emulated(self.launches):
            for i, launches in enumerate(zip(*(decoder.launches for decoder in self.ranks), strict=True)):
                with ExitStack() as stack:
                    for launch, state, touches in zip(launches, states, self._touches, strict=True):
                        stack.enter_context(noise(undeclared(state, touches[i]), launch.name))
                        self.launches.late += late(state, touches[i])
                        launch.run()
                    self.launches.late.clear()  # of Triton's, whose sources are looked at (test_overlap.py)
        assert not self.launches.waiting
        return torch.stack([decoder.buffers.logits for decoder in self.ranks])

    @staticmethod
    def _state(decoder: Decoder, touches: list[Touches]) -> list[Span]:
        """All that a step, or anybody between two steps, writes."""
        written = [tensor for launch in touches for tensor in launch.writes]
        return spans_of((*written, *tensors_of([*vars(decoder.buffers).values()]), decoder.cache.page_table))

    def reference(self) -> Tensor:
        """[rows in use, V] of the step to come, which it makes first."""
        f, layers = self.ranks[0].buffers, iter(self.counts)

        def count(name: str, part: str, value: Tensor) -> None:
            if part == "chosen":
                next(layers).add_(torch.bincount(value.flatten(), minlength=self.config.num_experts))

        rows = [row.tolist() for row in torch.stack((f.slots, f.positions, f.ids), dim=1)[self.used]]
        step = Step.build([(slot, position, [id]) for slot, position, id in rows], "cpu", tap=count)
        return self.model.logits(self.model.forward(step, self.cache))
