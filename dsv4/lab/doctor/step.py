"""Runs a decode step by its kernels and by what each launch means; names the first launch that differs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.cache.store import Cache
from dsv4.config import Activations
from dsv4.errors import ConfigError, DeviceError
from dsv4.lab.bench.decode import Wanted, fill
from dsv4.lab.bench.subject import DTYPE, of_folder, synthetic
from dsv4.lab.doctor.findings import Finding
from dsv4.model.bundle import Bundle
from dsv4.model.model import Model
from dsv4.ops.sample.cpu import pack
from dsv4.step.buffers import ROWS
from dsv4.step.draft import Draft
from dsv4.step.run import Decoder, Mismatch, check
from dsv4.weights.load import Progress

# Without a model folder: layers of every kind at Flash's sizes, with random weights.
LAYERS, EXPERTS = 6, 16
REMEDY = (
    "do not use this GPU until that launch is right: please report the line above with `dsv4 info --json`"
)
Told = Callable[[int, int], object]  # launches done, launches in all


def place(decoder: Decoder, context: int, vocab: int) -> None:
    """A token of each row, each in its own slot, at its own place in its blocks, sampled in its own way."""
    f = decoder.buffers
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(0, vocab, (f.rows,), generator=generator).tolist()
    rows = [(f.rows - 1 - row, max(0, context - 1 - row), ids[row]) for row in range(f.rows)]
    settings = [
        pack(temperature=(0.0, 0.7)[row % 2], top_p=0.95, seed=row, num_top=3 if row % 3 == 2 else -1)
        for row in range(f.rows)
    ]
    decoder.load(rows, torch.tensor(settings), send=lambda staged: staged.to(f.inputs.device))


def place_drafts(draft: Draft, context: int) -> None:
    """Give each sequence an anchor, and each row of the step before a position in turn, one not committed."""
    d = draft.drafter
    generator = torch.Generator().manual_seed(context)
    count, rows = len(d.anchors), len(d.taps)
    number = torch.arange(count)
    vocab = draft.config.vocab_size
    d.anchors.copy_(torch.randint(0, vocab, (count,), generator=generator))
    d.anchors_at.copy_((context - number).clamp(min=1))
    d.anchors_slots.copy_(count - 1 - number)
    settings = [pack(temperature=(0.0, 0.7)[r % 2], top_p=0.95, seed=r) for r in range(count)]
    d.settings.copy_(torch.tensor(settings))
    d.taps.copy_(torch.randn(d.taps.shape, generator=generator))
    at = torch.arange(rows)
    d.slots.copy_(at % count)
    d.committed.copy_(torch.where(at % 4 == 3, -1, (context - 1 - at // count).clamp(min=0)))


def raise_sinks(bundle: Bundle) -> None:
    """Let random sinks count: beside some hundred random keys they would be lost in rounding."""
    for name, tensor in bundle.weights.tensors.items():
        if name.endswith("attn_sink"):
            assert isinstance(tensor, torch.Tensor)
            tensor.add_(4.0)


def mismatches(step: Decoder | Draft, told: Told | None = None) -> list[Mismatch]:
    """The launches that differ, in their order; each has the inputs that kernels gave it."""
    found = []
    for number, (_, mismatch) in enumerate(check(step.launches), 1):
        if mismatch is not None:
            found.append(mismatch)
        if told is not None:
            told(number, len(step.launches))
    return found


def conclusion(name: str, launches: int, found: Sequence[Mismatch]) -> Finding:
    if not found:
        return Finding("step", name, "ok", f"{launches} launches compute what they mean")
    more = f"; {len(found) - 1} later launches differ too" if len(found) > 1 else ""
    return Finding("step", name, "fail", f"{found[0]}{more}", REMEDY)


@torch.inference_mode()
def examine_steps(
    model: Path | None,
    rows: Sequence[int],
    contexts: Sequence[int],
    activations: Activations,
    reading: Progress | None = None,
    told: Told | None = None,
) -> Iterator[Finding]:
    """One finding for each number of rows and context."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "--step compares kernels on a GPU, and there is none; on a CPU the tests emulate it"
        )
    if bad := [number for number in rows if number not in ROWS]:
        raise ConfigError(f"rows is {bad[0]}, expected one of {', '.join(map(str, ROWS))}: steps have these")
    device = torch.device("cuda", torch.cuda.current_device())
    subject = (
        synthetic("flash", EXPERTS, LAYERS, "modelopt", drafts=True) if model is None else of_folder(model)
    )
    subject = replace(subject, activations=activations)
    wanted = [Wanted(context, max(rows), steps=1) for context in contexts]
    layouts = [
        each.layout(subject.config) for each in wanted
    ]  # refuses what the model's positions do not allow
    free, _ = torch.cuda.mem_get_info(device)
    split = subject.split("auto", 2 * max(layout.store_bytes() for layout in layouts) + (8 << 30), free)
    bundle = subject.bundle(device, reading, split)
    if model is None:
        raise_sinks(bundle)
    stages = bundle.weights.num_mtp_layers if bundle.config.dspark else 0
    for context, layout in zip(
        contexts, [replace(each, num_mtp_layers=stages) for each in layouts], strict=True
    ):
        yield from _at(bundle, rows, context, Cache(layout, device, DTYPE), activations, told)


def _at(
    bundle: Bundle,
    rows: Sequence[int],
    context: int,
    cache: Cache,
    activations: str,
    told: Told | None,
) -> Iterator[Finding]:
    capacity = cache.layout.max_context
    model = Model(bundle, capacity, cache.page_table.device, copies_ahead=False)
    latest = torch.zeros(cache.layout.num_slots, dtype=torch.long, device=cache.page_table.device)
    for number in rows:
        fill(cache)
        decoder = Decoder(bundle, model, cache, number, latest=latest, taps=True)
        place(decoder, context, bundle.config.vocab_size)
        found = mismatches(decoder, told)
        name = f"{number} rows at {context:,} tokens, {activations}"
        yield conclusion(name, len(decoder.launches), found)
        if model.dspark is not None:
            draft = Draft(bundle, model, cache, number, decoder.buffers)
            place_drafts(draft, context)
            found = mismatches(draft, told)
            yield conclusion(f"drafts of {name}", len(draft.launches), found)
