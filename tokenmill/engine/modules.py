"""Whether an engine has prompt modules, and the tokens that each is computed behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.scheduler.modules import ModuleRules
from tokenmill.errors import ConfigError, ModelError
from tokenmill.model.spec import DecoderSpec
from tokenmill.model.tokenizer import Tokenizer
from tokenmill.parallel.layout import parse_layout
from tokenmill.plan.solve.settings import SolvedSettings

START_TOKENS = 2048  # what comes out of fewer differs more from reading (docs/performance.md)


def module_rules(
    config: EngineConfig,
    spec: DecoderSpec,
    settings: SolvedSettings,
    tokenizer: Callable[[], Tokenizer],
) -> tuple[ModuleRules | None, str]:
    """How modules are placed, if they are; and a line of the report."""
    why_not = _why_not(config, spec)
    if why_not is not None:
        if config.prompt_modules:
            raise ConfigError(
                f"prompt_modules is set, but {why_not}; leave it out, and marked parts are read like others"
            )
        return None, f"off: {why_not}"
    text = _text(config)
    solved = min(START_TOKENS, settings.max_len // 4, settings.num_blocks * settings.block_size // 8)
    count = config.module_start_tokens or max(1, solved)
    rules = ModuleRules(partial(_start, text, count, spec, tokenizer), config.module_reread_tokens)
    reread = f"the first {rules.reread} tokens of each are computed in place" if rules.reread else "all are copied"
    return rules, f"behind up to {count} tokens of {config.module_start or 'our own'}; {reread}"


def _why_not(config: EngineConfig, spec: DecoderSpec) -> str | None:
    if config.prompt_modules is False:
        return "as set"
    if spec.mla is not None:
        return "this model caches latents (MLA), and these cannot be turned to another place yet"
    if parse_layout(config.parallel).dp > 1:
        return "requests are divided among groups of ranks (dp), which do not place modules yet"
    if config.kv_pruning is not None:
        return "kv_pruning drops keys and values, and modules are copied whole"
    if not config.enable_prefix_caching:
        return "modules are kept in the prefix cache, and enable_prefix_caching is off"
    if config.batching != "continuous" or not config.kv_cache:
        return "modules are for continuous batching with a KV cache"
    return None


def _text(config: EngineConfig) -> str:
    if config.module_start is None:
        return files("tokenmill.model").joinpath("texts/module_start.txt").read_text(encoding="utf-8")
    try:
        return Path(config.module_start).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"module_start is {config.module_start!r}, which cannot be read: {error}") from None


def _start(text: str, count: int, spec: DecoderSpec, tokenizer: Callable[[], Tokenizer]) -> list[int]:
    """With the token that texts begin with, which attention leans on; where there is no tokenizer, that alone."""
    first = [spec.bos_id] if spec.bos_id is not None else [*spec.eos_ids, 0][:1]
    try:
        found = tokenizer().encode(text, add_special_tokens=False)
    except ModelError:
        return first
    return (first + found)[:count]
