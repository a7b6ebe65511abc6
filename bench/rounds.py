"""Rounds of speculation on random weights: what one takes, and tokens per second at a given acceptance.

    python -m bench.rounds flash --experts 176 --layout nvfp4 --case 3:2 --case 5:2,3,3,2,3 --case 5:0

DSpark's stages are there, and their drafts are made; random weights are never right, so after each round
the drafts are replaced by the tokens that plain decoding gave, as many as the case says
(`drafts:accepted,...`, one number a round, in turns), and wrong ones. The tokens of every case are held
against plain decoding's.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dsv4.cache.layout import CacheLayout
from dsv4.cache.store import Cache
from dsv4.config import Dspark, ModelConfig
from dsv4.gpu.tiles import rough_copy
from dsv4.lab.bench.ceiling import gpu, timed
from dsv4.lab.bench.decode import DTYPE, fill, release
from dsv4.lab.bench.subject import synthetic
from dsv4.lab.synthetic import make_weights
from dsv4.model.bundle import Bundle, Numerics
from dsv4.model.model import Model
from dsv4.ops import IMPLEMENTATIONS, Ops
from dsv4.ops.draft.round import COUNT, DRAFTS, MOST, POSITION, ROOM, SETTINGS, SLOT, state_of
from dsv4.ops.sample.cpu import pack
from dsv4.quant.formats import Format
from dsv4.step.round import PARTS, Round
from dsv4.step.run import Decoder

STAGES, TOKENS, PAGE, WARM = 3, 256, 256, 8


@dataclass(frozen=True)
class Case:
    drafts: int
    accepted: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "Case":
        drafts, _, accepted = text.partition(":")
        found = cls(int(drafts), tuple(map(int, accepted.split(","))))
        if max(found.accepted) > found.drafts:
            raise SystemExit(f"{text}: no round accepts more than its {drafts} drafts")
        return found


class Bench:
    def __init__(self, config: ModelConfig, layout: str, activations: str, context: int) -> None:
        device = gpu()
        ops = Ops.choose("cuda", **dict.fromkeys(IMPLEMENTATIONS, "gpu"))
        weights = make_weights(config, layout, str(device), draft_blocks=STAGES)
        self.bundle = Bundle(config, weights, ops, Numerics(DTYPE, activations, True))  # type: ignore[arg-type]
        most = -(-(context + TOKENS + 16) // PAGE) * PAGE
        self.cache = Cache(CacheLayout(config, Format.KV8, Format.MXFP4, 2, most, 1, STAGES), device, DTYPE)
        self.model, self.start, self.device = Model(self.bundle, most, device), context, device
        self.truth, self.head = self._plain(), rough_copy(self.bundle.tiled("head"))

    def _plain(self) -> Tensor:
        """Tokens that follow token 7 at `start`, one step each."""
        decoder = Decoder(self.bundle, self.model, self.cache, 1)
        decoder.run()
        torch.cuda.synchronize()
        decoder.capture()
        f, found = decoder.buffers, torch.empty(TOKENS, dtype=torch.long, device=self.device)

        def place() -> None:
            fill(self.cache)
            f.ids.fill_(7)
            f.positions.fill_(self.start)
            f.slots.zero_()
            f.settings.copy_(torch.tensor([pack()]))

        place()
        for i in range(TOKENS):
            decoder.step()
            found[i].copy_(f.ids[0])
        place()
        times = sorted(timed(decoder.step, 128, warm=WARM))
        print(f"plain decoding: {times[64]:.3f} ms a token, {1e3 / times[64]:.1f} tokens/s", flush=True)
        return found

    def round(self, drafts: int) -> Round:
        state = state_of(1, 5, self.device)
        costs = torch.ones(drafts + 1, device=self.device)
        made = Round(self.bundle, self.model, self.cache, 1, drafts, state, costs, head=self.head)
        seat = torch.zeros(made.seats.shape[1], dtype=torch.long)
        seat[SLOT], seat[ROOM], seat[MOST] = 0, self.start + TOKENS, 5
        seat[SETTINGS:] = torch.tensor(pack())
        made.run()  # no seat in use
        torch.cuda.synchronize()
        made.capture()
        made.seats.copy_(seat.unsqueeze(0))
        return made

    def run(self, case: Case) -> None:
        made = self.round(case.drafts)
        table, lengths = self._table(case)
        chosen = torch.empty(1, DRAFTS + 5, dtype=torch.long, device=self.device)

        def place() -> None:
            fill(self.cache)
            made.state.zero_()
            made.state[0, 0], made.state[0, POSITION] = 7, self.start
            inject()

        def inject() -> None:
            """The drafts that the case wants after this position."""
            torch.index_select(table, 0, made.state[0, POSITION : POSITION + 1] - self.start, out=chosen)
            made.state[:, COUNT:].copy_(chosen[:, COUNT:])

        place()
        tokens: list[int] = []
        for length in lengths:
            made.step()
            out, (taken, _) = made.decoder.buffers.out[:, 0].tolist(), made.taken[0].tolist()
            assert taken == length, f"{taken} tokens came out, expected {length}, after {len(tokens)}"
            tokens += out[:taken]
            inject()
        assert tokens == self.truth[: len(tokens)].tolist(), "not the tokens of plain decoding"
        place()

        def step() -> None:
            made.step()
            inject()

        num = len(lengths) - 2 * WARM
        time = sum(timed(step, num, warm=WARM)) / num
        mean = sum(lengths[WARM : WARM + num]) / num
        parts = {}
        for part in (PARTS[:1], PARTS[1:]):  # at one place: rows are used or not as they were
            place()
            times = sorted(timed(partial(made.step, part), 48, warm=WARM))
            parts[part] = times[24]
        print(
            f"{case.drafts} drafts, {mean:.2f} tokens a round: {time:.3f} ms, {mean * 1e3 / time:.1f} "
            f"tokens/s (verify {parts[PARTS[:1]]:.3f} ms, the rest {parts[PARTS[1:]]:.3f})",
            flush=True,
        )

    def _table(self, case: Case) -> tuple[Tensor, list[int]]:
        """By position from the start on: the state's columns with the drafts to come; each round's tokens."""
        table = torch.zeros(TOKENS, DRAFTS + 5, dtype=torch.long)
        truth, at, lengths = self.truth.tolist(), 0, []
        while at + 8 < TOKENS:
            right = case.accepted[len(lengths) % len(case.accepted)]
            wrong = [(truth[at + i] + (i >= right)) % 1000 for i in range(5)]
            right_ids = [truth[at + i] for i in range(right)]
            table[at, COUNT] = case.drafts
            table[at, DRAFTS:] = torch.tensor((right_ids + wrong[right:])[:5])
            lengths.append(right + 1)
            at += right + 1
        return table.to(self.device), lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=("flash", "pro"))
    parser.add_argument("--experts", type=int, default=176)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--layout", default="nvfp4")
    parser.add_argument("--activations", default="a16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--case", type=Case.of, action="append", required=True)
    args = parser.parse_args()
    config = synthetic(args.name, args.experts, args.layers, args.layout).config
    last = config.num_layers
    dspark = Dspark(5, 128799, (last - 3, last - 2, last - 1), 256 if args.name == "flash" else 512)
    config = replace(config, dspark=dspark, num_mtp_layers=STAGES)
    with torch.inference_mode():
        bench = Bench(config, args.layout, args.activations, args.context)
        for case in args.case:
            release()
            bench.run(case)


if __name__ == "__main__":
    main()
