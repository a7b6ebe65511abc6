"""The loop: submit, step, stream, cancel. Built from a checkpoint and an EngineConfig."""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from dsv4.cache.prefix import PrefixCache
from dsv4.cache.slots import Slots
from dsv4.config import EngineConfig
from dsv4.engine.build import Compiled, Prepared, make_executor, rank_devices
from dsv4.engine.calls import Calls, counter
from dsv4.engine.grammar import Bounds, Grammars
from dsv4.engine.keep import Arrivals, make_shelf
from dsv4.engine.output import Output
from dsv4.engine.pace import Pace
from dsv4.engine.ranks import Leader, Ranks
from dsv4.engine.request import Delta, Request, SamplingParams, Sequence
from dsv4.engine.runner import Runner
from dsv4.engine.scheduler import Scheduler
from dsv4.engine.settings import Settings, cache_layout
from dsv4.engine.speculation import make_speculation
from dsv4.engine.stream import Stream
from dsv4.errors import ConfigError, RequestError
from dsv4.model.bundle import Bundle
from dsv4.models import embedded
from dsv4.ops.sample.decode import MAX_PENALISED
from dsv4.parallel.comm import PeerError
from dsv4.parallel.machines import World
from dsv4.parallel.mesh import Mesh
from dsv4.text.generation import SamplingDefaults
from dsv4.text.tokenizer import Tokenizer
from dsv4.weights.load import Progress

P = ParamSpec("P")
T = TypeVar("T")


def _in_turn(method: "Callable[Concatenate[Engine, P], T]") -> "Callable[Concatenate[Engine, P], T]":
    """One thread at a time: what a step of another changes is whole before and after it."""

    @wraps(method)
    def run(engine: "Engine", *arguments: P.args, **named: P.kwargs) -> T:
        with engine.turn:
            if engine.is_closed:
                raise RequestError("the engine is closed; load it again with Engine.load")
            return method(engine, *arguments, **named)

    return run


