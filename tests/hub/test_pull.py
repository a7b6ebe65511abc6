"""`dsv4 pull` against a server that speaks the hub's protocol; every run is a process of its own."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from checkpoints import write_model
from hub_server import COMMIT, REPOSITORY, TOKEN, Refusal, Served, serving

from dsv4.config import preset
from dsv4.weights.writer import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, in several shards, and files that are not to be fetched."""
    folder = tmp_path_factory.mktemp("origin") / "model"
    with mock.patch("dsv4.lab.init.write_checkpoint", partial(write_checkpoint, limit=1 << 20)):
        write_model(folder, "official", preset("tiny"))
    (folder / "README.md").write_text("# words")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    return folder


@dataclass
class Hub:
    served: Served
    endpoint: str
    cache: Path

    @property
    def folder(self) -> Path:
        return self.cache / ("models--" + REPOSITORY.replace("/", "--"))

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / COMMIT

    def environment(self, **more: str) -> dict[str, str]:
        aside = ("HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(aside)}
        return {**kept, "HF_ENDPOINT": self.endpoint, "HF_HUB_CACHE": str(self.cache), **more}

    def start(self, *arguments: object, **more: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "dsv4", *map(str, arguments)]
        return subprocess.Popen(
            command, env=self.environment(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, *arguments: object, **more: str) -> tuple[int, str, str]:
        with self.start(*arguments, **more) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def pull(self, *arguments: object, **more: str) -> dict[str, Any]:
        code, out, err = self.run("pull", "flash", *arguments, "--json", **more)
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    def refused(self, *arguments: object, **more: str) -> str:
        code, _, err = self.run("pull", *(arguments or ("flash",)), **more)
        assert code == 2 and "Traceback" not in err, err
        return err


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[Hub]:
    with serving(model) as (served, endpoint):
        yield Hub(served, endpoint, tmp_path / "cache")


def wanted(folder: Path) -> dict[str, str]:
    """Name -> hash of what should arrive."""
    names = [p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def left_over(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.incomplete")]


def test_a_model_arrives_whole_and_nothing_else(hub: Hub, model: Path) -> None:
    """Every byte is right, files that are no part of the model stay there, the token stays with the hub."""
    said = hub.pull(HF_TOKEN=TOKEN)
    assert Path(said["folder"]) == hub.snapshot and said["commit"] == COMMIT
    assert wanted(hub.snapshot) == wanted(model) and len(wanted(model)) > 4
    assert {path.name for path in hub.snapshot.iterdir()} == set(wanted(model))
    assert said["num_bytes"] == said["fetched_bytes"] == sum(p.stat().st_size for p in hub.snapshot.iterdir())
    assert (hub.folder / "refs" / "main").read_text() == COMMIT
    assert not left_over(hub.cache)
    tokens = {(host, headers.get("authorization")) for host, _, headers in hub.served.asked}
    assert tokens == {("hub", f"Bearer {TOKEN}"), ("cdn", None)}
    before = len(hub.served.asked)
    assert hub.pull(HF_TOKEN=TOKEN)["fetched_bytes"] == 0
    assert len(hub.served.asked) == before + 1, "the listing alone was asked for again"


def test_the_hubs_own_library_finds_what_was_pulled(hub: Hub) -> None:
    hub.pull()
    code = (
        "from huggingface_hub import snapshot_download as s;"
        f"print(s({REPOSITORY!r}, allow_patterns=['*.json', '*.safetensors']))"
    )
    environment = hub.environment(HF_HUB_OFFLINE="1")
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(hub.snapshot), found.stderr


def test_killed_ten_times_it_goes_on_where_it_was(hub: Hub, model: Path) -> None:
    """No byte that reached the disk is sent twice, except what was on its way when the process died."""
    hub.served.seconds_per_piece = 0.02
    for _ in range(10):
        before, sent = _partial(hub), hub.served.sent_bytes
        process = hub.start("pull", "flash")
        deadline = time.monotonic() + 30
        while process.poll() is None and _partial(hub) <= before and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert _partial(hub) > before and hub.served.sent_bytes > sent
    hub.served.seconds_per_piece = 0.0
    assert hub.run("models")[1].count("flash") == 0, "a model that is here in part is not offered"
    hub.pull()
    assert wanted(hub.snapshot) == wanted(model) and not left_over(hub.cache)
    assert any("range" in headers for _, _, headers in hub.served.asked)
    total = sum(len(data) for data in hub.served.files.values())
    assert hub.served.sent_bytes < total + 10 * 8 * (2 << 20)


def _partial(hub: Hub) -> int:
    """Bytes of weights on the disk."""
    blobs = hub.folder / "blobs"
    return sum(p.stat().st_size for p in blobs.iterdir() if p.exists()) if blobs.exists() else 0


def test_ctrl_c_ends_it_at_once_and_keeps_what_came(hub: Hub) -> None:
    hub.served.seconds_per_piece = 0.3
    process = hub.start("pull", "flash")
    while _partial(hub) < 1 << 18 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "Traceback" not in err and time.monotonic() - start < 5
    assert left_over(hub.cache)


def test_cut_connections_are_taken_up_again(hub: Hub, model: Path) -> None:
    hub.served.cut_after = [100_000, 1, 0, 300_000, 5, 70_000]
    hub.pull()
    assert wanted(hub.snapshot) == wanted(model)


def test_a_server_without_ranges_sends_from_the_start(hub: Hub, model: Path) -> None:
    hub.served.cut_after, hub.served.knows_ranges = [100_000, 200_000], False
    hub.pull()
    assert wanted(hub.snapshot) == wanted(model)


def test_a_wrong_hash_is_refused_and_nothing_of_it_stays(hub: Hub, model: Path) -> None:
    name = next(name for name in hub.served.files if name.endswith(".safetensors"))
    hub.served.damaged = {name}
    err = hub.refused()
    assert name in err and "hash" in err and "again" in err
    damaged = hashlib.sha256(hub.served.files[name]).hexdigest()
    assert not (hub.folder / "blobs" / f"{damaged}.incomplete").stat().st_size
    assert not (hub.snapshot / name).exists() and not (hub.folder / "refs" / "main").exists()
    hub.served.damaged = set()
    hub.pull()
    assert wanted(hub.snapshot) == wanted(model)


def test_a_damaged_config_is_refused_too(hub: Hub) -> None:
    """Small files have Git's hash, not an LFS one."""
    hub.served.damaged = {"config.json"}
    assert "config.json arrived with hash" in hub.refused()


def test_another_kind_of_model_is_refused_before_its_weights(hub: Hub) -> None:
    config = json.loads(hub.served.files["config.json"])
    hub.served.files["config.json"] = json.dumps(config | {"model_type": "llama"}).encode()
    assert "this engine runs DeepSeek-V4 only" in hub.refused()
    assert not any(path.endswith(".safetensors") for path in hub.served.paths())


def test_into_a_folder(hub: Hub, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "flash"
    hub.pull(folder)
    assert wanted(folder) == wanted(model) and not hub.cache.exists()
    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert hub.pull(folder)["fetched_bytes"] == 0
    err = hub.refused("flash", folder, "--verify")
    assert weights.name in err and "delete it" in err
    (folder / "config.json").write_text("{}")
    assert "config.json of" in hub.refused("flash", folder), "a user's file is never overwritten"


def test_a_full_disk_is_seen_before(hub: Hub, tmp_path: Path) -> None:
    """The listing claims more than any disk has."""
    name = next(name for name in hub.served.files if name.endswith(".safetensors"))

    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 60

    hub.served.files[name] = Huge(hub.served.files[name])
    err = hub.refused()
    assert "GB more on the disk of" in err and "free" in err
    assert not any("/resolve/" in path for path in hub.served.paths())


@pytest.mark.parametrize("is_early", [False, True])
def test_a_disk_that_fills_up_meanwhile(hub: Hub, model: Path, is_early: bool) -> None:
    """A limit on file sizes stands for the disk: the same write fails, with another word. Early: in the small
    files, of which there is still a rest to be written when they are closed."""
    limit = 100 if is_early else max(len(data) for data in hub.served.files.values()) // 2
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}));"
        "sys.argv = ['dsv4', 'pull', 'flash']; from dsv4.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=hub.environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "cannot be written to (File too large)" in done.stderr, done.stderr
    assert "continues here" in done.stderr and "Traceback" not in done.stderr
    hub.pull()
    assert wanted(hub.snapshot) == wanted(model)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["nobody/nothing"], ["nobody/nothing@main was not found (HTTP 404)", "dsv4 models --known"]),
        (["flash@v9"], ["there is no such revision", "leave @REVISION out"]),
        (["no name"], ["'no name' names no model", "dsv4 models --known"]),
    ],
)
def test_names_that_are_not_there(hub: Hub, asked: list[str], words: list[str]) -> None:
    err = hub.refused(*asked)
    assert all(word in err for word in words), err


