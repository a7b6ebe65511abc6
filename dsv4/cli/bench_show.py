"""What `dsv4 bench` shows of its figures."""

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from dsv4.cli.show import out, say, size

if TYPE_CHECKING:
    from dsv4.lab.bench.ops import Result
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


def show_decode(line: dict[str, Any]) -> None:
    experts = f"{line['distinct_experts']:g} distinct experts per layer"
    parts = f"weights {size(line['weight_bytes'])} ({experts}), cache {size(line['cache_bytes'])}"
    show_rows(
        f"decode: {title_of(line)}, context {line['context']:,}, batch {line['batch']}",
        [
            (
                "per token",
                f"{line['ms_per_token']:.3f} ms",
                f"median of {line['steps']}, p99 {line['ms_per_token_p99']:.3f} ms",
            ),
            ("speed", f"{line['tokens_per_second']:,.1f} tokens/s", "the bare step, all sequences together"),
            ("read", size(line["read_bytes"]), f"per step: {parts}"),
            (
                "rate",
                f"{line['gb_per_second']:,.0f} GB/s",
                f"of {line['ceiling_gb_per_second']:,.0f} GB/s read at best, just now",
            ),
            ("share", f"{line['share']:.1%}", "of the read ceiling"),
            ("kernels", str(line["kernels_per_step"]), "per step"),
            *spill_rows(line.get("spill")),
        ],
    )


def show_engine(found: dict[str, Any]) -> None:
    """What a user gets."""
    title = f"\nthrough the engine, {found['context']:,} tokens before"
    if "left_out" in found:
        say("note", "yellow", f"{title.strip()}: left out, {found['left_out']}")
        return
    kinds = [kind for kind in found if f"{kind}_share" in found]
    show_rows(
        title,
        [
            (kind, f"{found[kind]:,.1f} tokens/s", f"{found[f'{kind}_share']:.1%} of the bare step's")
            for kind in kinds
        ],
    )


def show_profile(found: "Profile") -> None:
    total = found.busy_us + found.gap_us
    if not found.is_named:
        say("note", "yellow", "there were more kernels than launches, so they are told by their own names")
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


def show_result(result: "Result") -> None:
    what = f"{result.model:6} {result.op:24} {result.backend:8} {result.name:42}"
    if result.refused or result.us is None:
        out.print(f"{what} [bold red]not timed[/]: {escape(result.refused)}")
        return
    floor = result.floor_us
    share = f"{floor:9.1f} {floor / result.us:6.1%} of {result.bound}" if floor else f"{'':16} {result.bound}"
    out.print(f"{what} {result.us:12,.1f} {share}", markup=False)


def spill_rows(spill: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Of `dsv4 bench decode`: what spilled experts cost."""
    if spill is None:
        return []
    read = f"{size(spill['pcie_bytes_per_step'])} per step"
    rows = [
        ("in host memory", size(spill["host_bytes"]), f"{spill['spilled_experts']:,} experts"),
        (
            "hit rate",
            f"{spill['hit_rate']:.2%}",
            f"with {spill['resident_share']:.1%} of the experts resident",
        ),
        ("over PCIe", read, f"at best {spill['host_ceiling_gb_per_second']:,.1f} GB/s"),
    ]
    if "explained_ms" in spill:
        note = f"all resident {spill['ms_all_resident']:.3f} ms, PCIe at its best, both at once if they can"
        rows.append(("explained", f"{spill['explained_ms']:.3f} ms", note))
    return rows


def copied_rows(spill: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Of `dsv4 bench prefill`: the same of prompts."""
    if spill is None:
        return []
    rows = [
        ("in host memory", size(spill["host_bytes"]), f"{spill['spilled_experts']:,} experts"),
        (
            "over PCIe",
            size(spill["pcie_bytes"]),
            f"copied ahead to {spill['staged_slots']} slots, {spill['pcie_gb_per_second']:,.1f} GB/s",
        ),
    ]
    if "explained_ms" in spill:
        share = f"{spill['share_of_all_resident']:.1%} of the speed with all resident"
        rows.append(("all resident", f"{spill['ms_all_resident']:,.1f} ms", share))
        rows.append(("explained", f"{spill['explained_ms']:,.1f} ms", "the longer of that and the copies"))
    return rows
