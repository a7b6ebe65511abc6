"""A decode step at V4-Flash's or V4-Pro's widths on a CPU, kernels emulated: two rows, and one of them alone.

    TRITON_INTERPRET=1 python -m bench.published_widths pro

Two layers of that model, a CSA one routed by hash and an HCA one, every width its own; 8 experts of which 2
are chosen, NVFP4, BF16. Prints how far logits are from the reference's, and whether the row alone has the
same bits. Pro: 10 minutes and 5 GB on a CPU that others share; as much of it for the model as for a step.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.config import preset
from dsv4.lab.init import make
from tests.support.emulated import Decoders, Launches

POSITION = 383  # blocks of 4 and of 128 end here, and more entries are there than are selected


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=("flash", "pro"))
    published = preset(parser.parse_args().model)
    torch.set_num_threads(1)
    config = replace(
        published,
        layers=published.layers[2:4],
        **{
            "num_mtp_layers": 0,
            "vocab_size": 512,
            "num_experts": 8,
            "experts_per_token": 2,
            "index_topk": 64,
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        path, launches = Path(folder) / "model", Launches(Path(folder))
        for _ in make(path, config, "hfnvfp4", seed=3):
            pass
        begin = time.monotonic()
        batch = Decoders(path, launches, 2, POSITION, torch.bfloat16)
        batch.load([(0, POSITION, 7), (1, POSITION, 8)])
        want, (got,) = batch.reference(), batch.step()
        off = float(((got - want).abs().amax(1) / want.abs().amax(1)).max())
        alone = Decoders(path, launches, 1, POSITION, torch.bfloat16, slots=2)
        alone.load([(0, POSITION, 7)])
        same = "the same bits" if torch.equal(alone.step()[0], got[:1]) else "OTHER BITS"
        took = time.monotonic() - begin
    print(f"{config.hidden_size} channels, {sum(launches.counts.values())} CUDA launches, {took:.0f} s")
    print(f"logits: {off:.2%} of the largest from the reference's in BF16; a row alone has {same}")


if __name__ == "__main__":
    main()
