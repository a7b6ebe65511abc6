"""Runs the specification (dsv4/spec) on any checkpoint: `python -m dsv4.spec`. Slow, on a CPU, exact.

The tensors are those of `dsv4 score --ids`. With --drafts, MTP's logits follow, or DSpark's drafts at the
`anchors` that the file of ids names; `forced_ids` there are taken as drafts.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dsv4.errors import Dsv4Error, RequestError
from dsv4.lab.score import read_ids, write_logits
from dsv4.quant.codec import decode
from dsv4.quant.formats import Format
from dsv4.spec.drafts import dspark, dspark_taps, mtp, mtp_steps
from dsv4.spec.model import Model
from dsv4.spec.rounding import MODES, Rounding
from dsv4.weights.load import Checkpoint
from dsv4.weights.reader import Reader


class Stored(Mapping[str, Tensor]):
    """The float values of a checkpoint by official name, read and decoded at each use: nothing is kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.sources = {source.param.name: source for source in checkpoint.inventory.sources}

    def __getitem__(self, name: str) -> Tensor:
        source, reader = self.sources[name], self.checkpoint.reader
        if source.param.kind in ("table", "plain"):
            plain = source.read_plain(reader)
            return plain.long() if source.param.kind == "table" else plain.float()
        values = decode(source.read_rows(reader, 0, source.param.shape[0]))
        # The official conversion makes BF16 of what is stored in FP8.
        is_rounded = source.param.kind == "grouped" and source.format is Format.FP8
        return values.bfloat16().float() if is_rounded else values

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def open_model(checkpoint: Checkpoint, rounding: Rounding) -> Model:
    """The specification over a checkpoint whose reader is open."""
    stored = Stored(checkpoint)
    quantised = {name for name, source in stored.sources.items() if source.is_quantised}
    return Model(checkpoint.config, stored, rounding, quantised)


@torch.inference_mode()
def reference_logits(
    model: Model,
    ids: Tensor,
    prompt_len: int | None = None,
    drafts: bool = False,
    anchors: Tensor | None = None,
    forced: Tensor | None = None,
) -> dict[str, Tensor]:
    """prefill_logits [N, V], decode_logits [T-N, V] and, with `drafts`, those of the draft head.

    MTP: mtp_logits [N, V] and, at `anchors` [A], mtp_step_logits [A, 1 + S, V]. DSpark, at `anchors`:
    main_hidden, draft_base, draft_logits, draft_ids, confidence, and forced_logits and forced_confidence.
    """
    n = len(ids) if prompt_len is None else prompt_len
    low, high = int(ids.min()), int(ids.max())
    if not 1 <= n <= len(ids) or low < 0 or high >= model.config.vocab_size:
        raise RequestError(
            f"prompt-len is {n} of {len(ids)} ids from {low} to {high}; expected 1 to {len(ids)}, and ids "
            f"from 0 to {model.config.vocab_size - 1}"
        )
    streams = model.streams(ids)[-1]
    logits = model.head(streams)
    out = {"prefill_logits": logits[:n], "decode_logits": logits[n:]}
    if not drafts:
        return out
    at = [] if anchors is None else anchors.tolist()
    if bad := [p for p in at if not 0 <= p < len(ids) - 1]:
        raise RequestError(f"anchor {bad[0]} has no token after it; expected 0 to {len(ids) - 2}")
    given = [None] * len(at) if forced is None else forced.tolist()
    if "mtp.0.main_proj" in model.tensors:
        return out | _dspark(model, ids, at, given)
    if "mtp.0.e_proj" not in model.tensors:
        raise RequestError("the checkpoint has no whole draft head (mtp.*); leave --drafts out")
    n = min(n, len(ids) - 1)
    out["mtp_logits"] = mtp(model, streams[:n], ids[1 : n + 1])[1]
    steps = [
        mtp_steps(model, streams[: p + 1], ids[1 : p + 2], then or ())
        for p, then in zip(at, given, strict=True)
    ]
    return out | ({"mtp_step_logits": torch.stack(steps)} if steps else {})


def _dspark(
    model: Model, ids: Tensor, anchors: list[int], forced: list[list[int] | None]
) -> dict[str, Tensor]:
    if not anchors:
        raise RequestError("DSpark drafts after given positions; add a tensor `anchors` to the file of ids")
    taps = dspark_taps(model, ids)
    out: dict[str, list[Tensor]] = {}

    def add(names: tuple[str, ...], p: int, given: list[int] | None) -> None:
        for name, value in zip(names, dspark(model, taps[: p + 1], int(ids[p + 1]), given), strict=True):
            out.setdefault(name, []).append(value)

    for p, given in zip(anchors, forced, strict=True):
        add(("draft_base", "draft_logits", "draft_ids", "confidence"), p, None)
        if given is not None:
            add(("", "forced_logits", "", "forced_confidence"), p, given)
    return {"main_hidden": taps[anchors]} | {name: torch.stack(rows) for name, rows in out.items() if name}


def main() -> None:
    parser = argparse.ArgumentParser("python -m dsv4.spec", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("--ids", type=Path, required=True, help="safetensors file with a tensor `ids` [T]")
    parser.add_argument("--logits", type=Path, required=True, help="safetensors file to write the logits to")
    parser.add_argument("--rounding", choices=list(MODES), default="a16", help="which values are rounded")
    parser.add_argument("--prompt-len", type=int, help="how many ids are the prompt (default: all)")
    parser.add_argument("--drafts", action="store_true", help="also run the draft head")
    args = parser.parse_args()
    try:
        ids = torch.tensor(read_ids(args.ids))
        with Reader(args.ids) as reader:
            given = [reader.read(n) if n in reader.entries else None for n in ("anchors", "forced_ids")]
        checkpoint = Checkpoint.open(args.model)
        with checkpoint.reader:
            model = open_model(checkpoint, MODES[args.rounding])
            write_logits(args.logits, reference_logits(model, ids, args.prompt_len, args.drafts, *given))
    except Dsv4Error as error:
        sys.exit(f"error: {error}")
