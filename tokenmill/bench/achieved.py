"""How much of a machine a run used: the bytes it had to read and the operations it had to do, against ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from tokenmill.bench.figures import Answer
from tokenmill.plan.solve.shape import ModelShape, shape_of
from tokenmill.quant.forms import WeightForm

if TYPE_CHECKING:
    from tokenmill.bench.timing import Ceilings
    from tokenmill.config import EngineConfig
    from tokenmill.quant.schemes.scheme import QuantScheme, Schemes

AS_IN_FILES = WeightForm("int4", 32, zeros=True)  # GGUF's Q4_1, as the default model has it


@dataclass(frozen=True)
class Roof:
    """A model on a machine: what a step reads, and what the machine can at best, measured."""

    shape: ModelShape
    device: str
    dtype: str
    itemsize: int  # of what is neither quantized nor packed
    embedding: int  # bytes; 0: it is the head
    weights: int  # bytes
    kv_per_token: float  # bytes
    ceilings: Ceilings

    def achieved(self, work: Work, seconds: float) -> dict[str, Any]:
        moved, flops = self.bytes_of(work), self.flops_of(work)
        best = self.ceilings
        return {
            "device": self.device,
            "dtype": self.dtype,
            "steps": work.steps,
            "bytes_per_second": moved / seconds,
            "bytes_ceiling": best.bytes_per_s,
            "bytes_share": moved / seconds / best.bytes_per_s,
            "flops_per_second": flops / seconds,
            "flops_ceiling": best.flops_per_s,
            "flops_share": flops / seconds / best.flops_per_s,
        }

    def bytes_of(self, work: Work) -> float:
        """Weights once per step, and the keys and values that decoding rows look at. Activations are not counted."""
        shape, tokens = self.shape, work.tokens / max(work.steps, 1)
        idle = (shape.expert_weights - shape.experts_read(tokens)) * self.itemsize
        return work.steps * (self.weights - self.embedding - idle) + work.keys * self.kv_per_token

    def flops_of(self, work: Work) -> float:
        shape = self.shape
        return 2.0 * (work.tokens * shape.active + work.sampled * shape.head) + work.pairs * shape.pair_flops


@dataclass(frozen=True)
class Work:
    """What a run computed, as sums."""

    steps: int
    tokens: int  # that went through the layers
    sampled: int
    keys: float  # that decoding rows read
    pairs: float  # of query and key


def work_of(answers: Sequence[Answer], steps: int, shape: ModelShape) -> Work:
    """The least that these answers need: what was preempted and computed again is not counted."""
    tokens = sampled = 0
    keys = pairs = 0.0
    for answer in answers:
        if answer.output_tokens:
            decodes = answer.output_tokens - 1  # the last token of an answer is not computed with
            new = answer.prompt_tokens - answer.cached_tokens
            tokens += new + decodes
            sampled += answer.output_tokens
            keys += shape.pairs(answer.prompt_tokens, decodes)
            pairs += shape.pairs(answer.cached_tokens, new + decodes)
    return Work(steps, tokens, sampled, keys, pairs)


def measure_roof(config: EngineConfig) -> Roof:
    """Before an engine is there, and in a process of its own: nothing of it stays on the device."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_roof, config).result()


def _roof(config: EngineConfig) -> Roof:
    from tokenmill.bench.timing import ceilings
    from tokenmill.engine.checkpoints import open_checkpoint
    from tokenmill.engine.choices import (
        choose_device,
        choose_dtype,
        choose_kv_dtype,
        matrix_bytes,
        model_bytes,
        native_for,
        schemes_for,
    )
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.source import resolve
    from tokenmill.ops.native.library import Library
    from tokenmill.quant.schemes.choose import ComputeTarget

    device, files = choose_device(config.device), resolve(config.model, cache_dir=config.cache_dir)
    checkpoint, model_config = open_checkpoint(config, files)
    spec = spec_from_config(model_config)
    dtype = choose_dtype(config.dtype, spec, device)[0]
    native = native_for(config, dtype, device, lambda done, total, what: None)
    schemes = schemes_for(config, spec, checkpoint, ComputeTarget(device, dtype, isinstance(native, Library)))[0]
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, schemes, device)[0]
    sizes = model_bytes(spec, dtype, schemes, checkpoint, kv_dtype)
    return Roof(
        shape=shape_of(spec, files.name),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        embedding=0 if spec.tie_embeddings else matrix_bytes(spec, dtype, schemes, checkpoint)["embed"],
        weights=sizes.weights,
        kv_per_token=sizes.kv_per_token,
        ceilings=ceilings(device, dtype, _products(schemes)),
    )


def _products(schemes: Schemes) -> list[QuantScheme]:
    """The ways to multiply that are not plain; what a quantized file packs is taken to have 4 bits."""
    from tokenmill.quant.schemes.packed import Packed

    several = {id(one): one for one in (schemes.default, *schemes.named.values()) if not one.floats}
    as_packed = Packed() if schemes.exact else Packed(AS_IN_FILES)
    return [as_packed if one.as_in_file else one for one in several.values()]
