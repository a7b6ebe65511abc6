"""Times the sampling kernel in a graph: microseconds per launch for 1, 8 and 32 rows of each kind.

python -m bench.sample
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dsv4.ops.sample.cpu import HISTORY, RESULT, pack, pack_penalties
from dsv4.ops.sample.decode import sample

VOCAB, REPEATS = 129280, 200
KINDS = {
    "greedy": {},
    "greedy, masked": {"has_mask": True},
    "greedy, logprobs": {"num_top": 20},
    "T 0.7": {"temperature": 0.7},
    "T 0.7, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "T 0.7, top-k 50": {"temperature": 0.7, "top_k": 50},
    "T 0.7, min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "T 0.7, top-p 0.95, top-k 50": {"temperature": 0.7, "top_p": 0.95, "top_k": 50},
    "T 0.7, top-p 0.95, top-k 50, logprobs": {"temperature": 0.7, "top_p": 0.95, "top_k": 50, "num_top": 20},
    "T 0.7, top-p 0.95, masked": {"temperature": 0.7, "top_p": 0.95, "has_mask": True},
}


def microseconds(kernel: Callable[..., None], *tensors: Tensor) -> float:
    kernel(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            kernel(*tensors)
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / REPEATS)
    return min(times)


def line(name: str, kernel: Callable[..., None], *tensors: Tensor) -> None:
    cells = [microseconds(kernel, *(tensor[:rows] for tensor in tensors)) for rows in (1, 8, 32)]
    print(f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |")


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, vocabulary {VOCAB}, {REPEATS} launches a graph, best of 5")
    generator = torch.Generator().manual_seed(0)
    mask = torch.randint(-(1 << 31), 1 << 31, (32, VOCAB // 32), generator=generator).int().cuda()
    positions, ids = torch.zeros(2, 32, dtype=torch.int64).cuda()
    out = torch.empty(32, RESULT, dtype=torch.int32).cuda()
    for spread in (1.0, 3.0):
        print(f"\n| us; logits: normal * {spread} | 1 row | 8 rows | 32 rows |\n|---|---|---|---|")
        logits = (torch.randn(32, VOCAB, generator=generator) * spread).cuda()
        for name, kind in KINDS.items():
            settings = torch.tensor([pack(**kind, seed=row) for row in range(32)]).cuda()  # type: ignore[arg-type]
            line(name, sample, logits, settings, mask, out, ids, positions)
        for context in (1000, 30000, 300000):
            row = pack_penalties(presence=0.5, repetition=1.1, num_prompt=context)
            penalties = torch.randint(VOCAB, (32, HISTORY + context + 5000), generator=generator).int()
            penalties[:, : len(row)] = torch.tensor(row)
            for name, temperature in (("greedy", 0.0), ("T 0.7", 0.7)):
                rows = [pack(temperature=temperature, seed=row, penalties=row) for row in range(32)]
                penalised = partial(sample, penalties=penalties.cuda())
                settings = torch.tensor(rows).cuda()
                name += f", penalties of {context} tokens"
                line(name, penalised, logits, settings, mask, out, ids, positions)


if __name__ == "__main__":
    main()
