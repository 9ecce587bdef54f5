"""A GPU that is not there: a runner whose tensors hold nothing, so that what it would launch can be seen anywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

HOPPER = SimpleNamespace(
    multi_processor_count=132, major=9, minor=0, name="NVIDIA H200", total_memory=141 << 30,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=60 << 20,
)  # fmt: skip


CUDA = torch.device("cuda", 0)


class NoGPU(TorchFunctionMode):
    """Tensors of device "cuda" are meta tensors, which hold nothing, and say that they are on that device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if func == torch.Tensor.device.__get__:
                return CUDA
            if func is torch.Tensor.data_ptr:  # all storages begin at an address that is aligned
                return args[0].storage_offset() * args[0].element_size()
        if func is not torch.device:
            args, kwargs = tree_map(_elsewhere, (args, kwargs))
        return func(*args, **kwargs)


def _elsewhere(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value


class NoGenerator:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def manual_seed(self, seed: int) -> None: ...


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Inside, tensors of device "cuda" can be made, and Triton believes in an H200."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    before = driver._active
    driver.set_active(active)
    with contextlib.ExitStack() as stack:
        put = stack.enter_context
        put(mock.patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)))
        put(mock.patch("torch.cuda.get_device_properties", lambda device=None: HOPPER))
        put(mock.patch.object(torch.Tensor, "normal_", lambda self, *args, **options: self))
        put(mock.patch("torch.Generator", NoGenerator))
        put(mock.patch("torch.cuda.device", lambda device: contextlib.nullcontext()))
        put(mock.patch("tokenmill.engine.runner.torch_runner._TorchPending", mock.MagicMock()))
        put(mock.patch("tokenmill.engine.runner.cuda_graphs._Staging", mock.MagicMock()))
        put(mock.patch("tokenmill.engine.runner.cuda_graphs.Capture", mock.MagicMock()))
        put(NoGPU())
        try:
            yield
        finally:
            driver._active = before


def runner_of(
    config: dict[str, Any], *, max_rows: int, max_tokens: int, max_len: int, quantization: Any = None, kv: str = "auto"
) -> Any:
    """A runner for a model of this config on the GPU that is not there."""
    from tokenmill.config import EngineConfig
    from tokenmill.engine.choices import choose_kv_dtype, schemes_for
    from tokenmill.engine.runner.state import DeviceState
    from tokenmill.engine.runner.torch_runner import TorchRunner
    from tokenmill.model.decoder import Decoder
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.dummy import dummy_weights
    from tokenmill.ops.kv_forms import form_for
    from tokenmill.ops.registry import Need, select
    from tokenmill.ops.triton.specializations import collect
    from tokenmill.quant.schemes.choose import ComputeTarget

    device, dtype = torch.device("cuda", 0), torch.bfloat16
    spec = spec_from_config(config)
    schemes, _ = schemes_for(EngineConfig(quantization=quantization), spec, None, ComputeTarget(device, dtype, False))
    kv_dtype, _ = choose_kv_dtype(kv, dtype, schemes, device)
    form = form_for(kv_dtype)
    ops = select(Need("cuda", dtype, spec.attention_head_dim, 16, False, form.name if form else None))
    with collect():
        weights = dummy_weights(spec, dtype, device, 0, schemes)
    decoder = Decoder(spec, weights, ops, max_len)
    state = DeviceState(
        spec, max_rows=max_rows, max_len=max_len, num_blocks=1024, block_size=16, dtype=kv_dtype, device=device
    )
    return TorchRunner(decoder, state, max_rows=max_rows, max_tokens=max_tokens, graphs=True)
