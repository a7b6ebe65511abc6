"""The loop: submit, step, stream, cancel. Built from a checkpoint and an EngineConfig; everything else is passed."""

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import EngineConfig, ModelConfig
from dsv4.device import Device, available_memory
from dsv4.engine.request import Completion, Delta, FinishReason, Request, SamplingParams, Sequence, Token
from dsv4.engine.runner import Runner
from dsv4.engine.scheduler import Scheduler
from dsv4.errors import ConfigError, RequestError
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import Ops
from dsv4.quant.formats import Format
from dsv4.text.stream import StopStrings
from dsv4.text.tokenizer import TextStream, Tokenizer
from dsv4.weights.load import Checkpoint, Progress

DEFAULT_CONTEXT = 32768


@dataclass(frozen=True)
class Choice:
    """A setting that was `auto`, what it became and why; shown by `dsv4 info` and at start."""

    name: str
    value: str
    why: str


class Engine:
    """Continuous batching over one model. Results of a request do not depend on the other requests."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, tokenizer: Tokenizer | None = None,
                 progress: Progress | None = None) -> None:  # fmt: skip
        self.config, self.model_config, self.tokenizer = config, checkpoint.config, tokenizer
        if tokenizer is not None and tokenizer.vocab_size > checkpoint.config.vocab_size:
            raise ConfigError(
                f"tokenizer.json has {tokenizer.vocab_size} ids, the model {checkpoint.config.vocab_size} rows; "
                "the tokenizer belongs to another model"
            )
        self.device = Device.choose(config.device)
        self.notes = checkpoint.inventory.notes
        self.choices: list[Choice] = []
        self.ops = Ops.choose(self.device.kind, **dict(config.ops))
        dtype = self._dtype()
        kv_format, key_format = self._cache_formats()
        self.max_context = self._max_context(checkpoint.config)
        dense = self._dense(checkpoint)
        weights = checkpoint.load(dense, self.device.torch_name, progress)
        numerics = Numerics(dtype, config.activations, config.qat == "on")
        bundle = Bundle(checkpoint.config, weights, self.ops, numerics)
        layout = CacheLayout(
            *(checkpoint.config, kv_format, key_format, dtype.itemsize),
            *(self.max_context, config.max_batch, weights.num_mtp_layers),
        )
        model = Model(bundle, self.max_context, self.device.torch_name)
        self.cache = Cache(layout, self.device.torch_name, dtype)
        self.runner = Runner(model, self.cache, self.device.torch_name)
        self.scheduler = Scheduler(self.cache, config.chunk)
        self._states: dict[str, _State] = {}
        self._ids = itertools.count()

    @classmethod
    def load(cls, path: str | Path, config: EngineConfig | None = None, progress: Progress | None = None) -> "Engine":
        """An engine for a model folder; its tokenizer.json, if there is one, gives text in and out."""
        checkpoint = Checkpoint.open(path)
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
        return cls(checkpoint, config or EngineConfig(), tokenizer, progress)

    def _choose(self, name: str, value: str, why: str) -> None:
        self.choices.append(Choice(name, value, why))

    def _dtype(self) -> torch.dtype:
        wanted = self.config.compute_dtype
        if wanted == "auto":
            wanted = "float32" if self.device.kind == "cpu" else "bfloat16"
            why = "exact and fastest on a CPU" if wanted == "float32" else "the model's own type"
            self._choose("compute_dtype", wanted, why)
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]

    def _cache_formats(self) -> tuple[Format, Format]:
        wanted, qat = self.config.cache, self.config.qat == "on"
        if wanted == "auto":
            wanted = "fp8" if qat else "f32"
            self._choose("cache", wanted, "lossless after the model's own rounding" if qat else "qat is off: unrounded")
        if wanted == "fp8":
            return Format.KV8, Format.MXFP4
        plain = {"bf16": Format.BF16, "f32": Format.F32}[wanted]
        return plain, plain

    def _max_context(self, model: ModelConfig) -> int:
        if self.config.max_context is None:
            value = min(model.max_positions, DEFAULT_CONTEXT)
            self._choose("max_context", str(value), f"the model allows {model.max_positions}; raise with --max-context")
            return value
        if self.config.max_context > model.max_positions:
            raise RequestError(
                f"max_context {self.config.max_context} exceeds the model's {model.max_positions} positions"
            )
        return self.config.max_context

    def _dense(self, checkpoint: Checkpoint) -> bool:
        if self.config.weights != "auto":
            return self.config.weights == "dense"
        need, have = checkpoint.dense_bytes(), available_memory()
        dense = need <= have // 2
        why = f"decoded weights take {need / 1e9:.1f} GB, {have / 1e9:.1f} GB of memory are free"
        self._choose("weights", "dense" if dense else "packed (slow: decoded at every use)", why)
        return dense

    def request(
        self, prompt: str | list[int] | tuple[int, ...], params: SamplingParams | None = None
    ) -> Request:
        """A request from plain text (as it is, no chat markup) or from token ids."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the model folder has no tokenizer.json; give token ids instead of text")
            prompt = [self.tokenizer.bos_id, *self.tokenizer.encode_text(prompt)]
        return Request(f"r{next(self._ids)}", tuple(prompt), params or SamplingParams())

    def submit(self, request: Request) -> None:
        """Queue a request, or refuse it with the numbers if it can never be served."""
        if request.id in self._states:
            raise RequestError(f"request {request.id!r} is already running; give each request its own id")
        params, vocab = request.params, self.model_config.vocab_size
        if not request.ids:
            raise RequestError("the prompt is empty; give at least one token")
        if bad := [i for i in request.ids if not 0 <= i < vocab]:
            raise RequestError(f"prompt id {bad[0]} is outside the vocabulary of {vocab}")
        room = self.max_context - len(request.ids)
        max_tokens = params.max_tokens or room
        if max_tokens > room or room < 1:
            raise RequestError(
                f"prompt of {len(request.ids)} tokens + max_tokens {max_tokens} = {len(request.ids) + max_tokens} "
                f"exceeds max_context {self.max_context}; shorten one of them or raise max_context"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer.json in the model folder; use stop_ids")
        if params.logprobs is not None and params.logprobs > vocab:
            raise RequestError(f"logprobs asks for {params.logprobs} alternatives of a vocabulary of {vocab}")
        stop_ids = set(params.stop_ids)
        if not params.ignore_eos:
            stop_ids |= {self.model_config.eos_id, *(self.tokenizer.stop_ids if self.tokenizer else ())}
        seed = secrets.randbits(64) if params.seed is None else params.seed
        sequence = Sequence(request, seed, max_tokens, frozenset(stop_ids))
        self._states[request.id] = _State(sequence, self.tokenizer)
        self.scheduler.add(sequence)

    def step(self) -> list[Delta]:
        """One pass of every running sequence; what came out."""
        plan = self.scheduler.plan()
        deltas = []
        for span, logits in self.runner.run(plan):
            deltas.append(self._advance(self._states[span.sequence.request.id], logits))
        for group in plan.groups:
            for span in group:
                span.sequence.num_processed += len(span.ids)
        for delta in deltas:
            if delta.finish_reason:
                self.scheduler.finish(self._states.pop(delta.request_id).sequence)
        return deltas

    def _advance(self, state: "_State", logits: Tensor) -> Delta:
        sequence = state.sequence
        token = self._sample(sequence, logits)
        sequence.tokens.append(token)
        reason: FinishReason | None = None
        if token.id in sequence.stop_ids:
            text, reason = state.finish(), "stop"
        else:
            text, stopped = state.push(token.id)
            if stopped:
                reason = "stop"
            elif len(sequence.tokens) >= sequence.max_tokens:
                text, reason = text + state.finish(), "length"
        sequence.finish_reason = reason
        return Delta(sequence.request.id, token, text, reason)

    def _sample(self, sequence: Sequence, logits: Tensor) -> Token:
        params, sample = sequence.request.params, self.ops.sample
        u = sample.uniform(sequence.seed, len(sequence.tokens))
        chosen = sample.sample(logits, params.temperature, params.top_k, params.top_p, params.min_p, u)
        if params.logprobs is None:
            return Token(chosen)
        logprobs = sample.log_probs(logits)
        order = logprobs.sort(descending=True, stable=True)
        top = zip(
            order.indices[: params.logprobs].tolist(), order.values[: params.logprobs].tolist(), strict=True
        )
        return Token(chosen, float(logprobs[chosen]), tuple(top))

    def cancel(self, request_id: str) -> None:
        """End a request now; its slot and pages are free at once. Unknown or finished ids are an error."""
        state = self._states.pop(request_id, None)
        if state is None:
            raise RequestError(f"request {request_id!r} is not running")
        state.sequence.finish_reason = "cancelled"
        self.scheduler.finish(state.sequence)

    @property
    def num_unfinished(self) -> int:
        return len(self._states)

    def stream(self, request: Request) -> Iterator[Delta]:
        """Submit and yield what comes out, token by token. Closing the iterator early cancels the request.

        Other submitted requests advance too; their deltas are not seen here, so stream one at a time.
        """
        self.submit(request)
        return self._stream(request.id)

    def _stream(self, request_id: str) -> Iterator[Delta]:
        try:
            while request_id in self._states:
                for delta in self.step():
                    if delta.request_id == request_id:
                        yield delta
        finally:
            if request_id in self._states:
                self.cancel(request_id)

    def generate(
        self, prompts: list[Request] | list[str] | list[list[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Run all prompts together; completions in the order of the prompts."""
        requests = [p if isinstance(p, Request) else self.request(p, params) for p in prompts]
        states: dict[str, _State] = {}
        try:
            for request in requests:
                self.submit(request)
                states[request.id] = self._states[request.id]
            texts: dict[str, list[str]] = {request.id: [] for request in requests}
            while any(request.id in self._states for request in requests):
                for delta in self.step():
                    if delta.request_id in texts:
                        texts[delta.request_id].append(delta.text)
        finally:
            for request_id in states.keys() & self._states.keys():
                self.cancel(request_id)
        return [_completion(states[r.id].sequence, "".join(texts[r.id])) for r in requests]


def _completion(sequence: Sequence, text: str) -> Completion:
    assert sequence.finish_reason is not None
    return Completion(
        *(sequence.request.id, tuple(sequence.tokens), text, sequence.finish_reason),
        *(sequence.num_prompt, sequence.seed),
    )


class _State:
    """A sequence and its text: characters are released when complete and not part of a possible stop string."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        self.sequence = sequence
        self.text = TextStream(tokenizer) if tokenizer else None
        self.vocab_size = tokenizer.vocab_size if tokenizer else 0
        self.stops = StopStrings(sequence.request.params.stop)

    def push(self, token_id: int) -> tuple[str, bool]:
        if self.text is None:
            return "", False
        # A padded output row without an entry in the tokenizer can still be sampled: it has no text of its own.
        known = token_id < self.vocab_size
        return self.stops.push(self.text.push(token_id) if known else self.text.finish() + "\ufffd")

    def finish(self) -> str:
        if self.text is None:
            return ""
        text, stopped = self.stops.push(self.text.finish())
        return text if stopped else text + self.stops.finish()
