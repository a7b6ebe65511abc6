"""`dsv4 serve`: the OpenAI-compatible server."""

import io
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4.cli.options import check_ray, engine_options, needs_extra
from dsv4.cli.show import bytes_bar, err, model_folder, say_note
from dsv4.config import EngineConfig
from dsv4.errors import ConfigError
from dsv4.hub.cache import title

if TYPE_CHECKING:
    from dsv4.serve.server import ServerConfig

EPILOG = """
[bold]Examples[/]
  dsv4 serve
  dsv4 serve ./model --port 9000 --max-batch 16 --max-context 16384
  dsv4 serve ./model --host 0.0.0.0 --api-key-file keys.txt
  dsv4 serve ./model --ray --replicas 2 --max-replicas 8 --gpus-per-replica 1
  torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr 10.0.0.1 -m dsv4 serve ./model
  (that on the first of two machines, on the other the same with --node-rank 1)
[bold]Then[/]
  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" -d\\
  '{"messages": \\[{"role": "user", "content": "What is 27 + 58?"}]}'
"""


class UnfailingStderr(io.TextIOBase):
    """A log that cannot be written, as on a full disk, is no reason to stop serving."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))
        return len(text)

    def isatty(self) -> bool:
        return sys.stderr.isatty()


@engine_options
def serve(
    model: Annotated[Path | None, typer.Argument(help="model folder; default: the embedded model")] = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; the default is this machine only")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one")] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            "--name",
            help="the model's name for clients; default: its folder's; more of them, or patterns such as"
            " 'claude-*', are other names",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="keys, one per line; needed on every route but /health")
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="sequences that may wait; more are answered with status 429")
    ] = 64,
    queue_seconds: Annotated[
        float, typer.Option(help="time a request may wait; then it is answered with status 429")
    ] = 60.0,
    request_seconds: Annotated[float, typer.Option(help="time for one answer, waiting included")] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(help="on SIGTERM: time for running answers to finish")
    ] = 30.0,
    stall_seconds: Annotated[
        float, typer.Option(help="restart the engine after this long without output")
    ] = 120.0,
    max_connections: Annotated[
        int, typer.Option(help="limit; when full, the longest-idle connection is closed")
    ] = 1024,
    thinking: Annotated[
        bool, typer.Option(help="let the model think first, unless a request says otherwise")
    ] = True,
    max_thinking: Annotated[
        int | None, typer.Option(help="thinking tokens at most; then the answer begins")
    ] = None,
    cors_origins: Annotated[
        str, typer.Option(help="web pages that may use the API, e.g. https://a.example,https://b.example")
    ] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="certificates, as PEM: serve HTTPS")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="the key to --tls-cert, as PEM")] = None,
    log_texts: Annotated[bool, typer.Option(help="log prompts and answers; for debugging only")] = False,
    isolate_by_key: Annotated[
        bool, typer.Option(help="share cached prefixes only among requests with the same key")
    ] = False,
    lenient: Annotated[
        bool, typer.Option(help="leave out fields of requests that are not known, and name them in a header")
    ] = False,
    ray: Annotated[bool, typer.Option("--ray", help="as replicas behind Ray Serve, on its cluster")] = False,
    replicas: Annotated[int, typer.Option(help="with --ray: engines, at least")] = 1,
    max_replicas: Annotated[int | None, typer.Option(help="with --ray: engines, at most")] = None,
    gpus_per_replica: Annotated[float, typer.Option(help="with --ray: 0 on machines without one")] = 0,
    *,
    config: EngineConfig,
) -> None:
    """Serve a model to OpenAI's clients (/v1/chat/completions, /v1/responses) and Anthropic's (/v1/messages).

    One line per request goes to stderr, without its text. Ctrl-C or SIGTERM drains; a second one ends. SIGHUP
    reads keys and certificates again.
    """
    with needs_extra("the server", "serve"):
        from dsv4.serve.gate import LOCAL_NAMES
        from dsv4.serve.lines import stamp
        from dsv4.serve.server import ServerConfig, serve
    server_config = ServerConfig(
        host=host,
        port=port,
        names=tuple(name or ()),
        api_key_file=api_key_file,
        max_queue=max_queue,
        queue_seconds=queue_seconds,
        request_seconds=request_seconds,
        drain_seconds=drain_seconds,
        stall_seconds=stall_seconds,
        max_connections=max_connections,
        thinking=thinking,
        max_thinking=max_thinking,
        cors_origins=tuple(origin.strip() for origin in cors_origins.split(",") if origin.strip()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        log_texts=log_texts,
        isolate_by_key=isolate_by_key,
        lenient=lenient,
    )
    check_ray(ray, replicas=replicas - 1, max_replicas=max_replicas, gpus_per_replica=gpus_per_replica)
    err.file = UnfailingStderr()  # type: ignore[assignment]
    folder = model_folder(model)
    if api_key_file is None and host not in LOCAL_NAMES:
        say_note(f"anyone who can reach {host} can use the model; protect it with --api-key-file")
    if ray:
        scale = {"replicas": replicas, "max_replicas": max_replicas, "gpus_per_replica": gpus_per_replica}
        _serve_on_ray(folder, config, server_config, scale)
        return
    with ExitStack() as stack:
        update = stack.enter_context(bytes_bar(f"loading {title(folder)}"))

        # Not with rich, which takes 0.1 ms for a line: all streams would wait for it.
        form = "\x1b[2m{}\x1b[0m\n" if err.is_terminal and not err.no_color else "{}\n"

        def log(line: str) -> None:
            stack.close()  # the bar: the first line comes when the model is loaded, or says why it is not
            err.file.write(form.format(line if line.startswith("time=") else f"time={stamp()} {line}"))

        serve(folder, config, server_config, log, update)


def _serve_on_ray(
    folder: Path, config: EngineConfig, server_config: "ServerConfig", scale: dict[str, Any]
) -> None:
    with needs_extra("--ray", "ray"):
        from dsv4.serve.ray_serve import Scale, serve_on_ray
    if server_config.tls_cert is not None or server_config.cors_origins:
        raise ConfigError("--tls-cert and --cors-origins are for a proxy in front of Ray; leave them out")
    serve_on_ray(folder, config, server_config, Scale(**scale))
