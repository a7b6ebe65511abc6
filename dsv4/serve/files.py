"""The chat and status pages: their files, and facts about the model. Knows no requests for tokens."""

import asyncio
import hashlib
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsv4.models import EMBEDDED
from dsv4.serve.job import Service
from dsv4.weights.detect import read_headers, storage_name

_FOLDER = Path(__file__).parent / "page"
_MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_PAGES = {"index.html": "/", "status.html": "/status"}
# A file of the pages -> where it is served.
PATHS = {
    path: _PAGES.get(path.name, f"/page/{path.relative_to(_FOLDER).as_posix()}")
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _MEDIA
}
# Nothing is loaded from elsewhere, no string becomes a script or HTML, no link is looked up in advance.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def routes(service: Service) -> list[Route]:
    """All of `PATHS`, the facts about the model, and a request's place in the queue."""

    async def about(request: Request) -> Response:
        known = await asyncio.to_thread(facts, service.engine.model)
        ready = service.engine.ready
        own = {
            "name": service.name,
            "thinking": service.usual.thinking,
            "max_thinking": service.usual.max_thinking,
            "context": ready.max_context if ready else None,
            "max_batch": ready.max_batch if ready else None,
        }
        return Response(msgspec.json.encode({**known, **own}), media_type="application/json", headers=HEADERS)

    async def queue(request: Request) -> Response:
        ahead = service.engine.num_ahead(request.query_params.get("id", ""))
        return Response(msgspec.json.encode({"ahead": ahead}), media_type="application/json", headers=HEADERS)

    files = [Route(where, _file(path), methods=["GET"]) for path, where in PATHS.items()]
    own = [Route("/page/about", about, methods=["GET"]), Route("/page/queue", queue, methods=["GET"])]
    return [*files, *own]


def _file(path: Path) -> Any:
    data, media = path.read_bytes(), f"{_MEDIA[path.suffix]}; charset=utf-8"
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=media, headers=headers)

    return respond


@cache
def facts(model: str) -> dict[str, Any]:
    """What the checkpoint's headers tell: its size, its formats and its shape."""
    config, _, inventory = read_headers(model)
    stored: Counter[str] = Counter()  # storage -> number of parameters
    for source in inventory.sources:
        # The draft block and tables of ids are no part of a model's published size.
        if source.param.component not in ("mtp", "hash table"):
            stored[storage_name(source)] += math.prod(source.param.shape)
    return {
        "is_embedded": Path(model).resolve() == EMBEDDED.resolve(),
        "parameters": stored.total(),
        "bytes": inventory.num_bytes,
        "formats": [name for name, _ in stored.most_common()],
        "layers": config.num_layers,
        "width": config.hidden_size,
        "experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
    }
