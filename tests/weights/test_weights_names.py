"""Official and Hugging Face names, against the published rename rules applied as regular expressions."""

import re
from dataclasses import replace

import pytest
from checkpoints import SMALL

from dsv4.config import LayerSpec, preset
from dsv4.model.params import declare
from dsv4.weights.names import fused_name, has_weight_suffix, hf_name

# One line per logical parameter of layer 7: official name, Hugging Face name.
LAYER = """
attn_norm.weight                        input_layernorm.weight
ffn_norm.weight                         post_attention_layernorm.weight
hc_attn_fn                              attn_hc.fn
hc_attn_base                            attn_hc.base
hc_attn_scale                           attn_hc.scale
hc_ffn_fn                               ffn_hc.fn
hc_ffn_base                             ffn_hc.base
hc_ffn_scale                            ffn_hc.scale
attn.wq_a.weight                        self_attn.q_a_proj.weight
attn.q_norm.weight                      self_attn.q_a_norm.weight
attn.wq_b.weight                        self_attn.q_b_proj.weight
attn.wkv.weight                         self_attn.kv_proj.weight
attn.kv_norm.weight                     self_attn.kv_norm.weight
attn.wo_a.weight                        self_attn.o_a_proj.weight
attn.wo_b.weight                        self_attn.o_b_proj.weight
attn.attn_sink                          self_attn.sinks
attn.compressor.wkv.weight              self_attn.compressor.kv_proj.weight
attn.compressor.wgate.weight            self_attn.compressor.gate_proj.weight
attn.compressor.ape                     self_attn.compressor.position_bias
attn.compressor.norm.weight             self_attn.compressor.kv_norm.weight
attn.indexer.wq_b.weight                self_attn.compressor.indexer.q_b_proj.weight
attn.indexer.weights_proj.weight        self_attn.compressor.indexer.scorer.weights_proj.weight
attn.indexer.compressor.wkv.weight      self_attn.compressor.indexer.kv_proj.weight
attn.indexer.compressor.wgate.weight    self_attn.compressor.indexer.gate_proj.weight
attn.indexer.compressor.ape             self_attn.compressor.indexer.position_bias
attn.indexer.compressor.norm.weight     self_attn.compressor.indexer.kv_norm.weight
ffn.gate.weight                         mlp.gate.weight
ffn.gate.bias                           mlp.gate.e_score_correction_bias
ffn.gate.tid2eid                        mlp.gate.tid2eid
ffn.shared_experts.w1.weight            mlp.shared_experts.gate_proj.weight
ffn.shared_experts.w3.weight            mlp.shared_experts.up_proj.weight
ffn.shared_experts.w2.weight            mlp.shared_experts.down_proj.weight
ffn.experts.12.w1.weight                mlp.experts.12.gate_proj.weight
ffn.experts.12.w3.weight                mlp.experts.12.up_proj.weight
ffn.experts.12.w2.weight                mlp.experts.12.down_proj.weight
"""
TOP = """
embed.weight     model.embed_tokens.weight
head.weight      lm_head.weight
norm.weight      model.norm.weight
hc_head_fn       model.hc_head.hc_fn
hc_head_base     model.hc_head.hc_base
hc_head_scale    model.hc_head.hc_scale
"""
PAIRS = [
    *(tuple(line.split()) for line in TOP.strip().splitlines()),
    *(
        (f"layers.7.{official}", f"model.layers.7.{hf}")
        for official, hf in (line.split() for line in LAYER.strip().splitlines())
    ),
]


@pytest.mark.parametrize(("official", "hf"), PAIRS)
def test_hf_name(official: str, hf: str) -> None:
    name = official.removesuffix(".weight")
    assert has_weight_suffix(name) is official.endswith(".weight")
    assert hf_name(name) == hf.removesuffix(".weight")


def test_every_parameter_is_in_the_table() -> None:
    """The table above covers all that is declared, and nothing declared lacks a Hugging Face name."""
    config = replace(SMALL, layers=(LayerSpec("csa", 4, True), LayerSpec("csa", 4, False)))
    known = {official for official, _ in PAIRS}
    for param in declare(config, 0):
        name = re.sub(r"^layers\.\d+", "layers.7", re.sub(r"experts\.\d+", "experts.12", param.name))
        assert name + (".weight" if has_weight_suffix(name) else "") in known, param.name
        assert hf_name(param.name) is not None


def test_names_are_unique() -> None:
    for config in (SMALL, preset("flash")):
        names = [param.name for param in declare(config, 1)]
        assert len(set(names)) == len(names)
        renamed = [hf_name(name) for name in names if not name.startswith("mtp.")]
        assert len(set(renamed)) == len(renamed)


def test_draft_blocks_have_no_hf_name() -> None:
    assert hf_name("mtp.0.attn.wq_a") is None
    assert hf_name("mtp.0.hc_head_fn") is None
    assert hf_name("mtp.0.norm") is None


def test_fused_names_put_the_gate_first_and_down_apart() -> None:
    """The trap: w2 is down, not up; the fused rows are gate (w1), then up (w3)."""
    prefix = "model.layers.5.mlp.experts."
    assert fused_name("layers.5.ffn.experts.3.w1") == (f"{prefix}gate_up_proj", 0)
    assert fused_name("layers.5.ffn.experts.3.w3") == (f"{prefix}gate_up_proj", 1)
    assert fused_name("layers.5.ffn.experts.3.w2") == (f"{prefix}down_proj", 0)
    assert fused_name("layers.5.ffn.shared_experts.w1") is None
    assert fused_name("mtp.0.ffn.experts.3.w1") is None
