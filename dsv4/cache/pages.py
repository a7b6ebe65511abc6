"""Which page belongs to whom: a free list with reference counts. Knows page numbers, not their contents."""

from dsv4.errors import RequestError


class PagePool:
    """Hands out page numbers 0 .. num_pages-1. Several sequences may hold a page; it is free at none."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

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
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was released twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
