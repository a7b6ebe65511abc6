"""In front of all routes: the key, the body's limits, the log line, errors in OpenAI's shape."""

import asyncio
import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from dsv4.errors import Dsv4Error
from dsv4.serve.client import Busy
from dsv4.serve.job import Service
from dsv4.serve.openai import HttpError, error_body
from dsv4.serve.schema import MAX_BODY_BYTES, Kind, parse

BODY_SECONDS = 30.0
RETRY_SECONDS = 1
LOCAL_NAMES = ("127.0.0.1", "::1", "localhost")
OPEN_ROUTES = ("/health",)
QUIET_ROUTES = ("/health", "/ready", "/metrics")
LOGGED_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/")


class Gate:
    """In front of all routes: the key, the request's id, the log line, and errors in OpenAI's shape."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, path = time.monotonic(), scope["path"]
        note = scope["note"] = {"id": f"req_{secrets.token_hex(12)}"}
        status = 0

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", note["id"].encode())]
            await send(message)

        try:
            if not self._is_meant(scope):
                why = "the Host is not a name of this machine, as if a web page had sent the request"
                wrong = HttpError(403, f"{why}; behind a proxy, use --api-key-file", "wrong_host")
                await refusal(wrong)(scope, receive, noted)
            elif path in OPEN_ROUTES or self._has_key(scope):
                await self.app(scope, receive, noted)
            else:
                why = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
                answer = refusal(HttpError(401, why, "invalid_api_key"))
                if path == "/":  # a browser, which can ask its user for the key
                    answer.headers["WWW-Authenticate"] = 'Basic realm="dsv4: the API key as password"'
                await answer(scope, receive, noted)
        finally:
            if path not in QUIET_ROUTES:
                route = path if path in LOGGED_ROUTES else "other"
                self.service.metrics.requests.labels(route, status).inc()
                fields = {"route": route, "status": status, **note}
                fields["ms"] = round(1000 * (time.monotonic() - began))
                self.service.log(" ".join(f"{key}={value}" for key, value in fields.items()))

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


def _given_key(scope: Scope) -> bytes:
    """Of clients as a bearer's, of browsers, which ask their user for it, as a password."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
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


def refusal(error: Dsv4Error) -> JSONResponse:
    status, body = error_body(error)
    retry = error.retry_seconds if isinstance(error, Busy) else RETRY_SECONDS
    headers = {"Retry-After": str(retry)} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


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
    return parse(kind, bytes(data))
