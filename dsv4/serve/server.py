"""The server's life: bind, load, serve, drain on a signal, end. Knows no routes."""

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from dsv4.config import EngineConfig, ModelConfig
from dsv4.env import service_manager
from dsv4.errors import ConfigError
from dsv4.hub.cache import title
from dsv4.serve.app import make_app
from dsv4.serve.ask import Usual
from dsv4.serve.client import EngineProcess
from dsv4.serve.connections import IDLE_SECONDS, Listener
from dsv4.serve.gate import LOCAL_NAMES, key_hash
from dsv4.serve.job import Keys, Service
from dsv4.serve.lines import Lines, reported
from dsv4.serve.metrics import Metrics
from dsv4.serve.prompt import Encoder
from dsv4.text.generation import SamplingDefaults
from dsv4.text.tokenizer import Tokenizer

# Time for the last answers, or the error that ends them, to reach the clients.
LAST_WORDS_SECONDS = 2.0
MIN_KEY_CHARACTERS = 16


@dataclass(frozen=True)
class ServerConfig:
    """Everything about the server but the engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()  # of the model, patterns such as claude-* among them; none: the folder's
    api_key_file: Path | None = None
    max_queue: int = 64
    queue_seconds: float = 60.0
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    stall_seconds: float = 120.0
    max_connections: int = 1024
    thinking: bool = True
    max_thinking: int | None = None
    cors_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_texts: bool = False
    isolate_by_key: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        if self.isolate_by_key and self.api_key_file is None:
            raise ConfigError("isolate_by_key needs keys to tell users apart; give --api-key-file")
        if self.names and (not all(self.names) or set(self.names[0]) & set("*?[")):
            raise ConfigError(f"the model's names are {self.names}, expected the first to be no pattern")
        for name, holds, expected in (
            ("port", 0 <= self.port < 65536, "a number from 0 (any free one) to 65535"),
            ("max_queue", 0 <= self.max_queue <= 100_000, "a number from 0 to 100000"),
            ("queue_seconds", 0 < self.queue_seconds <= 86400, "a number above 0, at most 86400"),
            ("request_seconds", 0 < self.request_seconds <= 86400, "a number above 0, at most 86400"),
            ("stall_seconds", 0 < self.stall_seconds <= 86400, "a number above 0, at most 86400"),
            ("max_connections", 4 <= self.max_connections <= 1_000_000, "a number from 4 to 1000000"),
            ("max_thinking", self.max_thinking is None or self.max_thinking > 0, "a number above 0"),
            ("tls_key", (self.tls_key is None) == (self.tls_cert is None), "one beside tls_cert"),
            ("drain_seconds", 0 <= self.drain_seconds <= 86400, "a number from 0 to 86400"),
        ):
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected {expected}")


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: a drained server ends with exit code 0."""
        yield


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """The hashes of the keys in a file, one key per line."""
    if path is None:
        return ()
    try:
        keys = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror or error}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path} is empty; expected one key per line")
    if any(len(key) < MIN_KEY_CHARACTERS for key in keys):
        raise ConfigError(f"--api-key-file {path} has a key of less than {MIN_KEY_CHARACTERS} characters")
    return tuple(map(key_hash, keys))


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; see --host and --port"
        ) from None


