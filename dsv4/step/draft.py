"""What DSpark adds to a decode step: a block of drafts of every sequence, as launches over named buffers.

First the taps of committed rows become entries in the stages' rings. Then the stages run over the blocks, and
their slots are chosen one after the other, each by the one before (dsv4/spec/drafts.py). Nothing depends on
the host: anchors, positions and settings lie on the device.
"""

import torch
from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.config import LayerSpec
from dsv4.gpu.pdl import Launch, Names, check, tensors_of
from dsv4.gpu.tiles import Tiled
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.ops.draft import decode as draft
from dsv4.ops.linear.decode import Product
from dsv4.ops.rows import quantize
from dsv4.ops.sample import decode as sample
from dsv4.quant.formats import Format, QuantTensor
from dsv4.step.buffers import Buffers, DraftBuffers
from dsv4.step.layers import Layers

SLIDING = LayerSpec("sliding", 0, False)


class Draft(Layers):
    """The launches of one draft for a fixed number of sequences. `commit` makes the context of a step's
    committed rows, which each step needs; `block` drafts; `launches` are both."""

    def __init__(
        self,
        b: Bundle,
        model: Model,
        cache: Cache,
        sequences: int,
        step: Buffers,
        names: Names | None = None,
        overlap: bool = True,
        head: Tiled | None = None,
        drafts: int | None = None,
    ) -> None:
        """`step`: with the taps that it leaves. `names`: the step's, if both are to be checked as one list.
        Without `sequences` nobody drafts. `head`: instead of the trunk's, a rougher one. `drafts`: slots that
        are chosen, None: all; the block stays whole."""
        c, stages = b.config, b.weights.num_mtp_layers
        assert c.dspark is not None and model.dspark is not None, "the model has no DSpark stages"
        assert b.mesh.size == 1, "drafts of several ranks are not built"
        self.stages, self.rope = stages, model.dspark.stages[0].attention.rope
        assert len(self.rope.cos) >= cache.layout.max_context + c.dspark.block_size, len(self.rope.cos)
        self.head = head
        self.rings = [layer for layer in cache.layers[c.num_layers :][:stages]]
        self.drafts = c.dspark.block_size if drafts is None else drafts
        assert 1 <= self.drafts <= c.dspark.block_size, f"{drafts} drafts of {c.dspark.block_size} slots"
        self.drafter = DraftBuffers(
            c=c,
            sequences=sequences,
            step=step,
            stages=stages,
            dtype=b.numerics.dtype,
            device=cache.page_table.device,
            activations=b.numerics.activations,
        )
        state = {f"draft.{name}": held for name, held in vars(self.drafter).items()}
        state |= {f"draft.{name}": held for name, held in vars(self.drafter.layers).items()}
        state |= {f"mtp.{stage}.ring": layer.ring for stage, layer in enumerate(self.rings)}
        names = Names() if names is None else names
        for name, held in state.items():
            names.add(name, *tensors_of(held))
        self.between = names.of(tensors_of([*state.values()]), "state")
        super().__init__(b, model, cache, self.drafter.layers, names, peers=None, overlap=overlap)
        self._commit()
        self.commit: list[Launch] = self.list
        self.list = []
        if sequences:
            self._block()
        self.block: list[Launch] = self.list
        self.launches = self.list = [*self.commit, *self.block]
        check(self.list, between=self.between)

    def _commit(self) -> None:
        """Entries of the committed rows in all rings."""
        b, c, d = self.b, self.config, self.drafter
        taps = self._input("mtp.0.main_proj", d.taps, d.taps_in)
        if taps is not d.taps:
            self.add("round", quantize.round_values, x=d.taps, out=taps, activations=b.numerics.activations)
        parts, rows = d.main_parts, len(d.taps)
        fused = Product(
            b.tiled("mtp.0.main_proj"), taps, parts if len(parts) > 1 else parts[0], splits=len(parts)
        )
        self._product("taps", [fused], rows=rows)
        self.add(
            "fuse",
            draft.fuse,
            parts=parts,
            weight=b.plain("mtp.0.main_norm"),
            out=d.main,
            eps=c.norm_eps,
            out_in=d.main_in,
            activations=b.numerics.activations,
        )
        wkv = [f"mtp.{stage}.attn.wkv" for stage in range(self.stages)]
        into = [Product(b.tiled(w), self._input(w, d.main, d.main_in), d.kv[i]) for i, w in enumerate(wkv)]
        self._product("context", into, rows=rows)
        self.add(
            "keep",
            draft.keep,
            kv=d.kv,
            norms=torch.stack([b.plain(f"mtp.{stage}.attn.kv_norm") for stage in range(self.stages)]),
            rings=[layer.ring for layer in self.rings],
            ring_rows=self.rings[0].ring_rows,
            cos=self.rope.cos,
            sin=self.rope.sin,
            slots=d.slots,
            positions=d.committed,
            act=self.dtype,
            eps=c.norm_eps,
        )

    def _block(self) -> None:
        """All stages over the blocks' rows, their base logits, and the drafts."""
        b, c, d, f = self.b, self.config, self.drafter, self.buffers
        assert c.dspark is not None
        self.add(
            "begin",
            draft.begin,
            anchors=d.anchors,
            anchors_at=d.anchors_at,
            anchors_slots=d.anchors_slots,
            settings=d.settings,
            noise=c.dspark.noise_id,
            ids=f.ids,
            positions=f.positions,
            slots=f.slots,
            ends=d.mutual.ends,
            choices=d.choices,
            choices_at=d.choices_at,
            chain=d.chain,
        )
        mixed: Tensor | None = None
        for stage, layer in enumerate(self.rings):
            self.layer = name = f"mtp.{stage}"
            mixing = self._site(f"{name}.hc_attn", f"{name}.attn_norm", mixed)
            self._attention(f"{name}.attn", SLIDING, layer, self.rope, mixing, d.mutual)
            mixing = self._site(f"{name}.hc_ffn", f"{name}.ffn_norm", f.y)
            last = stage == self.stages - 1
            next_fn = b.plain(f"{name}.hc_head_fn" if last else f"mtp.{stage + 1}.hc_attn_fn")
            self._moe(f"{name}.ffn", SLIDING, mixing, next_fn, counts=None)
            mixed = f.moe
        self.layer = ""
        self._site(f"{name}.hc_head", f"{name}.norm", mixed, mixed=d.mixed)
        self._head(b.tiled("head") if self.head is None else self.head)
        for slot in range(self.drafts):
            self.add(
                "markov",
                draft.markov,
                slot=slot,
                chain=d.chain,
                w1=self._rows(f"{name}.markov_head.markov_w1"),
                w2=self._rows(f"{name}.markov_head.markov_w2"),
                base=f.logits,
                mixed=d.mixed,
                proj=b.plain(f"{name}.confidence_head.proj"),
                z=d.z,
                confidence=d.confidence,
            )
            self.add(
                "sample",
                sample.sample,
                logits=d.z,
                settings=d.choices,
                mask=None,
                out=d.out,
                next_ids=d.drafts[slot],
                positions=d.choices_at,
                slots=d.anchors_slots,
            )

    def _rows(self, name: str) -> Tensor:
        """A table as it is stored, row by row."""
        held = self.b.held(name)
        if isinstance(held, QuantTensor):
            assert held.format in (Format.BF16, Format.F32), f"{name} is {held.format}, expected BF16"
            held = held.data
        assert isinstance(held, Tensor), f"{name} is in tiles, expected rows: a tile is 512 columns wide"
        return held
