"""Hugging Face Transformers' DeepSeek-V4 on the same GPU: random weights of the same sizes, BF16, eager.

    python -m bench.beside flash --context 1024 --steps 32

First ours, then theirs, each alone in GPU memory; 4 layers and 16 experts by default. The last line is JSON.
"""

import math
import statistics
import time
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch

from bench import arguments
from dsv4.config import ModelConfig, preset
from dsv4.errors import ConfigError
from dsv4.lab.bench.ceiling import gpu, measure_read
from dsv4.lab.bench.decode import Session, Wanted, figures, release
from dsv4.lab.bench.subject import Reads, Subject, check_fits, check_kernels, other_bytes
from dsv4.model.params import each_kind

LAYERS, EXPERTS = 4, 16  # of both models, unless asked for otherwise
MAX_CONTEXT = 8192  # their eager attention keeps every score of a prompt
WARM, STEPS = 4, 32


def check(context: int) -> Any:
    """The module, or one sentence why it cannot be compared with; before anything is measured."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"this needs Hugging Face Transformers ({error}); pip install transformers"
        ) from None
    if not hasattr(transformers, "DeepseekV4ForCausalLM"):
        raise ConfigError(
            f"transformers {transformers.__version__} has no DeepSeek-V4; install 5.17 or newer"
        )
    if context > MAX_CONTEXT:
        raise ConfigError(
            f"context {context}: Transformers keeps every attention score of a prompt; "
            f"use at most {MAX_CONTEXT}"
        )
    return transformers


def check_theirs(config: ModelConfig, free: int) -> None:
    """Their weights take two bytes each."""
    need = 2 * sum(math.prod(param.shape) * count for param, count in each_kind(config, 0))
    if need > free:
        raise ConfigError(
            f"Transformers' model takes {need / 1e9:.1f} GB, but {free / 1e9:.1f} GB of GPU memory are free; "
            "lower --layers or --experts"
        )


def make(config: ModelConfig, device: torch.device) -> Any:
    """Their model of those sizes, random, in BF16."""
    import transformers

    raw = replace(config, num_mtp_layers=0).to_dict()
    theirs = transformers.DeepseekV4Config(
        **{k: v for k, v in raw.items() if k not in ("architectures", "model_type")}
    )
    options = {"attn_implementation": "eager", "dtype": torch.bfloat16}
    with device:
        model = transformers.DeepseekV4ForCausalLM._from_config(theirs, **options)
    generator = torch.Generator(device).manual_seed(0)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.random_(0, config.num_experts, generator=generator)
    return model.eval()


def measure(config: ModelConfig, context: int, batch: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds per token after a prompt of `context` tokens, by the host's clock."""
    model = make(config, device)
    ids = torch.randint(0, config.vocab_size, (batch, context), device=device)
    times = []
    with torch.inference_mode():
        result = model(ids, use_cache=True, logits_to_keep=1)
        for _ in range(WARM + STEPS):
            start = time.perf_counter()
            chosen = result.logits[:, -1:].argmax(-1)
            result = model(chosen, past_key_values=result.past_key_values, use_cache=True)
            float(result.logits[0, -1, 0])  # waited for, so the step is over
            times.append(1e3 * (time.perf_counter() - start))
    median = statistics.median(times[WARM:])
    return {
        **{"version": version("transformers"), "dtype": "bfloat16", "attention": "eager"},
        **{"steps": STEPS, "ms_per_token": round(median, 4)},
        "tokens_per_second": round(batch * 1e3 / median, 2),
    }


def ours(subject: Subject, wanted: Wanted, device: torch.device) -> dict[str, Any]:
    layout = wanted.layout(subject.config)
    check_kernels(subject.config, device, layout.max_context)
    check_fits(subject, other_bytes(layout, (wanted.rows,)), torch.cuda.mem_get_info(device)[0])
    with torch.inference_mode():
        ceiling = measure_read(device)
        bundle = subject.bundle(device)
        timing = Session(bundle, wanted, device).time()
        reads = Reads.of(bundle.weights.tensors, subject.config.num_layers)
    return {**subject.facts(), **figures(timing, wanted, layout, reads, ceiling)}


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("name", help="flash, pro or tiny: random weights of these sizes")
    parser.set_defaults(layers=LAYERS)
    given = parser.parse_args()
    given.experts = given.experts or min(EXPERTS, preset(given.name).num_experts)
    check(given.context)
    subject, device = arguments.subject_of(given, given.name), gpu()
    wanted = Wanted(given.context, given.batch[0], given.steps)
    line = ours(subject, wanted, device)
    release()
    check_theirs(subject.config, torch.cuda.mem_get_info(device)[0])
    theirs = measure(subject.config, given.context, wanted.batch, device)
    times = round(theirs["ms_per_token"] / line["ms_per_token"], 2)
    arguments.finish({"bench": "beside", **line, "transformers": theirs, "times_as_fast": times})


if __name__ == "__main__":
    arguments.run(main)
