"""config.json in and out: every key is read, held to a fixed value, or passed over for a stated reason.

Three dialects give the same ModelConfig: Hugging Face's flat keys, the official short keys, and the newer
Hugging Face keys (layer_types, mlp_layer_types, rope_parameters). A file may mix them; where they disagree it
is refused. A null says the same as a missing key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4.config import Dspark, LayerKind, LayerSpec, ModelConfig, Yarn
from dsv4.errors import ConfigError

# Larger numbers mean a damaged file; sizes beyond this could not be multiplied in 64 bits either.
MAX_NUMBER = 2**31 - 1
# Smaller ones are 0 in float32, or lose bits there.
MIN_FLOAT = 2.0**-126
# Of a rotation: each pair of channels turns slower than the one before; with 1, all would turn alike.
MIN_BASE = 2
# Every expert is a parameter to look for, so an absurd count would be an endless search.
MAX_EXPERTS = 4096

_HF_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_RATES = {"csa": 4, "hca": 128}


@dataclass(frozen=True)
class _Row:
    """One fact: its Hugging Face key, its official short key, the value when neither is given, and its range.

    Numbers are at least `least`, by default integers 1 and floats more than 0.
    """

    field: str
    hf: str
    short: str
    kind: type
    default: Any = None
    least: int | None = None
    most: int = MAX_NUMBER


_ROWS = (
    _Row("hidden_size", "hidden_size", "dim", int),
    _Row("vocab_size", "vocab_size", "vocab_size", int),
    _Row("num_mtp_layers", "num_nextn_predict_layers", "n_mtp_layers", int, 0, least=0, most=64),
    _Row("num_heads", "num_attention_heads", "n_heads", int),
    _Row("head_dim", "head_dim", "head_dim", int),
    _Row("rope_dim", "qk_rope_head_dim", "rope_head_dim", int),
    _Row("q_rank", "q_lora_rank", "q_lora_rank", int),
    _Row("o_groups", "o_groups", "o_groups", int),
    _Row("o_rank", "o_lora_rank", "o_lora_rank", int),
    _Row("window", "sliding_window", "window_size", int),
    _Row("rope_theta", "rope_theta", "rope_theta", float, 10000.0, MIN_BASE),
    _Row("compress_rope_theta", "compress_rope_theta", "compress_rope_theta", float, 160000.0, MIN_BASE),
    _Row("max_positions", "max_position_embeddings", "max_seq_len", int, 1048576),
    _Row("index_heads", "index_n_heads", "index_n_heads", int),
    _Row("index_dim", "index_head_dim", "index_head_dim", int),
    _Row("index_topk", "index_topk", "index_topk", int),
    _Row("num_experts", "n_routed_experts", "n_routed_experts", int, most=MAX_EXPERTS),
    _Row("experts_per_token", "num_experts_per_tok", "n_activated_experts", int),
    _Row("expert_width", "moe_intermediate_size", "moe_inter_dim", int),
    _Row("route_scale", "routed_scaling_factor", "route_scale", float),
    _Row("swiglu_limit", "swiglu_limit", "swiglu_limit", float),
    _Row("num_streams", "hc_mult", "hc_mult", int, 4, most=64),
    _Row("sinkhorn_iters", "hc_sinkhorn_iters", "hc_sinkhorn_iters", int, 20, most=1000),
    _Row("hc_eps", "hc_eps", "hc_eps", float, 1e-6),
    _Row("norm_eps", "rms_norm_eps", "norm_eps", float, 1e-6),
    _Row("bos_id", "bos_token_id", "bos_token_id", int, 0, least=0),
    _Row("eos_id", "eos_token_id", "eos_token_id", int, 1, least=0),
)

# Keys whose value this engine's arithmetic takes for granted: another value means another model.
_FIXED: dict[str, tuple[Any, str]] = {
    "num_key_value_heads": (1, "one shared key/value head"),
    "n_shared_experts": (1, "one shared expert"),
    "scoring_func": ("sqrtsoftplus", "the sqrt-softplus router"),
    "norm_topk_prob": (True, "renormalised router weights"),
    "topk_method": ("noaux_tc", "biased top-k without expert groups"),
    "hidden_act": ("silu", "SwiGLU experts"),
    "attention_bias": (False, "bias-free linears"),
    "tie_word_embeddings": (False, "a head of its own"),
    "model_type": ("deepseek_v4", "DeepSeek-V4"),
}
# The same for keys that only some writers use; to_json leaves them out.
_FIXED_ELSEWHERE: dict[str, tuple[Any, str]] = {
    "score_func": ("sqrtsoftplus", "the sqrt-softplus router"),
    "mlp_bias": (False, "bias-free linears"),
    "is_encoder_decoder": (False, "a decoder"),
}

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
    "output_hidden_states": "another library's output option",
    "output_attentions": "another library's output option",
    "return_dict": "another library's output option",
    "chunk_size_feed_forward": "another library's memory option",
    "id2label": "classification heads only",
    "label2id": "classification heads only",
    "problem_type": "classification heads only",
    "transformers_version": "provenance",
    "_name_or_path": "provenance",
    "pad_token_id": "nothing is padded",
    "n_group": "V4 has no expert groups; derived configs may carry it",
    "topk_group": "V4 has no expert groups; derived configs may carry it",
    "max_batch_size": "an engine option here",
}
_DSPARK_KEYS = (
    *("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids"),
    "dspark_markov_rank",
)
# Keys read by the parser's own methods rather than by a row.
_STRUCTURE = {
    *("num_hidden_layers", "n_layers", "num_hash_layers", "n_hash_layers", "compress_ratios", "layer_types"),
    *("compress_rates", "compress_rate_csa", "compress_rate_hca", "mlp_layer_types", "partial_rotary_factor"),
    *("rope_scaling", "rope_parameters", "rope_factor", "original_seq_len", "beta_fast", "beta_slow"),
    *("quantization_config", *_DSPARK_KEYS),
}
_KNOWN = {key for row in _ROWS for key in (row.hf, row.short)} | _STRUCTURE
_KNOWN |= _FIXED.keys() | _FIXED_ELSEWHERE.keys() | IGNORED.keys()

_YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
# V4 does not scale the rotation's length, and cuts the YaRN ramp at whole channels.
_ROPE_FIXED = {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}
_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", *_YARN_KEYS, *_ROPE_FIXED}


def parse(raw: Mapping[str, Any], where: str) -> ModelConfig:
    return _Parser(raw, where).parse()


def to_json(config: ModelConfig) -> dict[str, Any]:
    """Flat Hugging Face keys."""
    out: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"]}
    out |= {row.hf: getattr(config, row.field) for row in _ROWS}
    out |= {key: value for key, (value, _) in _FIXED.items()}
    out["num_hidden_layers"] = config.num_layers
    if all(layer.kind == _kind_of(layer.ratio) for layer in config.layers):
        out["compress_ratios"] = [layer.ratio for layer in config.layers] + [0] * config.num_mtp_layers
    else:
        names = {kind: name for name, kind in _HF_KINDS.items()}
        out["layer_types"] = [names[layer.kind] for layer in config.layers]
        rates = {layer.kind: layer.ratio for layer in config.layers}
        assert all(rates[layer.kind] == layer.ratio for layer in config.layers), "one rate per kind"
        out["compress_rates"] = {names[kind]: rate for kind, rate in rates.items()}
    hashed = [layer.hash_routed for layer in config.layers]
    if hashed == sorted(hashed, reverse=True):
        out["num_hash_layers"] = sum(hashed)
    else:
        out["mlp_layer_types"] = ["hash_moe" if is_hash else "moe" for is_hash in hashed]
    if config.yarn:
        yarn = config.yarn
        values = (yarn.factor, yarn.original_positions, yarn.beta_fast, yarn.beta_slow)
        out["rope_scaling"] = {"type": "yarn", **dict(zip(_YARN_KEYS, values, strict=True))}
    if config.dspark:
        d = config.dspark
        head = (d.block_size, d.noise_id, list(d.target_layers), d.markov_rank)
        out |= dict(zip(_DSPARK_KEYS, head, strict=True))
    if config.quantization:
        out["quantization_config"] = dict(config.quantization)
    return out


def _kind_of(ratio: int) -> LayerKind:
    """The official reading of a ratio: 4 overlaps and is indexed, any other is pooled whole."""
    return "sliding" if ratio == 0 else "csa" if ratio == _RATES["csa"] else "hca"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


class _Parser:
    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.where = where
        # Before its keys: of another family's file, they are not what is wrong.
        family, found = _FIXED["model_type"][0], raw.get("model_type")
        if found not in (None, family):
            raise self.fail(
                f"model_type is {_show(found)}, expected {family!r}: this engine runs DeepSeek-V4 only"
            )
        if unknown := sorted(raw.keys() - _KNOWN):
            raise self.fail(
                f"unknown keys {_show(unknown)}; this engine runs DeepSeek-V4 only and refuses what it would "
                "have to ignore: remove them if they do not change the model"
            )
        self.raw = {key: value for key, value in raw.items() if value is not None}

    def fail(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def number(
        self, name: str, value: Any, kind: type, least: int | None = None, most: int = MAX_NUMBER
    ) -> Any:
        """From `least` to `most`; by default an integer from 1, or a float that float32 has, more than 0."""
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise self.fail(
                f"{name} is {_show(value)}, expected {'an integer' if kind is int else 'a number'}"
            )
        # Written so that NaN fails too.
        lowest = least if least is not None else 1 if kind is int else MIN_FLOAT
        if not lowest <= value <= most:
            low = f"from {lowest:g}" if kind is int or value > 0 else "more than 0 and"
            raise self.fail(f"{name} is {_show(value)}, expected {low} up to {most}")
        return kind(value)

    def given(
        self, *keys: str, kind: type = int, least: int | None = None, most: int = MAX_NUMBER
    ) -> dict[str, Any]:
        return {key: self.number(key, self.raw[key], kind, least, most) for key in keys if key in self.raw}

    def agree(self, facts: Mapping[str, Any], what: str) -> Any:
        """The one value that all given keys state, or None when none is given."""
        values = list(facts.values())
        if any(value != values[0] for value in values):
            said = ", ".join(f"{key} says {_show(value)}" for key, value in facts.items())
            raise self.fail(f"keys contradict each other on {what}: {said}; keep the one that is right")
        return values[0] if values else None

    def needed(self, facts: Mapping[str, Any], what: str, keys: str) -> Any:
        if not facts:
            raise self.fail(f"{what} is not given; add {keys}")
        return self.agree(facts, what)

    def parse(self) -> ModelConfig:
        for key, (want, meaning) in (_FIXED | _FIXED_ELSEWHERE).items():
            found = self.raw.get(key, want)
            if type(found) is not type(want) or found != want:
                raise self.fail(f"{key} is {_show(found)}, expected {want!r} ({meaning})")
        quantization = self.raw.get("quantization_config", {})
        if not isinstance(quantization, dict):
            raise self.fail(f"quantization_config is {_show(quantization)}, expected an object")
        if isinstance(self.raw.get("eos_token_id"), list):
            raise self.fail(
                "eos_token_id is a list, expected one id; pass further ids as stop ids of a request"
            )

        nested = self.rope_facts()
        values: dict[str, Any] = {}
        for row in _ROWS:
            stated = self.given(row.hf, row.short, kind=row.kind, least=row.least, most=row.most)
            stated |= nested.get(row.field, {})
            if row.field == "rope_dim":
                stated |= self.rotary_widths(nested["share"], values["head_dim"])
            if row.default is None:
                values[row.field] = self.needed(stated, row.hf, row.hf)
            else:
                values[row.field] = self.agree(stated or {"default": row.default}, row.hf)

        layers = self.layers()
        if not self.raw.keys() & {"num_nextn_predict_layers", "n_mtp_layers"}:
            # Older files state the draft block only as the extra zeros of the ratio list.
            values["num_mtp_layers"] = int(len(self.raw.get("compress_ratios", [])) > len(layers))
        config = ModelConfig(
            layers=layers,
            yarn=self.agree(nested["yarn"], "YaRN"),
            quantization=quantization,
            dspark=self.dspark(len(layers)),
            **values,
        )
        self.check(config)
        return config

    def dspark(self, num_layers: int) -> Dspark | None:
        """The draft head, which is there if its block size is."""
        if "dspark_block_size" not in self.raw:
            return None
        numbers = {}
        for name, least in (("block_size", 1), ("noise_token_id", 0), ("markov_rank", 1)):
            key = f"dspark_{name}"
            numbers[name] = self.needed(self.given(key, least=least), "the DSpark draft head", key)
        targets = self.raw.get("dspark_target_layer_ids")
        if not isinstance(targets, list) or not targets or targets != sorted({*targets}, key=targets.index):
            raise self.fail(
                f"dspark_target_layer_ids is {_show(targets)}, expected a list of layers, each once"
            )
        for target in targets:
            self.number("dspark_target_layer_ids", target, int, 0, num_layers - 1)
        return Dspark(
            numbers["block_size"], numbers["noise_token_id"], tuple(sorted(targets)), numbers["markov_rank"]
        )

    def layers(self) -> tuple[LayerSpec, ...]:
        stated = self.given("num_hidden_layers", "n_layers")
        count = self.needed(stated, "the number of layers", "num_hidden_layers")
        schedules = self.schedules(count)
        if not schedules:
            raise self.fail("the layer schedule is not given; add compress_ratios or layer_types")
        routings = {
            key: [layer < num for layer in range(count)]
            for key, num in self.given("num_hash_layers", "n_hash_layers", least=0).items()
        }
        if "mlp_layer_types" in self.raw:
            names = self.names("mlp_layer_types", ("hash_moe", "moe"), count)
            routings["mlp_layer_types"] = [name == "hash_moe" for name in names]
        if not routings:
            raise self.fail("the hash-routed layers are not given; add num_hash_layers or mlp_layer_types")
        out = []
        for layer in range(count):
            kind, ratio = self.agree({k: s[layer] for k, s in schedules.items()}, f"layer {layer}")
            is_hash = self.agree({k: r[layer] for k, r in routings.items()}, f"hash routing of layer {layer}")
            out.append(LayerSpec(kind, ratio, is_hash))
        return tuple(out)

    def schedules(self, count: int) -> dict[str, list[tuple[LayerKind, int]]]:
        """key -> kind and ratio of each trunk layer."""
        out: dict[str, list[tuple[LayerKind, int]]] = {}
        rates = self.rates()
        if "compress_ratios" in self.raw:
            ratios = self.raw["compress_ratios"]
            if not isinstance(ratios, list) or not all(type(r) is int and 0 <= r <= 2**20 for r in ratios):
                raise self.fail(f"compress_ratios is {_show(ratios)}, expected a list of integers >= 0")
            if len(ratios) < count or any(ratios[count:]):
                raise self.fail(
                    f"compress_ratios has {len(ratios)} entries, {_show(ratios[count:])} after the first "
                    f"{count}; expected one for each of the {count} layers, then zeros for draft blocks"
                )
            out["compress_ratios"] = [(_kind_of(ratio), ratio) for ratio in ratios[:count]]
            for layer, (kind, ratio) in enumerate(out["compress_ratios"]):
                self.agree({"compress_ratios": ratio, **rates.get(kind, {})}, f"the ratio of layer {layer}")
        if "layer_types" in self.raw:
            each = {
                "sliding": 0,
                **{kind: self.agree(rates[kind], f"the {kind} rate") or _RATES[kind] for kind in _RATES},
            }
            kinds = [_HF_KINDS[name] for name in self.names("layer_types", tuple(_HF_KINDS), count)]
            out["layer_types"] = [(kind, each[kind]) for kind in kinds]
        return out

    def names(self, key: str, allowed: tuple[str, ...], count: int) -> list[str]:
        names = self.raw[key]
        if not isinstance(names, list) or len(names) != count or not all(name in allowed for name in names):
            raise self.fail(f"{key} is {_show(names)}, expected {count} of {', '.join(allowed)}")
        return names

    def rates(self) -> dict[str, dict[str, int]]:
        """kind -> key -> tokens per entry, of the keys that give one rate for all layers of a kind."""
        out: dict[str, dict[str, int]] = {kind: {} for kind in _HF_KINDS.values()}
        given = self.raw.get("compress_rates", {})
        if not isinstance(given, dict) or given.keys() - _HF_KINDS.keys():
            raise self.fail(
                f"compress_rates is {_show(given)}, expected an object with keys of {', '.join(_HF_KINDS)}"
            )
        for name, value in given.items():
            kind, key = _HF_KINDS[name], f"compress_rates.{name}"
            is_sliding = kind == "sliding"
            out[kind][key] = self.number(key, value, int, 1 - is_sliding, 0 if is_sliding else 2**20)
        for compressed in _RATES:
            out[compressed] |= self.given(f"compress_rate_{compressed}", most=2**20)
        return out

    def rope_facts(self) -> dict[str, dict[str, Any]]:
        """fact -> key -> value, from rope_scaling, rope_parameters and the short YaRN keys."""
        facts = ("rope_theta", "compress_rope_theta", "share", "yarn")
        out: dict[str, dict[str, Any]] = {fact: {} for fact in facts}
        for name, part in self.rope_parts().items():
            if not isinstance(part, dict):
                raise self.fail(f"{name} is {_show(part)}, expected an object")
            if unknown := sorted(part.keys() - _ROPE_KEYS):
                raise self.fail(f"{name} has the unknown keys {_show(unknown)}; known: {sorted(_ROPE_KEYS)}")
            part = {key: value for key, value in part.items() if value is not None}
            for key, want in _ROPE_FIXED.items():
                found = part.get(key, want)
                if isinstance(found, bool) is not isinstance(want, bool) or found != want:
                    raise self.fail(f"{name}.{key} is {_show(found)}, expected {want!r} in DeepSeek-V4")
            theta = "compress_rope_theta" if name.endswith(".compress") else "rope_theta"
            bases = (theta, "rope_theta", MIN_BASE)
            for fact, key, least in (bases, ("share", "partial_rotary_factor", None)):
                if key in part:
                    out[fact][f"{name}.{key}"] = self.number(f"{name}.{key}", part[key], float, least)
            yarn = self.yarn(name, part)
            if not name.endswith(".main"):
                out["yarn"][name] = yarn
            elif yarn is not None:
                raise self.fail(f"{name} is {_show(part)}, expected no scaling: it is for sliding layers")
        out["share"] |= self.given("partial_rotary_factor", kind=float)
        out["yarn"] |= self.short_yarn()
        return out

    def rope_parts(self) -> dict[str, Any]:
        keys = ("rope_scaling", "rope_parameters")
        parts: dict[str, Any] = {key: self.raw[key] for key in keys if key in self.raw}
        nested = parts.get("rope_parameters")
        if isinstance(nested, dict) and nested.keys() & {"main", "compress"}:
            if nested.keys() != {"main", "compress"}:
                raise self.fail(
                    f"rope_parameters has the keys {_show(sorted(nested))}, expected main and compress"
                )
            del parts["rope_parameters"]
            parts |= {f"rope_parameters.{key}": value for key, value in nested.items()}
        return parts

    def yarn(self, name: str, part: Mapping[str, Any]) -> Yarn | None:
        types = {f"{name}.{key}": part[key] for key in ("type", "rope_type") if key in part}
        kind = self.agree(types, "the RoPE type")
        if kind not in (None, "default", "yarn"):
            raise self.fail(f"{name} is of type {_show(kind)}, expected 'yarn' or 'default'")
        stated = {f"{name}.{key}": part[key] for key in _YARN_KEYS if key in part}
        if kind != "yarn":
            if stated:
                raise self.fail(f"{name} has {', '.join(stated)} but not the type 'yarn'; add it")
            return None
        return self.yarn_of(stated, [f"{name}.{key}" for key in _YARN_KEYS])

    def short_yarn(self) -> dict[str, Yarn | None]:
        keys = ["rope_factor", "original_seq_len", "beta_fast", "beta_slow"]
        stated = {key: self.raw[key] for key in keys if key in self.raw}
        if not stated:
            return {}
        # The official code's way to say: no YaRN.
        if self.given("original_seq_len", least=0) == {"original_seq_len": 0}:
            return {"original_seq_len": None}
        return {"original_seq_len": self.yarn_of(stated, keys)}

    def yarn_of(self, stated: Mapping[str, Any], keys: list[str]) -> Yarn:
        """`keys` are those of the factor, the original length and the two betas."""
        for key in keys[:2]:
            if key not in stated:
                raise self.fail(f"YaRN is incomplete: {', '.join(stated) or 'only its type'}; add {key}")
        values = {**dict(zip(keys[2:], (32.0, 1.0), strict=True)), **stated}
        factor, positions, fast, slow = (
            self.number(key, values[key], int if key == keys[1] else float) for key in keys
        )
        if factor < 1 or fast <= slow:
            raise self.fail(
                f"YaRN factor {factor} with betas {fast} and {slow}; expected a factor of at least 1 and "
                f"{keys[2]} more than {keys[3]}"
            )
        return Yarn(factor, positions, fast, slow)

    def rotary_widths(self, shares: Mapping[str, float], head_dim: int) -> dict[str, int]:
        """partial_rotary_factor as a width: the factor was made by a division, so it may be a little off."""
        out = {}
        for key, share in shares.items():
            width = share * head_dim
            if abs(width - round(width)) > 1e-6 * head_dim:
                raise self.fail(f"{key} is {share}, of head_dim {head_dim} that is {width:g}, not an integer")
            out[f"{key} of head_dim {head_dim}"] = round(width)
        return out

    def check(self, c: ModelConfig) -> None:
        """Facts that are possible one by one but not together."""
        uses_index = any(layer.kind == "csa" for layer in c.layers)
        rules = (
            (c.rope_dim % 2 == 0, f"qk_rope_head_dim {c.rope_dim}: channels are rotated in pairs"),
            (
                0 < c.rope_dim < c.head_dim,
                f"qk_rope_head_dim {c.rope_dim} must be less than head_dim {c.head_dim}",
            ),
            (
                not uses_index or c.rope_dim <= c.index_dim,
                f"qk_rope_head_dim {c.rope_dim} must fit index_head_dim {c.index_dim}",
            ),
            (
                not uses_index or c.index_dim & (c.index_dim - 1) == 0,
                f"index_head_dim {c.index_dim}: the Hadamard rotation needs a power of two",
            ),
            (
                c.dspark is None or c.dspark.noise_id < c.vocab_size,
                f"dspark_noise_token_id {c.dspark and c.dspark.noise_id} of a vocabulary of {c.vocab_size}",
            ),
            (c.num_heads % c.o_groups == 0, f"{c.num_heads} heads do not split into o_groups={c.o_groups}"),
            (
                c.experts_per_token <= c.num_experts,
                f"num_experts_per_tok {c.experts_per_token} of n_routed_experts {c.num_experts}",
            ),
            (
                c.hidden_size % 2 == 0 and c.expert_width % 2 == 0,
                f"hidden_size {c.hidden_size} and moe_intermediate_size {c.expert_width} must be even",
            ),
            (
                max(c.bos_id, c.eos_id) < c.vocab_size,
                f"bos_token_id {c.bos_id} and eos_token_id {c.eos_id} need a vocab_size {c.vocab_size} above",
            ),
        )
        for holds, text in rules:
            if not holds:
                raise self.fail(f"impossible sizes: {text}; check that this config belongs to the weights")
