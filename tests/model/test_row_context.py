"""Which adapter a row uses reaches every linear layer: rows of one step get what models with merged weights give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from decoder_driver import BLOCK, make_decoder

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY

from tokenmill.model.decoder import Decoder, LayerKV, TokenBatch
from tokenmill.model.families import spec_from_config
from tokenmill.model.layers import ResidentWeights
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.ops.types import AttentionBatch
from tokenmill.quant.schemes.adapters import NO_ADAPTER, LowRankUpdates, RowContext
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.scheme import Linear, Schemes

LENGTHS = [5, 3, 6, 4]
ADAPTERS = [0, NO_ADAPTER, 1, 0]
ADAPTED = [
    "layers.0.qkv",
    "layers.0.down",
    "layers.1.o",
    "layers.1.gate_up",
    "layers.2.qkv",
    "layers.2.gate_up",
    "layers.2.down",
]


def decoder() -> Decoder:
    spec = spec_from_config(TINY | {"num_hidden_layers": 3})
    return make_decoder(spec, dummy_weights(spec, torch.float32, torch.device("cpu"), 0, Schemes(Dense())), 64)


def linear_of(one: Decoder, name: str) -> Linear:
    _, index, part = name.split(".")
    layer = one.weights.layer(int(index))
    return getattr(layer.attention if part in ("qkv", "o") else layer.mlp, part)


def updates(one: Decoder) -> dict[str, LowRankUpdates]:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name in ADAPTED:
        rows, columns = linear_of(one, name).storage["weight"].shape
        down, up = (torch.randn(2, *shape, generator=generator) for shape in ((4, columns), (4, rows)))
        found[name] = LowRankUpdates(0.1 * down, 0.1 * up, torch.tensor([4, 4]), (rows,))
    return found


def run(one: Decoder, rows: list[int], context: RowContext | None, last_only: bool) -> torch.Tensor:
    """Logits of these rows of the batch: of every token, or of the last one of each."""
    spec, counts = one.spec, [LENGTHS[row] for row in rows]
    kv = [LayerKV(*(torch.zeros(32, BLOCK, spec.kv_heads, spec.head_dim) for _ in range(2))) for _ in range(3)]
    tables = torch.arange(32, dtype=torch.int32).view(4, 8)
    positions = torch.cat([torch.arange(count) for count in counts])
    owner = torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts))
    slots = tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    ends = torch.tensor([0, *counts]).cumsum(0)
    batch = AttentionBatch(
        rows=torch.tensor(rows, dtype=torch.int32), q_start=ends.int(), context=torch.tensor(counts, dtype=torch.int32),
        block_tables=tables, num_singles=0, max_query=max(counts), max_context=max(counts), host_rows=rows,
        host_counts=counts, host_context=counts,
    )  # fmt: skip
    ids = torch.cat([torch.arange(count) * 7 % 100 + 3 * row for row, count in zip(rows, counts, strict=True)])
    tokens = TokenBatch(ids, positions, slots, batch, context=context)
    with torch.inference_mode():
        return one.logits(one.forward(tokens, kv, wanted=ends[1:] - 1 if last_only else None))


@pytest.mark.parametrize("last_only", [False, True])
def test_rows_with_other_adapters_share_a_step(last_only: bool) -> None:
    base = decoder()
    base.adapters = updates(base)
    owner = torch.repeat_interleave(torch.tensor(ADAPTERS), torch.tensor(LENGTHS))
    together = run(base, [0, 1, 2, 3], RowContext(owner), last_only)
    first = 0
    for row, slot in enumerate(ADAPTERS):
        merged = decoder()
        for name, one in updates(merged).items() if slot != NO_ADAPTER else ():
            linear_of(merged, name).storage["weight"] += one.up[slot].T @ one.down[slot]
        alone = run(merged, [row], None, last_only)
        assert torch.allclose(together[first : first + len(alone)], alone, atol=1e-4), row
        first += len(alone)
    assert first == len(together)


def test_without_a_context_nothing_is_different() -> None:
    plain, with_adapters = decoder(), decoder()
    with_adapters.adapters = updates(with_adapters)
    assert torch.equal(run(plain, [0, 1], None, True), run(with_adapters, [0, 1], None, True))
    assert isinstance(plain.weights, ResidentWeights)
