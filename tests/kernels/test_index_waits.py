"""How the launches of the index wait for those before them; test_overlap.py says what a step must keep to."""

import re

from dsv4.gpu import build
from tests.support.cuda_source import COMMENT, WAIT, functions, until_wait


def test_choices_wait() -> None:
    """Each way out of a kernel has one wait before it; scores are read after it, the rest through L2."""
    found = functions("index/decode_select")
    text = COMMENT.sub("", build.source_path("index/decode_select").read_text())
    assert not re.search(r"\b(positions|slots|pages|table|scores)\[", text), "through L1"
    few, many = found["choose_few"], found["select_many_kernel"]
    short, loop = few.split("bool is_real = !p.warms;")
    assert short.count(WAIT) == short.count("return;") == 1 and short.index(WAIT) < short.index("to[")
    assert short.index(WAIT) < short.index("return;") and "p.scores" not in short
    assert re.match(r"\s*#pragma unroll 1\s*for \(;; is_real = true\) \{", loop)
    early, late = loop.split(f"if (is_real) {WAIT}")
    assert "p.scores" not in early and "return;" not in early and "to[" not in early
    assert "from = is_real ? p.scores + row * p.stride : (const float*)(p.positions + row);" in late
    assert len(re.findall(r"p\.scores", late)) == 1 and re.findall(r"(\S+ )return;", late) == ["(is_real) "]
    assert re.search(r"if \(is_real && [^;{}]*\)\s*to\[", late) and late.count("to[") == 1
    kernel = found["select_few_kernel"]
    assert (
        f"if (count > p.most) {WAIT}\n    else choose_few<" in kernel
        and kernel.count("launch_dependents();") == 1
    )
    taken, shared = many.split("const int* pages = p.pages_of(row);")
    assert re.search(
        rf"if \(block == 0\) choose_few<[^;]*;\s*else {re.escape(WAIT)}\s*return;\s*}}\s*$", taken
    )
    assert "launch_dependents();" in taken and taken.count("return;") == taken.count(WAIT) == 1
    early = until_wait(shared)
    assert early.count("{") == early.count("}") and "return;" not in early, "the wait is inside a branch"
    assert "from[" not in early and "(from" not in early and "to[" not in early


def test_the_index_waits() -> None:
    """In the first pass that counts, before inputs are read and anything is written."""
    found = functions("index/decode")
    text = COMMENT.sub("", build.source_path("index/decode").read_text())
    assert not re.search(r"p\.(q|weights|keys|scales|positions|slots|page_table)\[|table\[", text), (
        "through L1"
    )
    early, late = found["queries_kernel"].split(f"if (is_real) {{\n            {WAIT}")
    assert "launch_dependents();" in early and "return;" not in early
    assert "*at" not in early.split("at = ")[1] and "(at)" not in early
    assert "bool is_real = !p.warms;" in early and "for (;; is_real = true) {" in early
    assert (
        re.search(r"if \(is_real\) \{\s*\*at = [^;]*;\s*return;\s*\}\s*\}\s*\}$", late) and "p.q" not in late
    )
    kernel, few, many = (found[name] for name in ("scores_kernel", "score_few", "score_many"))
    ways = r"if \([^;]*\) score_many\([^;]*;\s*else if \([^;]*\) score_few\([^;]*;\s*else if \(block == 0\) "
    assert re.search(ways + re.escape(WAIT) + r"\s*\}$", kernel) and "launch_dependents();" in kernel
    early, late = few.split(f"if (is_real) {{\n            {WAIT}")
    assert "bool is_real = !p.warms;" in early and "for (;; is_real = true) {" in early
    assert late.index("if (!is_real) continue;") < late.index("p.out[") < late.index("return;")
    keys = text.split("struct Keys {")[1].split("\n};")[0]
    # `prepare` has written some of these in this step: L1 may hold what lay there before.
    assert re.findall(r"\b(pages|words|scales)\[i\](?:\[j\])? = (\w+)\(", keys) == [
        *(("pages", "__ldcg"), ("words", "__ldcg"), ("scales", "__ldcg"))
    ]
    early_many, _ = many.split(f"\n    {WAIT}")
    assert early_many.count("{") == early_many.count("}") + 1, "the wait is inside a branch"
    for part in (kernel, early, early_many, keys):
        assert not re.search(r"p\.(q|weights|out)\b|halved\(|weight\(", part) and "return;" not in part
