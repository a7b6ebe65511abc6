"""Official names and their Hugging Face counterparts. Official names are the project's own."""

import re

# Suffixes of one block, official -> Hugging Face.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
}
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_TOP = {
    "embed": "model.embed_tokens",
    "head": "lm_head",
    "norm": "model.norm",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_EXPERT_NAME = re.compile(r"ffn\.(shared_experts|experts\.\d+)\.(w[123])")


def hf_name(name: str) -> str | None:
    """The Hugging Face name of an official one, both without `.weight`; None for draft blocks."""
    if name in _TOP:
        return _TOP[name]
    kind, index, suffix = name.split(".", 2)
    if kind != "layers":
        return None
    if match := _EXPERT_NAME.fullmatch(suffix):
        return f"model.layers.{index}.mlp.{match[1]}.{_EXPERT[match[2]]}"
    return f"model.layers.{index}.{_BLOCK[suffix]}"


def resaved_name(name: str) -> str | None:
    """What `save_pretrained` of Transformers 5 writes: half official, half its own, the kv norm renamed."""
    if not name.startswith("layers."):
        return None
    return "model." + (name.replace(".attn.kv_norm", ".attn.norm"))


def has_weight_suffix(name: str) -> bool:
    """Whether the stored tensor is called `<name>.weight`: linears, embeddings, norms; not raw parameters."""
    last = name.rsplit(".", 1)[-1]
    return not (last.startswith("hc_") or last in ("attn_sink", "ape", "bias", "tid2eid"))


def fused_name(name: str) -> tuple[str, int] | None:
    """HF's fused expert tensor that holds an official expert weight: its name and which half of its rows."""
    match = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.\d+\.(w[123])", name)
    if not match:
        return None
    prefix = f"model.layers.{match[1]}.mlp.experts."
    return {
        "w1": (prefix + "gate_up_proj", 0),
        "w3": (prefix + "gate_up_proj", 1),
        "w2": (prefix + "down_proj", 0),
    }[match[2]]
