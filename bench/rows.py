"""Steps of a few rows: what each number of rows takes, of several sequences and of one whose drafts are
verified, alone in a step of their size and padded to a larger one.

    python -m bench.rows flash --experts 192 --layout nvfp4 --rows 1 2 3 4 5 6 7 8 --graphs 8 --profile

Prints milliseconds (median) and distinct experts of a layer.
"""

import argparse
from dataclasses import dataclass, replace

import torch

from dsv4.lab.bench.ceiling import gpu
from dsv4.lab.bench.decode import Session, Wanted, release
from dsv4.lab.bench.profile import profile
from dsv4.lab.bench.subject import choose
from dsv4.step.buffers import ROWS


@dataclass(frozen=True)
class Sized(Wanted):
    """`graph`: rows of the step, at least the batch."""

    graph: int = 1

    @property
    def rows(self) -> int:
        return self.graph


def one_sequence(session: Session, rows: int) -> None:
    """All rows in use are tokens of the first slot, one after the other."""
    f = session.decoder.buffers
    start = session.wanted.start(session.config)
    f.slots.zero_()
    f.positions[:rows] = torch.arange(start, start + rows, device=f.positions.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=("flash", "pro", "tiny"))
    parser.add_argument("--experts", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--activations", default="a16")
    parser.add_argument("--rows", type=int, nargs="+", default=[*range(1, 9)])
    parser.add_argument("--graphs", type=int, nargs="*", default=[], help="also padded to these")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--profile", action="store_true", help="microseconds of each launch, by rows")
    args = parser.parse_args()
    subject = choose(None, args.name, args.experts, args.layers, args.layout, None)
    subject, device = replace(subject, activations=args.activations), gpu()
    with torch.inference_mode():
        bundle = subject.bundle(device)
        print(f"{'rows':>4} {'of':>3} {'sequences':>10} {'one':>8} {'experts':>8}", flush=True)
        shares: dict[int, dict[str, float]] = {}
        for rows in args.rows:
            for graph in [rows, *(g for g in args.graphs if g > rows)]:
                release()
                wanted = Sized(args.context, min(rows, ROWS[-1]), args.steps, graph=graph)
                session = Session(bundle, wanted, device)
                timing = session.time()
                if args.profile and graph == rows:
                    found = profile(session)
                    shares[rows] = {k: v.busy_us + v.gap_us for k, v in found.launches.items()}
                session.place()
                one_sequence(session, rows)
                times = sorted(session.times(args.steps))
                distinct = sum(timing.distinct) / len(timing.distinct)
                print(
                    f"{rows:4} {graph:3} {timing.median:10.3f} {times[len(times) // 2]:8.3f} {distinct:8.1f}",
                    flush=True,
                )
                del session
    names = {name: None for share in shares.values() for name in share}
    for name in names:
        print(f"{name:20}", *(f"{share.get(name, 0.0):8.1f}" for share in shares.values()), flush=True)


if __name__ == "__main__":
    main()
