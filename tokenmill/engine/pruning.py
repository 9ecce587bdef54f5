"""Which pruning an engine has: its settings against its model, and what chooses the survivors."""

from __future__ import annotations

from tokenmill.config import EngineConfig
from tokenmill.engine.runner.pruner import Pruner, Scores, gated, key_norm
from tokenmill.engine.runner.state import DeviceState
from tokenmill.errors import ConfigError
from tokenmill.kv.pruning import Pruning
from tokenmill.model.decoder import Decoder
from tokenmill.model.draft_head import fingerprint
from tokenmill.model.kv_gate import shipped_gate
from tokenmill.model.spec import DecoderSpec


def pruning_for(config: EngineConfig, block_size: int, spec: DecoderSpec) -> Pruning | None:
    if config.kv_pruning is None:
        return None
    if spec.mla is not None or any(window is not None for window in spec.windows):
        why = "caches latents that all heads share" if spec.mla is not None else "has layers with a window of their own"
        raise ConfigError(f"kv_pruning is {config.kv_pruning!r}, but {spec.architecture} {why}; leave it out")
    return Pruning.of(config.kv_pruning, config.kv_pruning_keep, config.kv_pruning_window, block_size)


def pruner_for(pruning: Pruning, decoder: Decoder, state: DeviceState) -> Pruner:
    scores: Scores = key_norm
    if pruning.policy == "gate":
        gate = shipped_gate(fingerprint(decoder.weights.final_norm))
        if gate is None:
            raise ConfigError(
                "kv_pruning is 'gate', but no gate comes with this model; take keynorm, or train one with "
                "scripts/kv_pruning.py"
            )
        gate.check(decoder.spec.num_layers, decoder.spec.kv_heads, decoder.spec.head_dim)
        scores = gated(gate.to(state.arena.device), decoder.rope_tables)
    return Pruner(pruning, state, scores)


def pruning_lines(pruning: Pruning | None) -> list[str]:
    if pruning is None:
        return []
    kept = f"{pruning.kept} of {pruning.segment} tokens" if pruning.kept else "nothing"
    return [
        f"pruning      {pruning.policy}: of each segment before the newest {pruning.window} to "
        f"{pruning.window + pruning.segment} tokens {kept} stays, beside the first {pruning.sinks}"
    ]
