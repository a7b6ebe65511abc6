"""The loop: submit, step, stream, cancel. Built from a checkpoint and an EngineConfig."""

import itertools
import math
import operator
import secrets
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.cache.prefix import PrefixCache
from dsv4.cache.store import Cache
from dsv4.config import EngineConfig
from dsv4.engine.grammar import Grammars
from dsv4.engine.logprobs import token_of
from dsv4.engine.output import Output
from dsv4.engine.request import Completion, Delta, FinishReason, Request, SamplingParams, Sequence, Token
from dsv4.engine.runner import Runner
from dsv4.engine.scheduler import Scheduler
from dsv4.engine.settings import check_memory, settle
from dsv4.errors import ConfigError, RequestError
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.exact import settle_exact
from dsv4.model.model import Model
from dsv4.models import embedded
from dsv4.text.tokenizer import Tokenizer
from dsv4.weights.load import Checkpoint, Progress
from dsv4.weights.tiled import load_tiled


class Engine:
    """Continuous batching over one model. Results of a request do not depend on the other requests."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        progress: Progress | None = None,
    ) -> None:
        model_config = checkpoint.config
        if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
            raise ConfigError(
                f"tokenizer.json has {tokenizer.vocab_size} ids, the model {model_config.vocab_size} rows; "
                "the tokenizer belongs to another model"
            )
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer
        self.notes = checkpoint.inventory.notes
        self.settings = s = settle(config, checkpoint)
        layout = CacheLayout(
            *(model_config, s.kv_format, s.key_format, s.dtype.itemsize),
            *(s.max_context, config.max_batch, checkpoint.inventory.num_mtp_layers),
            *(config.prefix_snapshots, config.cache_pages),
        )
        check_memory(s, config, checkpoint, layout)
        # Decoding small blocks of rows is done before a second thread has woken up (measured: docs/log.md).
        torch.set_num_threads(1)
        if s.tiled:
            weights = load_tiled(checkpoint, s.device.torch_name, progress)
        else:
            weights = checkpoint.load(s.dense, s.device.torch_name, progress)
        torch.set_num_threads(s.threads)
        if not s.tiled:
            device = torch.device(s.device.torch_name)
            mtp = checkpoint.inventory.num_mtp_layers
            exact = settle_exact(model_config, mtp, s.max_context, device, s.threads)
            self.notes = (*self.notes, *exact.notes)
        numerics = Numerics(s.dtype, config.activations, config.qat == "on")
        bundle = Bundle(model_config, weights, s.ops, numerics)
        model = Model(bundle, s.max_context, s.device.torch_name)
        self.cache = Cache(layout, s.device.torch_name, s.dtype)
        decode = None
        if s.tiled:
            from dsv4.engine.graphs import Graphs  # imports Triton, which a machine without a GPU may lack

            decode = Graphs(bundle, model, self.cache, config.max_batch, not config.no_graph)
        self.runner = Runner(model, self.cache, s.device.torch_name, decode)
        self.prefix = PrefixCache(self.cache, config.prefix_snapshots)
        if decode is not None:
            self.prefix.settle = decode.join
        self.scheduler = Scheduler(self.cache, self.prefix, s.chunk)
        self.grammars = Grammars(tokenizer, model_config.vocab_size)
        self._outputs: dict[str, Output] = {}
        self._ids = itertools.count()

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
    ) -> "Engine":
        """An engine for a model folder, else the embedded model; tokenizer.json, if there, gives it text."""
        path = embedded() if path is None else Path(path)
        checkpoint = Checkpoint.open(path)
        folder = path if path.is_dir() else path.parent
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        return cls(checkpoint, config or EngineConfig(), tokenizer, progress)

    def request(
        self, prompt: str | list[int] | tuple[int, ...], params: SamplingParams | None = None
    ) -> Request:
        """A request from plain text (as it is, no chat markup) or from token ids."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the model folder has no tokenizer.json; give token ids instead of text")
            prompt = [self.tokenizer.bos_id, *self.tokenizer.encode_text(prompt)]
        try:
            ids = tuple(operator.index(id) for id in prompt)  # also NumPy's and torch's integers
        except TypeError as error:
            raise RequestError(f"a prompt is a text or a list of token ids ({error})") from None
        return Request(f"r{next(self._ids)}", ids, params or SamplingParams())

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with the numbers if it can never be served."""
        if request.id in self._outputs:
            raise RequestError(f"request {request.id!r} is already running; give each request its own id")
        params, vocab = request.params, self.model_config.vocab_size
        if not request.ids:
            raise RequestError("the prompt is empty; give at least one token")
        for what, ids in (("prompt id", request.ids), ("stop id", params.stop_ids)):
            if bad := [i for i in ids if not isinstance(i, int) or not 0 <= i < vocab]:
                raise RequestError(f"{what} {bad[0]!r} is outside the vocabulary of {vocab}")
        length, max_context = len(request.ids), self.settings.max_context
        max_tokens = params.max_tokens or max(1, max_context - length)
        if length + max_tokens > max_context:
            raise RequestError(
                f"prompt of {length} tokens + max_tokens {max_tokens} = {length + max_tokens} exceeds "
                f"max_context {max_context}; shorten one of them or raise max_context"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer.json in the model folder; use stop_ids")
        if (most := max(params.logprobs or 0, params.prompt_logprobs or 0)) > vocab:
            raise RequestError(f"logprobs asks for {most} alternatives of a vocabulary of {vocab}")
        stop_ids = set(params.stop_ids)
        if not params.ignore_eos:
            stop_ids |= {self.model_config.eos_id, *(self.tokenizer.stop_ids if self.tokenizer else ())}
        seed = secrets.randbits(64) if params.seed is None else params.seed
        sequence = Sequence(request, seed, max_tokens, frozenset(stop_ids))
        if params.grammar is not None:
            sequence.matcher = self.grammars.matcher(params.grammar)
        self._outputs[request.id] = Output(sequence, self.tokenizer)
        self.scheduler.add(sequence)

    def step(self) -> list[Delta]:
        """One pass of every running sequence; what came out."""
        plan = self.scheduler.plan()
        if not plan.groups and self.scheduler.waiting:
            raise RequestError(
                f"{len(self.scheduler.waiting)} requests wait for cache space that no running one will free; "
                "release the slots claimed outside the engine"
            )
        deltas = []
        for span, logits in self.runner.run(plan):
            deltas.append(self._advance(self._outputs[span.sequence.request.id], logits))
        self.scheduler.commit(plan)
        for delta in deltas:
            if delta.finish_reason:
                self.scheduler.finish(self._outputs.pop(delta.request_id).sequence)
        return deltas

    def _advance(self, output: Output, logits: Tensor) -> Delta:
        sequence = output.sequence
        # NaN anywhere, +inf, or -inf everywhere: no distribution to choose from, so no token.
        if not math.isfinite(float(logits.max())):
            position = sequence.num_prompt + len(sequence.tokens)
            why = f"request {sequence.request.id!r}: the logits for position {position} hold NaN or infinity"
            return self._end(output, "error", f"{why}; the weights are damaged or their products overflow")
        try:
            token = self._sample(sequence, logits)
        except RequestError as error:
            return self._end(output, "error", str(error))
        sequence.tokens.append(token)
        reason: FinishReason | None = None
        if token.id in sequence.stop_ids:
            text, reason = output.finish(), "stop"
        else:
            text, stopped = output.push(token.id)
            if stopped:
                reason = "stop"
            elif len(sequence.tokens) >= sequence.max_tokens:
                text, reason = text + output.finish(), "length"
        sequence.finish_reason = reason
        delta = Delta(sequence.request.id, token, text, reason, "", sequence.num_cached or 0)
        if len(sequence.tokens) == 1 and sequence.prompt:
            delta = replace(delta, prompt=tuple(sequence.prompt))
        output.deltas.append(delta)
        return delta

    @staticmethod
    def _end(output: Output, reason: FinishReason, error: str = "") -> Delta:
        """The last delta of a request that ends without a further token."""
        output.sequence.finish_reason = reason
        delta = Delta(output.sequence.request.id, None, output.finish(), reason, error)
        output.deltas.append(delta)
        return delta

    def _sample(self, sequence: Sequence, logits: Tensor) -> Token:
        params, sample = sequence.request.params, self.settings.ops.sample
        u = sample.uniform(sequence.seed, len(sequence.tokens))
        allowed = sequence.matcher.masked(logits) if sequence.matcher else logits
        chosen = sample.sample(allowed, params.temperature, params.top_k, params.top_p, params.min_p, u)
        if sequence.matcher:
            sequence.matcher.accept(chosen)
        return token_of(sample, logits, chosen, params.logprobs)

    def cancel(self, request_id: str) -> None:
        """End a request now; its slot and pages are free at once. Unknown or finished ids are an error."""
        output = self._outputs.pop(request_id, None)
        if output is None:
            raise RequestError(f"request {request_id!r} is not running")
        self._end(output, "cancelled")
        self.scheduler.finish(output.sequence)

    @property
    def num_unfinished(self) -> int:
        return len(self._outputs)

    def stream(self, request: Request) -> "Stream":
        """Submit a request and iterate over its deltas; several streams may be read in turns."""
        self.submit(request)
        return Stream(self, self._outputs[request.id])

    def generate(
        self, prompts: list[Request] | list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Run all prompts together; completions in the order of the prompts."""
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise RequestError("generate takes a list of prompts; put a single prompt in a list")
        requests = [p if isinstance(p, Request) else self.request(p, params) for p in prompts]
        with ExitStack() as stack:
            streams = [stack.enter_context(self.stream(request)) for request in requests]
            return [stream.completion() for stream in streams]


