"""What is computed (ModelConfig) and how (EngineConfig). Frozen; no torch; JSON keys are config_json's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv4.errors import ConfigError

LayerKind = Literal["sliding", "csa", "hca"]


@dataclass(frozen=True)
class LayerSpec:
    """One trunk layer: what it attends to, tokens per compressed entry (0: none), how it routes."""

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
class Dspark:
    """A draft head of several stages: drafts `block_size` tokens at once from the target layers' streams."""

    block_size: int
    noise_id: int
    target_layers: tuple[int, ...]
    markov_rank: int


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
    dspark: Dspark | None

    def drafter(self, num_blocks: int) -> str:
        """What drafts are made with, of a checkpoint with so many MTP blocks or DSpark stages."""
        if not num_blocks:
            return "no drafter"
        if self.dspark is None:
            return "MTP drafter"
        return f"DSpark drafter ({num_blocks} stages, blocks of {self.dspark.block_size})"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def release(self) -> Literal["april", "0731"]:
        """Whose rules a conversation's prompt follows: those of 31 July came with the DSpark draft head."""
        return "0731" if self.dspark else "april"

    @property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.o_groups

    @property
    def index_factor(self) -> float:
        """What the weights of index heads are multiplied by."""
        return self.index_dim**-0.5 * self.index_heads**-0.5

    def selects(self, ratio: int, tokens: int) -> bool:
        """Whether a CSA query over so many tokens chooses among its entries; else it takes them all."""
        return tokens // ratio > self.index_topk

    @classmethod
    def load(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` (a file, or the folder that holds it)."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            raw = json.loads(path.read_bytes(), object_pairs_hook=lambda pairs: _unique(path, pairs))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist; give a model folder that holds config.json and *.safetensors"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
        # ValueError: not UTF-8, not JSON, or an integer of thousands of digits.
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON ({error}); fetch it again") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} holds a {type(raw).__name__}, expected a JSON object; fetch it again")
        return cls.from_dict(raw, where=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """The strict reading of a config dictionary; a complaint names `where` and the key."""
        from dsv4.config_json import parse

        return parse(raw, where)

    def to_dict(self) -> dict[str, Any]:
        """The Hugging Face form with flat keys, as the published checkpoints carry it."""
        from dsv4.config_json import to_json

        return to_json(self)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ConfigError(f"{path} gives the key {key!r} twice; keep one of them")
        out[key] = value
    return out


# What Flash and Pro share; the published files differ only in the keys of _PRESETS.
_COMMON: dict[str, Any] = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}
_PRESETS: dict[str, dict[str, Any]] = {
    "flash": {
        **{"hidden_size": 4096, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8},
        **{"index_topk": 512, "n_routed_experts": 256, "moe_intermediate_size": 2048},
        **{"routed_scaling_factor": 1.5, "num_hidden_layers": 43},
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    },
    "pro": {
        **{"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16},
        **{"index_topk": 1024, "n_routed_experts": 384, "moe_intermediate_size": 3072},
        **{"routed_scaling_factor": 2.5, "num_hidden_layers": 61},
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    },
    "tiny": {
        **{"hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 128, "o_groups": 2},
        **{"index_topk": 32, "n_routed_experts": 8, "moe_intermediate_size": 128},
        **{"routed_scaling_factor": 1.5, "num_hidden_layers": 4, "num_hash_layers": 1},
        **{"vocab_size": 512, "head_dim": 128, "o_lora_rank": 64, "sliding_window": 64},
        **{"index_n_heads": 8, "index_head_dim": 64, "num_experts_per_tok": 2},
        "compress_ratios": [0, 4, 128, 4, 0],
        "max_position_embeddings": 65536,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 4096},
    },
}


def preset(name: str) -> ModelConfig:
    """`flash`, `pro`: the published models. `tiny`: every layer kind in a few megabytes, for tests."""
    if name not in _PRESETS:
        raise ConfigError(f"unknown preset {name!r}; use one of {', '.join(_PRESETS)}")
    return ModelConfig.from_dict({**_COMMON, **_PRESETS[name]}, where=f"preset {name}")


Activations = Literal["a16", "a8", "a4"]
_CHOICES = {
    "activations": ("a16", "a8", "a4"),
    "compute_dtype": ("auto", "float32", "bfloat16"),
    "qat": ("on", "off"),
    "cache": ("auto", "fp8", "bf16", "f32"),
    "weights": ("auto", "dense", "packed"),
    "head": ("stored", "nvfp4"),
}


@dataclass(frozen=True)
class EngineConfig:
    """Every knob of the engine, in the words of its flag. `auto` is settled once, when the engine is built.

    max_context: tokens one sequence may have, prompt and answer together, e.g. 32k
    gpus: GPUs that share the model: how many, or which, e.g. 2 or 0,1

    Size and memory
    device: auto, cpu, cuda or cuda:N
    max_batch: sequences that run at the same time
    chunk: prompt tokens processed per step; default: 512 on a CPU, 4096 on a GPU
    max_stall_ms: longest step that processes a prompt while others wait for a token (best effort)
    threads: CPU threads; default: what suits the model's size
    cache_pages: pages of the cache, one per 256 tokens; default: enough for max-batch x max-context
    spill: experts in pinned host memory: off, auto (those that do not fit on the GPU) or N per layer
    expert_memory: bytes of GPU memory for experts; default: all that is left
    swap_share: share of PCIe's bandwidth for moving experts that become hot or cold; 0: none

    Prefix cache
    prefix_snapshots: saved states of the prefix cache; 0 turns it off
    prefix_dir: keep the prefix cache in this folder over restarts; it holds traces of prompts
    prefix_dir_bytes: size limit of that folder; the least recently used files go first

    Precision
    activations: inputs of quantised linears: a16 (unrounded), a8 (FP8, as the official code) or a4
    compute_dtype: auto, float32 or bfloat16
    qat: on: the rounding the model was trained with; off: none
    cache: key/value cache: auto, fp8 (lossless with qat on), bf16 or f32
    weights: in memory: auto, dense (decoded once) or packed (as stored, slower on a CPU)
    head: output matrix: stored, or nvfp4 (rounded at load: a third of the bytes, less exact)

    Several processes
    ranks: CPU processes that share the model, to try what several GPUs do
    expert_parallel: give each rank whole experts, not a part of each
    rank_seconds: how long ranks wait for one another before all of them end

    Speculation and debugging
    speculate: tokens to draft per step, which never changes a token: auto, off (no drafter is loaded) or K
    no_graph: on a GPU, launch kernels one by one: the same tokens, slower
    no_overlap: on a GPU, do not overlap kernels (no PDL): the same tokens, slower
    ops: backend of an op, or a module with its functions
    """

    device: str = "auto"
    activations: Activations = "a16"
    compute_dtype: str = "auto"
    qat: str = "on"
    cache: str = "auto"
    weights: str = "auto"
    head: str = "stored"
    max_context: int | None = None
    max_batch: int = 8
    chunk: int | None = None
    max_stall_ms: int = 100
    threads: int | None = None
    gpus: str | None = None
    ranks: int = 1
    expert_parallel: bool = False
    rank_seconds: float = 20.0
    no_graph: bool = False
    no_overlap: bool = False
    prefix_snapshots: int = 64
    prefix_dir: str | None = None
    prefix_dir_bytes: int = 16 << 30
    cache_pages: int | None = None
    spill: str = "auto"
    expert_memory: int | None = None
    swap_share: float = 0.1
    speculate: str = "auto"
    ops: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if self.spill not in ("off", "auto") and not str(self.spill).isdecimal():
            raise ConfigError(f"spill is {self.spill!r}, expected off, auto or a number of experts per layer")
        if not isinstance(self.swap_share, int | float) or not 0 <= self.swap_share <= 1:
            raise ConfigError(f"swap_share is {self.swap_share!r}, expected a share from 0 to 1")
        needed = ("max_batch", "max_stall_ms", "ranks")
        for name in (*needed, "chunk", "max_context", "threads", "cache_pages", "expert_memory"):
            value = getattr(self, name)
            if value is None and name not in needed:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1")
        wanted = self.speculate
        is_number = isinstance(wanted, str) and wanted.isdecimal() and int(wanted) > 0
        if wanted not in ("off", "auto") and not is_number:
            raise ConfigError(f"speculate is {wanted!r}, expected 'off', 'auto' or a number of tokens as '3'")
        if type(self.prefix_snapshots) is not int or self.prefix_snapshots < 0:
            raise ConfigError(
                f"prefix_snapshots is {self.prefix_snapshots!r}, expected 0 (no prefix cache) or more"
            )
        if not 0.1 <= self.rank_seconds <= 3600:
            raise ConfigError(f"rank_seconds is {self.rank_seconds!r}, expected 0.1 to 3600")
        if self.gpus is not None and (self.ranks > 1 or self.device not in ("auto", "cuda")):
            raise ConfigError("gpus names the devices itself; leave device and ranks out")
        if type(self.prefix_dir_bytes) is not int or self.prefix_dir_bytes < 1:
            raise ConfigError(f"prefix_dir_bytes is {self.prefix_dir_bytes!r}, expected a number of bytes")
        if self.prefix_dir is not None and not self.prefix_snapshots:
            raise ConfigError("prefix_dir keeps what the prefix cache has, and prefix_snapshots 0 is none")
        if self.qat == "off" and self.cache == "fp8":
            raise ConfigError(
                "cache fp8 is lossless only for values that were rounded to FP8 (qat on); "
                "with qat off use cache auto, bf16 or f32"
            )
