"""`dsv4 launch`: starts a coding client against a server of ours, and the server if none runs."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from os import getpid
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4.child import end_with
from dsv4.cli.options import engine_options
from dsv4.cli.show import err, model_folder, text
from dsv4.config import EngineConfig
from dsv4.disk import read_text
from dsv4.env import state_folder, variables_with
from dsv4.errors import ConfigError, DeviceError

EPILOG = """
[bold]Examples[/]
  dsv4 launch claude -m ./DeepSeek-V4-Flash --max-context 128k
  dsv4 launch codex -- exec "What does this repository do?"
  dsv4 launch aider --dry-run
claude, codex, opencode and aider get the settings they read; any other program the variables of OpenAI's
and Anthropic's libraries. A server that runs already is used, and left running.
opencode run hides the model's thoughts: add --thinking to see them, --variant low to shorten them.
"""
_ANTHROPIC = {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "{key}", "ANTHROPIC_MODEL": "{model}"}
_OPENAI = {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "{key}"}
_CODEX = '{{name="dsv4", base_url="{url}/v1", wire_api="responses", env_key="DSV4_API_KEY"}}'
_LIMIT = '{{"reasoning": true, "limit": {{"context": {context}, "output": {output}}}}}'
_PROVIDER = (
    '{{"npm": "@ai-sdk/openai-compatible", "options": {{"baseURL": "{url}/v1", "apiKey": "{key}"}}, '
    f'"models": {{{{"{{model}}": {_LIMIT}}}}}}}}}'
)
# client -> the variables it reads, its arguments before the user's, and what installs it
CLIENTS: dict[str, tuple[dict[str, str], tuple[str, ...], str]] = {
    "claude": (
        {
            **_ANTHROPIC,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{output}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        },
        (),
        "npm install -g @anthropic-ai/claude-code",
    ),
    "codex": (
        {"DSV4_API_KEY": "{key}"},
        (
            *("-c", 'model="{model}"', "-c", 'model_provider="dsv4"', "-c", f"model_providers.dsv4={_CODEX}"),
            *("-c", "model_context_window={context}"),
        ),
        "npm install -g @openai/codex",
    ),
    "opencode": (
        {
            "OPENCODE_CONFIG_CONTENT": '{{"model": "dsv4/{model}", "small_model": "dsv4/{model}", '
            f'"provider": {{{{"dsv4": {_PROVIDER}}}}}}}}}'
        },
        (),
        "npm install -g opencode-ai",
    ),
    "aider": (
        {**_OPENAI, "AIDER_MODEL": "openai/{model}", "AIDER_SHOW_MODEL_WARNINGS": "false"},
        (),
        "pip install aider-chat",
    ),
}
OTHER = ({**_OPENAI, "OPENAI_BASE_URL": "{url}/v1", "OPENAI_MODEL": "{model}", **_ANTHROPIC}, (), "")


def _names(incomplete: str) -> list[str]:
    return list(CLIENTS)


@engine_options
def launch(
    client: Annotated[
        str,
        typer.Argument(help="claude, codex, opencode, aider or a program", autocompletion=_names),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]...", help="the client's own arguments, after --")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="model folder; default: the embedded model")
    ] = None,
    port: Annotated[int, typer.Option(help="where the server is, or is started")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="the server's keys; the first is used")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the variables and commands only")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Start a coding client with this model: a server if none runs, the client's variables, the client."""
    url, key = f"http://127.0.0.1:{port}", read_text(api_key_file).split()[0] if api_key_file else "any"
    variables, options, install = CLIENTS.get(client, OTHER)
    if not dry_run and shutil.which(client) is None:
        raise ConfigError(f"{client} is not installed: {install or 'install it, or name another program'}")
    served, server = _served(url, key), [""]
    if served is None:
        folder = model_folder(model)
        server = _server_command(folder, port, api_key_file, config)
        served = folder.resolve().name, config.max_context
    elif model is not None:
        raise ConfigError(f"{url} serves {served[0]} already; leave out --model, or take another --port")
    with nullcontext() if dry_run or not server[0] else _server(server, url, key):
        name, context = served if dry_run else _served(url, key) or served
        values = {"url": url, "key": key, "model": name, "context": context or "CONTEXT"}
        values["output"] = context // 8 if context else "OUTPUT"
        variables = {name: value.format(**values) for name, value in variables.items()}
        command = [client, *(option.format(**values) for option in options), *(arguments or ())]
        if not dry_run:
            raise typer.Exit(_run(command, variables))
    text(f"{shlex.join(['dsv4', *server[4:]])} &\n" if server[0] else "")
    for variable, value in variables.items():
        text(f"export {variable}={shlex.quote(value)}\n")
    text(shlex.join(command) + "\n")


def _run(command: list[str], variables: dict[str, str]) -> int:
    """The client, which has the terminal and its Ctrl-C; -> its exit code."""
    client = subprocess.Popen(command, env=variables_with(variables))
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: client.terminate()),
    }
    try:
        code = client.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _server_command(folder: Path, port: int, keys: Path | None, config: EngineConfig) -> list[str]:
    command = [sys.executable, "-P", "-m", "dsv4", "serve", str(folder), f"--port={port}"]
    command += [f"--api-key-file={keys}"] if keys else []
    command += [f"--op={op}={backend}" for op, backend in config.ops]
    for field in fields(config):
        value, flag = getattr(config, field.name), f"--{field.name.replace('_', '-')}"
        if value != field.default and field.name != "ops":
            command.append(flag if value is True else f"{flag}={value}")
    return command


def _get(url: str, key: str) -> Any:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return json.load(answer)


def _served(url: str, key: str) -> tuple[str, int | None] | None:
    """The name and the context of the model that a server has; None: nobody listens there."""
    try:
        while (model := _get(f"{url}/v1/models", key)["data"][0])["max_model_len"] is None:
            time.sleep(0.1)  # the model is loading
        return str(model["id"]), int(model["max_model_len"])
    except urllib.error.HTTPError as error:
        why = "needs a key: --api-key-file" if error.code == 401 else f"answers with status {error.code}"
        raise ConfigError(f"the server at {url} {why}") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"what answers at {url} is no server of dsv4; take another --port") from None
    except OSError:
        return None


@contextmanager
def _server(command: list[str], url: str, key: str) -> Iterator[None]:
    """A server while open: ready when this begins, ended afterwards. Its log is kept in a file."""
    log = state_folder() / "launch.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log.open("wb") as output:
        log.chmod(0o600)
        # A session of its own, which Ctrl-C in this terminal does not reach; the kernel ends it with us.
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(end_with, getpid()),
        )
    try:
        with err.status(f"starting the server; its log is {log}"):
            while not _is_ready(url, key):
                if server.poll() is not None:
                    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                    raise DeviceError(f"the server ended: {last.removeprefix('error: ')}; its log is {log}")
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str, key: str) -> bool:
    try:
        return bool(_get(f"{url}/ready", key))
    except OSError:
        return False
