"""Who holds which slot and which pages. Host integers only: what the device must know goes into a plan."""

from collections.abc import Sequence

from dsv4.cache.layout import CacheLayout
from dsv4.cache.pages import PagePool
from dsv4.errors import RequestError


class Slots:
    """A running sequence has a slot (rows in every ring and tail) and pages, and takes pages as it grows.

    Changes wait in `claimed` and `freed` until the next plan carries them to the device.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.pool = PagePool(layout.num_pages)
        self._pages: list[list[int] | None] = [None] * layout.num_slots
        self._owner = [-1] * layout.num_slots
        self._claimed: dict[int, None] = {}  # slots, in order
        self._freed: list[int] = []

    @property
    def num_free(self) -> int:
        return sum(pages is None for pages in self._pages)

    def capacity(self, slot: int) -> int:
        """Tokens that the slot's pages can hold."""
        return len(self._held(slot)) * self.layout.page_tokens

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.layout.page_tokens)

    def page_at(self, slot: int, position: int) -> int:
        """The page that holds the entries of this position."""
        return self._held(slot)[position // self.layout.page_tokens]

    def claim(self, sequence: int, tokens: int, shared: Sequence[int] = ()) -> int | None:
        """A slot with pages for that many tokens, or None while the cache is full.

        The `shared` pages, which somebody holds, come first; who shares entries also restores a snapshot.
        """
        self._check_fits(tokens)
        if None not in self._pages:
            return None
        # Held before room is made, which could otherwise give up the very pages that are to be shared.
        first = list(shared)
        self.pool.share(first)
        need = self.pages_for(tokens) - len(first)
        if not self.pool.make_room(need):
            self.pool.release(first)
            return None
        slot = self._pages.index(None)
        self._pages[slot], self._owner[slot] = first + self.pool.take(need), sequence
        self._claimed[slot] = None
        return slot

    def grow(self, slot: int, tokens: int) -> bool:
        """Give `slot` pages for that many tokens in all; False while the cache is full."""
        self._check_fits(tokens)
        pages = self._held(slot)
        need = self.pages_for(tokens) - len(pages)
        if need <= 0:
            return True
        if not self.pool.make_room(need):
            return False
        pages += self.pool.take(need)
        self._claimed[slot] = None
        return True

    def release(self, slot: int) -> None:
        pages = self._held(slot)
        self._pages[slot], self._owner[slot] = None, -1
        self._claimed.pop(slot, None)
        self._freed.append(slot)
        self.pool.release(pages)

    def take_claims(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """(slot, sequence, pages) of every slot whose pages changed since this was last asked."""
        changed = tuple((slot, self._owner[slot], tuple(self._held(slot))) for slot in self._claimed)
        self._claimed.clear()
        return changed

    def take_freed(self) -> tuple[int, ...]:
        """Slots released since this was last asked, in order; some may be claimed again by now."""
        freed = tuple(dict.fromkeys(self._freed))
        self._freed.clear()
        return freed

    def _held(self, slot: int) -> list[int]:
        pages = self._pages[slot]
        assert pages is not None, f"slot {slot} is not in use"
        return pages

    def _check_fits(self, tokens: int) -> None:
        if self.pages_for(tokens) > self.layout.pages_per_sequence:
            raise RequestError(
                f"{tokens} tokens do not fit a cache made for {self.layout.max_context} per sequence; "
                "shorten the request or raise max_context"
            )
