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
