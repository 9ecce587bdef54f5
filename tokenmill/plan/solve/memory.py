"""The memory model: how many bytes weights, keys and values, activations and tables take, before any is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.errors import ConfigError
from tokenmill.plan.solve.hardware import GIB, Hardware
from tokenmill.plan.solve.offload import (
    NO_EXPERTS_AWAY,
    NOTHING_STREAMED,
    CachedExperts,
    StreamedLayers,
    most_slots,
    to_free,
    to_hold,
)

MIB = 1 << 20
# Scratch of the sampler per logit, beyond the logits: reference sampling sorts and draws noise in plain torch.
SAMPLER_BYTES_PER_LOGIT = {"cpu": 44, "cuda": 24}
ATTENTION_WORKSPACE = {"cpu": 256 * MIB, "cuda": 256 * MIB}
LIBRARY_WORKSPACE = {"cpu": 0, "cuda": 640 * MIB}  # matmul library, kernels, and rounding of the allocator
CPU_KV_LIMIT = 4 * GIB
KV_BESIDE_STREAMED = 8  # the cache may take one part in so many of the memory, where layers have to make room for it
RECORDED_TOKENS = 1024  # of the largest step on a GPU that is recorded in pieces (engine/runner/piecewise.py)
RECORDED_PIECES, RECORDED_PIECE = 1024, 3 * MIB // 16  # at most, of all sizes; bytes of one besides its tensors
WIDENED_AT_ONCE = 64 * MIB  # of a matrix in float32, where `adaptive_precision` computes in float32 (model/widened.py)


@dataclass(frozen=True)
class ModelBytes:
    """The model as the memory plan sees it."""

    weights: int
    kv_per_token: int
    activation_per_token: int
    logits_per_row: int  # bytes of one row of logits in the model's dtype and in float32
    vocab: int
    rope_per_position: int = 512
    flops_per_token: float = 0.0  # of a forward pass; 0: not known
    scratch: int = 0  # what the largest product needs while it runs
    guard: int = 0  # float32 copies of weights, where rows that overflow are computed again (see guard_bytes)
    guard_per_token: int = 0  # by how much the activations of such a step are wider
    layers: tuple[int, ...] = ()  # bytes of each layer, of the weights; (): they cannot be streamed
    expert_bytes: tuple[int, ...] = ()  # of one expert, of every layer that has some; (): they cannot be cached
    experts: int = 0  # of such a layer


@dataclass(frozen=True)
class MemoryPlan:
    weights: int
    kv: int
    activations: int
    workspace: int
    budget: int
    num_blocks: int
    guard: int = 0  # of activations and workspace: what is there for rows that are computed again in float32
    streamed: StreamedLayers = NOTHING_STREAMED  # whose buffers are of the weights
    cached: CachedExperts = NO_EXPERTS_AWAY  # the same

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.workspace

    def lines(self, kv_tokens: int) -> list[str]:
        guard = f" ({_size(self.guard)} of it for adaptive_precision)" if self.guard else ""
        away = self.streamed
        buffers = f"  ({_size(away.buffers)} of it are buffers of {len(away.layers)} layers)" if away.layers else ""
        if self.cached.slots:
            buffers = f"  ({_size(self.cached.buffers)} of it are buffers of experts)"
        return [
            f"weights      {_size(self.weights)}{buffers}",
            f"kv cache     {_size(self.kv)}  ({kv_tokens:,} tokens in {self.num_blocks:,} blocks)",
            f"activations  {_size(self.activations)}  (the largest step, logits and sampling included)",
            f"workspace    {_size(self.workspace)}  (tables, attention scratch, libraries)",
            f"in all       {_size(self.total)}  of {_size(self.budget)} that may be used{guard}",
        ]


def guard_bytes(
    widest: int,  # elements of the largest matrix that is multiplied
    stacked: int,  # of a layer's experts, and the like: what ops take whole
    small: int,  # of a layer's norms, biases and routers
) -> int:
    """Bytes of what a step in float32 holds of a narrow model's weights: part of a matrix, and a layer's other ones."""
    return min(4 * widest, WIDENED_AT_ONCE) + 4 * stacked + 8 * small  # small ones of two layers may meet


def plan_memory(
    model: ModelBytes,
    hardware: Hardware,
    *,
    utilization: float,
    block_size: int,
    max_rows: int,
    max_step_tokens: int,
    max_len: int | None,  # None: as long as fits
    longest: int,  # the model's own limit
    kv_bytes: int | None,  # None: what is left
    prompt_graphs: bool = True,  # steps that read prompts are recorded
    max_memory: int | None = None,  # bytes of the device that may be used in all
    offload: int | None = None,  # bytes of weights that live elsewhere; None: as many as do not fit
) -> tuple[MemoryPlan, int]:
    """The plan and the length of the longest request it can hold. Refuses, with the numbers, what cannot fit."""
    where = hardware.device
    length = max_len or longest
    sampler = SAMPLER_BYTES_PER_LOGIT[where] * model.vocab
    activations = max_step_tokens * model.activation_per_token + max_rows * (model.logits_per_row + sampler)
    wider = max_step_tokens * model.guard_per_token
    activations += wider
    tables = 4 * (max_rows + 1) * (length + -(-length // block_size)) + model.rope_per_position * length
    guard = model.guard + model.rope_per_position * length if model.guard else 0  # it has tables of its own
    workspace = guard + tables + ATTENTION_WORKSPACE[where] + LIBRARY_WORKSPACE[where] + model.scratch
    # Recorded steps keep memory of their own: on a GPU of the largest batch that decodes, of the largest step that is
    # recorded in pieces, and some rounding; on a CPU of the largest batch that decodes and of the largest step.
    recorded = max_rows * (model.activation_per_token + model.logits_per_row)
    if where == "cuda":
        if prompt_graphs:
            recorded += min(RECORDED_TOKENS, max_step_tokens) * model.activation_per_token
            workspace += model.scratch + RECORDED_PIECES * RECORDED_PIECE
        workspace += 3 * recorded // 2
        budget = int(hardware.total_bytes * utilization) - (hardware.total_bytes - hardware.free_bytes)
    else:
        workspace += 2 * recorded + (max_step_tokens * model.activation_per_token if prompt_graphs else 0)
        budget = hardware.free_bytes
    if max_memory is not None:
        budget = min(budget, max_memory)
    fixed = model.weights + activations + workspace
    block_bytes = model.kv_per_token * block_size
    smallest = -(-(max_len or block_size) // block_size) * block_bytes  # one request of full length
    if kv_bytes is not None and kv_bytes < smallest:
        what = f"max_model_len {max_len}" if max_len else f"a single block of {block_size}"
        raise ConfigError(
            f"kv_cache_memory is {kv_bytes:,} bytes, but a request of {what} tokens takes {smallest:,}; "
            f"raise it to that or more{', or lower max_model_len' if max_len else ''}"
        )
    most_kv = max_rows * -(-length // block_size) * block_bytes
    away, cached = NOTHING_STREAMED, NO_EXPERTS_AWAY
    if offload:
        cached = most_slots(model.expert_bytes, model.experts, away=offload)
        away = NOTHING_STREAMED if cached.slots else to_hold(model.layers, offload)
        if not (away.layers or cached.slots):
            few = f"a model of {len(model.layers)} layers has too few to stream"
            why = few if model.layers else "several ranks do not stream"
            raise ConfigError(f"weights_offload is {offload:,}, but {why}; leave it out")
    elif offload is None and fixed + (kv_bytes or smallest * (1 if where == "cuda" else 2)) > budget:  # see below
        # Every byte of the cache is one that steps have to bring: it gets what requests cannot do without, and a share.
        wanted = (
            [kv_bytes] if kv_bytes else _halved(max(smallest, min(budget // KV_BESIDE_STREAMED, most_kv)), smallest)
        )
        lacking = [fixed + one - budget for one in wanted if one >= smallest]
        by_expert = (most_slots(model.expert_bytes, model.experts, freed=one) for one in lacking)
        cached = next((one for one in by_expert if one.slots), cached)
        if not cached.slots:  # no experts, or all that is beside them is too much, too
            away = next(filter(None, (to_free(model.layers, one) for one in lacking)), away)
    weights = model.weights - away.freed - cached.freed
    fixed -= away.freed + cached.freed
    left = budget - fixed
    options = ["lower kv_cache_memory"] if kv_bytes is not None else []
    if kv_bytes is None:
        kv_bytes = left if where == "cuda" else min(left if away.layers or cached.slots else left // 2, CPU_KV_LIMIT)
        kv_bytes = min(kv_bytes, most_kv * (4 if where == "cuda" else 1))
    num_blocks = kv_bytes // block_bytes
    if kv_bytes < smallest or fixed + num_blocks * block_bytes > budget:
        if offload == 0 and model.layers:
            what = "experts are cached" if model.expert_bytes else "layers are streamed"
            options.append(f"leave weights_offload out, so that {what}")
        of = replace(model, weights=weights)
        raise ConfigError(_refusal(of, hardware, activations, workspace, budget, kv_bytes, smallest, options))
    fitting = min(length, num_blocks * block_size)
    kv = num_blocks * block_bytes
    plan = MemoryPlan(weights, kv, activations, workspace, budget, num_blocks, guard + wider, away, cached)
    return plan, fitting


def _halved(most: int, least: int) -> list[int]:
    found = [most]
    while found[-1] > least:
        found.append(max(least, found[-1] // 2))
    return found


def _refusal(
    model: ModelBytes,
    hardware: Hardware,
    activations: int,
    workspace: int,
    budget: int,
    kv_bytes: int,
    smallest: int,
    options: list[str],
) -> str:
    options = [*options, "lower max_num_batched_tokens or max_num_seqs", "lower max_model_len"]
    if hardware.device == "cuda":
        options.append("raise gpu_memory_utilization")
    else:
        options.append("raise max_memory, if it is set")
    if model.guard:
        options.append("set adaptive_precision=False")
    options.append("use a smaller dtype or model")
    return (
        f"the model does not fit: {_size(model.weights)} weights + {_size(activations)} activations + "
        f"{_size(workspace)} workspace + {_size(max(kv_bytes, smallest))} kv cache "
        f"(a request of full length takes {_size(smallest)}), but "
        f"{_size(budget)} of the {_size(hardware.total_bytes)} of {hardware.name} may be used; {'; '.join(options)}"
    )


def _size(number: int) -> str:
    if abs(number) >= GIB:
        return f"{number / GIB:.2f} GiB"
    return f"{number / MIB:.0f} MiB"