def test_a_private_model_wants_a_token(hub: Hub, model: Path) -> None:
    hub.served.needs_token = True
    assert "HTTP 401" in hub.refused() and "HF_TOKEN" in hub.refused(HF_TOKEN="hf_wrong")
    hub.pull(HF_TOKEN=TOKEN)
    assert wanted(hub.snapshot) == wanted(model)


def test_a_rate_limit_is_waited_for(hub: Hub) -> None:
    hub.served.refusals = [Refusal(429, {"Retry-After": "1"}), Refusal(503)]
    start = time.monotonic()
    code, _, err = hub.run("pull", "flash")
    assert code == 0 and time.monotonic() - start > 1, err
    assert "the hub limits requests (HTTP 429); trying again in 1 s" in err
    assert "the hub failed (HTTP 503); trying again" in err


def test_a_rate_limit_of_hours_is_not(hub: Hub) -> None:
    hub.served.refusals = [Refusal(429, {"Retry-After": "7200"})]
    assert "HTTP 429), to be asked again in 7200 s" in hub.refused()


def test_a_proxy_is_used_and_a_dead_one_named(hub: Hub, model: Path) -> None:
    """The server as a proxy: it is asked with whole addresses, as proxies are."""
    port = hub.endpoint.rpartition(":")[2]
    hub.endpoint = "http://hub.invalid"
    hub.pull(HTTP_PROXY=f"http://127.0.0.1:{port}", NO_PROXY="127.0.0.1")
    assert wanted(hub.snapshot) == wanted(model)
    shutil.rmtree(hub.cache)
    err = hub.refused(HTTP_PROXY="http://127.0.0.1:9")
    assert "hub.invalid cannot be reached" in err


