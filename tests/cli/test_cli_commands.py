"""Every command as a user gives it: what it prints, and that it is what the library computes."""

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import read_file
from cli_support import dsv4, ok, process, refused
from safetensors.torch import load_file, save_file

from dsv4 import Engine, EngineConfig, SamplingParams, __version__
from dsv4.lab.score import score_ids, score_text
from dsv4.lab.styles import STYLES
from dsv4.ops import IMPLEMENTATIONS
from dsv4.text.generation import FILE as GENERATION

COMMANDS = ("generate", "chat", "batch", "score", "eval", "inspect", "info", "init")


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("modelopt")


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine.load(model, EngineConfig(max_context=512))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str) -> None:
    text = ok(command, "--help")
    examples = text.split("Examples")[1]
    assert f"dsv4 {command} " in examples or f"dsv4 {command}\n" in examples.replace(" \n", "\n")
    assert f"Usage: dsv4 {command} " in text


def test_no_arguments_show_help() -> None:
    text = ok()
    assert text.strip() == ok("--help").strip()
    assert all(re.search(rf"\b{command} +\S", text) for command in COMMANDS)


def test_the_module_is_the_program() -> None:
    done = process(["info", "--json"])
    assert done.returncode == 0 and json.loads(done.stdout)["dsv4"] == __version__


