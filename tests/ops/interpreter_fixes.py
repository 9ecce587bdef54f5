"""What Triton's interpreter does otherwise in these tests: loops to a tensor, less work per call, dots in one order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod


def apply() -> None:
    _let_loops_run_to_a_tensor()
    _prepare_the_language_once_per_launch()
    _leave_out_checks_for_overflow()
    _make_shapes_once()


def _let_loops_run_to_a_tensor() -> None:
    """Triton 3.6 turns loop bounds, arrays of one element, into ints in a way that numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


def _prepare_the_language_once_per_launch() -> None:
    """It replaces all of `triton.language` at every call inside of a kernel, too: a third of the time of some tests."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    prepared = set()  # the names of the language that this launch has seen: `tl`, `tl.core`, or both

    @cache
    def names_of(function):
        seen = function.__globals__.values()
        return tuple(any(value is module for value in seen) for module in (language, language.core))

    def patch_once(function):
        names = names_of(function)
        if names in prepared:
            return interpreter._LangPatchScope()  # nothing was changed, and nothing is to be restored
        launch = not prepared
        scope = patch(function)
        prepared.add(names)
        if launch:
            restore = scope.restore

            def restore_and_forget():
                prepared.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_once


def _leave_out_checks_for_overflow() -> None:
    """Each sum and product of integers is made again in 64 bits; a wrong address shows in the results as well."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _make_shapes_once() -> None:
    """Shapes are objects with types and names, made anew for every tensor: a fifth of what is left."""
    from triton.language import core

    @cache
    def of_type(*sizes):
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), str(shape)

    @cache
    def of_tensor(*sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    def make_type(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel, text = of_type(*core._unwrap_shape(shape))
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(*(type.shape if type.is_block() else ()))

    core.block_type.__init__ = make_type
    core.tensor.__init__ = make_tensor


def dot_in_one_order(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Takes the place of `InterpreterBuilder.create_dot`, which is numpy's product.

    That one adds in an order that depends on the CPU, on the shape, and on where in a tile a row lies. Here products
    are made one by one and halves of the inner dimension are added: elementwise ops, which round alike everywhere.
    """
    from triton.runtime import interpreter

    assert all(not one.dtype.is_floating() or one.dtype.primitive_bitwidth > 8 for one in (a, b)), "not done here"
    left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    sums = left[..., :, :, None] * right[..., None, :, :]  # [rows, inner, columns]
    while (inner := sums.shape[-2]) > 1:  # Triton's dimensions are powers of two
        sums = sums[..., : inner // 2, :] + sums[..., inner // 2 :, :]
    return interpreter.TensorHandle(sums[..., 0, :] + d.data, d.dtype.scalar)
