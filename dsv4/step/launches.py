"""What a decode step computes: a list of launches over named buffers, for one token of every sequence.

A layer's launches are in layers.py, how they are run in run.py.
"""

from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.gpu.pdl import Names, check, tensors_of
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.ops.exchange import decode as exchange
from dsv4.ops.experts.placement import Placement
from dsv4.ops.sample import decode as sample
from dsv4.step.buffers import Buffers
from dsv4.step.layers import Layers


def _names(f: Buffers, cache: Cache, placement: Placement | None) -> Names:
    """Everything that a step, or anybody between two steps, writes."""
    names = Names()
    for name, held in vars(f).items():
        names.add(name, *tensors_of(held))
    names.add("page_table", cache.page_table)
    if placement is not None:
        names.add("places", placement.table)
    for number, layer in enumerate(cache.layers):
        for part in ("ring", "entries", "tail", "keys", "key_tail"):
            names.add(f"layers.{number}.{part}", *tensors_of(getattr(layer, part)))
    return names


class Launches(Layers):
    """The launches of one step for a fixed number of rows, in order."""

    def __init__(
        self,
        b: Bundle,
        model: Model,
        cache: Cache,
        buffers: Buffers,
        latest: Tensor | None,
        penalties: Tensor | None,
        counts: Tensor | None,
        peers: exchange.Peers | None,
        overlap: bool,
        sums: bool,
        goes_on: bool,
    ) -> None:
        """The arguments are those of run.py's Decoder."""
        c, f = b.config, buffers
        super().__init__(b, model, cache, f, _names(f, cache, b.weights.placement), peers, overlap)
        self.between = state = self.names.known
        if peers is not None:
            self.names.add("inbox", peers.inbox)
        mixed: Tensor | None = None
        for number, (spec, layer) in enumerate(zip(c.layers, cache.layers, strict=False)):
            self.layer = name = f"layers.{number}"
            rope = model.blocks[number].attention.rope
            mixing = self._site(f"{name}.hc_attn", f"{name}.attn_norm", mixed, mean=self._tap(number))
            self._attention(f"{name}.attn", spec, layer, rope, mixing)
            mixing = self._site(f"{name}.hc_ffn", f"{name}.ffn_norm", f.y)
            last = number == c.num_layers - 1
            next_fn = b.plain("hc_head_fn" if last else f"layers.{number + 1}.hc_attn_fn")
            self._moe(f"{name}.ffn", spec, mixing, next_fn, None if counts is None else counts[number])
            mixed = f.moe
        self.layer = ""
        self._site("hc_head", "norm", mixed, mean=self._tap(c.num_layers))
        self._head(b.tiled("head"), sums)
        self.add(
            "sample",
            sample.sample,
            logits=f.logits,
            settings=f.settings,
            mask=f.mask,
            out=f.out,
            next_ids=f.ids if goes_on else None,
            positions=f.positions,
            slots=f.slots,
            latest=latest,
            penalties=penalties,
        )
        check(self.list, between=state)

    def _tap(self, site: int) -> Tensor | None:
        """Where the streams' mean goes that a layer's first site finds, or the head: those after the layer
        before."""
        taps = self.buffers.taps
        if taps is None or self.config.dspark is None or site - 1 not in self.config.dspark.target_layers:
            return None
        d, place = self.config.hidden_size, self.config.dspark.target_layers.index(site - 1)
        return taps[:, place * d : (place + 1) * d]