def files(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_command_line_does_not_wait_for_torch() -> None:
    """Nor does the server's HTTP process hold it: 200 MB."""
    code = "import dsv4.cli.main, dsv4.serve.server, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_init_is_reproducible(tmp_path: Path) -> None:
    made = {}
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        shown = ok("init", tmp_path / name, "--preset", "tiny", "--format", "official", "--seed", seed)
        assert shown.startswith(f"{tmp_path / name}: tiny, official, seed {seed}, ")
        made[name] = files(tmp_path / name)
    assert made["a"] == made["b"]
    assert made["a"].keys() == made["c"].keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert {name for name in made["a"] if made["a"][name] != made["c"][name]} == {"model.safetensors"}


def test_init_json_counts_bytes_and_names_with_brackets_work(tmp_path: Path) -> None:
    folder = tmp_path / "odd [bold]{name}"
    facts = json.loads(ok("init", folder, "--format", "bf16", "--json"))
    stored = read_file(folder / "model.safetensors")
    assert facts == {
        **{"folder": str(folder), "preset": "tiny", "format": "bf16", "seed": 0},
        "bytes": sum(len(tensor.data) for tensor in stored.values()),
    }
    shown = ok("init", tmp_path / "[red]two", "--format", "bf16")
    assert shown.startswith(f"{tmp_path / '[red]two'}: tiny, bf16, seed 0, ")


def test_init_offers_every_format() -> None:
    text = " ".join(ok("init", "--help").split())
    assert all(re.search(rf"[ ,]{name}[ ,]", text) for name in STYLES)


@pytest.mark.parametrize("format", ["modelopt", "official", "bf16"])
def test_inspect_counts_every_byte(checkpoint: Callable[..., Path], format: str) -> None:
    """Bytes per token: all of a layer but the experts that are not chosen; one row of a table is nothing."""
    folder = checkpoint(format)
    facts = json.loads(ok("inspect", folder, "--json"))
    stored = read_file(folder / "model.safetensors")
    assert facts["bytes"] == sum(len(tensor.data) for tensor in stored.values())
    assert facts["bytes"] == sum(part["bytes"] for part in facts["components"])
    assert facts["bytes"] == sum(tensor["bytes"] for tensor in facts["tensors"].values())
    active = 0.0
    for name, tensor in stored.items():
        share = 1.0
        if name.startswith(("mtp.", "embed.")) or name.endswith("tid2eid"):
            share = 0.0
        elif ".ffn.experts." in name:
            share = 3 / 7
        active += share * len(tensor.data)
    assert facts["active_bytes_per_token"] == pytest.approx(active, abs=1)
    assert facts["num_parameters"] == len(facts["tensors"]) and facts["num_mtp_layers"] == 1
    assert facts["config"]["vocab_size"] == 300


def test_inspect_text(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    facts = json.loads(ok("inspect", model, "--json"))
    lines = ok("inspect", model, "--tensors").splitlines()
    assert lines[0].startswith("layers      3 (1 sliding, 1 csa, 1 hca), MTP drafter, official names")
    for part in facts["components"]:
        assert any(line.startswith(part["name"]) for line in lines), part["name"]
    for name, tensor in facts["tensors"].items():
        shape = str(tensor["shape"])
        (line,) = [line for line in lines if line.startswith(f"{name} ") and shape in line]
        assert line.split()[-1] == f"{tensor['bytes']:,}"


def test_info() -> None:
    facts = json.loads(ok("info", "--json"))
    assert facts["device"] == "cpu" and facts["ops"] == dict.fromkeys(IMPLEMENTATIONS, "cpu")
    assert facts["memory_bytes"] > 0 and facts["torch"] == torch.__version__ and facts["why"]
    products = facts["exact"]["products"]
    assert products["256x4096"]["why"] and products["256x4096"]["heights"]
    assert facts["sampling_defaults"]["temperature"] == 0.6
    short = ok("info")
    assert f"ops       cpu: {', '.join(IMPLEMENTATIONS)}\n" in short and "tiles of" not in short
    assert "\nsampling  temperature 0.6, top_p 0.95, " in short
    assert max(map(len, short.splitlines())) <= 80
    text = ok("info", "--device", "cpu", "--verbose")
    assert re.search(r"^  (blas|onednn) multiplies \d+ shapes in tiles of", text, flags=re.MULTILINE)
    assert f"dsv4 {__version__}" in text and "asked for" in text
    assert all(re.search(rf"^ops       {op} +cpu +of", text, flags=re.MULTILINE) for op in IMPLEMENTATIONS)


def test_every_front_uses_the_models_sampling_defaults(model: Path, tmp_path: Path) -> None:
    """Python calls without params, and commands for the flags that are not given."""
    copy = shutil.copytree(model, tmp_path / "model")
    usual = {"do_sample": False, "repetition_penalty": 1.2, "eos_token_id": [1, 9]}
    (copy / GENERATION).write_text(json.dumps(usual))
    with Engine.load(copy, EngineConfig(max_context=64, max_batch=1)) as engine:
        want = SamplingParams(temperature=0, repetition_penalty=1.2, stop_ids=(1, 9))
        assert engine.request([1, 2]).params == want
        greedy = engine.generate([1, 2], replace(want, max_tokens=12))
    given = ("generate", "-m", copy, "--ids", "1,2", "--max-tokens", 12, "--max-context", 64, "--json")
    assert json.loads(ok(*given))["ids"] == greedy.ids
    assert json.loads(ok(*given, "--temperature", 1, "--seed", 3))["ids"] != greedy.ids
    (copy / GENERATION).write_text("{")
    assert "cannot be read" in refused(dsv4(*given))


GENERATE = ("--max-tokens", 8, "--seed", 5, "--temperature", 0.8, "--ignore-eos")
PARAMS: dict[str, Any] = {"max_tokens": 8, "seed": 5, "temperature": 0.8, "ignore_eos": True}


def test_generate_streams_one_prompt(model: Path, engine: Engine) -> None:
    want = engine.generate(["Once"], SamplingParams(**PARAMS))[0]
    done = dsv4("generate", "--model", model, "Once", *GENERATE)
    assert done.code == 0 and done.out == want.text + "\n"
    assert re.fullmatch(
        r"5 prompt tokens, first token after [\d.]+ m?s; 8 tokens at [\d.]+/s; ended by length\n", done.err
    )


def test_generate_several_prompts_in_order(model: Path, engine: Engine) -> None:
    want = engine.generate(["a", "bc", "d"], SamplingParams(**PARAMS))
    shown = [f"{i}. {p}\n{w.text}\n\n" for i, p, w in zip((1, 2, 3), ("a", "bc", "d"), want, strict=True)]
    assert ok("generate", "--model", model, "a", "bc", "d", *GENERATE) == "".join(shown)
    lines = ok("generate", "--model", model, "a", "bc", "d", *GENERATE, "--json").splitlines()
    for index, (line, done) in enumerate(zip(lines, want, strict=True)):
        assert json.loads(line) == {
            "index": index,
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": 8,
            "finish_reason": "length",
            "seed": 5,
            "ids": done.ids,
            "text": done.text,
        }


def test_generate_from_ids(model: Path, engine: Engine) -> None:
    want = engine.generate([[0, 17, 42], [9]], SamplingParams(**PARAMS))
    lines = ok(
        "generate", "--model", model, "--ids", "0,17, 42", "--ids", "9", *GENERATE, "--json"
    ).splitlines()
    assert [json.loads(line)["ids"] for line in lines] == [done.ids for done in want]


def test_generate_with_penalties(model: Path, engine: Engine) -> None:
    how = SamplingParams(**PARAMS, frequency_penalty=2, repetition_penalty=1.5, logit_bias={7: 4, 9: 3})
    flags = (
        "--frequency-penalty",
        2,
        "--repetition-penalty",
        1.5,
        "--logit-bias",
        "7=4",
        "--logit-bias",
        "9=3",
    )
    given = ("generate", "--model", model, "--ids", "0,17", *GENERATE, "--json")
    want = engine.generate([[0, 17]], how)[0].ids
    assert json.loads(ok(*given, *flags))["ids"] == want != json.loads(ok(*given))["ids"]


def test_generate_logprobs(model: Path, engine: Engine) -> None:
    want = engine.generate([[0, 17]], SamplingParams(**PARAMS, logprobs=2))[0]
    given = ("generate", "--model", model, "--ids", "0,17", *GENERATE, "--logprobs", 2)
    found = json.loads(ok(*given, "--json"))["logprobs"]
    for token, entry in zip(want.tokens, found, strict=True):
        assert entry["id"] == token.id and entry["logprob"] == token.logprob
        assert [(top["id"], top["logprob"]) for top in entry["top"]] == list(token.top)
    text, table = ok(*given).split("\n", 1) if "\n" not in want.text else ("", "")
    assert text == want.text
    for token, line in zip(want.tokens, table.splitlines(), strict=False):
        id, logprob, *others = line.split()
        assert int(id) == token.id and float(logprob) == pytest.approx(token.logprob, abs=1e-4)
        assert [int(other.split(":")[0]) for other in others] == [top for top, _ in token.top]


def test_generate_stops(model: Path, engine: Engine) -> None:
    whole = engine.generate(["Once"], SamplingParams(**PARAMS))[0]
    stop = whole.text[2:5]
    text = ok("generate", "--model", model, "Once", *GENERATE, "--stop", "never", "--stop", stop)
    assert text == whole.text[: whole.text.index(stop)] + "\n"
    done = json.loads(
        ok("generate", "--model", model, "Once", *GENERATE, "--stop-id", whole.ids[3], "--json")
    )
    assert done["ids"] == whole.ids[: whole.ids.index(whole.ids[3]) + 1] and done["finish_reason"] == "stop"


def test_generate_chat_and_thinking_change_the_prompt(model: Path) -> None:
    given = ("generate", "--model", model, "Hi", *GENERATE, "--json")
    runs = [json.loads(ok(*given, *extra)) for extra in ((), ("--chat",), ("--chat", "--thinking"))]
    assert [run["prompt_tokens"] for run in runs] == [3, 6, 6], (
        "with the marks of user, assistant and thinking"
    )
    assert len({tuple(run["ids"]) for run in runs}) == 3


def test_generate_reports_a_seed_that_repeats_it(model: Path) -> None:
    given = ("generate", "--model", model, "Hi", "--max-tokens", 8, "--json")
    first = json.loads(ok(*given))
    assert json.loads(ok(*given, "--seed", first["seed"])) == first
    assert json.loads(ok(*given))["seed"] != first["seed"]


def test_generate_without_a_tokenizer_prints_ids(model: Path, engine: Engine, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(model / file)
    want = engine.generate([[5, 6]], SamplingParams(**PARAMS))[0].ids
    assert ok("generate", "--model", tmp_path, "--ids", "5,6", *GENERATE).split() == [str(id) for id in want]
    both = ok("generate", "--model", tmp_path, "--ids", "5,6", "--ids", "5,6", *GENERATE)
    shown = " ".join(map(str, want))
    assert both == f"1. 5 6\n{shown}\n\n2. 5 6\n{shown}\n\n"


def test_generate_survives_a_terminal_without_unicode(model: Path, engine: Engine) -> None:
    want = engine.generate(["hi"], SamplingParams(**PARAMS))[0].text
    shown = ok("generate", "--model", model, "hi", *GENERATE, encoding="ascii")
    assert not want.isascii() and shown == want.encode("ascii", "backslashreplace").decode() + "\n"
    line = ok("generate", "--model", model, "hi", *GENERATE, "--json", encoding="ascii")
    assert json.loads(line)["text"] == want


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"chunk": 7}, {"activations": "a8"}, {"cache": "bf16", "qat": "off"}], ids=str
)
def test_score_ids(model: Path, tmp_path: Path, mtp: bool, options: dict[str, Any]) -> None:
    ids = [(37 * i + i * i) % 300 for i in range(30)]
    save_file({"ids": torch.tensor(ids)}, tmp_path / "ids.safetensors")
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    given = (
        "score",
        model,
        "--ids",
        tmp_path / "ids.safetensors",
        "--prompt-len",
        20,
        "--logits",
        tmp_path / "out",
        *flags,
    )
    shown = ok(*given, *(["--mtp"] if mtp else []))
    assert f"{tmp_path / 'out'}: prefill_logits [20, 300], decode_logits [10, 300]" in shown
    got = load_file(tmp_path / "out")
    want = score_ids(Engine.load(model, EngineConfig(max_context=30, max_batch=1, **options)), ids, 20, mtp)
    assert got.keys() == want.keys() == {"prefill_logits", "decode_logits", *(["mtp_logits"] if mtp else [])}
    for name, value in got.items():
        assert value.dtype == torch.float32 and torch.equal(value, want[name]), name
    assert got["prefill_logits"].shape == (20, 300) and got["decode_logits"].shape == (10, 300)
    if mtp:
        assert got["mtp_logits"].shape == (20, 300)
        assert not torch.equal(got["mtp_logits"], got["prefill_logits"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.safetensors", "out"]


def test_score_ids_all_prompt_and_json(model: Path, tmp_path: Path) -> None:
    save_file({"ids": torch.tensor([5, 6, 7], dtype=torch.int32)}, tmp_path / "ids")
    facts = json.loads(
        ok("score", model, "--ids", tmp_path / "ids", "--prompt-len", 3, "--logits", tmp_path / "o", "--json")
    )
    assert facts == {
        "logits": str(tmp_path / "o"),
        "shapes": {"prefill_logits": [3, 300], "decode_logits": [0, 300]},
    }
    assert load_file(tmp_path / "o")["decode_logits"].shape == (0, 300)


def test_score_text_numbers_agree(model: Path, engine: Engine, tmp_path: Path) -> None:
    """CRLF stays two bytes; every byte is a token here, so bits per byte follow from nats per token."""
    content = "Once upon a time,\r\nGrüße\tund 世界.\r\n"
    (tmp_path / "t.txt").write_bytes(content.encode())
    facts = json.loads(ok("score", model, "--text", tmp_path / "t.txt", "--json"))
    assert facts["bytes"] == facts["tokens"] == len(content.encode())
    assert facts["perplexity"] == pytest.approx(math.exp(facts["nats_per_token"]))
    assert facts["bits_per_byte"] == pytest.approx(
        facts["nats_per_token"] * facts["tokens"] / facts["bytes"] / math.log(2)
    )
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.bos_id, *engine.tokenizer.encode_text(content)]
    rows = score_ids(engine, ids, len(ids))["prefill_logits"].double().log_softmax(-1)
    nats = -sum(float(rows[i, ids[i + 1]]) for i in range(len(ids) - 1))
    assert facts["nats_per_token"] == pytest.approx(nats / facts["tokens"])
    shown = dict(
        line.rsplit(None, 1) for line in ok("score", model, "--text", tmp_path / "t.txt").splitlines()
    )
    assert shown.keys() == {"tokens", "nats per token", "perplexity", "bits per byte"}
    assert float(shown["nats per token"]) == pytest.approx(facts["nats_per_token"], abs=1e-4)


@pytest.mark.parametrize("max_context", [1, 10, 16, 17])
def test_score_text_in_pieces(model: Path, tmp_path: Path, max_context: int) -> None:
    """A text longer than the context is cut; each piece starts from the start token."""
    content = "sixteen letters!"
    (tmp_path / "t").write_text(content)
    done = dsv4("score", model, "--text", tmp_path / "t", "--max-context", max_context, "--json")
    facts = json.loads(done.out)
    engine = Engine.load(model, EngineConfig(max_context=64, max_batch=1))
    pieces = [content[i : i + max_context] for i in range(0, 16, max_context)]
    want = sum(score_text(engine, piece).nats for piece in pieces)
    assert facts["tokens"] == 16 and facts["nats_per_token"] == pytest.approx(want / 16)
    shown = dsv4("score", model, "--text", tmp_path / "t", "--max-context", max_context)
    assert (f"pieces of {max_context} tokens" in shown.err) == (max_context < 16)


def test_quantize_json_is_a_summary_unless_tensors_are_asked_for(model: Path, tmp_path: Path) -> None:
    given = ("quantize", model, tmp_path / "new", "--format", "bf16", "--json")
    summary, everything = json.loads(ok(*given)), json.loads(ok(*given, "--tensors"))
    assert everything.pop("tensors") and summary == {**everything, "is_new": True}
