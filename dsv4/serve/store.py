"""Responses and their items, kept for the requests that refer to them: the latest ones, bounded in bytes."""

from collections import OrderedDict
from typing import Any

import msgspec

from dsv4.serve.openai import HttpError

MAX_BYTES = 64 << 20


class Store:
    """Each owner sees its own. What is gone, by age or by a restart, is answered with 404."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        # (owner, item) -> the responses that have it, the latest last
        self._responses_of: dict[tuple[str, str], dict[str, None]] = {}

    def put(self, owner: str, given: list[dict[str, Any]], response: dict[str, Any]) -> None:
        """`given`: the whole input, so that a chain of responses does not depend on its older ones."""
        data = msgspec.msgpack.encode((given, response))
        if len(data) > self.max_bytes:
            return
        self.drop(owner, response["id"])
        self._kept[owner, response["id"]] = data
        self.num_bytes += len(data)
        for item in (*given, *response["output"]):
            if isinstance(item.get("id"), str):
                self._responses_of.setdefault((owner, item["id"]), {})[response["id"]] = None
        while self.num_bytes > self.max_bytes:
            self.drop(*next(iter(self._kept)))

    def drop(self, owner: str, id: str) -> bool:
        data = self._kept.pop((owner, id), None)
        if data is None:
            return False
        self.num_bytes -= len(data)
        given, response = msgspec.msgpack.decode(data)
        for item in (*given, *response["output"]):
            key = (owner, item.get("id"))
            if isinstance(item.get("id"), str) and (holders := self._responses_of.get(key)) is not None:
                holders.pop(id, None)
                if not holders:
                    del self._responses_of[key]
        return True

    def get(self, owner: str, id: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """-> its whole input, and the response."""
        data = self._kept.get((owner, id))
        if data is None:
            raise HttpError(404, f"Response with id {id!r} not found; {_WHY}", "not_found")
        self._kept.move_to_end((owner, id))
        given, response = msgspec.msgpack.decode(data)
        return given, response

    def item(self, owner: str, id: str) -> dict[str, Any]:
        holders = self._responses_of.get((owner, id))
        if holders is None:
            raise HttpError(404, f"Item with id {id!r} not found; {_WHY}", "not_found")
        given, response = self.get(owner, next(reversed(holders)))
        return next(item for item in (*response["output"], *given) if item.get("id") == id)


_WHY = (
    "only the latest responses are kept, in memory, and none with store: false; "
    "send the whole conversation as input"
)
