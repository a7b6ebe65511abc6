"""What MTP adds to a decode step: its block over committed rows, then over its own streams, as launches.

An entry of the block's ring depends on its own row alone: the row's streams after the trunk, and the token
that follows. So all committed rows stop there, and only the last one of each sequence goes through attention
and experts. Drafts after the first feed the block's own streams back, one position further each; the entries
that this leaves are overwritten when their positions are committed (dsv4/spec/drafts.py).
"""

from torch import Tensor

from dsv4.cache.store import Cache
from dsv4.config import LayerSpec
from dsv4.gpu.pdl import Launch, Names, check, tensors_of
from dsv4.gpu.tiles import Tiled
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.ops.draft import decode as draft
from dsv4.ops.draft import streams
from dsv4.ops.linear.decode import Mixing, Product
from dsv4.ops.mhc import decode as mhc
from dsv4.ops.sample import decode as sample
from dsv4.step.buffers import Buffers, MtpBuffers
from dsv4.step.layers import Layers

SLIDING = LayerSpec("sliding", 0, False)
NAME = "mtp.0"


class MtpDraft(Layers):
    """As Draft (draft.py): `commit` makes the entries of a step's committed rows, which each step needs;
    `block` drafts; `launches` are both. `commit` overwrites the step's buffers, which are free by then."""

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
        chances: Tensor | None = None,
    ) -> None:
        """`step`: whose rows are those of the sequences, one after the other, equally many of each; it has
        chosen. `chances` float32 [drafts or more]: how likely a draft is right if those before are, as
        logits. Others: as Draft has them."""
        c = b.config
        assert model.mtp, "the model has no MTP block"
        assert b.mesh.size == 1, "drafts of several ranks are not built"
        self.rope, self.ring = model.mtp[0].block.attention.rope, cache.layers[c.num_layers]
        self.head = head
        self.drafter = MtpBuffers(
            c=c,
            sequences=sequences,
            drafts=drafts or 1,
            step=step,
            dtype=b.numerics.dtype,
            device=cache.page_table.device,
            activations=b.numerics.activations,
            chances=chances,
        )
        state = {f"draft.{name}": held for name, held in vars(self.drafter).items()}
        state |= {f"draft.{name}": held for name, held in vars(self.drafter.layers).items()}
        state |= {"mtp.0.ring": self.ring.ring}
        names = Names() if names is None else names
        for name, held in state.items():
            names.add(name, *tensors_of(held))
        self.between = names.of(tensors_of([*state.values(), *vars(step).values()]), "state")
        super().__init__(b, model, cache, step, names, peers=None, overlap=overlap)
        self._commit()
        self.commit: list[Launch] = self.list
        self.list = []
        if sequences:
            self.buffers = self.drafter.layers
            self._block()
        self.block: list[Launch] = self.list
        self.launches = self.list = [*self.commit, *self.block]
        check(self.list, between=self.between)

    def _commit(self) -> None:
        """Entries of the committed rows."""
        b, c, d, f = self.b, self.config, self.drafter, self.buffers
        self._enter(d.chosen)
        wkv = f"{NAME}.attn.wkv"
        self._product("context", [Product(b.tiled(wkv), self._input(wkv, f.x, f.x_in), d.kv[0])])
        self.add(
            "keep",
            draft.keep,
            kv=d.kv,
            norms=b.plain(f"{NAME}.attn.kv_norm").unsqueeze(0),
            rings=[self.ring.ring],
            ring_rows=self.ring.ring_rows,
            cos=self.rope.cos,
            sin=self.rope.sin,
            slots=f.slots,
            positions=d.committed,
            act=self.dtype,
            eps=c.norm_eps,
        )

    def _block(self) -> None:
        """The drafts, one after the other."""
        c, d, f, step = self.config, self.drafter, self.buffers, self.drafter.step
        self.add(
            "take last",
            streams.take_last,
            committed=d.committed,
            anchors_at=d.anchors_at,
            anchors_slots=d.anchors_slots,
            settings=d.settings,
            streams=step.streams,
            x=step.x,
            x_in=step.x_in,
            gate=step.gate,
            comb=step.comb,
            to_streams=f.streams,
            to_x=f.x,
            to_x_in=f.x_in,
            to_gate=f.gate,
            to_comb=f.comb,
            positions=f.positions,
            slots=f.slots,
            choices=d.choices,
            drafts=d.drafts,
        )
        self._predict(d.drafts[0], Mixing(f.comb, c.sinkhorn_iters, c.hc_eps))
        for depth in range(1, len(d.drafts)):
            self._predict(d.drafts[depth], self._enter(d.drafts[depth - 1]))

    def _enter(self, following: Tensor) -> Mixing | None:
        """The streams and the tokens `following` -> the block's streams, in place, and its first input."""
        b, c, d, f = self.b, self.config, self.drafter, self.buffers
        rows = f.rows
        e, h, y = d.e[:rows], d.h[: rows * c.num_streams], d.embedded[:rows]
        how = [b.activations_of(f"{NAME}.{weight}") for weight in ("e_proj", "h_proj")]
        self.layer = NAME
        self.add(
            "enter",
            streams.enter,
            ids=following,
            table=self.model.embedding.data,
            streams=f.streams,
            enorm=b.plain(f"{NAME}.enorm"),
            hnorm=b.plain(f"{NAME}.hnorm"),
            e=e,
            h=h,
            eps=c.norm_eps,
            e_activations=how[0],
            h_activations=how[1],
        )
        parts = y.shape[1]
        token = Product(
            weight=b.tiled(f"{NAME}.e_proj"),
            x=e,
            y=y.transpose(0, 1) if parts > 1 else y[:, 0],
            y_stride=parts * c.hidden_size,
            splits=parts,
        )
        self._product("token", [token])
        into = f.streams.flatten(0, 1)
        self._product("streams", [Product(b.tiled(f"{NAME}.h_proj"), h, into)], rows=len(h))
        # All streams get the token's part, and keep their own.
        self.add(
            "mhc open",
            mhc.mix_open,
            y=y,
            gate=d.ones[:rows],
            comb=d.eye[:rows],
            streams=f.streams,
            fn=b.plain(f"{NAME}.hc_attn_fn"),
            partial=f.partial,
        )
        return self._close(f"{NAME}.hc_attn", f"{NAME}.attn_norm")

    def _predict(self, chosen: Tensor, mixing: Mixing | None) -> None:
        """The block from its first input on, its streams, and the drafts that they give."""
        b, d, f = self.b, self.drafter, self.buffers
        self._attention(f"{NAME}.attn", SLIDING, self.ring, self.rope, mixing, moved=True)
        mixing = self._site(f"{NAME}.hc_ffn", f"{NAME}.ffn_norm", f.y)
        self._moe(f"{NAME}.ffn", SLIDING, mixing, b.plain(f"{NAME}.hc_head_fn"), counts=None)
        self.layer = ""
        self._site(f"{NAME}.hc_head", f"{NAME}.norm", f.moe)
        self._head(b.tiled("head") if self.head is None else self.head)
        # The rows move on to the drafts' positions, and the settings to their indices.
        self.add(
            "sample",
            sample.sample,
            logits=f.logits,
            settings=d.choices,
            mask=None,
            out=d.out,
            next_ids=chosen,
            positions=f.positions,
            slots=f.slots,
        )
