"""The device's primitives on a GPU: generated tokens, and short prompts, as one graph per number of rows.

Token, position and sampling settings of a row live on the device and move on by themselves: when the same
rows go on, the next step is one graph replay. `latest` has the last choice of every slot, so that other rows
can be put together before the host has seen their tokens; a slot's tokens lie beside its penalties.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.engine.eager import Eager, Pass
from dsv4.engine.frequency import Recorder
from dsv4.engine.plan import Sampling, Span
from dsv4.engine.runner import UNSEEN, Masks, Result
from dsv4.engine.swap import Swapper
from dsv4.errors import DeviceError
from dsv4.gpu.ahead import Compiled
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.model.prompt import Prompt, never_waits
from dsv4.model.step import Mark, Step, prompt_sizes
from dsv4.model.step import Span as Tokens
from dsv4.model.warm import warm_up
from dsv4.ops.exchange.decode import Peers
from dsv4.ops.sample.cpu import MAX_TOP
from dsv4.ops.sample.decode import MAX_PENALISED
from dsv4.parallel.comm import PeerError
from dsv4.step.buffers import graph_rows
from dsv4.step.round import Round
from dsv4.step.run import Decoder

# (sequence, slot, position, sampling) of each row that a decoder's buffers hold.
Rows = list[tuple[int, int, int, Sampling | None]]


def _following(spans: tuple[Span, ...]) -> Rows:
    """What a decoder's buffers hold when these rows have been sampled."""
    return [
        (s.sequence, s.slot, s.end, replace(s.sampling, index=s.sampling.index + 1))
        for s in spans
        if s.sampling is not None
    ]


