"""An EAGLE-3 head at the end of a recorded step: with the kernels of a GPU it drafts what it drafts in torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path += [str(Path(__file__).parents[1] / one) for one in (".", "engine", "speculation")]
from test_drafts_on_device import masked_attention
from tiny import TINY
from tiny_drafts import made_eagle

from tokenmill.engine.runner.drafters import Verified
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.speculation import eagle
from tokenmill.engine.speculation.device_eagle import DeviceEagle
from tokenmill.model.decoder import Decoder, Features, TokenBatch
from tokenmill.model.eagle import EagleHead
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.ops.registry import Need, Ops, select
from tokenmill.ops.types import AttentionBatch, DecodeInputs
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.settings import Traits

WIDTH, ROWS = 3, [2, 0, 4, 1]  # entries of each row; row 4 is nobody's
STARTS, LAST = [5, 29, 0, 21], [2, 1, 0, 2]  # of the rows; which of its entries is the newest


def drafts(tmp_path: Path, ops: Ops, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """After a step of four rows with three entries each: one that fills its block, one that is nobody's."""
    monkeypatch.setattr(eagle, "select", lambda need: ops)
    torch.manual_seed(0)
    spec = spec_from_config(TINY)
    weights = dummy_weights(spec, torch.float32, device, 0)
    plain = select(Need("cpu", torch.float32, spec.head_dim), "reference")
    decoder = Decoder(spec, weights, plain, 64)
    state = DeviceState(spec, max_rows=4, max_len=64, num_blocks=40, block_size=8, dtype=torch.float32, device=device)
    state.block_tables[:4] = torch.randperm(40)[:32].view(4, 8).to(device)
    sampler = Sampler(plain, 4, spec.vocab_size, device, state.tokens, 12)
    head = EagleHead.load(made_eagle(tmp_path / "head", TINY, [0, 1]), spec)
    runner = SimpleNamespace(decoder=decoder, state=state, sampler=sampler, device=device)
    drafter = DeviceEagle(head, runner, 12)  # type: ignore[arg-type]
    drafter._head.state.arena.copy_(torch.randn(drafter._head.state.arena.shape))
    rows = torch.tensor(ROWS).repeat_interleave(WIDTH)
    positions = (torch.tensor(STARTS)[:, None] + torch.arange(WIDTH)).flatten().to(device)
    live = (rows != state.scratch_row).to(device)
    slots = torch.where(live, state.slots(rows.to(device), positions), -1)
    context = torch.where(live, positions + 1, 0).int()
    newest = (torch.tensor(LAST)[:, None] == torch.arange(WIDTH)).flatten()
    last = torch.where(newest, rows, state.scratch_row).to(device)
    n = len(rows)
    batch = AttentionBatch(
        rows.int().to(device), torch.arange(n + 1, dtype=torch.int32, device=device), context, state.block_tables, n, 1,
        64, [0] * n, [1] * n, [64] * n, queries=WIDTH,
    )  # fmt: skip
    tokens, features = torch.randint(2, 42, (n,), device=device), Features((0, 1), torch.randn(n, 64).to(device))
    ids = torch.zeros(n, dtype=torch.int32, device=device)
    inputs = DecodeInputs(ids, positions, slots, context, batch.rows, ids)
    whole = TokenBatch(ids, positions, slots, batch, features=features)
    drafter.draft(Verified(inputs, features.states, tokens, last, Traits(), WIDTH, whole))
    return torch.cat([state.drafts[:4].flatten().cpu(), drafter._head.state.arena[:, :, :40].flatten().cpu()])


def test_kernels_draft_what_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, triton_device: str) -> None:
    """Drafts, and all keys and values that are no chain's own."""
    from tokenmill.ops.triton import norm, rope
    from tokenmill.ops.triton.attention.paged import attention

    device, need = torch.device(triton_device), Need("cpu", torch.float32, 8)
    expected, kernels = select(need, "reference"), select(need, "reference")
    expected.attention = masked_attention
    kernels.attention, kernels.rope_kv_write = attention, rope.rope_kv_write
    kernels.rms_norm, kernels.add_rms_norm = norm.rms_norm, norm.add_rms_norm
    found = [drafts(tmp_path, ops, device, monkeypatch) for ops in (expected, kernels)]
    assert found[0][:16].tolist() == found[1][:16].tolist() and len(set(found[0][:16].tolist())) > 6
    torch.testing.assert_close(found[0][16:], found[1][16:])
