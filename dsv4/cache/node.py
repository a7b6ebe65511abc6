"""A place in the tree of cached prefixes. Apart from the tree, so that requests can name it without torch."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """The page of `ids` after the tokens of all parents; a root has no page."""

    parent: "Node | None"
    ids: tuple[int, ...] = ()
    page: int = -1
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    is_gone: bool = False
    key: bytes = b""  # of its file, where prefixes are kept in a folder
