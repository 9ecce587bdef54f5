"""The rungs of `tokenmill ladder`: each is the one below plus one switch of the engine, on the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tokenmill.compat import did_you_mean
from tokenmill.errors import ConfigError
from tokenmill.plan.demand.workload import Workload

LONGER = 4  # a reservation is for so many times the longest request: a limit is set for the worst case
BLOCK = 16  # tokens
WHOLE_STEP = {"cpu": 2048, "cuda": 16384}  # tokens of a step of whole prompts, at least
MOST_ROWS = {"cpu": 64, "cuda": 256}

IDENTICAL, BOUNDED = "identical", "bounded"

TORCH_OPS = {
    "rms_norm": "reference",
    "add_rms_norm": "reference",
    "rope_kv_write": "reference",
    "rope": "reference",
    "attention": "cpu",
    "act_mul": "reference",
    "add": "reference",
    "scaled": "reference",
    "soft_cap": "reference",
    "per_head": "reference",
    "concat": "reference",
    "add_low_rank": "reference",
    "sample": "cpu",
}
NATIVE_OPS = dict.fromkeys(TORCH_OPS, "native")


@dataclass(frozen=True)
class Rung:
    """One technique."""

    name: str  # as --rungs takes it
    title: str
    switch: dict[str, Any]  # settings that differ from the rung below
    told: str  # what changes, in a sentence
    claim: str = IDENTICAL


@dataclass(frozen=True)
class LadderSizes:
    """Settings that all rungs share, fitted to the requests."""

    rows: int  # requests at once, from the first batch on
    max_len: int  # tokens that a reservation is for
    kv_bytes: int  # the same memory on every rung: all requests fit as they are, a quarter of them when reserved
    whole_step: int  # tokens

    @property
    def scarce_kv_bytes(self) -> int:
        """As few as a sixteenth, but enough for a request of the longest length, in a form of half the bytes."""
        tokens = max(self.max_len, self.rows * self.max_len // LONGER)
        return max(self.kv_bytes // LONGER**2, int(0.6 * self.kv_bytes * self.max_len / tokens))

    @property
    def reserved_rows(self) -> int:
        return max(1, self.rows // LONGER)


@dataclass(frozen=True)
class LadderPlan:
    """What a machine and a model make of the ladder."""

    device: str  # cpu or cuda
    sizes: LadderSizes
    stored_packed: bool = False  # the file holds quantized weights that a CPU computes with
    options: dict[str, Any] = field(default_factory=dict)  # of the user: device, dtype, load_format
    away: int = 0  # bytes of weights that are not on the device where some are not; 0: the model is too small for that
    mixture: bool = False  # it has experts

    @property
    def base(self) -> dict[str, Any]:
        """Everything off."""
        sizes = self.sizes
        found: dict[str, Any] = {
            "kv_cache": False,
            "max_num_seqs": 1,
            "kv_reservation": "max_model_len",
            "batching": "continuous",
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": sizes.whole_step,
            "enable_prefix_caching": False,
            "shared_prefix_attention": False,
            "cuda_graphs": False,
            "speculation": "off",
            "overlap": False,
            "ops": TORCH_OPS if self.device == "cpu" else "reference",
            "block_size": BLOCK,
            "max_model_len": sizes.max_len,
            "kv_cache_memory": sizes.kv_bytes,
        }
        if self.device == "cpu":
            found["kv_cache_dtype"] = "float32"
        return found | self.options

    def rungs(self) -> list[Rung]:
        beyond = [*_beyond_memory(self.sizes), *self._offload()]
        if self.device == "cpu":
            return [*_alone(), *_together(self.sizes), *_on_cpu(self.stored_packed), *beyond]
        return [*_alone(), FUSED_ON_GPU, *_together(self.sizes), *_on_gpu(), *beyond]

    def _offload(self) -> list[Rung]:
        """Weights that are elsewhere, with the memory for keys and values that all others have."""
        if not self.away:
            return []
        switch = {"kv_cache_memory": self.sizes.kv_bytes, "kv_host_memory": None, "weights_offload": self.away}
        where = "disk" if self.device == "cpu" else "the host's memory"
        streamed = Rung(
            "offload",
            "streamed weights",
            {**switch, "expert_cache": "off"} if self.mixture else switch,
            f"Some layers are brought from {where} in every step; keys and values have their memory again.",
        )
        cached = Rung(
            "expert-cache",
            "cached experts",
            {"expert_cache": None},
            f"Every layer keeps the experts that were chosen last; only those that it lacks are brought from {where}.",
        )
        return [streamed, cached] if self.mixture else [streamed]

    def settings(self, name: str) -> dict[str, Any]:
        """Of the engine on this rung: everything off, and then every switch up to it. None leaves it to the engine."""
        found = dict(self.base)
        for rung in self.rungs():
            found |= rung.switch
            if rung.name == name:
                return {key: value for key, value in found.items() if value is not None}
        raise KeyError(name)

    def rounds(self, name: str) -> bool:
        """Whether something is rounded on purpose on this rung: there, or below it."""
        names = [rung.name for rung in self.rungs()]
        return any(rung.claim == BOUNDED for rung in self.rungs()[: names.index(name) + 1])

    def chosen(self, names: str | None) -> list[Rung]:
        """From "kv-cache,paging"; all without."""
        known = {rung.name: rung for rung in self.rungs()}
        if names is None:
            return list(known.values())
        wanted = [name.strip() for name in names.split(",")]
        for name in wanted:
            if name not in known:
                raise ConfigError(f"--rungs names {name!r}; {did_you_mean(name, known)}")
        return [rung for rung in known.values() if rung.name in wanted]


def _alone() -> list[Rung]:
    return [
        Rung("bottom", "no KV cache, one at a time", {}, "Every token computes the whole text before it again."),
        Rung("kv-cache", "KV cache", {"kv_cache": True}, "Keys and values are kept: a token computes itself only."),
    ]


# Before the batches: attention in plain torch loops over rows there, and would hide what batches gain.
FUSED_ON_GPU = Rung("fused-ops", "fused kernels", {"ops": None}, "Triton kernels; below, plain torch.")


def _together(sizes: LadderSizes) -> list[Rung]:
    """Batches, and the memory for them."""
    return [
        Rung(
            "static",
            "static batching, padded",
            {"batching": "static", "max_num_seqs": sizes.rows},
            f"As many at once as memory is reserved for ({sizes.reserved_rows}). Prompts are padded to the longest, "
            "nobody leaves before all are done, nobody enters.",
        ),
        Rung(
            "dynamic",
            "dynamic batching",
            {"batching": "dynamic"},
            "A batch is what waits when the last one ended; no padding, and who is done leaves. Nobody enters.",
        ),
        Rung("continuous", "continuous batching", {"batching": None}, "Who waits enters as soon as one leaves."),
        Rung(
            "paging",
            "paged KV cache",
            {"kv_reservation": None},
            "Blocks on demand, where the rungs below reserve the longest length that is allowed.",
        ),
        Rung(
            "chunked-prefill",
            "chunked prefill",
            {"enable_chunked_prefill": True, "max_num_batched_tokens": None},
            "Prompts are cut to fit beside those who decode; below, they had steps of their own and all others waited.",
        ),
        Rung(
            "prefix-cache",
            "prefix cache",
            {"enable_prefix_caching": True},
            "The beginning that the prompts share is computed once.",
        ),
    ]


def _on_cpu(stored_packed: bool) -> list[Rung]:
    """Recorded steps come after quantization: a graph holds native calls only, and below `ops` names each op.

    An engine that is told its ops one by one leaves products to torch; left alone, it multiplies floats natively, too.
    """
    what = "as the file stores them" if stored_packed else "in int8"
    return [
        Rung(
            "fused-ops",
            "native fused ops",
            {"ops": NATIVE_OPS},
            "Norms, RoPE with the cache write, attention, activations and sampling in C++; products stay torch's.",
        ),
        Rung(
            "quantized",
            "quantized weights",
            {"ops": None, "quantization": None if stored_packed else "int8"},
            f"Weights stay packed {what}, multiplied in integers; below, they were floats.",
            BOUNDED,
        ),
        Rung(
            "recorded",
            "recorded steps",
            {"cuda_graphs": None},
            "A decode step is one native call and one that reads prompts is two, not one per op.",
        ),
        Rung("kv-quantized", "int8 KV cache", {"kv_cache_dtype": "int8"}, "A quarter of the bytes per token.", BOUNDED),
        Rung(
            "speculation",
            "speculative decoding",
            {"speculation": None},
            "Drafts of what comes next are verified several at a time, while few requests decode.",
        ),
    ]


def _on_gpu() -> list[Rung]:
    return [
        Rung(
            "shared-prefix",
            "shared-prefix attention",
            {"shared_prefix_attention": None},
            "Keys that many rows share are read once per step.",
        ),
        Rung(
            "recorded",
            "CUDA graphs",
            {"cuda_graphs": None},
            "Decode steps and those that read short prompts are recorded and replayed.",
        ),
        Rung("overlap", "overlap", {"overlap": None}, "The next step is launched before the one before is read back."),
        Rung("quantized", "fp8 weights", {"quantization": "fp8"}, "Products of weights and inputs in fp8.", BOUNDED),
        Rung("kv-quantized", "fp8 KV cache", {"kv_cache_dtype": "fp8"}, "Half the bytes per token.", BOUNDED),
        Rung(
            "speculation",
            "speculative decoding",
            {"speculation": "suffix"},  # unset, a GPU may have none: a rung that switches nothing says nothing
            "What followed the same tokens before is drafted, and verified several at a time.",
        ),
    ]


def _beyond_memory(sizes: LadderSizes) -> list[Rung]:
    return [
        Rung(
            "less-memory",
            "less KV memory",
            {"kv_cache_memory": sizes.scarce_kv_bytes},
            "Fewer bytes for keys and values: who has no room waits, or is preempted and computed again.",
        ),
        Rung(
            "kv-tiers",
            "KV in host memory",
            {"kv_host_memory": sizes.kv_bytes},
            "Keys and values that have no room any more are kept in the host's memory, and come back.",
        ),
    ]


def requests(count: int, prompt: int, output: int, seed: int) -> Workload:
    """Requests of many lengths around these, whose prompts share their first half (a system prompt); all at once."""
    dice, shared = random.Random(f"{seed}/ladder"), max(1, prompt // 2)
    prompts = [shared + dice.randint(max(1, prompt // 4), max(1, 3 * prompt // 4)) for _ in range(count)]
    outputs = [dice.randint(max(1, output // 4), max(1, 2 * output - output // 4)) for _ in range(count)]
    return Workload(
        f"{count} requests, about {prompt} + {output} tokens",
        arrivals=(0.0,) * count,
        prompts=tuple(prompts),
        outputs=tuple(outputs),
        hash_ids=((0,),) * count,
        hash_block=shared,
    )


def fitted(work: Workload, device: str, kv_bytes_per_token: int, longest: int) -> LadderSizes:
    """Sizes for these requests; `longest` is the model's limit."""
    whole = max(prompt + output for prompt, output in zip(work.prompts, work.outputs)) + BLOCK
    if whole > longest:
        raise ConfigError(f"a request has {whole} tokens, but the model was made for {longest}; ask for less")
    max_len = min(longest, -(-LONGER * whole // BLOCK) * BLOCK)
    rows = min(len(work), MOST_ROWS[device])
    tokens = max(max_len, rows * max_len // LONGER) + BLOCK
    # A hundredth of the blocks is kept free for those who run.
    kv_bytes = int(1.02 * tokens * kv_bytes_per_token) + 2 * BLOCK * kv_bytes_per_token
    return LadderSizes(rows, max_len, kv_bytes, max(WHOLE_STEP[device], max_len, rows))
