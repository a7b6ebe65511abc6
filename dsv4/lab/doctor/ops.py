"""Compares the reference with recorded numbers, and on a GPU every backend of every op with the reference."""

import torch
from torch import Tensor

from dsv4.lab.doctor.findings import Finding
from dsv4.lab.doctor.golden import FINGERPRINTS
from dsv4.ops import IMPLEMENTATIONS
from dsv4.ops.agree import Verdict, compare_all, run
from dsv4.ops.cases import make_cases


def examine_ops() -> list[Finding]:
    """The reference on the CPU first; then, on a GPU, every backend of the table, chosen there or not."""
    out = [_reference(op) for op in IMPLEMENTATIONS]
    if torch.cuda.is_available():
        return out + [finding(verdict) for verdict in compare_all("cuda")]
    others = [f"{op}.{b}" for op, backends in IMPLEMENTATIONS.items() for b in backends if b != "cpu"]
    text = f"no GPU: not examined: {', '.join(others)}"
    return [*out, Finding("ops", "gpu backends", "note", text)]


def finding(verdict: Verdict) -> Finding:
    if not verdict.problem:
        return Finding("ops", verdict.name, "ok", verdict.text)
    remedy = f"do not use it (--op {verdict.name.split('.')[0]}=cpu); report this line"
    return Finding("ops", verdict.name, "fail", verdict.problem, remedy)


def fingerprint(results: list[Tensor]) -> list[float]:
    """Length and one projection of each result: enough to notice a wrong one."""
    out = []
    for result in results:
        flat = result.double().flatten()
        wave = torch.cos(torch.arange(flat.numel(), dtype=torch.float64) * 0.7)
        out += [float(flat.norm()), float(flat @ wave)]
    return out


def fingerprints() -> dict[str, list[float]]:
    """What golden.py records."""
    cases = make_cases(torch.float32)
    return {f"{c.op}.{c.function} {c.name}": fingerprint(run(c, "cpu", "cpu")) for c in cases}


def _reference(op: str) -> Finding:
    name, cases = f"{op}.cpu", [case for case in make_cases(torch.float32) if case.op == op]
    for case in cases:
        key = f"{case.op}.{case.function} {case.name}"
        got, want = fingerprint(run(case, "cpu", "cpu")), FINGERPRINTS[key]
        bound = case.tolerance(torch.float32) * max(map(abs, want))
        if len(got) != len(want) or any(abs(g - w) > bound for g, w in zip(got, want, strict=True)):
            text = f"{case.function} ({case.name}) gives {_short(got)}, elsewhere it gave {_short(want)}"
            remedy = "this torch or CPU computes otherwise: install the pinned torch of requirements.txt"
            return Finding("ops", name, "fail", text, remedy)
    return Finding("ops", name, "ok", f"{len(cases)} cases as recorded")


def _short(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.5g}" for value in values) + "]"
