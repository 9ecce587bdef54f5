"""Has the kernels of an engine on a GPU compiled before it is ready, and says what that took."""

from __future__ import annotations

import importlib.util
import logging
import time
from typing import TYPE_CHECKING

import torch

from tokenmill.config import EngineConfig
from tokenmill.engine.core import Engine
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.runner.warmup import Progress, warm_up
from tokenmill.plan.solve.hardware import cpu_hardware
from tokenmill.plan.solve.settings import SolvedSettings

if TYPE_CHECKING:
    from tokenmill.ops.triton.compiler import KernelCompiler

log = logging.getLogger("tokenmill.kernels")


def start_compiler(config: EngineConfig, device: torch.device) -> KernelCompiler | None:
    """Whoever compiles, started before anything is loaded where there is something to do; None: nobody need.

    Where kernels are compiled when they are first launched, they are kept in the same place.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from tokenmill.ops.triton.compiler import KernelCompiler, use_cache

    if note := use_cache(config.cache_dir):
        log.warning("%s", note)
    if not config.warm_up or config.ops == "reference":
        return None
    compiler = KernelCompiler(cpu_hardware().free_bytes)
    log.debug("kernels are kept in %s", compiler.folder)
    if compiler.cache_is_new:
        compiler.start()
    return compiler


def warm_up_kernels(compiler: KernelCompiler, engine: Engine, settings: SolvedSettings, tell: Progress) -> list[str]:
    """Compile and try everything that steps may need; what is to be reported."""
    from tokenmill.ops.triton.launch import FIRST_LAUNCHES

    runner = engine.runner
    if not isinstance(runner, TorchRunner):  # another kind of runner warms itself up
        return []
    began = time.monotonic()
    try:
        shared = engine.scheduler.finds_shared_prefixes
        with runner.on_device():
            kernels, compiled = warm_up(runner, settings.max_rows, settings.max_step_tokens, shared, compiler, tell)
    except Exception as error:  # Triton's, the driver's or the disk's; slower at first, but the engine works
        reason = f"{type(error).__name__}: {error}"
        log.warning("the warm-up failed, so kernels are compiled when they are first needed: %s", reason)
        return [f"kernels      compiled when first needed, because the warm-up failed: {reason}"]
    finally:
        runner.end_rehearsal()
        FIRST_LAUNCHES.count = 0
    seconds = time.monotonic() - began
    return [f"kernels      {kernels}, of which {compiled} were compiled now and the others kept; {seconds:.1f} s"]
