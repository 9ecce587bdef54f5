"""Triton kernels are tested on the GPU where there is one, and through Triton's interpreter elsewhere."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read while triton is imported


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run here."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if type(triton.language.max).__name__ != "InterpretedFunction":
        pytest.fail("triton was imported without its interpreter; set TRITON_INTERPRET=1 in tests/conftest.py, first")
    _let_loops_run_to_a_tensor()
    return "cpu"


def _let_loops_run_to_a_tensor() -> None:
    """Triton 3.6 turns loop bounds, arrays of one element, into ints in a way that numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


@pytest.fixture
def poisoned_memory():
    """Fresh tensors are full of NaN, so that a result which nobody wrote is noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fixed_order_of_sums(triton_device, monkeypatch):
    """The interpreter adds up a dot's products in one order: a row's bits are the kernel's doing, not the BLAS's.

    numpy's product, which it would take, adds in an order that depends on the CPU, on the shape, and on where in a
    tile a row lies. Here products are made one by one and halves of the inner dimension added: only elementwise ops.
    """
    if triton_device != "cpu":
        return  # a GPU's tensor cores do as the test expects, or the kernel is wrong
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        assert all(not one.dtype.is_floating() or one.dtype.primitive_bitwidth > 8 for one in (a, b)), "not done here"
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        sums = left[..., :, :, None] * right[..., None, :, :]  # [rows, inner, columns]
        while (inner := sums.shape[-2]) > 1:  # Triton's dimensions are powers of two
            sums = sums[..., : inner // 2, :] + sums[..., inner // 2 :, :]
        return interpreter.TensorHandle(sums[..., 0, :] + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
