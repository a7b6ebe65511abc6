"""In front of all routes: the key, the body's limits, the log line, and every error in OpenAI's shape."""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv4.errors import Dsv4Error
from dsv4.serve.anthropic import error_shape
from dsv4.serve.job import Service
from dsv4.serve.lines import stamp
from dsv4.serve.openai import HttpError, error_body
from dsv4.serve.parse import Kind, Notes, parse
from dsv4.serve.schema import MAX_BODY_BYTES
from dsv4.serve.ticket import Busy, Unavailable

BODY_SECONDS = 30.0
LEAST_BODY_BYTES, BYTES_PER_TOKEN = 10 << 20, 32
SMALL_BODY_BYTES = 128 << 10  # read within a millisecond or two; larger ones beside the event loop
RETRY_SECONDS = 1
LOCAL_NAMES = ("127.0.0.1", "::1", "localhost")
OPEN_ROUTES = ("/health",)
QUIET_ROUTES = ("/health", "/ready", "/metrics")
PAGES = ("/", "/status")
ANTHROPIC_ROUTE = "/v1/messages"

logger = logging.getLogger("dsv4.serve")


class Gate:
    """The outermost application. `scope["stack"]` closes what a request holds, however it ends.

    `routes` are logged and counted by name; what else clients make up is one, "other".
    """

    def __init__(self, app: ASGIApp, service: Service, routes: Collection[str] = ()) -> None:
        self.app, self.service, self._routes = app, service, frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, path = time.monotonic(), scope["path"]
        scope["began"] = began
        replay = scope.get("replay")
        note = scope["note"] = {"id": f"req_{replay.id if replay else secrets.token_hex(12)}"}
        notes = scope["notes"] = Notes([] if self.service.is_lenient else None)
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII):
            note["client_id"] = given
        status = 0

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                echoed = note.get("client_id", note["id"]).encode()
                message["headers"] = [*message["headers"], (b"x-request-id", echoed)]
                if notes.ignored:
                    left_out = ",".join(notes.ignored)[:1024].encode("ascii", "replace")
                    message["headers"].append((b"x-ignored-fields", re.sub(rb"[^\x21-\x7e]", b"?", left_out)))
            await send(message)

        try:
            with ExitStack() as scope["stack"]:
                self._check(scope)
                scope["app"] = self  # so that the router raises what it does not find
                await self.app(scope, receive, noted)
        except BaseException as error:
            is_ended = isinstance(error, asyncio.CancelledError)
            if not (isinstance(error, Dsv4Error | HTTPException) or is_ended):
                logger.error("a mistake of the server at %s", path, exc_info=error)
            note["error"] = type(error).__name__
            if not status:  # else the answer is cut, and the connection with it
                await self._refuse(_told(error, scope), error, scope, noted)
            if is_ended:
                raise
        finally:
            if path not in QUIET_ROUTES and not path.startswith("/page/"):
                route = path if path in self._routes else "other"
                self.service.metrics.requests.labels(route, status).inc()
                fields = {"time": stamp(), "client": (scope.get("client") or ("-",))[0], "route": route}
                fields |= {"status": status, **note, "ms": round(1000 * (time.monotonic() - began))}
                for name, left_out in (("dropped", notes.dropped), ("ignored", notes.ignored)):
                    if left_out:
                        fields[name] = json.dumps(",".join(left_out)[:200])
                self.service.log(" ".join(f"{key}={value}" for key, value in fields.items()))

    async def _refuse(self, told: Dsv4Error, error: BaseException, scope: Scope, send: Send) -> None:
        answer = refusal(told, scope["path"].startswith(ANTHROPIC_ROUTE))
        if answer.status_code == 401:
            # A browser can ask its user for the key.
            way = 'Basic realm="dsv4: the API key as password"' if scope["path"] in PAGES else "Bearer"
            answer.headers["WWW-Authenticate"] = way
        if isinstance(error, HTTPException):
            answer.headers.update(error.headers or {})  # Allow, of a wrong method
        await answer(scope, _nothing, send)

    def _check(self, scope: Scope) -> None:
        if not self._is_meant(scope):
            why = "the Host is not a name of this machine, as if a web page had sent the request"
            raise HttpError(403, f"{why}; behind a proxy, use --api-key-file", "wrong_host")
        if scope["path"] not in OPEN_ROUTES and not self._has_key(scope):
            # It begins as OpenAI's does, by which LiteLLM knows it.
            why = "Incorrect API key provided, or none; send it as 'Authorization: Bearer KEY'"
            raise HttpError(401, why, "invalid_api_key")

    def _is_meant(self, scope: Scope) -> bool:
        """Whether a server without keys, on this machine only, was called by a name of this machine.

        Otherwise any web page could have its own name lead here, and then read the answers.
        """
        if self.service.keys.hashes or not self.service.is_local:
            return True
        given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        return re.sub(r":\d+$", "", given).strip("[]").lower() in LOCAL_NAMES

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request may pass; `scope["owner"]` then says for whom prefixes are kept, `scope["key"]`
        for whom responses are."""
        scope["owner"] = scope["key"] = ""
        if not self.service.keys.hashes:
            return True
        # All are compared, whichever matches: the time taken says nothing about the keys.
        digests = [key_hash(key) for key in _given_keys(scope)]
        found = [
            (number, digest)
            for number, known in enumerate(self.service.keys.hashes, 1)
            for digest in digests
            if hmac.compare_digest(digest, known)
        ]
        if not found:
            return False
        scope["note"]["key"], scope["key"] = found[0][0], found[0][1].hex()
        if self.service.isolates:
            scope["owner"] = scope["key"]
        return True


def _told(error: BaseException, scope: Scope) -> Dsv4Error:
    """What the client gets to know."""
    if isinstance(error, Dsv4Error):
        return error
    method, path = scope["method"], scope["path"]
    if isinstance(error, HTTPException) and error.status_code == 404:
        return HttpError(404, f"Unknown request URL: {method} {path}; see /v1/models", "unknown_url")
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("the server shuts down")
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, f"{method} is not allowed for {path}", "method_not_supported")
    return HttpError(500, "the server made a mistake; its log has more", None, "server_error")


def _given_keys(scope: Scope) -> Iterator[bytes]:
    """Of clients as a bearer's or as Anthropic's, of browsers, which ask their user for it, as a password."""
    for name, value in scope["headers"]:
        kind, _, key = value.partition(b" ")
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and kind.lower() == b"bearer":
            yield key.strip()
        elif name == b"authorization" and kind.lower() == b"basic":
            with contextlib.suppress(binascii.Error):
                yield base64.b64decode(key.strip(), validate=True).partition(b":")[2]


async def _nothing() -> Message:
    raise AssertionError("a refusal reads no more of its request")


def key_hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def refusal(error: Dsv4Error, for_anthropic: bool = False, **beside: Any) -> Response:
    status, body = error_body(error)
    body = {**(error_shape(error) if for_anthropic else body), **beside}
    retry = error.retry_seconds if isinstance(error, Busy) else RETRY_SECONDS
    headers = {"Retry-After": str(retry)} if status in (429, 503) else {}
    return json_response(body, status, headers)


def body_limit(max_context: int) -> int:
    """Bytes of a body, by the context: one full of \\uXXXX fits."""
    return min(MAX_BODY_BYTES, max(LEAST_BODY_BYTES, BYTES_PER_TOKEN * max_context))


async def read_body(request: Request, kind: type[Kind], most: int) -> Kind:
    """The checked body; asking for JSON's media type keeps other web pages from posting here."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HttpError(415, f"Content-Type is {media or 'missing'!r}, expected application/json")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        why = "small bodies could unpack to any size; send it as it is"
        raise HttpError(415, f"Content-Encoding is {coding[:60]!r}, expected none: {why}")
    # Before a byte of it is asked for, as `Expect: 100-continue` wants to know.
    if len(length := request.headers.get("content-length", "")) > 18 or int(length or 0) > most:
        raise HttpError(413, f"the body is larger than {most} bytes", "body_too_large")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise HttpError(413, f"the body is larger than {most} bytes", "body_too_large")
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {BODY_SECONDS:g} s", "timeout") from None
    except ClientDisconnect:
        raise HttpError(499, "the client went away while it sent its request") from None
    request.scope["size"] = len(data)
    ignored = request.scope["notes"].ignored
    if len(data) <= SMALL_BODY_BYTES:
        return parse(kind, data, ignored)
    return await asyncio.to_thread(parse, kind, data, ignored)
