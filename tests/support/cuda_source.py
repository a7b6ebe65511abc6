"""Reads a CUDA source: its functions, and what stands before their wait."""

import re

from dsv4.gpu import build

COMMENT = re.compile(r"//[^\n]*")
WAIT = "wait_for_prerequisites();"


def functions(name: str) -> dict[str, str]:
    """Functions of a CUDA source or header, comments taken out: name -> its head, then its body."""
    if name.endswith(".cuh"):
        (path,) = (header for header in build.HEADERS if header.name == name)
    else:
        path = build.source_path(name)
    text, out = COMMENT.sub("", path.read_text()), {}
    depth, start, head = 0, 0, ""
    for at, letter in enumerate(text):
        if letter == "{":
            depth += 1
            head = text[start:at].rstrip() if depth == 1 else head
        elif letter == "}":
            depth -= 1
            if depth == 0 and head.endswith(")"):
                opened, level = len(head) - 1, 1
                while level:
                    opened -= 1
                    level += {")": 1, "(": -1}.get(head[opened], 0)
                out[re.findall(r"\w+", head[:opened])[-1]] = text[start : at + 1]
        if depth == 0 and letter in "};":
            start = at + 1
    return out


def until_wait(function: str) -> str:
    assert WAIT in function, "never waits"
    return function[: function.index(WAIT)]
