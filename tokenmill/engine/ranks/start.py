"""Whether an engine has several ranks, what each of them loads, and what is said of it."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import torch

from tokenmill.config import EngineConfig, parse_speculation
from tokenmill.engine.checkpoints import Progress
from tokenmill.engine.choices import hardware_of
from tokenmill.engine.identity import weights_fingerprint
from tokenmill.engine.rank_model import Prepared, settings_text
from tokenmill.engine.ranks.machines import Machines
from tokenmill.engine.ranks.processes import RankProcesses
from tokenmill.engine.tiers import wants_tiers
from tokenmill.errors import ConfigError
from tokenmill.parallel.layout import MAX_RANKS, Layout, parse_layout
from tokenmill.peers import address_of, read_secret
from tokenmill.plan.solve.hardware import Hardware
from tokenmill.plan.solve.settings import SolvedSettings


def start_ranks(config: EngineConfig, device: torch.device) -> RankProcesses | None:
    """None: the engine has one rank."""
    layout = parse_layout(config.parallel)
    if layout.ranks == 1:
        return None
    if device.type != "cpu":
        seen = torch.cuda.device_count()
        why = f"torch sees {seen} of the GPUs" if seen < layout.ranks else "ranks on GPUs are not there yet"
        raise ConfigError(
            f"parallel is {config.parallel!r}, which is {layout.ranks} ranks, but {why}; use device='cpu', or leave "
            "parallel out"
        )
    if layout.ranks > MAX_RANKS:
        raise ConfigError(
            f"parallel is {config.parallel!r}, which is {layout.ranks} ranks; an engine has {MAX_RANKS} at most"
        )
    if any(kind != "suffix" for kind, _ in parse_speculation(config.speculation)):
        raise ConfigError(
            f"speculation is {config.speculation!r} and parallel {config.parallel!r}, but heads, draft models and "
            "layers draft beside one rank only; use suffix, or leave one of the two out"
        )
    if wants_tiers(config) and layout.ranks != layout.tp:
        raise ConfigError(
            f"parallel is {config.parallel!r}, and kv_host_memory, kv_disk_path and kv_push_to are for one rank, or "
            "for ranks that divide heads (tp, ep); leave that or these out"
        )
    if config.rank_listen is None:
        return RankProcesses(layout.ranks)
    if wants_tiers(config):
        raise ConfigError(
            f"rank_listen is {config.rank_listen!r}, and kv_host_memory, kv_disk_path and kv_push_to reach ranks of "
            "one machine only; leave one of the two out"
        )
    machines = _machines(config, config.rank_listen, layout)
    return RankProcesses(layout.ranks, here=range(1, machines.here), machines=machines)


def _machines(config: EngineConfig, address: str, layout: Layout) -> Machines:
    here = config.ranks_here or (layout.ranks // layout.pp if layout.pp > 1 else 1)
    secret = read_secret(config.rank_secret_file or "", "rank_secret_file")
    return Machines(layout, here, address_of(address), secret, "rank_listen", config.rank_patience)


def gather_ranks(config: EngineConfig, made: Prepared, ranks: RankProcesses | None, tell: Progress) -> None:
    """Wait for the machines that have the others. Raises RanksAbsentError."""
    if ranks is not None and ranks.machines is not None:
        ranks.machines.open(config.model, weights_fingerprint(made.files))
        ranks.machines.wait(tell)


def smallest_hardware(device: torch.device, ranks: RankProcesses | None) -> Hardware:
    """What the rank with the least memory has of its machine: all plan alike."""
    found = hardware_of(device, 1 if ranks is None else ranks.near)
    for total, free in [] if ranks is None or ranks.machines is None else ranks.machines.memory:
        found = replace(found, total_bytes=min(found.total_bytes, total), free_bytes=min(found.free_bytes, free))
    return found


def threads_of_rank(ranks: int) -> int:
    """Ranks divide what one rank would have had, so that they do not fight for cores."""
    return max(1, torch.get_num_threads() // ranks)


def load_order(config: EngineConfig, made: Prepared, settings: SolvedSettings) -> dict[str, Any]:
    """What every rank loads: nothing is fetched or solved again."""
    there = replace(config, model=str(made.files.path), skip_tokenizer_init=True)
    return {"config": asdict(there), "settings": settings_text(settings), "threads": torch.get_num_threads()}


def group_lines(config: EngineConfig, made: Prepared, ranks: RankProcesses | None) -> list[str]:
    if ranks is None:
        return []
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    each = f"{threads} thread{'s' * (threads > 1)} each"
    lines = [f"ranks        {ranks.ranks} ({parse_layout(config.parallel)}), {each}"]
    if ranks.machines is not None:
        own = "rank 0" if ranks.near == 1 else f"ranks 0 to {ranks.near - 1}"
        others = ", ".join(
            f"{', '.join(map(str, span))} at {host}"
            for span, host in zip(ranks.machines.ranges[1:], ranks.machines.hosts, strict=True)
        )
        lines[0] = f"ranks        {ranks.ranks} ({parse_layout(config.parallel)}): {own} here, {each}; {others}"
        layout, spans = parse_layout(config.parallel), ranks.machines.ranges
        if any(rank + 1 in layout.tensor_group(rank) for rank in (span[-1] for span in spans)):
            lines.append(
                "ranks        heads are divided between machines: every layer waits for the network twice, and steps "
                "are not recorded; stages (pp) wait once per step"
            )
    if (groups := parse_layout(config.parallel).dp) > 1:
        lines.append(
            f"ranks        {groups} groups with requests of their own: max_num_seqs, max_num_batched_tokens and the KV "
            "cache are each group's"
        )
    if config.allreduce_8bit_above is not None:
        lines.append(
            f"ranks        sums of {config.allreduce_8bit_above:,} bytes or more travel in eight bits, which changes "
            "answers within a bound (as set)"
        )
    if ranks.near * threads > cores:
        lines.append(f"ranks        there are {cores} cores for {ranks.near * threads} threads, so they take turns")
    if config.adaptive_precision and made.dtype in (torch.float16, torch.bfloat16) and not config.batch_invariant:
        lines.append("ranks        adaptive_precision is off: it is for one rank only")
    return lines
