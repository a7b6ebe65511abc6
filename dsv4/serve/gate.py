"""In front of all routes: the key, the body's limits, the log line, and every error in OpenAI's shape."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv4.errors import Dsv4Error
from dsv4.serve.anthropic import error_shape
from dsv4.serve.client import Busy
from dsv4.serve.job import Service
from dsv4.serve.openai import HttpError, error_body
from dsv4.serve.schema import MAX_BODY_BYTES, Kind, parse

BODY_SECONDS = 30.0
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
        replay = scope.get("replay")
        note = scope["note"] = {"id": f"req_{replay.id if replay else secrets.token_hex(12)}"}
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
            await send(message)

        try:
            with ExitStack() as scope["stack"]:
                self._check(scope)
                scope["app"] = self  # so that the router raises what it does not find
                await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not isinstance(error, Dsv4Error | HTTPException):
                logger.error("a mistake of the server at %s", path, exc_info=error)
            note["error"] = type(error).__name__
            if not status:  # else the answer is cut, and the connection with it
                answer = refusal(_told(error, scope), path.startswith(ANTHROPIC_ROUTE))
                if path in PAGES and answer.status_code == 401:  # a browser can ask for the key
                    answer.headers["WWW-Authenticate"] = 'Basic realm="dsv4: the API key as password"'
                await answer(scope, receive, noted)
        finally:
            if path not in QUIET_ROUTES and not path.startswith("/page/"):
                route = path if path in self._routes else "other"
                self.service.metrics.requests.labels(route, status).inc()
                fields = {"route": route, "status": status, **note}
                fields["ms"] = round(1000 * (time.monotonic() - began))
                self.service.log(" ".join(f"{key}={value}" for key, value in fields.items()))

    def _check(self, scope: Scope) -> None:
        if not self._is_meant(scope):
            why = "the Host is not a name of this machine, as if a web page had sent the request"
            raise HttpError(403, f"{why}; behind a proxy, use --api-key-file", "wrong_host")
        if scope["path"] not in OPEN_ROUTES and not self._has_key(scope):
            why = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise HttpError(401, why, "invalid_api_key")

    def _is_meant(self, scope: Scope) -> bool:
        """Whether a server without keys, on this machine only, was called by a name of this machine.

        Otherwise any web page could have its own name lead here, and then read the answers.
        """
        if self.service.key_hashes or not self.service.is_local:
            return True
        given = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        return re.sub(r":\d+$", "", given).strip("[]").lower() in LOCAL_NAMES

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request may pass; `scope["owner"]` then says for whom prefixes are kept."""
        scope["owner"] = ""
        if not self.service.key_hashes:
            return True
        digest = key_hash(_given_key(scope))
        # All are compared, whichever matches: the time taken says nothing about the keys.
        found = [hmac.compare_digest(digest, known) for known in self.service.key_hashes]
        if self.service.isolates:
            scope["owner"] = digest.hex()
        return any(found)


def _told(error: BaseException, scope: Scope) -> Dsv4Error:
    """What the client gets to know."""
    if isinstance(error, Dsv4Error):
        return error
    method, path = scope["method"], scope["path"]
    if isinstance(error, HTTPException) and error.status_code == 404:
        return HttpError(404, f"Unknown request URL: {method} {path}; see /v1/models", "unknown_url")
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, f"{method} is not allowed for {path}", "method_not_supported")
    return HttpError(500, "the server made a mistake; its log has more", None, "server_error")


def _given_key(scope: Scope) -> bytes:
    """Of clients as a bearer's or as Anthropic's, of browsers, which ask their user for it, as a password."""
    headers = dict(scope["headers"])
    if b"x-api-key" in headers:
        return headers[b"x-api-key"].strip()
    given = headers.get(b"authorization", b"")
    kind, _, key = given.partition(b" ")
    if kind.lower() == b"bearer":
        return key.strip()
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(key.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def key_hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def refusal(error: Dsv4Error, for_anthropic: bool = False) -> Response:
    status, body = error_body(error)
    body = error_shape(error) if for_anthropic else body
    retry = error.retry_seconds if isinstance(error, Busy) else RETRY_SECONDS
    headers = {"Retry-After": str(retry)} if status in (429, 503) else {}
    return json_response(body, status, headers)


async def read_body(request: Request, kind: type[Kind]) -> Kind:
    """The checked body; asking for JSON's media type keeps other web pages from posting here."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise HttpError(415, f"Content-Type is {media or 'missing'!r}, expected application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", "body_too_large")
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {BODY_SECONDS:g} s", "timeout") from None
    except ClientDisconnect:
        raise HttpError(499, "the client went away while it sent its request") from None
    request.scope["size"] = len(data)
    return parse(kind, bytes(data))
