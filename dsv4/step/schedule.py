"""How the products of a step overlap with what runs before and after them, by the launch's name.

No row changes a bit of any result. Smaller kernels have no row: their `@launcher` says when they trigger
(`mhc open` of the tokens late), and "experts up" always triggers late (linear/decode.py), since "experts
down" reads its tasks early. Figures: one H200, Flash's geometry, NVFP4, 4k, a single row, November 2026;
docs/log.md, "Products of a single row" and "What did not help", has the runs.
"""

from dataclasses import dataclass

from dsv4.ops.linear.decode import STAGES


@dataclass(frozen=True)
class Overlap:
    """`early_stages`: chunks of weights that a warp fetches before its PDL wait. `paced`: all of them, but a
    few at a time. `spread`: one block a multiprocessor, with twice the chunks. `beside`: one block that fits
    beside a spread launch's. `triggers_late`: the next launch starts only after this one's wait. `mixes`:
    Sinkhorn's rounds run in a block of their own. `prefetches`: the next site's fn is brought to L2.
    """

    early_stages: int = STAGES
    paced: bool = False
    spread: bool = False
    beside: bool = False
    triggers_late: bool = False
    mixes: bool = False
    prefetches: bool = False


SCHEDULE = {
    # Small kernels precede it, whose reads a burst of 17 MB would delay: 4.41 -> 4.25 ms a step with the
    # other paced products and the late fetches of "output b" and "experts down".
    "projections": Overlap(paced=True),
    # Late, since index scores and attention read before they wait what "prepare" wrote. The rounds take
    # longer than any small kernel: 4.73 -> 4.48 ms with those beside "experts up" and its early input.
    "queries up": Overlap(paced=True, triggers_late=True, mixes=True),
    # Where wo_b's weights fit beside it (ranks of two and more): the pair takes 2.55 us a layer less there.
    "output a, beside": Overlap(paced=True, spread=True),
    "output b, beside": Overlap(paced=True, beside=True, prefetches=True),
    "output a": Overlap(paced=True),
    # Its blocks start when its input is about to be there: weights fetched first would queue before it.
    "output b": Overlap(early_stages=0, prefetches=True),
    # Late, since "experts up" reads its input early. Spread: 0.9 us a layer less.
    "gate, shared up": Overlap(paced=True, spread=True, triggers_late=True),
    "experts up": Overlap(mixes=True),
    # Half of the weights before the input, as for "output b".
    "experts down": Overlap(early_stages=1, prefetches=True),
    "head": Overlap(),
    # A drafter's: of the taps, and of all its stages' context. Not measured.
    "taps": Overlap(),
    "context": Overlap(),
}
