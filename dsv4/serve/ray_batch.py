"""A batch over Ray Data: several engines, the same lines as from one. Needs the extra `ray`."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, redirect_stdout
from typing import Any

import ray

from dsv4.errors import ConfigError
from dsv4.serve.batch import Answerer, Job, answering

# Lines of a block, which goes to one engine, as a multiple of the requests under way. An engine has two at
# once, so that it is busy at the end of one; a block's answers wait until those before it are written.
_BLOCK, _AT_ONCE = 4, 2


class Engines:
    """One engine of the pool: lines that follow each other in, their answers out, with the first number."""

    def __init__(self, job: Job, parallel: int) -> None:
        self.job, self.parallel = job, parallel
        self._stack = AsyncExitStack()
        self._loading: asyncio.Task[Answerer] | None = None  # in the loop that Ray calls us in
        self._running = asyncio.Semaphore(parallel)  # for all that Ray calls us with at once

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if self._loading is None:
            entered = self._stack.enter_async_context(answering(self.job, print, lambda done, total: None))
            self._loading = asyncio.ensure_future(entered)
        answerer = await asyncio.shield(self._loading)

        async def answer(number: int, line: bytes) -> bytes:
            async with self._running:
                return await answerer.answer(number, line)

        items = list(zip(map(int, batch["number"]), batch["line"], strict=True))
        answers = await asyncio.gather(*(answer(*item) for item in items))
        yield {"number": [items[0][0]], "answers": [b"".join(answers)]}


def run_on_ray(
    job: Job,
    items: Iterable[tuple[int, bytes]],
    parallel: int,
    replicas: int,
    gpus_per_replica: float,
    take: Callable[[bytes], None],
) -> None:
    """Every line's answer to `take`, in order. They come back in any order and wait here for their turn."""
    if not (lines := list(items)):
        return
    with redirect_stdout(sys.stderr):  # where the result goes Ray's threads say what dies, until they end
        ray.init(ignore_reinit_error=True, log_to_driver=False, configure_logging=False)
        try:
            if (there := ray.cluster_resources().get("GPU", 0)) < gpus_per_replica:
                raise ConfigError(f"--gpus-per-replica is {gpus_per_replica:g}, the cluster has {there:g}")
            _answer(
                job=job,
                lines=lines,
                parallel=parallel,
                replicas=replicas,
                gpus_per_replica=gpus_per_replica,
                take=take,
            )
        finally:
            ray.shutdown()


def _answer(
    job: Job,
    lines: list[tuple[int, bytes]],
    parallel: int,
    replicas: int,
    gpus_per_replica: float,
    take: Callable[[bytes], None],
) -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # Answers are sent as they are made: those that only an engine knows are lost when the batch is killed.
    context.target_max_block_size = 1
    size = min(_BLOCK * parallel, -(-len(lines) // replicas))
    rows = [{"number": number, "line": line} for number, line in lines]
    answered = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size)).map_batches(
        Engines,
        fn_constructor_args=(job, parallel),
        batch_size=max(1, parallel // 4),
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=replicas, max_concurrent_calls_per_actor=_AT_ONCE),
        num_gpus=gpus_per_replica,
        num_cpus=1,
    )
    following, early = lines[0][0], dict[int, bytes]()
    for row in answered.iter_rows():
        early[row["number"]] = row["answers"]
        while following in early:
            for line in early.pop(following).splitlines(keepends=True):
                take(line)
                following += 1
    if following != lines[-1][0] + 1:
        raise ConfigError(f"Ray gave no answer to line {following + 1}; the same command goes on")
