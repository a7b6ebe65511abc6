"""What `dsv4 bench` shows of its figures, which are those of its JSON lines."""

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from dsv4.cli.show import out, say_note, size

if TYPE_CHECKING:
    from dsv4.lab.bench.profile import Profile


def title_of(line: dict[str, Any]) -> str:
    kind = "synthetic" if line["is_synthetic"] else "from its folder"
    sizes = f"{line['layers']} layers, {line['experts']} experts"
    return f"{line['model']}, {line['layout']}, {line.get('activations', 'a16')}, {sizes}, {kind}"


def show_rows(title: str, rows: list[tuple[str, str, str]]) -> None:
    out.print(title, style="bold", markup=False)
    table = Table("", "", "", box=None, pad_edge=False, show_header=False)
    for name, value, note in rows:
        table.add_row(name, f"[bold]{value}[/]", f"[dim]{note}[/]")
    out.print(table)


def decode(line: dict[str, Any]) -> None:
    experts = f"{line['distinct_experts']:g} distinct experts per layer"
    parts = f"weights {size(line['weight_bytes'])} ({experts}), cache {size(line['cache_bytes'])}"
    median = f"median of {line['steps']}, p99 {line['ms_per_token_p99']:.3f} ms"
    best = f"of {line['ceiling_gb_per_second']:,.0f} GB/s read at best, just now"
    show_rows(
        f"decode: {title_of(line)}, context {line['context']:,}, batch {line['batch']}",
        [
            ("per token", f"{line['ms_per_token']:.3f} ms", median),
            ("speed", f"{line['tokens_per_second']:,.1f} tokens/s", "the bare step, all sequences together"),
            ("read", size(line["read_bytes"]), f"per step: {parts}"),
            ("rate", f"{line['gb_per_second']:,.0f} GB/s", best),
            ("share", f"{line['share']:.1%}", "of the read ceiling"),
            ("kernels", str(line["kernels_per_step"]), "per step"),
            *_spill_rows(line.get("spill")),
        ],
    )


def engine(found: dict[str, Any]) -> None:
    """What a user gets."""
    title = f"\nthrough the engine, {found['context']:,} tokens before"
    if "left_out" in found:
        say_note(f"{title.strip()}: left out, {found['left_out']}")
        return
    kinds = [kind for kind in found if f"{kind}_share" in found]
    show_rows(
        title,
        [
            (kind, f"{found[kind]:,.1f} tokens/s", f"{found[f'{kind}_share']:.1%} of the bare step's")
            for kind in kinds
        ],
    )


def prefill(line: dict[str, Any]) -> None:
    best = f"of {line['matmul_tflops']:,.0f} TFLOP/s: a BF16 product of 8192 x 8192 x 8192, just now"
    slowest = f"median of {line['rounds']}, slowest {line['ms_slowest']:,.1f} ms"
    prompt = f"{line['tokens']:,} tokens after {line['context']:,}, chunks of {line['chunk']:,}"
    show_rows(
        f"prefill: {title_of(line)}, {prompt}",
        [
            ("prompt", f"{line['ms']:,.1f} ms", slowest),
            ("speed", f"{line['tokens_per_second']:,.0f} tokens/s", ""),
            ("arithmetic", f"{line['tflops']:,.1f} TFLOP/s", "of the products the prompt needs"),
            ("share", f"{line['matmul_share']:.1%}", best),
            *_copied_rows(line.get("spill")),
        ],
    )


def machine(line: dict[str, Any]) -> None:
    versions = f"torch {line['torch']}, triton {line['triton']}, CUDA {line['cuda']}, {line['driver']}"
    memory = f"{size(line['gpu_memory_bytes'])} of {size(line['gpu_memory_total_bytes'])} used"
    out.print(f"\n{line['device_name']}, {memory}; {versions}", markup=False)
    out.print(f"commit {line['commit'] or 'unknown'}, {line['date']}", markup=False)


def profile(found: "Profile") -> None:
    total = found.busy_us + found.gap_us
    if not found.is_named:
        say_note("there were more kernels than launches, so they are told by their own names")
    out.print(f"\nkernels {found.busy_us:,.0f} µs and gaps {found.gap_us:,.0f} µs per step", style="bold")
    table = Table(
        "launch", "layers", *("", "each µs", "gap µs", "ms per step", "share"), box=None, pad_edge=False
    )
    for column in table.columns[2:]:
        column.justify = "right"
    ordered = sorted(found.by_both.items(), key=lambda item: -item[1].busy_us - item[1].gap_us)
    rows = [(name, kind, share) for (name, kind), share in ordered]
    rows += [("all of a kind", kind, share) for kind, share in found.kinds.items()]
    for name, kind, share in rows:
        both = share.busy_us + share.gap_us
        table.add_row(
            *(escape(name), kind, f"{share.count:g} x", f"{share.busy_us / share.count:.2f}"),
            *(f"{share.gap_us / share.count:.2f}", f"{both / 1e3:.3f}", f"{both / total:.1%}"),
        )
    out.print(table)


def _spill_rows(spill: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Of `dsv4 bench decode`: what spilled experts cost."""
    if spill is None:
        return []
    resident = f"with {spill['resident_share']:.1%} of the experts resident"
    return [
        ("in host memory", size(spill["host_bytes"]), f"{spill['spilled_experts']:,} experts"),
        ("hit rate", f"{spill['hit_rate']:.2%}", resident),
        ("over PCIe", size(spill["pcie_bytes_per_step"]), "per step"),
    ]


def _copied_rows(spill: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Of `dsv4 bench prefill`: the same of prompts."""
    if spill is None:
        return []
    copied = f"copied ahead to {spill['staged_slots']} slots, {spill['pcie_gb_per_second']:,.1f} GB/s"
    return [
        ("in host memory", size(spill["host_bytes"]), f"{spill['spilled_experts']:,} experts"),
        ("over PCIe", size(spill["pcie_bytes"]), copied),
    ]
