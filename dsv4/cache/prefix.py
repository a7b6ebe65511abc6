"""What finished and running sequences have left behind: pages by their tokens, and snapshots to go on from.

Host integers only: a snapshot is a handle, and what the device must do about it goes into the next plan.

A tree per owner: a node is one page, reached by exactly its tokens after exactly those of its parents, so
nothing is found by chance. A page in the tree is held by reference; it can be given up as soon as nobody else
holds it. A hit ends at a snapshot, since windows and tails cannot be made from pages. Knows ids, not text.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

from dsv4.cache.folder import chain
from dsv4.cache.layout import SPARE
from dsv4.cache.node import Node
from dsv4.cache.shelf import Found, Shelf
from dsv4.cache.slots import Slots

# Pages that come from the folder in one copy: bounds what it takes of the device's memory.
COPY_PAGES = 64


# The fields of a plan's Copy: number on the shelf, pages or a snapshot's handle, its position.
CopyFields = tuple[int, tuple[int, ...], int, int]


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
    """Least recently used first out, pages and snapshots each; with `max_snapshots` 0 nothing is kept.

    With a `shelf`, what is kept here is also kept in files, and what they have can be put in.
    """

    def __init__(self, slots: Slots, max_snapshots: int, shelf: Shelf | None = None) -> None:
        self.slots, self.max_snapshots, self.shelf = slots, max_snapshots, shelf
        self._page_tokens = slots.layout.page_tokens
        # A root lives as long as something is kept below it or a sequence stands at it.
        self._roots: WeakValueDictionary[str, Node] = WeakValueDictionary()
        # A node is used together with its parents, they after it: the oldest one never has children.
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._snapshots: OrderedDict[Node, int] = OrderedDict()
        self._handles = count()
        self._saves: dict[int, tuple[int, int]] = {}  # handle -> slot, position: not yet in a plan
        self._drops: list[int] = []
        # What is to be written, to be put in, or counts as used; not yet in a plan.
        self._new_pages: list[Node] = []
        self._new_snapshots: dict[int, tuple[Node, int]] = {}  # handle -> node, position
        self._copies_in: list[CopyFields] = []
        self._used: dict[Node, bool] = {}  # whether its snapshot was
        slots.pool.reclaim = self._reclaim

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def has_copies(self) -> bool:
        """Whether a plan should carry something to the shelf."""
        return self.shelf is not None and bool(self._new_pages or self._new_snapshots)

    def take_saves(self) -> tuple[tuple[int, int, int], ...]:
        """(handle, slot, position) of the snapshots to make, since this was last asked."""
        saves = tuple((handle, slot, position) for handle, (slot, position) in self._saves.items())
        self._saves.clear()
        return saves

    def take_drops(self) -> tuple[int, ...]:
        """Handles of the snapshots that nobody can ask for any more, since this was last asked.

        Last of all: what claims have put in may be too many, and the oldest may be one they restore, whose
        save is in the same plan.
        """
        self._evict_snapshots()
        drops = tuple(self._drops)
        self._drops.clear()
        return drops

    def take_copies_out(self) -> tuple[CopyFields, ...]:
        """Pages and snapshots to copy to the shelf, since this was last asked."""
        pages, snapshots, used = self._new_pages, self._new_snapshots, self._used
        self._new_pages, self._new_snapshots, self._used = [], {}, {}
        if self.shelf is None:
            return ()
        now = time.time_ns()

        def when(node: Node) -> int:
            """A page is used with its parents, they after it: others never need the oldest file."""
            return now - 1000 * len(_line(node))

        copies: list[CopyFields] = []
        if pages:
            number = self.shelf.expect("page", [node.key for node in pages], [when(node) for node in pages])
            copies.append((number, tuple(node.page for node in pages), -1, 0))
        for handle, (node, position) in snapshots.items():
            copies.append((self.shelf.expect("snapshot", [node.key], [when(node)]), (), handle, position))
        for node, with_snapshot in used.items():
            line = _line(node)
            self.shelf.use(
                keys=[above.key for above in line],
                used_ns=[now - 1000 * depth for depth in range(1, len(line) + 1)],
                snapshot=node.key if with_snapshot else None,
            )
        return tuple(copies)

    def take_copies_in(self) -> tuple[CopyFields, ...]:
        """Pages and snapshots to put in from the shelf, since this was last asked."""
        copies = tuple(self._copies_in)
        self._copies_in.clear()
        return copies

    def known(self, owner: str, ids: Sequence[int]) -> tuple[int, int]:
        """How many pages of a prompt are here, and how many of them up to a snapshot."""
        path = self._path(owner, ids)
        return len(path), self._saved(path)

    def _saved(self, path: list[Node]) -> int:
        return max((depth for depth, node in enumerate(path, 1) if node in self._snapshots), default=0)

    def claim(
        self,
        sequence: int,
        owner: str,
        ids: Sequence[int],
        tokens: int,
        reuse: bool = True,
        found: Found | None = None,
    ) -> Hit | None:
        """A slot for `tokens` tokens that begin with `ids`, or None while the cache is full.

        At least one of `ids` is left to process, for the logits after it; without `reuse` all are. What was
        `found` in files is used where it reaches further than what is here, and follows it.
        """
        path = self._path(owner, ids) if reuse else []
        saved = self._saved(path)
        if found is not None and (not reuse or found.depth <= saved or found.first > len(path)):
            found = None
        saved = found.depth if found else saved
        slot = self.slots.claim(sequence, tokens, [node.page for node in path[:saved]])
        if slot is None:
            return None
        path = [node for node in path if not node.is_gone]  # the claim may have needed their pages
        if found is not None:
            path = self._put_in(found, slot, path, owner, ids)
        node = path[saved - 1] if saved else self._root(owner)
        if saved:
            self._snapshots.move_to_end(node)
            self._used[node] = True
        self._use(path[-1] if path else node)
        fork = len(path) * self._page_tokens if len(path) > saved else 0
        return Hit(slot, saved * self._page_tokens, node, fork, self._snapshots[node] if saved else None)

    def _put_in(
        self, found: Found, slot: int, path: list[Node], owner: str, ids: Sequence[int]
    ) -> list[Node]:
        """Enter what was found into the slot's own pages and the tree; -> all nodes of the prompt there."""
        assert self.shelf is not None
        begin, size = len(path), self._page_tokens
        for start in range(begin * size, found.depth * size, size):
            node = path[-1] if path else self._root(owner)
            path.append(self._enter(node, tuple(ids[start : start + size]), self.slots.page_at(slot, start)))
        pages = [node.page for node in path[begin : found.depth]]
        for at in range(0, len(pages), COPY_PAGES):
            rows = found.pages[begin - found.first + at :][:COPY_PAGES]
            self._copies_in.append((self.shelf.offer(rows), tuple(pages[at : at + COPY_PAGES]), -1, 0))
        handle = self._snapshots[path[found.depth - 1]] = next(self._handles)
        self._copies_in.append((self.shelf.offer(found.snapshot), (), handle, found.depth * size))
        return path

    def _root(self, owner: str) -> Node:
        return self._roots.setdefault(
            owner, Node(None, key=self.shelf.folder.root(owner) if self.shelf else b"")
        )

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

    def keep(
        self,
        slot: int,
        node: Node,
        ids: tuple[int, ...],
        end: int,
        position: int,
        saves: bool = True,
        is_marked: bool = False,
    ) -> Node:
        """Enter the page of `slot` that ends at `end` and holds `ids`, after those of `node`; -> its node.

        The slot has come to `position`, and a step launched ahead to one more. If that is too far past `end`
        and the state there `is_marked` in no other place, or without `saves`, the page is kept without a
        snapshot.
        """
        if not self.max_snapshots or node.is_gone:
            return node
        child = node.children.get(ids)
        if child is None:
            child = self._enter(node, ids, self.slots.page_at(slot, end - 1))
            self._new_pages.append(child)
        self._use(child)
        self._used.setdefault(child, False)
        if saves and child not in self._snapshots and (is_marked or position + 1 - end <= SPARE):
            handle = self._snapshots[child] = next(self._handles)
            self._saves[handle] = (self.slots.layout.num_slots if is_marked else slot, end)
            self._new_snapshots[handle] = (child, end)
            self._evict_snapshots()
        return child

    def is_saved(self, node: Node) -> bool:
        """Whether a prompt can go on after this node's page."""
        return node in self._snapshots

    def _enter(self, node: Node, ids: tuple[int, ...], page: int) -> Node:
        child = node.children[ids] = Node(node, ids, page, key=chain(node.key, ids) if self.shelf else b"")
        self.slots.pool.keep(page)
        self._nodes[child] = None
        return child

    def _evict_snapshots(self) -> None:
        while len(self._snapshots) > self.max_snapshots:
            oldest, handle = self._snapshots.popitem(last=False)
            self._drop(handle)
            self._prune(oldest)

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
        self._new_snapshots.pop(handle, None)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None and not node.children
        del node.parent.children[node.ids]
        del self._nodes[node]
        if node in self._snapshots:
            self._drop(self._snapshots.pop(node))
        node.is_gone = True
        self.slots.pool.drop(node.page)

    def _reclaim(self, count: int) -> None:
        """Free that many pages, of those that nobody else holds, the least recently used first.

        Last of all those above a page in use, whose owner has a copy of its own of them: what it has left
        below goes with them.
        """
        pool = self.slots.pool
        for is_last_resort in (False, True):
            for node in list(self._nodes):
                if count <= 0:
                    return
                if node.is_gone or not pool.is_idle(node.page) or (node.children and not is_last_resort):
                    continue
                below = [node]
                for parent in below:
                    below += parent.children.values()
                for each in reversed(below):
                    count -= pool.is_idle(each.page)
                    self._remove(each)

    def clear(self) -> None:
        """Forget everything; running sequences go on. Files stay: what they hold was there before."""
        for node in list(self._nodes):
            self._remove(node)
        self._new_pages.clear()
        self._used.clear()
        self._copies_in.clear()
        if self.shelf is not None:
            self.shelf.clear()


def _line(node: Node) -> list[Node]:
    """The pages from the root to this one."""
    line: list[Node] = []
    step: Node | None = node
    while step is not None and step.parent is not None:
        line.append(step)
        step = step.parent
    return line[::-1]
