"""Reads a Triton kernel's source: which pointers it loads before its PDL wait, and after; where it stores.

A walk over the syntax tree, into helper functions too, with the arguments of one launch: a condition on those
alone is decided, of any other both branches are walked.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass, field
from typing import Any

from triton.runtime.jit import JITFunction

WAIT, TRIGGER = "wait_for_prerequisites", "launch_dependents"
Roots = frozenset[str]
NOTHING: Roots = frozenset()


class _Pointer:
    """What a pointer is to a condition, wherever it points: not None."""

    def __add__(self, offset: object) -> "_Pointer":
        return self


POINTER = _Pointer()


@dataclass
class Found:
    early: set[str] = field(default_factory=set)  # loaded before the wait
    late: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    through_l1: set[str] = field(default_factory=set)  # of the early ones, without ".cg"
    stored_early: set[str] = field(default_factory=set)
    triggers: set[bool] = field(default_factory=set)  # whether the wait came before
    waits: bool = False  # on every path


def read(kernel: JITFunction, arguments: dict[str, Any], is_pointer: Any) -> Found:
    """`arguments` by name, as they are launched; `is_pointer` tells which of them are tensors."""
    found = Found()
    roots = {name: frozenset([name]) for name, value in arguments.items() if is_pointer(value)}
    known = {name: POINTER if name in roots else value for name, value in arguments.items()}
    walk = _Walk(found, kernel.fn.__globals__, roots, known, False)
    walk.body(_definition(kernel).body)
    found.waits = walk.waited
    return found


def _definition(function: JITFunction) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


class _Walk:
    """One function. `roots`: the pointers a name is made of; `known`: names whose value is decided."""

    def __init__(
        self,
        found: Found,
        names: dict[str, Any],
        roots: dict[str, Roots],
        known: dict[str, Any],
        waited: bool,
    ) -> None:
        self.found, self.names, self.roots, self.known, self.waited = found, names, roots, known, waited
        self.returned: Roots = NOTHING

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            assert node.value is not None
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            roots = self.expression(node.value)
            for target in targets:
                for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
                    kept = self.roots.get(name, NOTHING) if isinstance(node, ast.AugAssign) else NOTHING
                    self.roots[name] = roots | kept
                    self.known.pop(name, None)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                is_known, value = self.decide(node.value)
                if is_known:
                    self.known[node.target.id] = value
        elif isinstance(node, ast.Expr):
            self.expression(node.value)
        elif isinstance(node, ast.Return):
            self.returned |= NOTHING if node.value is None else self.expression(node.value)
        elif isinstance(node, ast.If):
            self.expression(node.test)
            is_known, value = self.decide(node.test)
            if is_known:
                self.body(node.body if value else node.orelse)
            else:
                self.either(node.body, node.orelse)
        elif isinstance(node, ast.For | ast.While):
            self.expression(node.iter if isinstance(node, ast.For) else node.test)
            # Twice, for what a round leaves to the next; a loop may also have no round at all.
            self.either(node.body + node.body, [])
        else:
            raise AssertionError(f"a statement that this reader does not know: {ast.unparse(node)}")

    def either(self, one: list[ast.stmt], other: list[ast.stmt]) -> None:
        ends = []
        for branch in (one, other):
            walk = _Walk(self.found, self.names, dict(self.roots), dict(self.known), self.waited)
            walk.body(branch)
            ends.append(walk)
        first, second = ends
        self.waited = first.waited and second.waited
        for name in first.roots.keys() | second.roots.keys():
            self.roots[name] = first.roots.get(name, NOTHING) | second.roots.get(name, NOTHING)
        self.known = {n: v for n, v in first.known.items() if n in second.known and second.known[n] is v}
        self.returned |= first.returned | second.returned

    def decide(self, node: ast.expr) -> tuple[bool, Any]:
        wanted = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if any(isinstance(n, ast.Call | ast.Attribute) for n in ast.walk(node)) or wanted - self.known.keys():
            return False, None
        return True, eval(compile(ast.Expression(node), "condition", "eval"), {}, dict(self.known))

    def expression(self, node: ast.AST | None) -> Roots:
        if node is None or isinstance(node, ast.Constant):
            return NOTHING
        if isinstance(node, ast.Name):
            return self.roots.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            return NOTHING if node.attr == "dtype" else self.expression(node.value)
        if isinstance(node, ast.Call):
            return self.call(node)
        children = (self.expression(child) for child in ast.iter_child_nodes(node))
        return frozenset().union(*children)

    def call(self, node: ast.Call) -> Roots:
        name = ast.unparse(node.func)
        given = [self.expression(argument) for argument in node.args]
        named = {keyword.arg: self.expression(keyword.value) for keyword in node.keywords}
        if name == WAIT:
            self.waited = True
        elif name == TRIGGER:
            self.found.triggers.add(self.waited)
        elif name == "tl.load":
            (self.found.late if self.waited else self.found.early).update(given[0])
            modifiers = {k.arg: k.value for k in node.keywords}
            modifier = modifiers.get("cache_modifier")
            if not self.waited and not (isinstance(modifier, ast.Constant) and modifier.value == ".cg"):
                self.found.through_l1.update(given[0])
        elif name == "tl.store":
            self.found.stored.update(given[0])
            if not self.waited:
                self.found.stored_early.update(given[0])
        elif isinstance(helper := self.names.get(name), JITFunction):
            return self.helper(helper, node, given, named)
        else:
            base = self.expression(node.func.value) if isinstance(node.func, ast.Attribute) else NOTHING
            return base.union(*given, *named.values())
        return NOTHING

    def helper(
        self, function: JITFunction, node: ast.Call, given: list[Roots], named: dict[Any, Roots]
    ) -> Roots:
        definition = _definition(function)
        parameters = [argument.arg for argument in definition.args.args]
        values: dict[str, ast.expr] = dict(zip(parameters, node.args, strict=False))
        values |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        roots = dict(zip(parameters, given, strict=False)) | named
        known = {}
        for parameter, value in values.items():
            is_known, decided = self.decide(value)
            if is_known:
                known[parameter] = decided
        walk = _Walk(self.found, function.fn.__globals__, roots, known, self.waited)
        walk.body(definition.body)
        self.waited = walk.waited
        return walk.returned
