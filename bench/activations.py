"""What rounded activations cost: a table of settings on the same weights, and where in the network it hurts.

    python -m bench.activations --jobs 2                      # the embedded model; minutes on two cores
    python -m bench.activations --suites text --tokens 64     # quicker, less certain

Every setting runs in a process of its own, on one thread, in float32 on the CPU. Attention: wq_a, wkv, wq_b
and the indexer's wq_b; output: wo_b; experts: routed and shared ones.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

PARTS = ("attention", "output", "experts")
# What each part's inputs are rounded to, and the head; the first is what the others are held against.
SETTINGS = [
    ("a16", "a16", "a16", "stored"),
    ("a8", "a8", "a8", "stored"),
    ("a4", "a4", "a4", "stored"),
    ("a4", "a16", "a16", "stored"),
    ("a16", "a4", "a16", "stored"),
    ("a16", "a16", "a4", "stored"),
    ("a8", "a8", "a4", "stored"),
    ("a4", "a4", "a8", "stored"),
    ("a16", "a16", "a16", "nvfp4"),
]


def part_of(name: str) -> str:
    return "experts" if ".ffn." in name else "output" if name.endswith("wo_b") else "attention"


def one(setting: tuple[str, ...], suites: list[str], tokens: int) -> dict[str, Any]:
    """All figures of a setting."""
    from dsv4 import Engine, EngineConfig
    from dsv4.lab.compare import compare, record
    from dsv4.lab.evalset import choose, read_set
    from dsv4.lab.evaluate import evaluate, figures
    from dsv4.model.bundle import Bundle
    from dsv4.models import evaluation_set

    *roundings, head = setting
    rounding = dict(zip(PARTS, roundings, strict=True))
    items = read_set(evaluation_set())

    def load(is_rounded: bool, **options: Any) -> Engine:
        Bundle.activations_of = lambda self, name: (  # type: ignore[method-assign, assignment]
            rounding[part_of(name)] if is_rounded and name in self.weights.quantised else "a16"
        )
        options |= {"head": head} if is_rounded else {}
        return Engine.load(None, EngineConfig(device="cpu", compute_dtype="float32", threads=1, **options))

    out: dict[str, Any] = {"setting": setting}
    plain, rounded = (load(is_rounded, max_batch=1, max_context=512) for is_rounded in (False, True))
    assert plain.tokenizer is not None
    found, streams, shares = [], [], []
    for item in choose(items, "text", None):
        ids = [plain.tokenizer.bos_id, *plain.tokenizer.encode_text(item.text)][:tokens]
        result = compare(record(plain, ids), rounded, ids)
        found.append(result.logits.as_dict())
        layers = [layer for layer in result.layers.values() if layer.name.startswith("layers.")]
        streams.append([layer.parts["hc_ffn.streams"].relative for layer in layers])
        shares.append([layer.routing.share for layer in layers if layer.routing.chosen])
    count = sum(f["positions"] for f in found)
    mean = lambda key: sum(f[key] * f["positions"] for f in found) / count  # noqa: E731
    out |= {"positions": count, "kl": mean("kl_mean"), "top1": mean("top1_agreement")}
    out["kl_max"] = max(f["kl_max"] for f in found)
    out["streams"] = [sum(column) / len(column) for column in zip(*streams, strict=True)]
    out["same_experts"] = [sum(column) / len(column) for column in zip(*shares, strict=True)]
    engine = load(True, max_batch=8)
    for suite in suites:
        out[suite] = figures(evaluate(engine, choose(items, suite, None), 600))[suite]
    return out


def show(found: list[dict[str, Any]], suites: list[str]) -> None:
    """As Markdown."""
    titles = {"text": "bits per byte", "sums": "sums", "recall": "recall"}
    head = [*PARTS, "head", *(titles[s] for s in suites)]
    head += ["KL per token, mean (largest)", "top-1", "streams, first layer", "last layer", "same experts"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for line in found:
        cells = [*line["setting"]]
        for suite in suites:
            part = line[suite]
            rate = part.get("exact") or part.get("found")
            cells.append(f"{part['bits_per_byte']:.4f}" if suite == "text" else f"{rate['share']:.1%}")
        cells += [f"{line['kl']:.4f} ({line['kl_max']:.2f})", f"{line['top1']:.1%}"]
        cells += [f"{line['streams'][0]:.3f}", f"{line['streams'][-1]:.3f}"]
        cells.append(f"{sum(line['same_experts']) / len(line['same_experts']):.1%}")
        print("| " + " | ".join(cells) + " |")
    print(f"\n{found[0]['positions']} tokens for KL, top-1 and errors")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of each held-out text, for KL and errors")
    parser.add_argument("--suites", default="text,sums,recall")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    given = parser.parse_args()
    suites = [suite for suite in given.suites.split(",") if suite]
    if given.setting:
        print(json.dumps(one(tuple(given.setting.split(",")), suites, given.tokens)))
        return

    def run(setting: tuple[str, ...]) -> dict[str, Any]:
        options = ("--setting", ",".join(setting), "--suites", given.suites, "--tokens", str(given.tokens))
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{setting}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(run, SETTINGS))
    show(found, suites)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
