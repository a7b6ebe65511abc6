"""Start: what each launch of a decode step touches, and when; proves that PDL is safe.

Knows buffers by name only: neither kernels nor a GPU.

With programmatic dependent launch (PDL) a kernel starts when every block of the launch before it has executed
launch_dependents or has exited. Its griddepcontrol.wait returns when that launch is complete and its writes
are visible. Of every launch at least one block waits, and it is complete when all its blocks have exited:
so complete means it and all before it. A block that has nothing to do may leave without a wait. Hence the
rules of `check`:

- Reads after the wait, and writes (none comes before the wait), are ordered as in a serial step.
- When a launch starts, all before the last one that triggered late (executed launch_dependents only after its
  own wait) are complete. Of that one and those after it nothing is known, however many they are.
- So a buffer may be read early, before the wait, if its last writer is among the complete ones. A prefetch to
  L2 may come at any time: it returns no value, and L2 is coherent.

A launch that writes a buffer cannot overtake one that still reads it: it writes after its wait, when all
before it are complete. A later one that has started already is checked as an early reader.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, ParamSpec

from torch import Tensor

from dsv4.gpu.meaning import Claim

P = ParamSpec("P")


@dataclass(frozen=True)
class Launch:
    """One launch of a step, over named buffers."""

    name: str
    run: Callable[[], None]
    layer: str = ""
    claims: Callable[[], list[Claim]] | None = None  # what it computes, in torch
    reads: tuple[str, ...] = ()  # after the wait
    reads_early: tuple[str, ...] = ()  # before it
    writes: tuple[str, ...] = ()  # after it
    prefetches: tuple[str, ...] = ()
    triggers_late: bool = False  # launch_dependents comes after the wait
    waits: bool = True


@dataclass(frozen=True)
class Touches:
    """The tensors of one launch, as its Launch names them."""

    reads: tuple[Tensor, ...] = ()
    reads_early: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()
    prefetches: tuple[Tensor, ...] = ()
    triggers_late: bool = False


@dataclass(frozen=True)
class Launcher(Generic[P]):
    """A function that launches one kernel, and what that kernel does with its parameters.

    A parameter that holds several tensors is named whole, or by field: `entries.tail_values`.
    """

    function: Callable[P, None]
    reads: tuple[str, ...]
    reads_early: tuple[str, ...]
    writes: tuple[str, ...]
    triggers_late: bool
    means: Callable[..., list[Claim]] | None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        self.function(*args, **kwargs)

    def touches(self, arguments: Mapping[str, Any]) -> Touches:
        def found(paths: Iterable[str]) -> tuple[Tensor, ...]:
            return tuple(tensor for path in paths for tensor in tensors_of(_at(arguments, path)))

        return Touches(
            reads=found(self.reads),
            reads_early=found(self.reads_early),
            writes=found(self.writes),
            triggers_late=self.triggers_late,
        )


def launcher(
    reads: Sequence[str] = (),
    reads_early: Sequence[str] = (),
    writes: Sequence[str] = (),
    triggers_late: bool = False,
    means: Callable[..., list[Claim]] | None = None,
) -> Callable[[Callable[P, None]], Launcher[P]]:
    """Declares the parameters of a function that launches one kernel, and what that kernel computes."""

    def declare(function: Callable[P, None]) -> Launcher[P]:
        known = inspect.signature(function).parameters
        for path in (*reads, *reads_early, *writes):
            assert path.split(".")[0] in known, f"{function.__name__} has no parameter {path}"
        return Launcher(
            function=function,
            reads=tuple(reads),
            reads_early=tuple(reads_early),
            writes=tuple(writes),
            triggers_late=triggers_late,
            means=means,
        )

    return declare


def _at(arguments: Mapping[str, Any], path: str) -> Any:
    name, *rest = path.split(".")
    value = arguments.get(name)
    for field in rest:
        value = None if value is None else getattr(value, field)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """A tensor, or those of a dataclass, a list or a tuple; of None and numbers none."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for field in fields(value) for tensor in tensors_of(getattr(value, field.name))]
    return []


class Names:
    """Names of buffers. Tensors that share memory share a name: what one writes the other sees."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []  # so that no memory is freed and named anew

    def add(self, name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._names.setdefault(_memory(tensor), name)
            self._held.append(tensor)

    def of(self, tensors: Iterable[Tensor], otherwise: str) -> tuple[str, ...]:
        """Unnamed ones, such as weights, are named after the launch that touches them first."""
        found: dict[str, None] = {}
        for tensor in tensors:
            if _memory(tensor) not in self._names:
                self.add(f"{otherwise} #{len(self._held)}", tensor)
            found[self._names[_memory(tensor)]] = None
        return tuple(found)

    def launch(
        self,
        name: str,
        run: Callable[[], None],
        touches: Touches,
        layer: str = "",
        claims: Callable[[], list[Claim]] | None = None,
    ) -> Launch:
        return Launch(
            name=name,
            run=run,
            layer=layer,
            claims=claims,
            reads=self.of(touches.reads, name),
            reads_early=self.of(touches.reads_early, name),
            writes=self.of(touches.writes, name),
            prefetches=self.of(touches.prefetches, name),
            triggers_late=touches.triggers_late,
        )

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._names.values()))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def check(launches: Sequence[Launch], between: Collection[str] = ()) -> None:
    """Step after step of these launches, each read early finds its buffer written.

    `between`: buffers that may be written between two steps, by work that knows no PDL.
    """
    before = Launch(name="what came before the step", run=lambda: None, writes=tuple(between))
    order = (before, *launches)
    last_writer: dict[str, int] = {}
    complete = -1  # the last launch that is complete when the current one starts
    # Twice: the second time what the step before left unfinished is known.
    for i in range(2 * len(order)):
        launch = order[i % len(order)]
        assert launch.waits, f"{launch.name} never waits, so nothing before it is complete after it"
        if i and order[(i - 1) % len(order)].triggers_late:
            complete = i - 2
        for buffer in launch.reads_early:
            writer = last_writer.get(buffer, -1)
            number, by = i % len(order), writer % len(order)
            assert writer <= complete, (
                f"{launch.name} (launch {number}) reads {buffer} before its PDL wait, but {order[by].name} "
                f"(launch {by}) may still be writing it; read it after the wait, or let a launch between the "
                "two trigger late"
            )
        last_writer.update(dict.fromkeys(launch.writes, i))
