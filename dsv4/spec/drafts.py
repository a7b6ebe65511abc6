"""The draft heads. MTP: one block for one token, then fed its own streams. DSpark: several tokens at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.config import LayerSpec
from dsv4.spec import ops
from dsv4.spec.model import Model

SLIDING = LayerSpec("sliding", 0, False)


def mtp(model: Model, streams: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Draft from streams [T, N, D] of positions i and the tokens i+1: own streams, logits of tokens i+2."""
    embedded = model.linear(model.norm(model.embed(next_ids), "mtp.0.enorm"), "mtp.0.e_proj")
    streams = model.linear(model.norm(streams, "mtp.0.hnorm"), "mtp.0.h_proj")
    streams = model.block(embedded.unsqueeze(-2) + streams, next_ids, "mtp.0", SLIDING)
    return streams, model.head(streams, "mtp.0.")


def mtp_steps(model: Model, streams: Tensor, next_ids: Tensor, drafts: Sequence[int]) -> Tensor:
    """Return logits [1 + len(drafts), V]; each further step takes the block's own streams of the last one."""
    rows = []
    for token in (*drafts, 0):
        own, logits = mtp(model, streams, next_ids)
        rows.append(logits[-1])
        streams, next_ids = torch.cat((streams, own[-1:])), torch.cat((next_ids, torch.tensor([token])))
    return torch.stack(rows)


def num_stages(model: Model) -> int:
    """Count DSpark's stages by their tensors; config.json may say less."""
    return next(stage for stage in range(99) if f"mtp.{stage}.attn_norm" not in model.tensors)


def dspark_taps(model: Model, ids: Tensor) -> Tensor:
    """Return what DSpark sees of the trunk [T, targets * D]: each target layer's streams, averaged."""
    assert model.config.dspark is not None
    streams, targets = model.streams(ids), model.config.dspark.target_layers
    return torch.cat([streams[layer].float().mean(-2) for layer in targets], -1).to(model.rounding.dtype)


def dspark_streams(model: Model, taps: Tensor, anchor: int) -> Tensor:
    """Run the stages over one block: taps of positions 0 .. p, the token at p+1 -> streams [B, N, D].

    Slot j stands at p+1+j and drafts the token after it; all but the first hold noise. Every slot attends to
    the window that ends at p, made of the taps alone, and to all slots.
    """
    c, dspark = model.config, model.config.dspark
    assert dspark is not None
    p = taps.shape[0] - 1
    before = torch.arange(max(0, p - c.window + 1), p + 1)
    slots = torch.arange(p + 1, p + 1 + dspark.block_size)
    ids = torch.tensor([anchor] + [dspark.noise_id] * (dspark.block_size - 1))
    context = model.norm(model.linear(taps[before], "mtp.0.main_proj"), "mtp.0.main_norm")
    earlier, rope = model.rope(before, SLIDING), model.rope(slots, SLIDING)
    streams = model.spread(model.embed(ids))
    for stage in range(num_stages(model)):
        name = f"mtp.{stage}.attn"

        def attend(x: Tensor, name: str = name) -> Tensor:
            q, _ = model.queries(x, name, rope)
            keys = torch.cat((model.raw_keys(context, name, earlier), model.raw_keys(x, name, rope)))
            seen = torch.ones(len(slots), len(keys), dtype=torch.bool)
            return model.output(ops.attend(q, keys, seen, model[f"{name}.attn_sink"]), name, rope)

        streams = model.block(streams, ids, f"mtp.{stage}", SLIDING, attend)
    return streams


def dspark(
    model: Model, taps: Tensor, anchor: int, forced: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft a block, or correct for `forced`: logits without and with Markov's part, drafts, confidences."""
    prefix = f"mtp.{num_stages(model) - 1}."
    streams = dspark_streams(model, taps, anchor)
    mixed, base = model.mix_head(streams, prefix), model.head(streams, prefix)
    previous, logits, drafts, confidence = anchor, [], [], []
    for slot in range(len(base)):
        markov = model[f"{prefix}markov_head.markov_w1"][previous]
        logits.append(base[slot] + model.product(markov, model[f"{prefix}markov_head.markov_w2"]))
        seen = torch.cat((mixed[slot].float(), markov.float()))
        confidence.append(model.product(seen, model[f"{prefix}confidence_head.proj"])[0])
        drafts.append(ops.top_k(logits[-1], 1)[0])
        previous = int(drafts[-1]) if forced is None else forced[slot]
    return base, torch.stack(logits), torch.stack(drafts), torch.stack(confidence)
