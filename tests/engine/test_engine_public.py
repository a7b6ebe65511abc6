"""The public API: conversations, one prompt or many, async streams, a closed engine, names and words."""

import asyncio
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

import dsv4
from dsv4 import Engine, EngineConfig, RequestError, SamplingParams
from dsv4.cache.layout import SPARE
from dsv4.engine.chat import ChatDelta
from dsv4.text.deltas import ToolCall

GREEDY = SamplingParams(temperature=0, max_tokens=80)
SUM = [{"role": "user", "content": "What is 27 + 58?"}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(config=EngineConfig(max_context=1024)) as engine:
        yield engine


def test_a_conversation_goes_on(engine: Engine) -> None:
    answer = engine.chat(SUM, GREEDY)
    assert answer.reasoning and "85" in answer.text and "</think>" not in answer.reasoning + answer.text
    assert (answer.finish_reason, answer.tool_calls) == ("stop", ())
    assert answer.completion_tokens == len(answer.tokens) > 10 and answer.prompt_tokens == 14
    assert answer.message == {
        **{"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning},
    }
    again = engine.chat([*SUM, answer.message, {"role": "user", "content": "What is 1 + 2?"}], GREEDY)
    assert again.prompt_tokens > 2 * answer.prompt_tokens and again.finish_reason == "stop"
    plain = engine.chat(SUM, GREEDY, thinking=False)
    assert plain.reasoning == "" and plain.text and "reasoning_content" not in plain.message


def test_the_stream_adds_up_to_the_answer(engine: Engine) -> None:
    with engine.chat_stream(SUM, GREEDY) as stream:
        deltas = list(stream)
    whole = engine.chat(SUM, GREEDY)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert tuple(delta.token for delta in deltas) == whole.tokens


def test_stop_strings_end_the_text_and_not_the_reasoning(engine: Engine) -> None:
    cut = engine.chat(SUM, SamplingParams(temperature=0, stop=("=", "5")))
    whole = engine.chat(SUM, GREEDY)
    assert "=" in cut.reasoning and cut.reasoning == whole.reasoning
    assert whole.text.startswith(cut.text) and cut.text == whole.text.split("5")[0].split("=")[0]
    assert cut.finish_reason == "stop" and engine.num_unfinished == 0


def test_an_answer_that_is_closed_early_is_what_there_is(engine: Engine) -> None:
    with engine.chat_stream(SUM, GREEDY) as stream:
        first = [next(stream) for _ in range(5)]
    answer = stream.completion()
    assert answer.reasoning.startswith("".join(delta.reasoning for delta in first))
    assert len(first) <= answer.completion_tokens < 5 + SPARE
    assert answer.finish_reason == "cancelled" and engine.num_unfinished == 0


def test_tool_calls_come_whole(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model calls nothing, so a grammar writes the call."""
    pytest.importorskip("llguidance")
    assert engine.tokenizer is not None
    mark = f"<[{engine.tokenizer.dsml_id}]>"
    grammar = (
        f'start: "<" {mark} "tool_calls>\\n<" {mark} "invoke name=\\"f\\">\\n<" {mark} '
        f'"parameter name=\\"x\\" string=\\"false\\">7</" {mark} "parameter>\\n</" {mark} "invoke>\\n</" '
        f'{mark} "tool_calls>"'
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}]
    params = SamplingParams(temperature=0, grammar=grammar, max_tokens=200)
    answer = engine.chat(SUM, params, thinking=False, tools=tools)
    (call,) = answer.tool_calls
    assert call == ToolCall(call.id, "f", '{"x": 7}') and answer.finish_reason == "tool_calls"
    assert answer.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 7}'}
    result = {"role": "tool", "tool_call_id": call.id, "content": "8"}
    assert engine.chat([*SUM, answer.message, result], GREEDY, tools=tools).finish_reason


def test_one_prompt_or_many(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    one, ids = engine.generate("Once", params), engine.generate([0, 17, 42], params)
    assert one.ids == engine.generate(["Once"], params)[0].ids
    assert ids.ids == engine.generate([[0, 17, 42]], params)[0].ids
    assert engine.generate(engine.request("Once", params)).ids == one.ids
    assert engine.generate([], params) == []
    assert capsys.readouterr().err == ""
    engine.generate(["Once", "The"], params, progress=True)
    assert capsys.readouterr().err.endswith("\rgenerating: 2 of 2\n")


def test_streams_may_be_read_by_async_for(engine: Engine) -> None:
    """Two at once, and the event loop goes on meanwhile."""

    async def text(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        return "".join([delta.text async for delta in engine.chat_stream(messages, GREEDY)])

    async def main() -> tuple[list[str], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        answers = await asyncio.gather(text("What is 1 + 2?"), text("What is 27 + 58?"))
        ticking.cancel()
        return answers, ticks

    answers, ticks = asyncio.run(main())
    assert "3" in answers[0] and "85" in answers[1] and ticks > 10


def test_a_read_that_is_cancelled_loses_nothing(engine: Engine) -> None:
    """Time limits so short that most reads end before their delta comes."""
    want = engine.chat(SUM, GREEDY)

    async def main() -> list[ChatDelta]:
        deltas: list[ChatDelta] = []
        with engine.chat_stream(SUM, GREEDY) as stream:
            while not stream.is_done:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.0005):
                        deltas.append(await anext(stream))
        return deltas

    deltas = asyncio.run(main())
    assert tuple(delta.token for delta in deltas) == want.tokens
    assert "".join(delta.text for delta in deltas) == want.text


def test_an_engine_that_is_closed_ends_what_another_thread_reads() -> None:
    for _ in range(3):
        engine = Engine.load(config=EngineConfig(max_context=1024))
        stream = engine.stream(engine.request("Once", SamplingParams(ignore_eos=True)))
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(list, stream)
            engine.close()
        assert rest.result()[-1].finish_reason == "cancelled"


def test_a_closed_engine_says_so() -> None:
    with Engine.load() as engine:
        assert re.fullmatch(
            r"<Engine of 8 layers x 256 on \S+, max_context=16384, .* 0 requests running>", repr(engine)
        )
        stream = engine.stream(engine.request("Once", GREEDY))
        next(stream)
    assert repr(engine).endswith("closed>") and list(stream)[-1].finish_reason == "cancelled"
    for call in (lambda: engine.generate("x"), engine.step, lambda: engine.chat(SUM)):
        with pytest.raises(RequestError, match=r"closed; load it again with Engine\.load"):
            call()
    engine.close()


def test_no_tokenizer_no_conversation(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(checkpoint("modelopt") / file)
    with Engine.load(tmp_path) as engine, pytest.raises(RequestError, match=r"no tokenizer\.json"):
        engine.chat(SUM)


def test_the_names_and_their_words() -> None:
    assert set(dsv4.__all__) <= set(dir(dsv4)) and not [n for n in dir(dsv4) if n in ("Any", "TYPE_CHECKING")]
    assert all(getattr(dsv4, name).__doc__ for name in dsv4.__all__)
    assert (Path(dsv4.__file__).parent / "py.typed").exists()
    for made in (EngineConfig, SamplingParams):
        words = dict(re.findall(r"^    (\w+): (.+)$", made.__doc__ or "", flags=re.MULTILINE))
        assert words.keys() == {field.name for field in fields(made)}
    public = [name for name in dir(Engine) if not name.startswith("_")]
    silent = [
        name for name in public if callable(getattr(Engine, name)) and not getattr(Engine, name).__doc__
    ]
    assert not silent


def test_progress_shows_in_a_notebook_by_itself() -> None:
    code = "import sys, types; sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"
    code += "from dsv4 import *; Engine.load().generate(['a', 'b'], SamplingParams(max_tokens=2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert re.search(r"loading tiny, bytes: (\d+) of \1\n", done.stderr), done.stderr
    assert done.stderr.endswith("generating: 2 of 2\n") and done.stdout == ""


def test_a_closed_engine_is_freed_at_once() -> None:
    """No cycle holds it: its ranks' threads would otherwise end with the interpreter, which aborts then."""
    gc.collect()
    gc.disable()
    try:
        engine = Engine.load(None, EngineConfig(device="cpu", max_context=512))
        assert engine.drafter is not None
        executor = weakref.ref(engine.runner.executor)
        engine.close()
        del engine
        assert executor() is None
    finally:
        gc.enable()