def test_offline(hub: Hub) -> None:
    assert "HF_HUB_OFFLINE is set; unset it" in hub.refused(HF_HUB_OFFLINE="1")
    hub.pull()
    before = len(hub.served.asked)
    assert hub.pull(HF_HUB_OFFLINE="1")["folder"] == str(hub.snapshot)
    assert len(hub.served.asked) == before


def test_two_at_once_do_not_mix(hub: Hub, model: Path) -> None:
    hub.served.seconds_per_piece = 0.05
    first = hub.start("pull", "flash")
    while not left_over(hub.cache) and first.poll() is None:
        time.sleep(0.01)
    assert "another process" in hub.refused()
    first.communicate(timeout=60)
    assert first.returncode == 0 and wanted(hub.snapshot) == wanted(model)


def test_a_pulled_model_is_served_by_its_name(hub: Hub) -> None:
    hub.pull()
    process = hub.start("serve", "flash", "--port", "0", "--max-context", "256")
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(found[1] for line in lines if (found := re.search(r"ready at (http[^\s,]+)", line)))
        with urllib.request.urlopen(f"{url}/models", timeout=30) as response:
            assert json.load(response)["data"][0]["id"] == "DeepSeek-V4-Flash"
        asked = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 2}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 2
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def test_commands_take_the_name(hub: Hub) -> None:
    """Before: one sentence. After: the model is inspected, generates, and is listed."""
    code, _, err = hub.run("inspect", "flash")
    assert code == 2 and "dsv4 pull flash" in err
    hub.pull()
    assert hub.run("inspect", "flash", "--json")[0] == 0
    code, _, err = hub.run("generate", "Once", "--model", "flash@main", "--max-tokens", "2")
    assert code == 0, err
    listed = json.loads(hub.run("models", "--json")[1])["models"]
    assert [(m["name"], m["storage"], m["draft"]) for m in listed][1:] == [("flash", "mxfp4, fp8", "yes")]
    (hub.snapshot / "config.json").unlink()
    assert "here only in part (1 files are missing" in hub.run("inspect", "flash")[2]
