"""What a program calls: prompts to requests, completions, conversations. The loop itself is engine.py's."""

import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Integral
from typing import Self, cast, overload

from dsv4.config import ModelConfig
from dsv4.engine.chat import ChatCompletion, ChatStream
from dsv4.engine.request import Completion, Delta, Request, SamplingParams
from dsv4.engine.speculation import Speculation
from dsv4.engine.stream import Stream
from dsv4.engine.survival import Counts
from dsv4.errors import RequestError
from dsv4.text.chat import encode
from dsv4.text.stream import OutputParser
from dsv4.text.tokenizer import Tokenizer

Prompt = str | list[int] | tuple[int, ...] | Request


class Calls(ABC):
    """The methods of Engine that are made of its others."""

    tokenizer: Tokenizer | None
    model_config: ModelConfig
    usual = SamplingParams()  # of a call without params; Engine.load sets the model's own defaults
    speculation: Speculation | None

    @property
    def counts(self) -> Counts:
        """What was drafted so far, and what came of it."""
        return self.speculation.counts if self.speculation else Counts()

    @abstractmethod
    def next_id(self) -> str: ...

    @abstractmethod
    def step(self) -> list[Delta]: ...

    @abstractmethod
    def stream(self, request: Request) -> Stream: ...

    @abstractmethod
    def close(self) -> None: ...

    def request(
        self, prompt: str | list[int] | tuple[int, ...], params: SamplingParams | None = None
    ) -> Request:
        """A request from plain text (as it is, no chat markup) or from token ids.

        params: default here and below: as the model's generation_config.json says
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the model folder has no tokenizer.json; give token ids instead of text")
            prompt = [self.tokenizer.bos_id, *self.tokenizer.encode_text(prompt)]
        try:
            ids = tuple(operator.index(id) for id in prompt)  # also NumPy's and torch's integers
        except TypeError as error:
            raise RequestError(f"a prompt is a text or a list of token ids ({error})") from None
        return Request(self.next_id(), ids, params or self.usual)

    @overload
    def generate(
        self, prompts: Prompt, params: SamplingParams | None = None, progress: bool | None = None
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[tuple[int, ...]] | list[Request] | list[Prompt],
        params: SamplingParams | None = None,
        progress: bool | None = None,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        progress: bool | None = None,
    ) -> Completion | list[Completion]:
        """Continue one prompt (-> its completion), or a list of them together (-> a list in their order).

        progress: show on stderr how many are done; default: in a notebook.
        """
        if isinstance(prompts, str | Request) or any(isinstance(prompt, Integral) for prompt in prompts):
            return self.generate([cast(Prompt, prompts)], params, progress)[0]
        given = cast(Sequence[Prompt], prompts)
        requests = [p if isinstance(p, Request) else self.request(p, params) for p in given]
        update = counter("generating", progress)
        with ExitStack() as stack:
            streams = [stack.enter_context(self.stream(request)) for request in requests]
            reasons: list[str | None] = [None]
            while None in reasons and "error" not in reasons:
                before = len(reasons) - reasons.count(None)
                self.step()
                reasons = [stream.output.sequence.finish_reason for stream in streams]
                if (done := len(reasons) - reasons.count(None)) != before:
                    update(done, len(reasons))
            return [stream.completion() for stream in streams]

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
    ) -> ChatStream:
        """Answer a conversation; iterate over the stream for what each token adds.

        messages: as the API takes them, [{"role": "user", "content": "Hello"}]
        thinking: let the model think first
        tools: functions that the model may call, [{"type": "function", "function": {"name": ..., ...}}]
        reasoning_effort: high or max; models of 31 July 2026 and later also know low, and begin with high
        """
        if self.tokenizer is None:
            raise RequestError("the model folder has no tokenizer.json, which a conversation needs")
        params = params or self.usual
        segments = encode(
            messages,
            thinking=thinking,
            tools=tools,
            reasoning_effort=reasoning_effort,
            release=self.model_config.release,
        )
        parser = OutputParser(thinking=thinking, tokenizer=self.tokenizer, tools=tools)
        # Stop strings end the text of an answer, which only the parser can tell from its reasoning.
        request = self.request(self.tokenizer.encode_prompt(segments), replace(params, stop=()))
        return ChatStream(self.stream(request), parser, params.stop)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        reasoning_effort: str | None = None,
    ) -> ChatCompletion:
        """Answer a conversation, with the arguments of `chat_stream`: -> reasoning, text and tool calls."""
        with self.chat_stream(
            messages, params, thinking=thinking, tools=tools, reasoning_effort=reasoning_effort
        ) as stream:
            return stream.completion()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def counter(title: str, wanted: bool | None) -> Callable[[int, int], None]:
    """Shows progress on one line of stderr; None: in a notebook only."""
    if not ("ipykernel" in sys.modules if wanted is None else wanted):
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        sys.stderr.write(f"\r{title}: {done} of {total}" + "\n" * (done == total))
        sys.stderr.flush()

    return show
