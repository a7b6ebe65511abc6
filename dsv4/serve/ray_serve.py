"""Replicas of the server behind Ray Serve: health checks, autoscaling and rolling updates are Ray's.

Two deployments. `Entrance` reads a request's body and hands it on; `Replica` has an engine and the server's
own routes. So the router sees the prompt, and can send a conversation where its beginning is cached. Ray's
proxies see headers only. Needs the extra `ray`.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dsv4.config import EngineConfig
from dsv4.errors import ConfigError
from dsv4.models import EMBEDDED
from dsv4.serve.app import make_app
from dsv4.serve.gate import refusal
from dsv4.serve.openai import HttpError
from dsv4.serve.schema import MAX_BODY_BYTES
from dsv4.serve.server import ServerConfig, make_service
from dsv4.serve.ticket import Unavailable

APP = "dsv4"
# A request whose replica died before a byte of the answer was sent is sent to another one.
MAX_TRIES = 3
# Without an engine for so long, a replica is given up: a dead process is restarted within it.
SICK_SECONDS = 120.0
# Of a prompt, what decides where it goes.
_KEY_CHARACTERS, _KEY_IDS = 1024, 256


@dataclass(frozen=True)
class Call:
    """One HTTP request, and where it would find its prefix."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    key: str


def prefix_key(body: bytes) -> str:
    """The same for all turns of a conversation: its text up to the first question; empty: any replica."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    beginning: list[Any] = [asked.get("system"), asked.get("instructions")]
    messages = asked.get("messages") or asked.get("input") or asked.get("prompt")
    if isinstance(messages, str):
        beginning.append(messages[:_KEY_CHARACTERS])
    elif isinstance(messages, list):
        roles = [item.get("role") if isinstance(item, dict) else None for item in messages]
        beginning += messages[: roles.index("user") + 1 if "user" in roles else _KEY_IDS]
    return hashlib.sha256(msgspec.json.encode(beginning)).hexdigest() if any(beginning) else ""


class PrefixRouter(RequestRouter):
    """A conversation goes to one replica (rendezvous hashing: when replicas come and go, only their own
    conversations move); where that one is full, to the next of its order."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        calls = [arg for arg in (pending_request.args if pending_request else ()) if isinstance(arg, Call)]
        if not calls or not calls[0].key:
            return [candidate_replicas]

        def rank(replica: RunningReplica) -> bytes:
            name = f"{calls[0].key} {replica.replica_id.unique_id}"
            return hashlib.sha256(name.encode()).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]


class Replica:
    """An engine in a process of its own, and the routes."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, folder: str, engine: EngineConfig, config: ServerConfig
    ) -> None:
        service = make_service(Path(folder), engine, config, print, lambda done, total: None)
        self.engine, self.app = service.engine, make_app(service)
        await self.engine.start()
        self._well = time.monotonic()

    async def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        if self.engine.ready is not None:
            self._well = time.monotonic()
        elif time.monotonic() - self._well > SICK_SECONDS:
            raise Unavailable(f"no engine for {SICK_SECONDS:g} s")

    async def answer(self, call: Call) -> AsyncIterator[Any]:
        """(status, headers), then the body in parts. Whoever stops listening ends the request."""
        sent: asyncio.Queue[Any] = asyncio.Queue()
        parts = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent.put_nowait((message["status"], message["headers"]))
            elif message.get("body"):
                sent.put_nowait(message["body"])

        async def run() -> None:
            scope = {
                "type": "http",
                "method": call.method,
                "path": call.path,
                "query_string": b"",
                "headers": call.headers,
            }
            try:
                await self.app(scope, receive, send)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (item := await sent.get()) is not None:
                yield item
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


class Entrance:
    """Reads bodies, hands them to a replica, and passes its answer on."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self.replicas = replicas.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return refusal(
                    HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "body_too_large")
                )
        call = Call(
            method=request.method,
            path=request.url.path,
            headers=[(bytes(name), bytes(value)) for name, value in request.headers.raw],
            body=bytes(body),
            key=prefix_key(bytes(body)),
        )
        for _ in range(MAX_TRIES):
            stream = self.replicas.remote(call)
            try:
                status, headers = await anext(stream)
            except RayActorError:
                continue
            answer = StreamingResponse(_parts(stream), status)
            answer.raw_headers = [(bytes(name), bytes(value)) for name, value in headers]
            return answer
        return refusal(Unavailable(f"{MAX_TRIES} replicas died under the request; send it again"))


async def _parts(stream: Any) -> AsyncIterator[bytes]:
    async for part in stream:
        yield part


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many replicas, and what each takes; between `replicas` and `max_replicas`, Ray follows the load."""

    replicas: int = 1
    max_replicas: int | None = None
    gpus_per_replica: float = 0
    cpus_per_replica: float = 1
    entrances: int = 1
    health_seconds: float = 10.0
    # How long the load must call for more, or for fewer.
    upscale_seconds: float = 30.0
    downscale_seconds: float = 600.0
    # During an update, so many more: with 0 each is drained before its successor starts, on the same GPU.
    surge_percent: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.entrances < 1:
            raise ConfigError(
                f"replicas is {self.replicas} and entrances {self.entrances}, expected at least 1 of each"
            )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, expected at least replicas {self.replicas}"
            )


def application(folder: Path, engine: EngineConfig, config: ServerConfig, scale: Scale) -> serve.Application:
    # Beyond twice a batch, another replica is worth more than a cached prefix.
    most = 2 * engine.max_batch
    replica = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=most,
        ray_actor_options={"num_gpus": scale.gpus_per_replica, "num_cpus": scale.cpus_per_replica},
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.replicas,
            max_replicas=scale.max_replicas or scale.replicas,
            target_ongoing_requests=engine.max_batch,
            upscale_delay_s=scale.upscale_seconds,
            downscale_delay_s=scale.downscale_seconds,
        ),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=scale.health_seconds,
        graceful_shutdown_timeout_s=config.drain_seconds,
        max_surge_percent=scale.surge_percent,
    )
    entrance = serve.deployment(
        Entrance,
        name="Entrance",
        num_replicas=scale.entrances,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain_seconds,  # it passes the answers on
        max_surge_percent=100,
    )
    return entrance.bind(replica.bind(str(folder.resolve()), engine, config))


def build(args: dict[str, Any]) -> serve.Application:
    """For a Serve config file (examples/ray-serve.yaml): the fields of EngineConfig, ServerConfig, Scale."""
    folder = Path(args.get("model") or EMBEDDED)
    return application(
        folder=folder,
        engine=EngineConfig(**args.get("engine", {})),
        config=msgspec.convert(args.get("server", {}), ServerConfig, dec_hook=lambda kind, text: kind(text)),
        scale=msgspec.convert(args.get("scale", {}), Scale),
    )


def serve_on_ray(folder: Path, engine: EngineConfig, config: ServerConfig, scale: Scale) -> None:
    """Deploy, or update what is deployed replica by replica, and wait until Ctrl-C."""
    serve.start(http_options={"host": config.host, "port": config.port})
    serve.run(application(folder, engine, config, scale), name=APP, route_prefix="/", blocking=True)
