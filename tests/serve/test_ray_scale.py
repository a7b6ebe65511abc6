"""Ray follows the load within its bounds, and an update under load loses no request."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import yaml
from openai import OpenAI
from serve_support import ROOT, wait
from test_ray import question, replica_pids

from dsv4.errors import ConfigError

pytestmark = pytest.mark.ray
PORT, CLIENTS = 18124, 10


@contextmanager
def deployed(log: Path, max_context: int, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """What `dsv4 serve --ray` does, with a quick autoscaler."""
    code = (
        "from dsv4.config import EngineConfig; from dsv4.models import EMBEDDED\n"
        "from dsv4.serve.ray_serve import Scale, serve_on_ray; from dsv4.serve.server import ServerConfig\n"
        f"engine = EngineConfig(max_context={max_context}, max_batch=2, threads=1)\n"
        "scale = Scale(replicas=1, max_replicas=2, upscale_seconds=2, downscale_seconds=4)\n"
        f"serve_on_ray(EMBEDDED, engine, ServerConfig(port={PORT}), scale)\n"
    )
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()


def context_length() -> int:
    """Of whichever replica answers; 0: none does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return 0
    return next((length for length in (1024, 512) if f":{length}" in text.replace(" ", "")), 0)


def test_the_example_is_a_serve_config() -> None:
    """By Ray's own schema, and its arguments by ours."""
    from ray.serve.schema import ServeDeploySchema

    from dsv4.serve.ray_serve import build

    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "examples/ray-serve.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == "dsv4.serve.ray_serve:build"
    assert isinstance(application.args, dict)
    made = build({**application.args, "model": None})
    deployments = [
        made._bound_deployment,
        *(node._bound_deployment for node in made._bound_deployment.init_args),
    ]
    bounds = deployments[1]._deployment_config.autoscaling_config
    assert (bounds.min_replicas, bounds.max_replicas, bounds.target_ongoing_requests) == (2, 8, 16)
    assert (bounds.upscale_delay_s, bounds.downscale_delay_s) == (30, 600)
    assert {d._deployment_config.graceful_shutdown_timeout_s for d in deployments} == {30}
    assert [d._deployment_config.max_surge_percent for d in deployments] == [100, 0]
    assert deployments[1].init_args[2].api_key_file == Path("/etc/dsv4/keys.txt")


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2, expected at least replicas 3"),
        ({"replicas": 0}, "replicas is 0 and entrances 1, expected at least 1"),
    ],
)
def test_bounds_that_make_no_sense(scale: dict[str, int], words: str) -> None:
    from dsv4.serve.ray_serve import build

    with pytest.raises(ConfigError, match=words):
        build({"scale": scale})


def test_bounds_and_update(tmp_path: Path) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0, timeout=300)
    answered: list[str] = []
    failed: list[Exception] = []
    most, done = 0, threading.Event()

    def ask(number: int) -> None:
        while not done.is_set():
            try:
                parts = client.chat.completions.create(
                    model="tiny",
                    messages=question(number),  # type: ignore[arg-type]
                    temperature=0,
                    max_tokens=30,
                    stream=True,
                )
                ends = [part.choices[0].finish_reason for part in parts if part.choices]
                answered.append(str(ends[-1]))
            except openai.APIError as error:
                failed.append(error)

    def sees(replicas: int) -> bool:
        nonlocal most
        found = len(replica_pids())
        most = max(most, found)
        return found == replicas

    with deployed(tmp_path / "first.txt", 1024):
        wait(lambda: context_length() == 1024, 300)
        assert sees(1), "at least as many as are asked for"
        askers = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
        for asker in askers:
            asker.start()
        try:
            wait(lambda: sees(2), 120)
            before, count = {*replica_pids()}, len(answered)
            with deployed(tmp_path / "second.txt", 512, RAY_ADDRESS="auto"):
                wait(lambda: sees(2) and not before & {*replica_pids()}, 300)
                time.sleep(5)
                assert not failed, failed
                assert len(answered) > count, "it answered all the while"
        finally:
            done.set()
            for asker in askers:
                asker.join(120)
        assert not failed and {*answered} <= {"stop", "length"}, failed
        assert most == 2, "and at most so many, with five times the load of one"
        assert context_length() == 512
        wait(lambda: sees(1), 120)