class Stream:
    """The deltas of one request. Asking for the next one runs the engine; closing early cancels the request.

    A request that was cancelled ends with a delta without a token; one that failed raises its error.
    """

    def __init__(self, engine: Engine, output: Output) -> None:
        self.engine, self.output = engine, output

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Delta:
        while not self.is_done:
            if self.output.deltas:
                return self._take()
            self.engine.step()
        raise StopIteration

    def advance(self) -> list[Delta]:
        """What there is, after one step of the engine if that was nothing: empty inside a prompt."""
        if not self.output.deltas and not self.is_done:
            self.engine.step()
        return [self._take() for _ in range(len(self.output.deltas))]

    def _take(self) -> Delta:
        delta = self.output.deltas.popleft()
        if delta.finish_reason == "error":
            raise RequestError(delta.error)
        return delta

    def completion(self) -> Completion:
        """Run to the end; -> every token, and the text that was not taken yet."""
        text, sequence = "".join(delta.text for delta in self), self.output.sequence
        assert sequence.finish_reason is not None
        return Completion(
            *(sequence.request.id, tuple(sequence.tokens), text, sequence.finish_reason),
            *(sequence.num_prompt, sequence.seed, sequence.num_cached or 0, tuple(sequence.prompt)),
        )

    @property
    def is_done(self) -> bool:
        """Whether all deltas were taken and no more will come."""
        return not self.output.deltas and self.output.sequence.finish_reason is not None

    def close(self) -> None:
        if not self.output.sequence.finish_reason:
            self.engine.cancel(self.output.sequence.request.id)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
