"""What launches find out about weights: damage, and which types hold them. Looked at a batch later."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsv4.errors import CheckpointError
from dsv4.gpu.tiles import Fits
from dsv4.quant.codec import F32_MAX, bad_scales
from dsv4.quant.formats import Format
from dsv4.weights.detect import Source
from dsv4.weights.load import Checkpoint, check_stored
from dsv4.weights.reader import AGAIN
from dsv4.weights.stack import Stack

# A bank's half or a linear.
Place = tuple[str, str]
Look = Callable[[list[bool]], None]
# Batches whose findings a GPU may not have made yet.
_BEHIND = 1


class Findings:
    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._is_cuda = checkpoint, device.type == "cuda"
        self._open: list[tuple[Tensor, Look]] = []
        self._ended: deque[tuple[Tensor, list[tuple[int, Look]], torch.cuda.Event | None]] = deque()
        self._fits: dict[Place, Fits] = {}

    def check(self, stack: Stack, sources: Sequence[Source]) -> None:
        """Scales that are no finite numbers, NaN codes, values that are not finite."""
        count, bad = len(stack), ~(stack.factor.abs() <= F32_MAX)
        if stack.scale is not None and stack.format is not None:
            bad = bad | _any(bad_scales(stack.scale, stack.format), count)
        if stack.format is Format.FP8:
            bad = bad | _any((stack.data & 127) == 127, count)
        elif stack.format is None or stack.format.is_plain:
            bad = bad | ~torch.isfinite(torch.stack(torch.aminmax(stack.data.view(count, -1), dim=1))).all(0)
        self.expect(~bad, sources)

    def checked_plain(self, stored: Tensor, source: Source) -> Tensor:
        """A table of experts, or float32 values; a copy."""
        if source.param.kind != "table":
            plain = stored.reshape(source.param.shape).to(torch.float32, copy=True)
            if plain.numel():
                self.expect(torch.isfinite(torch.stack(torch.aminmax(plain))).all().view(1), [source])
            return plain
        table = stored.reshape(source.param.shape).to(torch.long, copy=True)
        if table.numel():
            low, high = torch.aminmax(table)
            self.expect(((low >= 0) & (high < self._checkpoint.config.num_experts)).view(1), [source])
        return table

    def expect(self, is_right: Tensor, sources: Sequence[Source]) -> None:
        """[sources] bool: a source that is not is examined on the host, which says what is wrong where."""

        def look(found: list[bool]) -> None:
            for source, right in zip(sources, found, strict=True):
                if not right:
                    check_stored(self._checkpoint, source)
                    raise CheckpointError(
                        f"{source.weight.name} in {source.weight.file.name} was read wrongly once and right "
                        f"the second time; check the disk and the memory of this machine, or {AGAIN}"
                    )

        self._open.append((is_right, look))

    def add_fits(self, place: Place, fits: Tensor) -> None:
        """[2] bool, as put_stack returns them."""

        def note(found: list[bool]) -> None:
            before = self._fits.get(place, Fits())
            self._fits[place] = Fits(before.bf16 and found[0], before.fp8 and found[1])

        self._open.append((fits, note))

    def end_batch(self) -> None:
        if self._open:
            flags, then = torch.cat([flags for flags, _ in self._open]), self._open
            self._open, event = [], None
            if self._is_cuda:
                host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
                host.copy_(flags, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                flags = host
            self._ended.append((flags, [(len(f), look) for f, look in then], event))
        self._look(_BEHIND if self._is_cuda else 0)

    def finish(self) -> dict[Place, Fits]:
        self._look(0)
        return self._fits

    def _look(self, behind: int) -> None:
        while len(self._ended) > behind:
            flags, looks, event = self._ended.popleft()
            if event is not None:
                event.synchronize()
            found = iter(flags.tolist())
            for count, look in looks:
                look([next(found) for _ in range(count)])


def _any(bad: Tensor, count: int) -> Tensor:
    return bad.view(count, -1).any(1)