class Graphs(Eager):
    runs_ahead, same_bits = True, False

    def __init__(
        self,
        b: Bundle,
        model: Model,
        cache: Cache,
        max_batch: int,
        chunk: int,
        use_graphs: bool,
        overlap: bool,
        compiled: Compiled | None = None,
        swap_share: float = 0.0,
        peers: Peers | None = None,
        num_drafts: int = 0,
        drafts_always: bool = False,
    ) -> None:
        """Every kernel that can run is compiled and loaded here; `compiled` is told how far that has come.

        `num_drafts`: most that a sequence verifies at a time (rounds.py). `drafts_always`: as many as there
        are, not only those that are worth their time."""
        device = cache.page_table.device
        super().__init__(model, cache, str(device))
        self.ahead_drafts, self.drafts_always = num_drafts, drafts_always
        self.latest = torch.zeros(cache.layout.num_slots, dtype=torch.long, device=device)
        placement, counts = b.weights.placement, None
        self.swapper: Swapper | None = None
        if placement is not None and swap_share and 0 < placement.slots.num_resident < len(placement.slots):
            self.swapper = Swapper(placement, swap_share)
        self.peers = peers
        # Ranks choose the same experts: one keeps count.
        if self.swapper is not None or (b.weights.checksum is not None and b.mesh.rank == 0):
            shape = (b.config.num_layers, b.config.num_experts)
            counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self.placement = placement
        self.recorder = None if counts is None else Recorder(counts, b.weights.checksum, self._note_choices)
        self._make_steps(b, max_batch, overlap, counts)
        self.prompts: list[Prompt] = []  # by rising size
        if use_graphs and never_waits(model):
            sizes = prompt_sizes(chunk, spills=model.staging is not None)
            streams = (b.config.num_streams, b.config.hidden_size)
            out = torch.empty(max(sizes, default=0), *streams, dtype=b.numerics.dtype, device=device)
            self.prompts = [Prompt(model, cache, size, out) for size in sizes]
        self.prompt_sizes = tuple(prompt.size for prompt in self.prompts)
        warm_up(model, cache, chunk, self._run_padding, self.prompt_sizes, compiled)
        with torch.inference_mode():
            self._run_padding()
            torch.cuda.synchronize(device)
            for step in self._steps() if use_graphs else ():
                step.capture()
            self._record_prompts()

    def _make_steps(self, b: Bundle, max_batch: int, overlap: bool, counts: Tensor | None) -> None:
        """Of each number of rows one."""
        sizes = graph_rows(max_batch)
        self.max_rows = sizes[-1]
        self.decoders: dict[int, Decoder] = {}
        self._holds: dict[int, Rows] = {}  # by number of rows: what the decoder's buffers hold now
        for rows in sizes:
            self.decoders[rows] = Decoder(
                b=b,
                model=self.model,
                cache=self.cache,
                rows=rows,
                latest=self.latest,
                penalties=self._penalties_of(b),
                overlap=overlap,
                counts=counts,
                peers=self.peers,
            )

    def _penalties_of(self, b: Bundle) -> Tensor | None:
        return self.penalties if b.config.vocab_size <= MAX_PENALISED else None

    def _steps(self) -> Iterable[Decoder | Round]:
        return self.decoders.values()

    def _note_choices(self, new: Tensor) -> None:
        """new [layers, experts]: choices since the last time."""
        here = new if self.placement is None else new[self.placement.is_resident()]
        self.expert_hits += int(here.sum())
        self.expert_misses += int(new.sum()) - int(here.sum())
        if self.swapper is not None:
            self.swapper.note(new)

    def _run_padding(self) -> None:
        """Every decode step launch by launch, on rows that are not in use: the cache stays as it is."""
        for step in self._steps():
            step.run()

    def _record_prompts(self) -> None:
        """The largest first: the others find memory enough in its pool."""
        pool = torch.cuda.graph_pool_handle()
        for prompt in reversed(self.prompts):
            try:
                prompt.run()
                torch.cuda.synchronize(self.device)
                prompt.capture(pool)
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"the GPU's memory does not hold a prompt step of {prompt.size} tokens beside the rest "
                    f"({str(error).splitlines()[0]}); lower max_batch or max_context, or use --no-graph"
                ) from error

    def read(self, spans: list[Tokens], mark: Mark | None = None) -> Tensor:
        """The smallest step that holds them all, else launch by launch: the same kernels, the same bits."""
        prompt = next((prompt for prompt in self.prompts if prompt.fits(spans)), None)
        if prompt is not None:
            return prompt(spans, mark)
        return self.model.read(Step.build(spans, self.device, mark=mark), self.cache)

    def prefill(self, spans: tuple[Span, ...]) -> Pass:
        """Waited for inside a prompt too: chunks that queue up on the device are a stall nobody planned."""
        made = super().prefill(spans)
        if not made.sampled:
            made.done = torch.cuda.Event()
            made.done.record()
        return made

    @torch.inference_mode()
    def decode(self, spans: tuple[Span, ...]) -> Pass:
        """One generated token of each sequence; with a grammar among them, sampling waits for its mask."""
        size = min(rows for rows in self.decoders if rows >= len(spans))
        decoder, samplings = self.decoders[size], [s.sampling for s in spans if s.sampling is not None]
        assert len(samplings) == len(spans), "every generated token is followed by a choice"
        unseen = [span.ids[0] == UNSEEN for span in spans]
        rows: Rows = [(span.sequence, span.slot, span.start, span.sampling) for span in spans]
        if self._holds.pop(size, []) != rows or not all(unseen):
            tokens = [(span.slot, span.start, span.ids[0]) for span in spans]
            decoder.load(tokens, self.packed(samplings), self.send, take_latest=any(unseen))
        is_masked = any(sampling.masked for sampling in samplings)
        if self.swapper is not None:
            self.swapper.between()
        decoder.step(samples=not is_masked)
        if self.recorder is not None:
            self.recorder.step()
        self._holds[size] = [] if is_masked else _following(spans)
        made = Pass(spans, None, decoder=decoder)
        if any(s.wants_logits for s in spans) or any(c.num_top > MAX_TOP for c in samplings):
            made.logits = decoder.buffers.logits[: len(spans)].clone()
        if not is_masked:
            self.land(made, decoder.buffers.out[: len(spans)])
        return made

    @torch.inference_mode()
    def sample(self, launched: Pass, masks: Masks) -> None:
        if launched.decoder is None:
            return super().sample(launched, masks)
        decoder = launched.decoder
        decoder.buffers.mask[: len(launched.spans)] = self.mask(launched, masks)
        decoder.sample()
        self._holds[decoder.buffers.rows] = _following(launched.spans)
        self.land(launched, decoder.buffers.out[: len(launched.spans)])

    def land(self, made: Pass, out: Tensor) -> None:
        if made.decoder is None:  # a prompt: its choices are the first inputs of generated tokens
            slots = self.send(torch.tensor([span.slot for span in made.sampled]))
            self.latest.index_copy_(0, slots, out[:, 0].long())
        self._land(made, out)

    @staticmethod
    def _land(made: Pass, out: Tensor, is_timed: bool = False) -> None:
        made.out = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        made.out.copy_(out, non_blocking=True)
        made.done = torch.cuda.Event(enable_timing=is_timed)
        made.done.record()

    def fetch(self, launched: Pass) -> list[Result]:
        if launched.done is not None:
            launched.done.synchronize()
        if self.peers is not None and (ended := int(self.peers.ended)):
            late = f"rank {ended - 1} sent nothing for {self.peers.seconds:g} s"
            raise PeerError(late if ended > 0 else "another rank is gone")
        return super().fetch(launched)
