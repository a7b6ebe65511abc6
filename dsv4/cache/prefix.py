"""What finished and running sequences have left behind: pages by their tokens, and snapshots to go on from.

Host integers only: a snapshot is a handle, and what the device must do about it goes into the next plan.

A tree per owner: a node is one page, reached by exactly its tokens after exactly those of its parents, so
nothing is found by chance. A page in the tree is held by reference; it can be given up as soon as nobody else
holds it. A hit ends at a snapshot, since windows and tails cannot be made from pages. Knows ids, not text.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

from dsv4.cache.layout import SPARE
from dsv4.cache.node import Node
from dsv4.cache.slots import Slots


@dataclass(frozen=True)
class Hit:
    """A slot whose first `position` tokens are there once the snapshot is restored; `fork` is a position to
    stop and save at: there, prompts were seen to part while nothing was saved; 0: nowhere.
    """

    slot: int
    position: int
    node: Node
    fork: int
    snapshot: int | None


class PrefixCache:
    """Least recently used first out, pages and snapshots each; with `max_snapshots` 0 nothing is kept."""

    def __init__(self, slots: Slots, max_snapshots: int) -> None:
        self.slots, self.max_snapshots = slots, max_snapshots
        self._page_tokens = slots.layout.page_tokens
        # A root lives as long as something is kept below it or a sequence stands at it.
        self._roots: WeakValueDictionary[str, Node] = WeakValueDictionary()
        # A node is used together with its parents, they after it: the oldest one never has children.
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._snapshots: OrderedDict[Node, int] = OrderedDict()
        self._handles = count()
        self._saves: dict[int, tuple[int, int]] = {}  # handle -> slot, position: not yet in a plan
        self._drops: list[int] = []
        slots.pool.reclaim = self._reclaim

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def take_saves(self) -> tuple[tuple[int, int, int], ...]:
        """(handle, slot, position) of the snapshots to make, since this was last asked."""
        saves = tuple((handle, slot, position) for handle, (slot, position) in self._saves.items())
        self._saves.clear()
        return saves

    def take_drops(self) -> tuple[int, ...]:
        """Handles of the snapshots that nobody can ask for any more, since this was last asked."""
        drops = tuple(self._drops)
        self._drops.clear()
        return drops

    def claim(
        self, sequence: int, owner: str, ids: Sequence[int], tokens: int, reuse: bool = True
    ) -> Hit | None:
        """A slot for `tokens` tokens that begin with `ids`, or None while the cache is full.

        At least one of `ids` is left to process, for the logits after it; without `reuse` all are.
        """
        path = self._path(owner, ids) if reuse else []
        saved = max((depth for depth, node in enumerate(path, 1) if node in self._snapshots), default=0)
        pages = [node.page for node in path[:saved]]
        slot = self.slots.claim(sequence, tokens, pages)
        if slot is None:
            return None
        path = [node for node in path if not node.is_gone]  # the claim may have needed their pages
        node = path[saved - 1] if saved else self._root(owner)
        if saved:
            self._snapshots.move_to_end(node)
        self._use(path[-1] if path else node)
        fork = len(path) * self._page_tokens if len(path) > saved else 0
        return Hit(slot, saved * self._page_tokens, node, fork, self._snapshots[node] if saved else None)

    def _root(self, owner: str) -> Node:
        return self._roots.setdefault(owner, Node(None))

    def _path(self, owner: str, ids: Sequence[int]) -> list[Node]:
        path: list[Node] = []
        node, size = self._roots.get(owner), self._page_tokens
        for start in range(0, (len(ids) - 1) // size * size, size):
            node = node.children.get(tuple(ids[start : start + size])) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def _use(self, node: Node) -> None:
        step: Node | None = node
        while step is not None and step.parent is not None:
            self._nodes.move_to_end(step)
            step = step.parent

    def next_stop(self, start: int, stop: int, fork: int) -> int:
        """Where a run from `start` to `stop` should end instead, for its pages to be of use to others."""
        if not self.max_snapshots:
            return stop
        if start < fork < stop:
            return fork
        boundary = stop // self._page_tokens * self._page_tokens
        return boundary if boundary > start else stop

    def keep(
        self, slot: int, node: Node, ids: tuple[int, ...], end: int, position: int, saves: bool = True
    ) -> Node:
        """Enter the page of `slot` that ends at `end` and holds `ids`, after those of `node`; -> its node.

        The slot has come to `position`, and a step launched ahead to one more. If that is too far past
        `end`, or without `saves`, the page is kept without a snapshot.
        """
        if not self.max_snapshots or node.is_gone:
            return node
        child = node.children.get(ids)
        if child is None:
            page = self.slots.page_at(slot, end - 1)
            child = node.children[ids] = Node(node, ids, page)
            self.slots.pool.keep(page)
            self._nodes[child] = None
        self._use(child)
        if saves and child not in self._snapshots and position + 1 - end <= SPARE:
            handle = self._snapshots[child] = next(self._handles)
            self._saves[handle] = (slot, end)
            while len(self._snapshots) > self.max_snapshots:
                oldest, handle = self._snapshots.popitem(last=False)
                self._drop(handle)
                self._prune(oldest)
        return child

    def is_saved(self, node: Node) -> bool:
        """Whether a prompt can go on after this node's page."""
        return node in self._snapshots

    def _prune(self, node: Node) -> None:
        """Nobody can resume here, nor further down: give up what lies between this and the next one above."""
        step: Node | None = node
        while step is not None and step.parent is not None and not step.children:
            if step in self._snapshots:
                return
            above = step.parent
            self._remove(step)
            step = above

    def _drop(self, handle: int) -> None:
        if self._saves.pop(handle, None) is None:  # else it was never made
            self._drops.append(handle)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del node.parent.children[node.ids]
        del self._nodes[node]
        if node in self._snapshots:
            self._drop(self._snapshots.pop(node))
        node.is_gone = True
        self.slots.pool.drop(node.page)

    def _reclaim(self, count: int) -> None:
        """Free that many pages, of those that nobody else holds, the least recently used first."""
        for node in list(self._nodes):
            if count <= 0:
                return
            if not node.children and self.slots.pool.is_idle(node.page):
                self._remove(node)
                count -= 1

    def clear(self) -> None:
        """Forget everything; running sequences go on."""
        for node in list(self._nodes):
            self._remove(node)
