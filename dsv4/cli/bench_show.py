"""What `dsv4 bench` shows of its figures, which are those of its JSON lines."""

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from dsv4.cli.show import out, say_note, size

if TYPE_CHECKING:
    from dsv4.lab.bench.ops import Result
    from dsv4.lab.bench.profile import Profile


def title_of(line: dict[str, Any]) -> str:
    kind = "synthetic" if line["is_synthetic"] else "from its folder"
    sizes = f"{line['layers']} layers, {line['experts']} experts"
    return f"{line['model']}, {line['layout']}, {line.get('activations', 'a16')}, {sizes}, {kind}"


def _rows(title: str, rows: list[tuple[str, str, str]]) -> None:
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
    _rows(
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
    _rows(
        title,
        [
            (kind, f"{found[kind]:,.1f} tokens/s", f"{found[f'{kind}_share']:.1%} of the bare step's")
            for kind in kinds
        ],
    )


def sweep(lines: list[dict[str, Any]]) -> None:
    out.print("\nover context and batch", style="bold")
    table = Table("context", "batch", "tokens/s", "ms per token", "share", box=None, pad_edge=False)
    for one in lines:
        if "left_out" in one:
            cells = [f"[yellow]left out: {one['left_out']}[/]"]
        else:
            cells = [f"{one['tokens_per_second']:,.1f}", f"{one['ms_per_token']:.3f}", f"{one['share']:.1%}"]
        table.add_row(f"{one['context']:,}", str(one["batch"]), *cells)
    out.print(table)


def beside(line: dict[str, Any], theirs: dict[str, Any]) -> None:
    times = theirs["ms_per_token"] / line["ms_per_token"]
    ours = f"per token, {line['layout']}: {times:.1f} times as fast"
    _rows(
        f"\nbeside Transformers {theirs['version']}: {line['layers']} layers, {line['experts']} experts",
        [
            ("theirs", f"{theirs['ms_per_token']:.3f} ms", "per token, bfloat16, eager"),
            ("ours", f"{line['ms_per_token']:.3f} ms", ours),
        ],
    )


def prefill(line: dict[str, Any]) -> None:
    best = f"of {line['matmul_tflops']:,.0f} TFLOP/s: a BF16 product of 8192 x 8192 x 8192, just now"
    slowest = f"median of {line['rounds']}, slowest {line['ms_slowest']:,.1f} ms"
    prompt = f"{line['tokens']:,} tokens after {line['context']:,}, chunks of {line['chunk']:,}"
    _rows(
        f"prefill: {title_of(line)}, {prompt}",
        [
            ("prompt", f"{line['ms']:,.1f} ms", slowest),
            ("speed", f"{line['tokens_per_second']:,.0f} tokens/s", ""),
            ("arithmetic", f"{line['tflops']:,.1f} TFLOP/s", "of the products the prompt needs"),
            ("share", f"{line['matmul_share']:.1%}", best),
            *_copied_rows(line.get("spill")),
        ],
    )


def ranks(line: dict[str, Any]) -> None:
    _rows(
        f"one rank of {line['ranks']}: {title_of(line)}, context {line['context']:,}, batch {line['batch']}",
        [
            ("weights", size(line["weight_bytes"]), "of this rank"),
            ("per token", f"{line['ms_per_token']:.3f} ms", f"median of {line['steps']}, measured"),
            *(predicted_rows(line) if line["ranks"] > 1 else ()),
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


def op(result: "Result") -> None:
    what = f"{result.model:6} {result.op:24} {result.backend:8} {result.name:42}"
    if result.refused or result.us is None:
        out.print(f"{what} [bold red]not timed[/]: {escape(result.refused)}")
        return
    floor = result.floor_us
    share = f"{floor:9.1f} {floor / result.us:6.1%} of {result.bound}" if floor else f"{'':16} {result.bound}"
    out.print(f"{what} {result.us:12,.1f} {share}", markup=False)


def _spill_rows(spill: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Of `dsv4 bench decode`: what spilled experts cost."""
    if spill is None:
        return []
    read = f"{size(spill['pcie_bytes_per_step'])} per step"
    resident = f"with {spill['resident_share']:.1%} of the experts resident"
    rows = [
        ("in host memory", size(spill["host_bytes"]), f"{spill['spilled_experts']:,} experts"),
        ("hit rate", f"{spill['hit_rate']:.2%}", resident),
        ("over PCIe", read, f"at best {spill['host_ceiling_gb_per_second']:,.1f} GB/s"),
    ]
    if "explained_ms" in spill:
        note = f"all resident {spill['ms_all_resident']:.3f} ms, PCIe at its best, both at once if they can"
        rows.append(("explained", f"{spill['explained_ms']:.3f} ms", note))
    return rows


def _copied_rows(spill: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Of `dsv4 bench prefill`: the same of prompts."""
    if spill is None:
        return []
    copied = f"copied ahead to {spill['staged_slots']} slots, {spill['pcie_gb_per_second']:,.1f} GB/s"
    rows = [
        ("in host memory", size(spill["host_bytes"]), f"{spill['spilled_experts']:,} experts"),
        ("over PCIe", size(spill["pcie_bytes"]), copied),
    ]
    if "explained_ms" in spill:
        share = f"{spill['share_of_all_resident']:.1%} of the speed with all resident"
        rows.append(("all resident", f"{spill['ms_all_resident']:,.1f} ms", share))
        rows.append(("explained", f"{spill['explained_ms']:,.1f} ms", "the longer of that and the copies"))
    return rows


def predicted_rows(line: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Of `dsv4 bench ranks`: what several GPUs would reach."""
    rows = []
    at_published = "ms_added_at_published"
    without = f"the step without them, {line['ms_without_all_reduces']:.3f} ms,"
    for rate, step, each, added, why in (
        ("predicted_tokens_per_second", "the step", "all_reduce_us", "ms_added", "assumed"),
        ("predicted_counted_once", without, "all_reduce_us", "ms_added", "assumed"),
        ("predicted_at_published", "the step", "published_all_reduce_us", at_published, "published"),
    ):
        waits = f"{line['all_reduces']} all-reduces of {line[each]:.1f} us, {why}"
        what = f"{line['ranks']} GPUs: {step} + {line[added]:.3f} ms for {waits}"
        rows.append(("predicted", f"{line[rate]:,.1f} tokens/s", what))
    step = "the step has its own pushes and waits already, so what both have is counted twice; without, once"
    return [*rows, ("", "", f"{step}; ranks that come late are not counted")]
