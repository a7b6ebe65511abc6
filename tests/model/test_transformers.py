"""Agreement with Hugging Face Transformers' DeepseekV4ForCausalLM, an independent implementation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsv4 import Engine, EngineConfig
from dsv4.lab.reference import open_model, reference_logits
from dsv4.lab.score import score_ids
from dsv4.spec.rounding import MODES
from dsv4.weights.load import Checkpoint

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
BASE: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4},
    **{"head_dim": 48, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16},
    # Enough index heads that no two ReLU scores are exactly 0: Transformers leaves ties to chance.
    **{"sliding_window": 24, "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8},
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "max_position_embeddings": 1024},
    "rope_parameters": {
        **{"type": "yarn", "rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 128},
        **{"beta_fast": 32, "beta_slow": 1},
    },
}
CASES = {
    "sliding": {"layer_types": [SLIDING, SLIDING], "mlp_layer_types": ["hash_moe", "moe"]},
    "csa": {"layer_types": [CSA, CSA], "mlp_layer_types": ["moe", "moe"]},
    "hca": {"layer_types": [HCA, HCA], "mlp_layer_types": ["moe", "hash_moe"]},
    "all": {
        "layer_types": [SLIDING, CSA, HCA, CSA],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {CSA: 4, HCA: 128},
    },
    "other ratios": {
        "layer_types": [HCA, CSA, HCA],
        "mlp_layer_types": ["moe", "moe", "moe"],
        "compress_rates": {CSA: 8, HCA: 32},
    },
    "no yarn": {
        "layer_types": [HCA, CSA],
        "mlp_layer_types": ["moe", "moe"],
        "rope_parameters": {"rope_type": "default"},
    },
}


def random_model(settings: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    layers = len(settings["layer_types"])
    transformers = pytest.importorskip("transformers")  # here: others need not wait for it to be imported
    config = transformers.DeepseekV4Config(num_hidden_layers=layers, **{**BASE, **settings})
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                p.copy_(1 + 0.1 * torch.randn_like(p))
            elif name.endswith(("base", "sinks", "position_bias")):
                p.copy_(0.3 * torch.randn_like(p))
            else:
                p.copy_(torch.randn_like(p) * (1.0 if "embed" in name else p.shape[-1] ** -0.5))
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):
                order = torch.rand(b.shape[0], config.n_routed_experts).argsort(1)
                b.copy_(order[:, : b.shape[1]])
            elif name.endswith("e_score_correction_bias"):
                b.copy_(0.3 * torch.randn_like(b))
    return model


@pytest.mark.parametrize("saved", ["state dict", "save_pretrained"])
@pytest.mark.parametrize("case", CASES)
def test_logits_agree(case: str, saved: str, tmp_path: Path) -> None:
    if saved == "save_pretrained" and case != "all":
        pytest.skip("names do not depend on the layer kinds")
    model = random_model(CASES[case], seed=7)
    if saved == "save_pretrained":
        model.save_pretrained(tmp_path)
    else:
        # Hugging Face names with fused experts, as the class itself holds them.
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    ids = torch.randint(0, 96, (1, 290))
    with torch.no_grad():
        want = model(ids).logits[0]
    engine = Engine.load(tmp_path, EngineConfig(qat="off", max_batch=1, chunk=100, max_context=300))
    parts = score_ids(engine, ids[0].tolist(), 250)
    got = torch.cat((parts["prefill_logits"], parts["decode_logits"]))
    checkpoint = Checkpoint.open(tmp_path)
    with checkpoint.reader:
        of_spec = reference_logits(open_model(checkpoint, MODES["off"]), ids[0])["prefill_logits"]
    for who, logits in (("the engine", got), ("the specification", of_spec)):
        r = (logits - want).norm(dim=1) / want.norm(dim=1)
        assert r.max() <= 1e-4, f"{case}, {who}: position {int(r.argmax())} differs by {r.max():.1e}"
