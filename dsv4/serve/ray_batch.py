"""A batch over Ray Data: several engines, the same lines as from one. Needs the extra `ray`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any

import ray

from dsv4.errors import ConfigError
from dsv4.serve.batch import Answerer, Job, answering, in_order

# Rows of a block, as a multiple of the requests under way: at its end an engine has little to do.
_BLOCK = 16


class Engines:
    """One engine of the pool: blocks of lines in, their answers out."""

    def __init__(self, job: Job, parallel: int) -> None:
        self.job, self.parallel = job, parallel
        self._stack = AsyncExitStack()
        self._loading: asyncio.Task[Answerer] | None = None  # in the loop that Ray calls us in

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if self._loading is None:
            entered = self._stack.enter_async_context(answering(self.job, print, lambda done, total: None))
            self._loading = asyncio.ensure_future(entered)
        answerer = await asyncio.shield(self._loading)
        items = list(zip(map(int, batch["number"]), batch["line"], strict=True))
        made = in_order(items, answerer.answer, self.parallel)
        answers = [line async for line in made]
        yield {"number": [number for number, _ in items], "answer": answers}


def run_on_ray(
    job: Job,
    items: Iterable[tuple[int, bytes]],
    parallel: int,
    replicas: int,
    gpus_per_replica: float,
    take: Callable[[bytes], None],
) -> None:
    """Every line's answer to `take`, in order. Blocks come back in any order and wait here for their turn."""
    ray.init(ignore_reinit_error=True, log_to_driver=False, configure_logging=False)
    if (there := ray.cluster_resources().get("GPU", 0)) < gpus_per_replica:
        raise ConfigError(f"--gpus-per-replica is {gpus_per_replica:g}, the cluster has {there:g}")
    ray.data.DataContext.get_current().enable_progress_bars = False
    lines = list(items)
    if not lines:
        return
    size = min(_BLOCK * parallel, -(-len(lines) // replicas))
    rows = [{"number": number, "line": line} for number, line in lines]
    answered = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size)).map_batches(
        Engines,
        fn_constructor_args=(job, parallel),
        batch_size=size,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=replicas),
        num_gpus=gpus_per_replica,
        num_cpus=1,
    )
    following, early = lines[0][0], dict[int, bytes]()
    for row in answered.iter_rows():
        early[row["number"]] = row["answer"]
        while following in early:
            take(early.pop(following))
            following += 1
    if following != lines[-1][0] + 1:
        raise ConfigError(f"Ray gave no answer to line {following + 1}; the same command goes on")
