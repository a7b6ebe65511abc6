"""config.json: three dialects, one ModelConfig; what is unknown, contradictory or mistyped is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV4Config

from dsv4.config import Dspark, EngineConfig, LayerSpec, ModelConfig, Yarn, preset
from dsv4.config_json import IGNORED
from dsv4.errors import ConfigError

# The published values. Columns: our field, Flash, Pro.
PUBLISHED = [
    ("hidden_size", 4096, 7168),
    ("num_layers", 43, 61),
    ("num_mtp_layers", 1, 1),
    ("vocab_size", 129280, 129280),
    ("num_heads", 64, 128),
    ("head_dim", 512, 512),
    ("rope_dim", 64, 64),
    ("nope_dim", 448, 448),
    ("q_rank", 1024, 1536),
    ("o_groups", 8, 16),
    ("o_rank", 1024, 1024),
    ("heads_per_group", 8, 8),
    ("window", 128, 128),
    ("rope_theta", 10000.0, 10000.0),
    ("compress_rope_theta", 160000.0, 160000.0),
    ("yarn", Yarn(16.0, 65536, 32.0, 1.0), Yarn(16.0, 65536, 32.0, 1.0)),
    ("max_positions", 1048576, 1048576),
    ("index_heads", 64, 64),
    ("index_dim", 128, 128),
    ("index_topk", 512, 1024),
    ("num_experts", 256, 384),
    ("experts_per_token", 6, 6),
    ("expert_width", 2048, 3072),
    ("route_scale", 1.5, 2.5),
    ("swiglu_limit", 10.0, 10.0),
    ("num_streams", 4, 4),
    ("sinkhorn_iters", 20, 20),
    ("hc_eps", 1e-6, 1e-6),
    ("norm_eps", 1e-6, 1e-6),
    ("bos_id", 0, 0),
    ("eos_id", 1, 1),
]


@pytest.mark.parametrize(("field", "flash", "pro"), PUBLISHED)
def test_presets_have_the_published_sizes(field: str, flash: Any, pro: Any) -> None:
    assert getattr(preset("flash"), field) == flash
    assert getattr(preset("pro"), field) == pro


def test_presets_have_the_published_layer_schedule() -> None:
    def at(name: str, kind: str) -> list[int]:
        return [i for i, layer in enumerate(preset(name).layers) if layer.kind == kind]

    assert at("flash", "sliding") == [0, 1]
    assert at("flash", "csa") == list(range(2, 43, 2))
    assert at("flash", "hca") == list(range(3, 42, 2))
    assert at("pro", "sliding") == []
    assert at("pro", "csa") == list(range(2, 61, 2))
    assert at("pro", "hca") == [0, 1, *range(3, 60, 2)]
    for name in ("flash", "pro"):
        layers = preset(name).layers
        assert all(layer.ratio == {"sliding": 0, "csa": 4, "hca": 128}[layer.kind] for layer in layers)
        assert [layer.hash_routed for layer in layers] == [True] * 3 + [False] * (len(layers) - 3)


# One small model, in every dialect.
SMALL = replace(
    preset("tiny"),
    yarn=Yarn(16.0, 4096, 24.0, 2.0),
    rope_theta=9000.0,
    compress_rope_theta=150000.0,
    norm_eps=1e-5,
    eos_id=7,
)


def flat() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 2,
        "o_lora_rank": 64,
        "sliding_window": 64,
        "compress_ratios": [0, 4, 128, 4, 0],
        "rope_theta": 9000,
        "compress_rope_theta": 150000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24,
            "beta_slow": 2,
        },
        "max_position_embeddings": 65536,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 7,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "use_cache": True,
    }


SHORT_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_nextn_predict_layers": "n_mtp_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "max_position_embeddings": "max_seq_len",
    "num_experts_per_tok": "n_activated_experts",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hash_layers": "n_hash_layers",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "rms_norm_eps": "norm_eps",
}
NO_SHORT_KEY = (
    *("architectures", "model_type", "num_key_value_heads", "norm_topk_prob", "topk_method", "rope_scaling"),
    *("hidden_act", "attention_bias", "attention_dropout", "tie_word_embeddings", "torch_dtype", "use_cache"),
)


def short() -> dict[str, Any]:
    out = {SHORT_KEYS.get(key, key): value for key, value in flat().items() if key not in NO_SHORT_KEY}
    yarn = {"original_seq_len": 4096, "rope_factor": 16, "beta_fast": 24, "beta_slow": 2}
    return out | yarn | {"dtype": "fp8", "scale_fmt": "ue8m0"}


def newer() -> dict[str, Any]:
    gone = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_theta", "compress_rope_theta")
    out = {key: value for key, value in flat().items() if key not in (*gone, "rope_scaling")}
    yarn = {"factor": 16, "original_max_position_embeddings": 4096, "beta_fast": 24, "beta_slow": 2}
    sliding, csa, hca = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
    return out | {
        "layer_types": [sliding, csa, hca, csa],
        "compress_rates": {csa: 4, hca: 128},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 9000.0, "partial_rotary_factor": 0.5},
            "compress": {"rope_type": "yarn", "rope_theta": 150000.0, "attention_factor": 1.0, **yarn},
        },
    }


@pytest.mark.parametrize("dialect", [flat, short, newer])
def test_every_dialect_gives_the_same_config(dialect: Any) -> None:
    assert ModelConfig.from_dict(dialect()) == SMALL


def test_dialects_may_be_mixed_while_they_agree() -> None:
    assert ModelConfig.from_dict(newer() | short() | flat()) == SMALL


@pytest.mark.parametrize("name", ["flash", "pro", "tiny"])
def test_to_dict_reads_back(name: str) -> None:
    config = replace(preset(name), quantization={"quant_method": "fp8", "weight_block_size": [128, 128]})
    text = json.dumps(config.to_dict())
    assert ModelConfig.from_dict(json.loads(text)) == config


@pytest.mark.parametrize(
    "layers",
    [
        (LayerSpec("csa", 2, False), LayerSpec("hca", 16, False), LayerSpec("sliding", 0, False)),
        (LayerSpec("hca", 64, False), LayerSpec("csa", 4, False), LayerSpec("hca", 16, False)),
        (LayerSpec("sliding", 0, False), LayerSpec("csa", 4, True), LayerSpec("hca", 128, False)),
    ],
    ids=["unusual CSA rate", "two HCA rates", "hash layer not first"],
)
def test_to_dict_reads_back_an_unusual_schedule(layers: tuple[LayerSpec, ...]) -> None:
    config = replace(SMALL, layers=layers)
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("source", ["default", "flash", "pro", "tiny"])
def test_config_saved_by_transformers(source: str) -> None:
    theirs = DeepseekV4Config() if source == "default" else DeepseekV4Config(**preset(source).to_dict())
    saved = ModelConfig.from_dict(json.loads(theirs.to_json_string()))
    whole = ModelConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False)))
    assert saved == whole == ModelConfig.from_dict(theirs.to_dict())
    if source != "default":
        assert saved == preset(source)
    else:  # its default schedule is Pro's pattern on Flash's sizes, without YaRN
        assert [layer.ratio for layer in saved.layers] == [128, 128, *[128, 4] * 20, 128]
        assert replace(saved, layers=preset("flash").layers, yarn=preset("flash").yarn) == preset("flash")


def refused(raw: dict[str, Any], *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw, where="some/config.json")
    message = str(caught.value)
    for word in ("some/config.json", *words):
        assert word in message, f"{word!r} is not in: {message}"
    return message


def test_unknown_key_is_named() -> None:
    refused(flat() | {"sliding_windov": 64, "n_experts": None}, "sliding_windov", "n_experts")


CONTRADICTIONS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"dim": 128}, ("hidden_size says 256", "dim says 128")),
    ({"n_layers": 3}, ("num_hidden_layers", "n_layers")),
    ({"window_size": 128}, ("sliding_window", "window_size")),
    ({"n_mtp_layers": 0}, ("num_nextn_predict_layers", "n_mtp_layers")),
    ({"norm_eps": 1e-6}, ("rms_norm_eps", "norm_eps")),
    (
        {"layer_types": [*["sliding_attention"] * 2, *["compressed_sparse_attention"] * 2]},
        ("compress_ratios", "layer_types"),
    ),
    (
        {"compress_rates": {"heavily_compressed_attention": 64}},
        ("compress_ratios says 128", "compress_rates.heavily_compressed_attention says 64"),
    ),
    ({"compress_rate_csa": 8}, ("compress_ratios says 4", "compress_rate_csa says 8")),
    ({"mlp_layer_types": ["moe"] * 4}, ("num_hash_layers", "mlp_layer_types")),
    ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, ("num_hash_layers", "mlp_layer_types")),
    ({"n_hash_layers": 2}, ("num_hash_layers", "n_hash_layers")),
    ({"partial_rotary_factor": 0.25}, ("qk_rope_head_dim", "partial_rotary_factor of head_dim 128")),
    (
        {"rope_parameters": newer()["rope_parameters"] | {"compress": {"rope_type": "default"}}},
        ("rope_scaling", "rope_parameters.compress"),
    ),
    (
        {"rope_parameters": newer()["rope_parameters"] | {"main": {"rope_theta": 10000}}},
        ("rope_theta says 9000", "rope_parameters.main.rope_theta says 10000"),
    ),
    (
        {"rope_parameters": {"main": {}, "compress": flat()["rope_scaling"] | {"rope_theta": 10000}}},
        ("compress_rope_theta says 150000", "rope_parameters.compress.rope_theta says 10000"),
    ),
    (
        {"rope_parameters": {"main": {"partial_rotary_factor": 0.25}, "compress": flat()["rope_scaling"]}},
        ("qk_rope_head_dim", "rope_parameters.main.partial_rotary_factor"),
    ),
    ({"rope_parameters": flat()["rope_scaling"] | {"factor": 8}}, ("rope_scaling", "rope_parameters")),
    ({"rope_scaling": flat()["rope_scaling"] | {"rope_type": "default"}}, ("type", "rope_type")),
    ({"original_seq_len": 2048, "rope_factor": 16}, ("rope_scaling", "original_seq_len")),
    ({"original_seq_len": 0}, ("rope_scaling", "original_seq_len")),
]


@pytest.mark.parametrize(("extra", "words"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_contradiction_names_both_keys(extra: dict[str, Any], words: tuple[str, str]) -> None:
    refused(flat() | extra, *words)


def test_two_rates_of_one_kind_contradict() -> None:
    rates = {"heavily_compressed_attention": 64}
    words = ("compress_rates.heavily_compressed_attention says 64", "compress_rate_hca says 128")
    refused(newer() | {"compress_rates": rates, "compress_rate_hca": 128}, *words)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8, expected 1"),
    ({"num_key_value_heads": True}, "num_key_value_heads is True, expected 1"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected True"),
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sqrtsoftplus'"),
    ({"score_func": "sigmoid"}, "score_func"),
    ({"model_type": "x", "kv_lora_rank": 512}, "model_type is 'x', expected 'deepseek_v4': this engine runs"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"hidden_size": "256"}, "hidden_size is '256', expected an integer"),
    ({"hidden_size": 256.0}, "hidden_size is 256.0, expected an integer"),
    ({"hidden_size": True}, "hidden_size is True, expected an integer"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": None}, "hidden_size is not given"),
    ({"hidden_size": 10**400}, "hidden_size is 1000"),
    ({"n_routed_experts": 10**9}, "n_routed_experts"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
    ({"hc_eps": float("nan")}, "hc_eps is nan"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ({"swiglu_limit": float("inf")}, "swiglu_limit is inf"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63"),
    ({"qk_rope_head_dim": 128}, "less than head_dim 128"),
    ({"index_head_dim": 96}, "power of two"),
    ({"index_head_dim": 32}, "index_head_dim 32"),
    ({"o_groups": 3}, "o_groups=3"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    ({"eos_token_id": 512}, "eos_token_id 512"),
    ({"eos_token_id": [1, 2]}, "eos_token_id is a list"),
    ({"moe_intermediate_size": 127}, "must be even"),
    ({"compress_ratios": [0, 4, 128]}, "compress_ratios has 3 entries"),
    ({"compress_ratios": [0, 4, 128, 4, 4]}, "compress_ratios has 5 entries, [4] after"),
    ({"compress_ratios": [0, True, 128, 4]}, "compress_ratios is"),
    ({"compress_ratios": None}, "add compress_ratios or layer_types"),
    ({"num_hash_layers": None}, "add num_hash_layers or mlp_layer_types"),
    ({"num_hash_layers": -1}, "num_hash_layers is -1"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types is"),
    ({"mlp_layer_types": ["hash_moe", "moe"]}, "expected 4 of hash_moe, moe"),
    ({"compress_rates": {"full_attention": 4}}, "compress_rates is"),
    ({"compress_rates": {"sliding_attention": 4}}, "compress_rates.sliding_attention is 4"),
    ({"partial_rotary_factor": 0.123}, "partial_rotary_factor is 0.123"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear', expected 'yarn' or 'default'"),
    ({"rope_scaling": {"type": "yarn", "factor": 16}}, "add rope_scaling.original_max_position_embeddings"),
    ({"rope_scaling": {"factor": 16}}, "not the type 'yarn'"),
    ({"rope_scaling": flat()["rope_scaling"] | {"factor": "16"}}, "rope_scaling.factor is '16'"),
    ({"rope_scaling": flat()["rope_scaling"] | {"beta_fast": 1}}, "rope_scaling.beta_fast more than"),
    ({"rope_scaling": flat()["rope_scaling"] | {"mscale": 0.7}}, "rope_scaling.mscale is 0.7"),
    ({"rope_scaling": flat()["rope_scaling"] | {"attention_factor": True}}, "attention_factor is True"),
    ({"rope_scaling": flat()["rope_scaling"] | {"low_freq_factor": 1}}, "low_freq_factor"),
    ({"rope_scaling": [16]}, "rope_scaling is [16]"),
    ({"rope_parameters": {"main": {}}}, "expected main and compress"),
    ({"rope_parameters": {"main": flat()["rope_scaling"], "compress": {}}}, "expected no scaling"),
    ({"rope_factor": 16}, "add original_seq_len"),
    ({"quantization_config": []}, "quantization_config is []"),
]


@pytest.mark.parametrize(("extra", "words"), WRONG, ids=lambda value: str(value)[:50])
def test_wrong_value_is_named(extra: dict[str, Any], words: str) -> None:
    refused(flat() | extra, words)


@pytest.mark.parametrize(
    "key",
    [
        *("hidden_size", "vocab_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank"),
        *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor"),
        *("swiglu_limit", "num_hidden_layers", "compress_ratios", "num_hash_layers"),
    ],
)
def test_missing_size_is_named(key: str) -> None:
    raw = flat()
    del raw[key]
    refused(raw, key)


def test_defaults_are_the_published_values() -> None:
    raw = flat()
    for key in (
        "hc_mult",
        "hc_sinkhorn_iters",
        "hc_eps",
        "rms_norm_eps",
        "rope_theta",
        "compress_rope_theta",
    ):
        del raw[key]
    for key in ("bos_token_id", "eos_token_id", "rope_scaling", "max_position_embeddings"):
        del raw[key]
    published = {"norm_eps": 1e-6, "rope_theta": 1e4, "compress_rope_theta": 1.6e5, "eos_id": 1, "yarn": None}
    assert ModelConfig.from_dict(raw) == replace(SMALL, max_positions=1048576, **published)


@pytest.mark.parametrize(("extra_zeros", "num_mtp"), [(0, 0), (1, 1), (3, 1)])
def test_draft_block_is_announced_by_extra_zeros(extra_zeros: int, num_mtp: int) -> None:
    """A file without num_nextn_predict_layers; DSpark checkpoints append three zeros."""
    raw = flat() | {"compress_ratios": [0, 4, 128, 4, *[0] * extra_zeros]}
    del raw["num_nextn_predict_layers"]
    assert ModelConfig.from_dict(raw) == replace(SMALL, num_mtp_layers=num_mtp)


def test_stated_draft_count_stands_above_the_ratio_list() -> None:
    raw = flat() | {"compress_ratios": [0, 4, 128, 4], "num_nextn_predict_layers": 1}
    assert ModelConfig.from_dict(raw) == SMALL


def test_dspark_is_noticed() -> None:
    keys = {"block_size": 5, "noise_token_id": 99, "target_layer_ids": [3, 1], "markov_rank": 16}
    raw = {f"dspark_{key}": value for key, value in keys.items()}
    assert ModelConfig.from_dict(flat() | raw) == replace(SMALL, dspark=Dspark(5, 99, (1, 3), 16))
    assert ModelConfig.from_dict(flat() | raw | {"dspark_block_size": None}).dspark is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("markov_rank", None, "the DSpark draft head is not given; add dspark_markov_rank"),
        (
            "target_layer_ids",
            [1, 1],
            r"dspark_target_layer_ids is \[1, 1\], expected a list of layers, each once",
        ),
        ("target_layer_ids", [4], "dspark_target_layer_ids is 4, expected from 0 up to 3"),
        ("block_size", 0, "dspark_block_size is 0, expected from 1"),
    ],
)
def test_a_broken_dspark_head_is_refused(key: str, value: Any, said: str) -> None:
    keys = {"block_size": 5, "noise_token_id": 99, "target_layer_ids": [3, 1], "markov_rank": 16, key: value}
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_dict(flat() | {f"dspark_{name}": given for name, given in keys.items()})


def test_ignored_keys_change_nothing() -> None:
    assert ModelConfig.from_dict(flat() | dict.fromkeys(IGNORED, "anything")) == SMALL


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**40, -1, 0, "yarn", "default", "moe", "sliding_attention", "4"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
DIALECTS = {"flat": flat, "short": short, "newer": newer}


@settings(max_examples=600, deadline=None)
@given(data=st.data(), dialect=st.sampled_from(sorted(DIALECTS)))
def test_arbitrary_json_gives_a_config_or_a_config_error(data: st.DataObject, dialect: str) -> None:
    """One value anywhere, nested ones included, becomes arbitrary JSON."""
    raw = json.loads(json.dumps(DIALECTS[dialect]()))
    place: Any = raw
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        config = ModelConfig.from_dict(raw)
    except ConfigError as error:
        assert len(str(error)) < 1000
    else:
        assert ModelConfig.from_dict(config.to_dict()) == replace(config, dspark=None)


@settings(max_examples=200, deadline=None)
@given(raw=st.dictionaries(st.sampled_from(sorted({**flat(), **short(), **newer()})), JSON, max_size=4))
def test_arbitrary_extra_keys_give_a_config_or_a_config_error(raw: dict[str, Any]) -> None:
    try:
        ModelConfig.from_dict(flat() | raw)
    except ConfigError:
        return


FILES = {
    "empty": (b"", "is not JSON"),
    "cut": (json.dumps(flat()).encode()[:100], "is not JSON"),
    "not UTF-8": (b"\xff\xfe\x00{", "is not JSON"),
    "a list": (b"[1, 2]", "holds a list, expected a JSON object"),
    "deep": (b'{"a":' * 100_000, "is not JSON"),
    "a number of 5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    "a key twice": (b'{"vocab_size": 5, "vocab_size": 6}', "'vocab_size' twice"),
    "a nested key twice": (b'{"rope_scaling": {"factor": 1, "factor": 2}}', "'factor' twice"),
}


@pytest.mark.parametrize("case", FILES)
def test_damaged_file_is_refused(case: str, tmp_path: Path) -> None:
    data, words = FILES[case]
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        ModelConfig.load(tmp_path)
    assert words in str(caught.value)


def test_load_takes_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flat()))
    assert ModelConfig.load(tmp_path) == ModelConfig.load(tmp_path / "config.json") == SMALL
    with pytest.raises(ConfigError, match="does not exist; give a model folder"):
        ModelConfig.load(tmp_path / "elsewhere")


def test_unknown_preset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'huge'; use one of flash, pro, tiny"):
        preset("huge")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activations": "a2"}, "activations is 'a2', expected one of a16, a8, a4"),
        ({"compute_dtype": "float16"}, "compute_dtype"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": True}, "max_batch is True"),
        ({"chunk": 1.5}, "chunk is 1.5"),
        ({"max_context": 0}, "max_context is 0"),
        ({"qat": "off", "cache": "fp8"}, "with qat off use cache"),
    ],
)
def test_engine_option_is_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert words in str(caught.value)