class Engine(Calls):
    """Continuous batching over one model. Results of a request do not depend on the other requests.

    Several threads may submit, read streams and generate: whoever waits for tokens runs a step for all.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: Settings,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        notes: tuple[str, ...] = (),
        compiled: Compiled | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Around loaded weights; `load` is the usual way to one. `compiled` is told of kernels on a GPU."""
        self.config, self.model_config, self.tokenizer, self.notes = config, bundle.config, tokenizer, notes
        self.settings = s = settings
        layout = cache_layout(bundle.config, s, config, bundle.weights.num_mtp_layers)
        self.model, executor = make_executor(bundle, s, config, compiled)
        # What comes up while it runs; called from any thread. Whoever has a log puts its own function here.
        self.notices: list[str] = []
        self.notify: Callable[[str], object] = self.notices.append
        shelf = make_shelf(config, s, bundle, executor.cache, lambda what: self.notify(what))
        self.ranks, self.runner = ranks, Leader(executor, ranks) if ranks else Runner(executor, shelf)
        self.slots = Slots(layout)
        self.prefix = PrefixCache(self.slots, config.prefix_snapshots, shelf)
        self.drafter = executor.drafter
        ahead, has_blocks = executor.ahead_drafts, bool(self.model.dspark)
        self.speculation = make_speculation(self.drafter, s.drafts, ahead, has_blocks)
        rules = executor.same_bits, self.speculation, ahead
        self.scheduler = Scheduler(self.slots, self.prefix, s.chunk, *rules)
        self.pace = Pace(config.max_stall_ms / 1000, s.chunk, executor.prompt_sizes)
        self.arrivals = Arrivals(self.scheduler, self.prefix)
        self.grammars = Grammars(tokenizer, bundle.config.vocab_size)
        self._outputs: dict[str, Output] = {}
        self._running: dict[int, Output] = {}  # the same by sequence number
        self._ids = itertools.count()
        self._numbers = itertools.count()
        self.is_closed = False
        self.turn = threading.RLock()  # whose it is to change what the engine holds

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        compiled: Compiled | None = None,
    ) -> "Engine":
        """An engine for a model folder, else the embedded model; tokenizer.json, if there, gives it text."""
        path, config = embedded() if path is None else Path(path), config or EngineConfig()
        progress = progress or counter(f"loading {path.name}, bytes", None)
        folder = path if path.is_dir() else path.parent
        world = World.find()
        if world is not None and world.rank > 0:
            raise ConfigError(
                f"torchrun started this as rank {world.rank} of {world.size}, and the engine is rank 0's; "
                "here call dsv4.engine.follow.main_launched(World.find()), as `torchrun -m dsv4` does"
            )
        devices = rank_devices(config, world)
        prepared = Prepared.make(path, config, 0, devices)
        tokenizer = prepared.tokenizer(folder)
        usual = SamplingParams(**SamplingDefaults.load(folder).shown())
        ranks = Ranks(path, prepared.settled, devices, world) if len(devices) > 1 else None
        with ExitStack() as undo:
            if ranks:
                undo.callback(ranks.stop)
            if ranks:
                weights, notes = prepared.load(ranks.watched(progress), ranks.share)
            else:
                weights, notes = prepared.load(progress)
            bundle = prepared.bundle(weights, ranks.join() if ranks else Mesh())
            try:
                engine = cls(
                    bundle,
                    settings=prepared.settings,
                    config=config,
                    tokenizer=tokenizer,
                    notes=notes,
                    compiled=compiled,
                    ranks=ranks,
                )
            except PeerError as error:
                raise (ranks.lost(error) if ranks else error) from None
            undo.pop_all()
        engine.usual = usual
        return engine

    def close(self) -> None:
        """Cancel all requests and end the other ranks. Memory is freed once nothing refers to the engine."""
        with self.turn:
            for request_id in () if self.is_closed else tuple(self._outputs):
                self.cancel(request_id)
            self.is_closed = True
        if self.ranks:
            self.ranks.stop()

    def __repr__(self) -> str:
        s, c = self.settings, self.model_config
        state = "closed" if self.is_closed else f"{self.num_unfinished} requests running"
        where = f"{self.ranks.size} devices" if self.ranks else s.device.torch_name
        sizes = f"max_context={s.max_context}, max_batch={self.config.max_batch}"
        return f"<Engine of {c.num_layers} layers x {c.hidden_size} on {where}, {sizes}, {state}>"

    def next_id(self) -> str:
        """A name for a request that no other has."""
        return f"r{next(self._ids)}"

    @_in_turn
    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with the numbers if it can never be served."""
        if request.id in self._outputs:
            raise RequestError(f"request {request.id!r} is already running; give each request its own id")
        params, vocab = request.params, self.model_config.vocab_size
        if not request.ids:
            raise RequestError("the prompt is empty; give at least one token")
        known: dict[str, Iterable[int]] = {
            **{"prompt id": request.ids, "stop id": params.stop_ids, "logit_bias id": params.logit_bias},
            **{"allowed id": params.allowed_ids, "bad word's id": chain(*params.bad_words)},
        }
        for what, ids in known.items():
            if bad := [i for i in ids if not isinstance(i, int) or not 0 <= i < vocab]:
                raise RequestError(f"{what} {bad[0]!r} is outside the vocabulary of {vocab}")
        length, max_context = len(request.ids), self.settings.max_context
        max_tokens = params.max_tokens or max(1, max_context - length)
        if length + max_tokens > max_context:
            raise RequestError(
                f"prompt of {length} tokens + max_tokens {max_tokens} = {length + max_tokens} exceeds "
                f"max_context {max_context}; shorten one of them or raise max_context"
            )
        if params.min_tokens > max_tokens:
            raise RequestError(f"min_tokens is {params.min_tokens}, expected at most max_tokens {max_tokens}")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer.json in the model folder; use stop_ids")
        if (most := max(params.logprobs or 0, params.prompt_logprobs or 0)) > vocab:
            raise RequestError(f"logprobs asks for {most} alternatives of a vocabulary of {vocab}")
        if params.is_penalised and self.settings.tiled and vocab > MAX_PENALISED:
            raise RequestError(
                f"penalties and logit_bias need a vocabulary of at most {MAX_PENALISED} on a GPU, not {vocab}"
            )
        stop_ids = set(params.stop_ids)
        if not params.ignore_eos:
            stop_ids |= {self.model_config.eos_id, *(self.tokenizer.stop_ids if self.tokenizer else ())}
        seed = secrets.randbits(64) if params.seed is None else params.seed
        sequence = Sequence(self.next_number(), request, seed, max_tokens, frozenset(stop_ids))
        matcher = None if params.grammar is None else self.grammars.matcher(params.grammar)
        sequence.matcher = Bounds(params, stop_ids, vocab, matcher) if params.is_bounded else matcher
        output = Output(sequence, self.tokenizer)
        self._outputs[request.id] = self._running[sequence.number] = output
        self.arrivals.add(sequence)

    def next_number(self) -> int:
        """A sequence's number, which names it wherever a slot could be somebody else's by now."""
        return next(self._numbers)

    @_in_turn
    def step(self) -> list[Delta]:
        """One pass of every running sequence; what came out."""
        began = time.perf_counter()
        self.arrivals.take()
        plan = self.scheduler.plan(self.pace.limit)
        if not plan.spans and self.scheduler.waiting:
            self.runner.apply(plan, self._mask)  # what it moves in the cache must not be lost
            raise RequestError(
                f"{len(self.scheduler.waiting)} requests wait for cache space that no running one will free; "
                "release the slots claimed outside the engine"
            )
        known = {number: output.sequence.num_known for number, output in self._running.items()}
        samples = {span.sequence for span in plan.spans if span.end == known[span.sequence]}
        deltas = []
        try:
            results = self.runner.apply(plan, self._mask)
        except BaseException:
            self.scheduler.restart()
            self.runner.forget()
            raise
        seconds = time.perf_counter() - began
        self.pace.note(sum(len(span.ids) for span in plan.prefill), len(plan.decode), seconds)
        if self.speculation is not None:
            self.speculation.note(plan, results, seconds)
        for result in results:
            output = self._running[result.sequence]
            output.sequence.prompt += result.prompt
            if result.error:
                output.fail(result.error)
            if result.error or result.sequence in samples:
                deltas += output.advance((result.token, *result.more))
        for delta in deltas:
            if delta.finish_reason == "error":
                self._drop(delta.request_id)
        self.scheduler.commit(plan)
        for delta in deltas:
            if delta.finish_reason and delta.finish_reason != "error":
                self._drop(delta.request_id)
        if not self._outputs and self.prefix.has_copies:  # no next plan would carry them
            self.runner.apply(self.scheduler.changes(), self._mask)
        return deltas

    def _drop(self, request_id: str) -> None:
        sequence = self._outputs.pop(request_id).sequence
        del self._running[sequence.number]
        self.arrivals.finish(sequence)

    def _mask(self, number: int, ahead: tuple[int, ...] = ()) -> bytes | None:
        """The tokens that a sequence's grammar allows after those `ahead`, as bits."""
        output = self._running.get(number)
        if output is None or output.failure:
            return None
        matcher = output.sequence.matcher
        assert matcher is not None, f"sequence {number} has no grammar"
        try:
            return matcher.mask(ahead)
        except RequestError as error:
            output.fail(str(error))
            return None

    @_in_turn
    def cancel(self, request_id: str) -> None:
        """End a request now; its slot and pages are free at once. Unknown or finished ids are an error."""
        if request_id not in self._outputs:
            raise RequestError(f"request {request_id!r} is not running")
        self._outputs[request_id].end("cancelled")
        self._drop(request_id)

    def progress(self, request_id: str) -> tuple[int, int] | None:
        """Tokens of a prompt that were found in the cache, and that are processed; None: it has not begun."""
        sequence = self._outputs[request_id].sequence
        if sequence.num_cached is None:
            return None
        return sequence.num_cached, min(sequence.num_processed, sequence.num_prompt)

    @property
    def num_unfinished(self) -> int:
        return len(self._outputs)

    @_in_turn
    def stream(self, request: Request) -> Stream:
        """Submit a request and iterate over its deltas; several streams may be read in turns."""
        self.submit(request)
        return Stream(self, self._outputs[request.id])
