"""Solves what a config leaves unset, and says why."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError
from tokenmill.plan.solve.gpus import rates_of, recognize
from tokenmill.plan.solve.hardware import GIB, Hardware
from tokenmill.plan.solve.memory import MemoryPlan, ModelBytes, plan_memory
from tokenmill.plan.solve.offload import NEAR_RESIDENT, hiding_tokens

DEFAULT_ROWS = {"cpu": 64, "cuda": 256}
# A GPU with as much memory has room for more requests at once; where they come faster than it can serve them, whoever
# finds no row waits for its first token until somebody ends.
LARGE_GPU_BYTES, LARGE_GPU_ROWS = 64 * GIB, 512
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = (8192, 16384)
SHORT_STEP_S = 0.2  # so long a step of prompts may take without anybody asking for it
LONG_STEP_S = 1.0  # and beyond this, whoever decodes beside it would notice
SMALL_STEP_TOKENS = 2048  # still enough to compute at full speed
USUAL_FLOPS = 6e14  # per second, of a large GPU that is not in the table


@dataclass(frozen=True)
class SolvedSettings:
    """A config with nothing left open."""

    block_size: int
    max_rows: int
    max_step_tokens: int
    max_len: int
    num_blocks: int
    memory: MemoryPlan
    reasons: tuple[str, ...]  # one line per setting


def solve(config: EngineConfig, model: ModelBytes, longest: int, hardware: Hardware) -> SolvedSettings:
    """Fill in sizes. `longest` is the model's own limit on positions."""
    reasons: list[str] = []

    def choose(name: str, given: int | None, value: int, why: str) -> int:
        reasons.append(f"{name} = {given if given is not None else value}  ({'as set' if given is not None else why})")
        return value if given is None else given

    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} but the model was made for {longest} positions; "
            f"set it to {longest} or less"
        )
    block_size = choose("block_size", config.block_size, 16, "little waste at the end of a sequence, whole cache lines")
    max_rows = choose("max_num_seqs", config.max_num_seqs, *_rows(hardware, config.max_num_batched_tokens))
    step_tokens, step_why = _step_tokens(hardware, model, max_rows)
    max_step_tokens = choose("max_num_batched_tokens", config.max_num_batched_tokens, step_tokens, step_why)
    if max_step_tokens < max_rows:
        raise ConfigError(
            f"max_num_batched_tokens is {max_step_tokens}, below max_num_seqs {max_rows}: every running request needs "
            f"a token per step; raise the first or lower the second"
        )
    memory, max_len = plan_memory(
        model,
        hardware,
        utilization=config.gpu_memory_utilization,
        block_size=block_size,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        max_len=config.max_model_len,
        longest=longest,
        kv_bytes=config.kv_cache_memory,
        prompt_graphs=config.cuda_graphs and config.prompt_graphs,
        max_memory=config.max_memory,
        offload=config.weights_offload,
    )
    if memory.streamed.layers:
        reasons.append(_streamed(config, model, memory, hardware))
    if memory.cached.slots:
        reasons.append(_cached(config, memory, hardware))
    why = "all the model was made for" if max_len == longest else f"the kv cache ends there; the model knows {longest}"
    choose("max_model_len", config.max_model_len, max_len, why)
    return SolvedSettings(
        block_size=block_size,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        max_len=max_len,
        num_blocks=memory.num_blocks,
        memory=memory,
        reasons=tuple(reasons),
    )


def _streamed(config: EngineConfig, model: ModelBytes, memory: MemoryPlan, hardware: Hardware) -> str:
    away, where = memory.streamed, "the host's memory" if hardware.device == "cuda" else "disk"
    why = "as set" if config.weights_offload is not None else "the rest fits"
    cost, gpu = "", recognize(hardware.name) if hardware.device == "cuda" else None
    if gpu is not None and model.flops_per_token:
        seconds = away.seconds(gpu.host)
        hides = hiding_tokens(seconds, model.flops_per_token / rates_of(gpu, "dense").linear_flops)
        cost = (
            f"; about {seconds:.2g} s of each, which steps of {hides:,} tokens and more hide at {NEAR_RESIDENT:.0%} of "
            "the speed without"
        )
    return (
        f"weights_offload = {away.nbytes}  ({why}: {len(away.layers)} of {len(model.layers)} layers are brought from "
        f"{where} in every step, each while those before it are computed{cost})"
    )


def _cached(config: EngineConfig, memory: MemoryPlan, hardware: Hardware) -> str:
    cached, where = memory.cached, "the host's memory" if hardware.device == "cuda" else "disk"
    why = "as set" if config.weights_offload is not None else "the rest fits"
    return (
        f"weights_offload = {cached.nbytes}  ({why}: {cached.slots} of {cached.experts} experts of every layer stay, "
        f"those that were chosen last; others are brought from {where} when a step chooses them)"
    )


def _rows(hardware: Hardware, step_tokens: int | None) -> tuple[int, str]:
    rows, why = DEFAULT_ROWS[hardware.device], f"enough to fill a {hardware.device} device"
    if hardware.device == "cuda" and hardware.total_bytes >= LARGE_GPU_BYTES:
        rows = LARGE_GPU_ROWS
        why = "under a heavy load newcomers start at once; a device of this size has the memory"
    if step_tokens is not None and step_tokens < rows:
        return step_tokens, "no more than max_num_batched_tokens: every running request needs a token per step"
    return rows, why


def _step_tokens(hardware: Hardware, model: ModelBytes, max_rows: int) -> tuple[int, str]:
    """More tokens per step cost fewer launches; but who decodes waits for the whole step."""
    if hardware.device == "cpu":
        return max(CPU_STEP_TOKENS, max_rows), "keeps steps short, so that running answers keep flowing"
    usual, many = GPU_STEP_TOKENS
    gpu = recognize(hardware.name)
    token_s = model.flops_per_token / (USUAL_FLOPS if gpu is None else rates_of(gpu, "dense").linear_flops)
    if 0 < token_s * many <= SHORT_STEP_S:
        return max(many, max_rows), "a step of prompts stays short with a model of this size"
    if token_s * usual > LONG_STEP_S:
        return max(SMALL_STEP_TOKENS, max_rows), f"{usual} would take about {token_s * usual:.1f} s, and decodes wait"
    return max(usual, max_rows), "fills the device"
