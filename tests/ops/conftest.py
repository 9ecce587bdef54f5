"""Triton kernels are tested on the GPU where there is one, and through Triton's interpreter elsewhere."""

import interpreter_fixes
import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where Triton kernels run here."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if type(triton.language.max).__name__ != "InterpretedFunction":
        pytest.fail("triton was imported without its interpreter: something did so before tests/conftest.py")
    interpreter_fixes.apply()
    return "cpu"


@pytest.fixture
def poisoned_memory():
    """Fresh tensors are full of NaN, so that a result which nobody wrote is noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fixed_order_of_sums(triton_device, monkeypatch):
    """The interpreter adds up a dot's products in one order: a row's bits are the kernel's doing, not the BLAS's."""
    if triton_device != "cpu":
        return  # a GPU's tensor cores do as the test expects, or the kernel is wrong
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", interpreter_fixes.dot_in_one_order)
