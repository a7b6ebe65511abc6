"""Triton's interpreter, quicker: the same values, without what it works out again for each operation."""

from functools import cache
from typing import Any

import pytest


@cache
def quicken() -> None:
    """Where TRITON_INTERPRET=1 made Triton interpret. Three times as fast with Triton 3.6."""
    pytest.importorskip("triton", reason="Triton is not installed")
    _let_loops_run_to_tensors()
    _patch_a_module_once_per_launch()
    _remember_numpy_types()
    _make_types_when_asked_for()
    _compare_types_by_identity_first()
    _leave_out_checks_nobody_reads()


def _let_loops_run_to_tensors() -> None:
    """Triton 3.6's interpreter counts loops with int(array of one element), which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def after(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = after


def _patch_a_module_once_per_launch() -> None:
    """Each call of a device function patched the language again, which its launch had done."""
    from triton.runtime import interpreter

    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_once(fn: Any) -> Any:
        if fn.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(fn.__module__)
        return patch_lang(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _remember_numpy_types() -> None:
    from triton.runtime import interpreter

    get, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = get(dtype.scalar)
        return found[name]

    interpreter._get_np_dtype = get_np_dtype


def _make_types_when_asked_for() -> None:
    """A tuple's type and a block's name are read for messages; every tensor had both made. Shapes recur."""
    from triton.language import core

    def set_values(self: Any, args: Any, type: Any = None) -> None:
        self.values = [*args]
        if type is not None:
            self._type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def get_type(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = core._type_for_tuple_values(self.values)
        return self._type

    init_block, shapes, tensors = core.block_type.__init__, {}, {}

    def set_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        if key not in shapes:
            init_block(self, element_ty, shape)
            shapes[key] = self.shape, self.numel
        self.element_ty, (self.shape, self.numel) = element_ty, shapes[key]

    init_tensor = core.tensor.__init__

    def set_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if isinstance(type, core.block_type) else ()
        if key not in tensors:
            init_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[key]

    core.tuple.__init__ = set_values
    core.tuple.type = property(get_type, lambda self, type: setattr(self, "_type", type))
    core.block_type.__init__ = set_block
    core.tensor.__init__ = set_tensor
    core.block_type.name = property(
        lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None
    )


def _compare_types_by_identity_first() -> None:
    from triton.language import core, semantic

    equal, broadcast = core.dtype.__eq__, semantic.TritonSemantic.broadcast_impl_value
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        is_same = lhs.shape is rhs.shape  # set_tensor gives equal shapes as one object
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_if_needed


def _leave_out_checks_nobody_reads() -> None:
    """Each int32 operation was done again in int64, for an assertion that only a debugging build makes."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, operation: None