def serve(
    folder: Path,
    engine_config: EngineConfig,
    config: ServerConfig,
    log: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Serve the model in `folder` until a signal. A `log` that fails or stands still stops nothing."""
    ModelConfig.load(folder)
    tls = tls_context(config)
    lines = Lines(log)
    try:
        with bind(config.host, config.port) as sock, reported(lines.put):
            asyncio.run(_serve(folder, engine_config, config, sock, tls, lines, progress))
    finally:
        lines.close()


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificates(context, config)
    return context


def load_certificates(context: ssl.SSLContext, config: ServerConfig) -> None:
    assert config.tls_cert is not None

    def no_password() -> str:  # without it, OpenSSL would ask on the terminal, and the server stand still
        how = f"openssl pkey -in {config.tls_key} -out PLAIN makes one without"
        raise ConfigError(f"--tls-key {config.tls_key} has a passphrase, which nobody is here to type; {how}")

    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, no_password)
    except OSError as error:
        where = f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key}"
        raise ConfigError(f"{where} cannot be used: {error.strerror or error}; expected PEM files") from None


def tell_manager(state: str) -> None:
    """To systemd, where it has started the server with Type=notify."""
    if path := service_manager():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.sendto(state.encode(), path.replace("@", "\0", 1) if path.startswith("@") else path)


def url(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def make_service(
    folder: Path,
    engine_config: EngineConfig,
    config: ServerConfig,
    log: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Service:
    """What the routes need, with an engine that is not started yet. Everybody may call it who has a key."""
    engine = EngineProcess(
        str(folder.resolve()),
        engine_config,
        max_queue=config.max_queue,
        queue_seconds=config.queue_seconds,
        request_seconds=config.request_seconds,
        stall_seconds=config.stall_seconds,
        log=log,
        progress=progress,
    )
    names = config.names or (title(folder),)
    return Service(
        names=names,
        engine=engine,
        encoder=Encoder(Tokenizer.load(folder)),
        metrics=Metrics(engine, names[0]),
        log=log,
        keys=Keys(read_keys(config.api_key_file)),
        usual=Usual(
            thinking=config.thinking,
            max_thinking=config.max_thinking,
            sampling=SamplingDefaults.load(folder),
            release=ModelConfig.load(folder).release,
        ),
        isolates=config.isolate_by_key,
        logs_texts=config.log_texts,
        is_lenient=config.lenient,
    )


async def _serve(
    folder: Path,
    engine_config: EngineConfig,
    config: ServerConfig,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    lines: Lines,
    progress: Callable[[int, int], None],
) -> None:
    log = lines.put
    service = make_service(folder, engine_config, config, log, progress)
    engine, lines.on_drop = service.engine, service.metrics.dropped_lines.inc
    app = make_app(replace(service, is_local=config.host in LOCAL_NAMES))
    if config.cors_origins:
        exposed = ("x-request-id", "x-ignored-fields", "retry-after")
        app = CORSMiddleware(
            app, config.cors_origins, ("GET", "POST", "DELETE"), allow_headers=("*",), expose_headers=exposed
        )
    uvicorn_config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        http="h11",
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(LAST_WORDS_SECONDS) + 1,
    )
    server = _Uvicorn(uvicorn_config)
    listener = Listener(sock, server, config.max_connections, tls)
    loop = asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []

    def leave() -> None:
        listener.stop()
        server.should_exit = True

    async def finish() -> None:
        """Until the open answers have ended, new requests are told to go elsewhere."""
        end = loop.time() + config.drain_seconds
        while engine.num_open and loop.time() < end:
            await asyncio.sleep(0.02)
        if engine.num_open:
            more = f"the answer took longer than {config.drain_seconds:g} s more"
            await engine.stop(f"the server shuts down and {more}")
        leave()

    def drain() -> None:
        if closing:
            server.force_exit = True
            return leave()
        log(f"server: draining, {engine.num_open} sequences are open, {config.drain_seconds:g} s at most")
        tell_manager("STOPPING=1")
        engine.refuse_new("the server shuts down")
        closing.append(asyncio.create_task(finish()))

    def reload() -> None:
        try:
            hashes = read_keys(config.api_key_file)
            if tls is not None:
                tls_context(config)  # else a pair that does not match would leave the one in use without key
                load_certificates(tls, config)
            service.keys.hashes = hashes
        except ConfigError as error:
            log(f"server: {error}; what was read before stays in use")
        else:
            log(f"server: read again, {len(service.keys.hashes)} API keys")

    for number, handler in ((signal.SIGTERM, drain), (signal.SIGINT, drain), (signal.SIGHUP, reload)):
        loop.add_signal_handler(number, handler)
    uvicorn_config.load()
    listener.start()
    http = asyncio.create_task(server.serve([]))
    load = asyncio.create_task(engine.start())
    try:
        await asyncio.wait((http, load), return_when=asyncio.FIRST_COMPLETED)
        if load.done() and not closing:
            gc.collect()
            gc.freeze()  # what is there stays: never look through it again
            for note in load.result().notes:
                log(f"engine: {note}")
            base = url(sock, "https" if tls else "http")
            log(f"server: {service.name} is ready at {base}/v1, a chat page at {base}/")
            tell_manager("READY=1")
        await asyncio.wait((http, engine.ended), return_when=asyncio.FIRST_COMPLETED)
        if engine.ended.done():
            engine.ended.result()
        await http
    finally:
        listener.stop()
        server.should_exit = True
        for task in (*closing, load):
            task.cancel()
        await asyncio.gather(*closing, load, http, return_exceptions=True)
        await engine.stop("the server shuts down")
    log("server: ended")
