"""Which page belongs to whom: a free list with reference counts. Knows page numbers, not their contents."""

from collections.abc import Callable

from dsv4.errors import RequestError


class PagePool:
    """Hands out page numbers 0 .. num_pages-1. Several sequences may hold a page; it is free at none.

    A page may also be kept for its contents. One that is kept and not held otherwise is idle: `reclaim` is
    asked to drop some of those when free ones run out.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_idle = 0
        self.reclaim: Callable[[int], None] | None = None
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._kept = [False] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """What sequences can get: free pages and idle ones."""
        return len(self._free) + self.num_idle

    def make_room(self, count: int) -> bool:
        """Whether so many pages are free, idle ones given up for it; if there are too few, all stay."""
        if count <= len(self._free):
            return True
        if self.reclaim is None or count > self.num_available:
            return False
        self.reclaim(count - len(self._free))
        return count <= len(self._free)

    def take(self, count: int) -> list[int]:
        assert count >= 0
        if count > len(self._free):
            raise RequestError(
                f"{count} cache pages are needed and {len(self._free)} of {self.num_pages} are free; "
                "wait for a sequence to end"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self.num_idle -= self.is_idle(page)
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._holders[page] -= 1
            self.num_idle += self.is_idle(page)
            if self._holders[page] == 0:
                assert not self._kept[page], f"page {page} is kept and was released by all"
                self._free.append(page)

    def is_idle(self, page: int) -> bool:
        return self._kept[page] and self._holders[page] == 1

    def keep(self, page: int) -> None:
        """One more holder, for the page's contents; at most one keeps a page."""
        assert not self._kept[page], f"page {page} is kept already"
        self.share([page])
        self._kept[page] = True

    def drop(self, page: int) -> None:
        """The end of `keep`."""
        assert self._kept[page], f"page {page} is not kept"
        self.num_idle -= self.is_idle(page)
        self._kept[page] = False
        self.release([page])
