"""What is computed (ModelConfig, read strictly from config.json) and how (EngineConfig, every knob). Frozen; no torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from dsv4.errors import ConfigError

LayerKind = Literal["sliding", "csa", "hca"]
_HF_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}


@dataclass(frozen=True)
class LayerSpec:
    """One trunk layer: what it attends to, how many tokens make one compressed entry (0: none), how it routes."""

    kind: LayerKind
    ratio: int
    hash_routed: bool


@dataclass(frozen=True)
class Yarn:
    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class ModelConfig:
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    num_mtp_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_positions: int
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    route_scale: float
    swiglu_limit: float
    num_streams: int
    sinkhorn_iters: int
    hc_eps: float
    norm_eps: float
    bos_id: int
    eos_id: int
    quantization: Mapping[str, Any]
    is_dspark: bool

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.o_groups

    @classmethod
    def load(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` (a file, or the folder that holds it)."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            raw = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist; give a model folder that holds config.json and *.safetensors"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path} is not JSON ({error}); fetch it again") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} holds a {type(raw).__name__}, expected a JSON object")
        return cls.from_dict(raw, where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        return _Parser(raw, where).parse()

    def to_dict(self) -> dict[str, Any]:
        """The Hugging Face form with flat keys, as the published checkpoints carry it."""
        out: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
        out |= {row.hf: getattr(self, row.field) for row in _ROWS}
        out |= {key: value for key, (value, _) in _FIXED.items() if key not in _SHORT_ONLY}
        out["num_hidden_layers"] = self.num_layers
        out["num_hash_layers"] = sum(layer.hash_routed for layer in self.layers)
        out["compress_ratios"] = [layer.ratio for layer in self.layers] + [0] * self.num_mtp_layers
        if self.yarn:
            out["rope_scaling"] = {
                "type": "yarn",
                "factor": self.yarn.factor,
                "original_max_position_embeddings": self.yarn.original_positions,
                "beta_fast": self.yarn.beta_fast,
                "beta_slow": self.yarn.beta_slow,
            }
        if self.quantization:
            out["quantization_config"] = dict(self.quantization)
        return out


@dataclass(frozen=True)
class _Row:
    """One fact with its Hugging Face key, its official short key and the value it has when neither is given."""

    field: str
    hf: str
    short: str
    kind: type
    default: Any = None


_ROWS = (
    _Row("hidden_size", "hidden_size", "dim", int),
    _Row("vocab_size", "vocab_size", "vocab_size", int),
    _Row("num_mtp_layers", "num_nextn_predict_layers", "n_mtp_layers", int, 0),
    _Row("num_heads", "num_attention_heads", "n_heads", int),
    _Row("head_dim", "head_dim", "head_dim", int),
    _Row("rope_dim", "qk_rope_head_dim", "rope_head_dim", int),
    _Row("q_rank", "q_lora_rank", "q_lora_rank", int),
    _Row("o_groups", "o_groups", "o_groups", int),
    _Row("o_rank", "o_lora_rank", "o_lora_rank", int),
    _Row("window", "sliding_window", "window_size", int),
    _Row("rope_theta", "rope_theta", "rope_theta", float, 10000.0),
    _Row("compress_rope_theta", "compress_rope_theta", "compress_rope_theta", float, 160000.0),
    _Row("max_positions", "max_position_embeddings", "max_seq_len", int, 1048576),
    _Row("index_heads", "index_n_heads", "index_n_heads", int),
    _Row("index_dim", "index_head_dim", "index_head_dim", int),
    _Row("index_topk", "index_topk", "index_topk", int),
    _Row("num_experts", "n_routed_experts", "n_routed_experts", int),
    _Row("experts_per_token", "num_experts_per_tok", "n_activated_experts", int),
    _Row("expert_width", "moe_intermediate_size", "moe_inter_dim", int),
    _Row("route_scale", "routed_scaling_factor", "route_scale", float),
    _Row("swiglu_limit", "swiglu_limit", "swiglu_limit", float),
    _Row("num_streams", "hc_mult", "hc_mult", int, 4),
    _Row("sinkhorn_iters", "hc_sinkhorn_iters", "hc_sinkhorn_iters", int, 20),
    _Row("hc_eps", "hc_eps", "hc_eps", float, 1e-6),
    _Row("norm_eps", "rms_norm_eps", "norm_eps", float, 1e-6),
    _Row("bos_id", "bos_token_id", "bos_token_id", int, 0),
    _Row("eos_id", "eos_token_id", "eos_token_id", int, 1),
)

# Keys whose value this engine's arithmetic takes for granted: another value means another model.
_FIXED: dict[str, tuple[Any, str]] = {
    "num_key_value_heads": (1, "one shared key/value head"),
    "n_shared_experts": (1, "one shared expert"),
    "scoring_func": ("sqrtsoftplus", "the sqrt-softplus router"),
    "score_func": ("sqrtsoftplus", "the sqrt-softplus router"),
    "norm_topk_prob": (True, "renormalised router weights"),
    "topk_method": ("noaux_tc", "biased top-k without expert groups"),
    "hidden_act": ("silu", "SwiGLU experts"),
    "attention_bias": (False, "bias-free linears"),
    "mlp_bias": (False, "bias-free linears"),
    "tie_word_embeddings": (False, "a head of its own"),
    "model_type": ("deepseek_v4", "DeepSeek-V4"),
}
_SHORT_ONLY = {"score_func", "model_type", "mlp_bias"}

# Keys that say nothing about what is computed here, each with the reason it may be passed over.
IGNORED = {
    "architectures": "class name of another library",
    "torch_dtype": "tensors carry their own dtype",
    "dtype": "tensors carry their own dtype",
    "expert_dtype": "tensors carry their own dtype",
    "scale_fmt": "tensors carry their own dtype",
    "use_cache": "always",
    "initializer_range": "training only",
    "attention_dropout": "training only",
    "router_aux_loss_coef": "training only",
    "router_jitter_noise": "training only",
    "output_router_logits": "another library's output option",
    "transformers_version": "provenance",
    "_name_or_path": "provenance",
    "pad_token_id": "nothing is padded",
    "n_group": "V4 has no expert groups; derived configs may carry it",
    "topk_group": "V4 has no expert groups; derived configs may carry it",
    "max_batch_size": "an engine option here",
    "dspark_block_size": "the DSpark draft head is not run",
    "dspark_markov_rank": "the DSpark draft head is not run",
    "dspark_noise_token_id": "the DSpark draft head is not run",
    "dspark_target_layer_ids": "the DSpark draft head is not run",
}
_STRUCTURE = {
    *("num_hidden_layers", "n_layers", "num_hash_layers", "n_hash_layers", "compress_ratios", "layer_types"),
    *("compress_rates", "compress_rate_csa", "compress_rate_hca", "mlp_layer_types", "partial_rotary_factor"),
    *("rope_scaling", "rope_parameters", "rope_factor", "original_seq_len", "beta_fast", "beta_slow"),
    "quantization_config",
}
_ROPE_KEYS = {
    *("type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    *("rope_theta", "partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


class _Parser:
    """Reads one config dictionary; every complaint names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def fail(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def number(self, key: str, kind: type) -> Any:
        value = self.raw[key]
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise self.fail(f"{key} is {value!r}, expected {'an integer' if kind is int else 'a number'}")
        if not math.isfinite(value):
            raise self.fail(f"{key} is {value!r}, expected a finite number")
        return kind(value)

    def agree(self, facts: dict[str, Any], what: str) -> Any:
        """The one value that all given keys state, or None when none is given."""
        values = list(facts.values())
        if any(value != values[0] for value in values):
            raise self.fail(f"keys contradict each other on {what}: {facts}")
        return values[0] if values else None

    def given(self, *keys: str, kind: type = int) -> dict[str, Any]:
        return {key: self.number(key, kind) for key in keys if self.raw.get(key) is not None}

    def parse(self) -> ModelConfig:
        known = (
            {key for row in _ROWS for key in (row.hf, row.short)}
            | _FIXED.keys()
            | IGNORED.keys()
            | _STRUCTURE
        )
        if unknown := sorted(self.raw.keys() - known):
            raise self.fail(
                f"unknown keys {unknown}; this engine runs DeepSeek-V4 only and refuses keys it would have to ignore"
            )
        for key, (want, meaning) in _FIXED.items():
            if self.raw.get(key, want) != want:
                raise self.fail(f"{key} is {self.raw[key]!r}, expected {want!r} ({meaning})")

        values = {}
        for row in _ROWS:
            if row.field == "eos_id" and isinstance(self.raw.get(row.hf), list):
                raise self.fail(
                    f"{row.hf} is a list, expected one id; pass further ids as stop ids of a request"
                )
            stated = self.given(*dict.fromkeys((row.hf, row.short)), kind=row.kind)
            if row.field == "rope_dim" and self.raw.get("partial_rotary_factor") is not None:
                share = self.number("partial_rotary_factor", float) * self.number("head_dim", int)
                stated[f"partial_rotary_factor*head_dim={share:g}"] = round(share)
            if row.field in ("rope_theta", "compress_rope_theta"):
                stated |= self.nested_theta(row.field)
            value = self.agree(stated, row.field)
            if value is None and row.default is None:
                raise self.fail(f"neither {row.hf} nor {row.short} is given; one of them is needed")
            values[row.field] = row.default if value is None else value

        layers = self.layers()
        if self.raw.get("num_nextn_predict_layers") is None and self.raw.get("n_mtp_layers") is None:
            # Older files state the draft block only as the extra zeros of the ratio list.
            values["num_mtp_layers"] = min(
                1, max(0, len(self.raw.get("compress_ratios") or []) - len(layers))
            )
        config = ModelConfig(
            layers=layers,
            yarn=self.yarn(),
            quantization=self.raw.get("quantization_config") or {},
            is_dspark="dspark_block_size" in self.raw,
            **values,
        )
        self.check(config)
        return config

    def layers(self) -> tuple[LayerSpec, ...]:
        count = self.agree(self.given("num_hidden_layers", "n_layers"), "the number of layers")
        if count is None:
            raise self.fail("neither num_hidden_layers nor n_layers is given; one of them is needed")
        if count < 1:
            raise self.fail(f"num_hidden_layers is {count}, expected at least 1")
        schedules: dict[str, list[tuple[LayerKind, int]]] = {}
        if (ratios := self.raw.get("compress_ratios")) is not None:
            if not isinstance(ratios, list) or not all(isinstance(r, int) and r >= 0 for r in ratios):
                raise self.fail(f"compress_ratios is {ratios!r}, expected a list of integers >= 0")
            if len(ratios) < count or any(ratios[count:]):
                raise self.fail(
                    f"compress_ratios has {len(ratios)} entries {ratios[count:]}, expected {count} "
                    "and then zeros for draft blocks"
                )
            schedules["compress_ratios"] = [
                ("sliding" if r == 0 else "csa" if r == 4 else "hca", r) for r in ratios[:count]
            ]
        if (names := self.raw.get("layer_types")) is not None:
            rates = {"sliding": 0, **self.compress_rates()}
            if not isinstance(names, list) or len(names) != count or any(n not in _HF_KINDS for n in names):
                raise self.fail(f"layer_types is {names!r}, expected {count} of {sorted(_HF_KINDS)}")
            schedules["layer_types"] = [(_HF_KINDS[n], rates[_HF_KINDS[n]]) for n in names]
        schedule = self.agree(schedules, "the layer schedule")
        if schedule is None:
            raise self.fail("neither compress_ratios nor layer_types is given; one of them is needed")

        hashes: dict[str, list[bool]] = {
            key: [layer < num for layer in range(count)]
            for key, num in self.given("num_hash_layers", "n_hash_layers").items()
        }
        if (names := self.raw.get("mlp_layer_types")) is not None:
            if not isinstance(names, list) or len(names) != count or not set(names) <= {"hash_moe", "moe"}:
                raise self.fail(f"mlp_layer_types is {names!r}, expected {count} of 'hash_moe', 'moe'")
            hashes["mlp_layer_types"] = [name == "hash_moe" for name in names]
        routing = self.agree(hashes, "the hash-routed layers")
        if routing is None:
            raise self.fail("neither num_hash_layers nor mlp_layer_types is given; one of them is needed")
        return tuple(
            LayerSpec(kind, ratio, is_hash) for (kind, ratio), is_hash in zip(schedule, routing, strict=True)
        )

    def compress_rates(self) -> dict[str, int]:
        rates = self.raw.get("compress_rates")
        rates = (
            {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
            if rates is None
            else rates
        )
        if (
            not isinstance(rates, dict)
            or rates.keys() - _HF_KINDS.keys()
            or not all(isinstance(rate, int) and rate >= 0 for rate in rates.values())
        ):
            raise self.fail(
                f"compress_rates is {rates!r}, expected a map from {sorted(_HF_KINDS)} to integers"
            )
        out = {_HF_KINDS[name]: rate for name, rate in rates.items()}
        for key, kind in (("compress_rate_csa", "csa"), ("compress_rate_hca", "hca")):
            out |= {kind: value for value in self.given(key).values()}
        if out.get("csa", 4) < 1 or out.get("hca", 128) < 1:
            raise self.fail(f"compress_rates is {rates!r}, expected at least 1 for compressed layers")
        return {"csa": 4, "hca": 128} | out

    def rope(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The scaling dictionaries of the plain and of the compressed layers, as given."""
        nested = self.raw.get("rope_parameters")
        flat = self.raw.get("rope_scaling")
        for name, value in (("rope_parameters", nested), ("rope_scaling", flat)):
            if value is not None and not isinstance(value, dict):
                raise self.fail(f"{name} is {value!r}, expected an object")
        if nested is not None and "main" not in nested and "compress" not in nested:
            nested, flat = None, (flat or nested)
        if nested is not None and nested.keys() != {"main", "compress"}:
            raise self.fail(f"rope_parameters has the keys {sorted(nested)}, expected main and compress")
        main = nested["main"] if nested else {}
        compress = nested["compress"] if nested else {}
        for part in (main, compress, flat or {}):
            if not isinstance(part, dict) or part.keys() - _ROPE_KEYS:
                raise self.fail(f"unknown RoPE settings {part!r}; known are {sorted(_ROPE_KEYS)}")
            for key, want in (
                ("attention_factor", 1.0),
                ("mscale", 1.0),
                ("mscale_all_dim", 1.0),
                ("truncate", True),
            ):
                if part.get(key) not in (None, want):
                    raise self.fail(
                        f"RoPE {key} is {part[key]!r}, expected {want!r}: V4 does not scale the rotation"
                    )
        if main.get("rope_type", "default") != "default":
            raise self.fail(f"rope_parameters.main is {main!r}, expected no scaling on sliding layers")
        if nested and flat:
            self.agree({"rope_parameters": _yarn_of(compress), "rope_scaling": _yarn_of(flat)}, "YaRN")
        return main, (compress if nested else flat or {})

    def nested_theta(self, field: str) -> dict[str, float]:
        main, compress = self.rope()
        name, part = ("main", main) if field == "rope_theta" else ("compress", compress)
        if part is self.raw.get("rope_scaling") or "rope_theta" not in part:
            return {}
        return {f"rope_parameters.{name}.rope_theta": float(part["rope_theta"])}

    def yarn(self) -> Yarn | None:
        _, scaling = self.rope()
        kind = self.agree(
            {key: scaling[key] for key in ("type", "rope_type") if key in scaling}, "the RoPE type"
        )
        if kind not in (None, "default", "yarn"):
            raise self.fail(f"RoPE scaling is {kind!r}, expected 'yarn' or 'default'")
        stated: dict[str, Yarn | None] = {}
        if scaling:
            try:
                stated["rope_scaling"] = Yarn(*_yarn_of(scaling)) if kind == "yarn" else None
            except (KeyError, TypeError) as error:
                raise self.fail(f"YaRN settings {scaling!r} are incomplete: {error}") from None
        if self.given("original_seq_len").get("original_seq_len"):
            short = self.given("rope_factor", "beta_fast", "beta_slow", kind=float)
            stated["original_seq_len"] = Yarn(
                short.get("rope_factor", 1.0),
                self.raw["original_seq_len"],
                short.get("beta_fast", 32.0),
                short.get("beta_slow", 1.0),
            )
        return self.agree(stated, "YaRN")

    def check(self, c: ModelConfig) -> None:
        positive = [
            row.field
            for row in _ROWS
            if row.kind is int and row.field not in ("num_mtp_layers", "bos_id", "eos_id")
        ]
        for name in (*positive, "rope_theta", "compress_rope_theta", "swiglu_limit", "route_scale"):
            if getattr(c, name) <= 0:
                raise self.fail(f"{name} is {getattr(c, name)}, expected more than 0")
        uses_index = any(layer.kind == "csa" for layer in c.layers)
        rules = [
            (
                c.rope_dim % 2 == 0 and c.rope_dim <= c.head_dim,
                f"rope width {c.rope_dim} in a head of {c.head_dim}",
            ),
            (
                not uses_index or c.rope_dim <= c.index_dim,
                f"rope width {c.rope_dim} in an index head of {c.index_dim}",
            ),
            (
                not uses_index or c.index_dim & (c.index_dim - 1) == 0,
                f"index_head_dim {c.index_dim}: the Hadamard rotation needs a power of two",
            ),
            (c.num_heads % c.o_groups == 0, f"{c.num_heads} heads in {c.o_groups} output groups"),
            (
                c.experts_per_token <= c.num_experts,
                f"{c.experts_per_token} experts chosen of {c.num_experts}",
            ),
            (c.hidden_size % 2 == 0 and c.expert_width % 2 == 0, "odd widths cannot be packed in 4 bits"),
            (
                0 <= c.bos_id < c.vocab_size and 0 <= c.eos_id < c.vocab_size,
                "BOS or EOS outside the vocabulary",
            ),
        ]
        for holds, text in rules:
            if not holds:
                raise self.fail(f"impossible sizes: {text}")


def _yarn_of(scaling: Mapping[str, Any]) -> tuple[float, int, float, float]:
    return (
        float(scaling["factor"]),
        int(scaling["original_max_position_embeddings"]),
        float(scaling.get("beta_fast", 32)),
        float(scaling.get("beta_slow", 1)),
    )


def _published(dim: int, heads: int, q_rank: int, groups: int, topk: int, experts: int, width: int, scale: float,
               ratios: list[int]) -> ModelConfig:  # fmt: skip
    raw = {
        **{"hidden_size": dim, "num_attention_heads": heads, "q_lora_rank": q_rank, "o_groups": groups},
        **{"index_topk": topk, "n_routed_experts": experts, "moe_intermediate_size": width},
        **{"routed_scaling_factor": scale, "num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0]},
        **{
            "vocab_size": 129280,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "o_lora_rank": 1024,
            "sliding_window": 128,
        },
        **{"index_n_heads": 64, "index_head_dim": 128, "num_experts_per_tok": 6, "num_hash_layers": 3},
        **{"num_nextn_predict_layers": 1, "swiglu_limit": 10.0, "max_position_embeddings": 1048576},
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    }
    return ModelConfig.from_dict(raw, "preset")


def preset(name: str) -> ModelConfig:
    """`flash` and `pro`: the published models. `tiny`: every layer kind in a few megabytes, for tests and demos."""
    if name == "flash":
        return _published(4096, 64, 1024, 8, 512, 256, 2048, 1.5, [0, 0, *[4, 128] * 20, 4])
    if name == "pro":
        return _published(7168, 128, 1536, 16, 1024, 384, 3072, 2.5, [128, 128, *[4, 128] * 29, 4])
    if name == "tiny":
        flash = _published(256, 4, 128, 2, 32, 8, 128, 1.5, [0, 4, 128, 4])
        return replace(
            flash,
            **{
                "vocab_size": 512,
                "head_dim": 128,
                "o_rank": 64,
                "window": 64,
                "index_heads": 8,
                "index_dim": 64,
            },
            **{"experts_per_token": 2, "max_positions": 65536, "yarn": Yarn(16.0, 4096, 32.0, 1.0)},
            layers=tuple(replace(layer, hash_routed=i < 1) for i, layer in enumerate(flash.layers)),
        )
    raise ConfigError(f"unknown preset {name!r}; use one of flash, pro, tiny")


Activations = Literal["a16", "a8", "a4"]
_CHOICES = {
    "activations": ("a16", "a8", "a4"),
    "compute_dtype": ("auto", "float32", "bfloat16"),
    "qat": ("on", "off"),
    "cache": ("auto", "fp8", "bf16", "f32"),
    "weights": ("auto", "dense", "packed"),
}


@dataclass(frozen=True)
class EngineConfig:
    """Every knob of the engine. `auto` is settled once, when the engine is built, and shown with its reason."""

    device: str = "auto"
    activations: Activations = "a16"
    compute_dtype: str = "auto"
    qat: str = "on"
    cache: str = "auto"
    weights: str = "auto"
    max_context: int | None = None
    max_batch: int = 8
    chunk: int = 512
    ops: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name in ("max_batch", "chunk", "max_context"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1) and not (name == "max_context" and value is None):
                raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1")
        if self.qat == "off" and self.cache == "fp8":
            raise ConfigError(
                "cache fp8 is lossless only for values that were rounded to FP8 (qat on); "
                "with qat off use cache auto, bf16 or f32"
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
