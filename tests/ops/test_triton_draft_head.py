"""The kernels around a draft head's products, against torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY

from tokenmill.ops import reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "hidden"), [(576, 576), (20, 44)])
def test_the_input_is_the_norm_of_state_and_embedding(dtype, width, hidden, triton_device):
    from tokenmill.ops.triton.draft_head import head_input

    generator = torch.Generator().manual_seed(width)
    state, embed = (torch.randn(n, w, generator=generator).to(dtype) for n, w in ((5, width), (11, hidden)))
    weight, ids = torch.rand(width + hidden, generator=generator).to(dtype), torch.tensor([3, 0, 10, 3, 7])
    state, embed, weight, ids = (one.to(triton_device) for one in (state, embed, weight, ids))
    expected = reference.rms_norm(torch.cat([state, embed[ids]], -1), weight, 1e-5)
    torch.testing.assert_close(head_input(state, ids, embed, weight, 1e-5), expected)


@pytest.mark.parametrize("vocab", [8192, 5000, 70])
def test_the_likeliest_token_is_drafted_and_kept(vocab, triton_device):
    from tokenmill.ops.triton.draft_head import head_pick

    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator)
    logits[2, 9] = logits[2, vocab - 1] = 50.0  # the first of equals, as argmax has it
    names = torch.randperm(3 * vocab, generator=generator)[:vocab]
    rows, drafts = torch.tensor([5, 0, 3, 2]), torch.full((7, 4), -5)
    expected = names[logits.argmax(-1)]
    logits, names, rows, drafts = (one.to(triton_device) for one in (logits, names, rows, drafts))
    assert head_pick(logits, names, rows, drafts, 2).tolist() == expected.tolist()
    assert drafts[[5, 0, 3, 2], 2].tolist() == expected.tolist() and int((drafts == -5).sum()) == 24


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("form", [None, "int8"])
def test_a_head_on_the_device_attends_to_what_its_rows_have_cached(form, queries, triton_device):
    """Rows of different lengths, one of them full, and an entry that is nobody's: as a recorded step has them."""
    from tokenmill.engine.runner.drafters import Verified
    from tokenmill.engine.runner.state import DeviceState
    from tokenmill.engine.speculation.head import DeviceHead
    from tokenmill.engine.speculation.head_runner import HeadRunner
    from tokenmill.model.decoder import Decoder
    from tokenmill.model.draft_head import DraftHead, Target
    from tokenmill.model.families import spec_from_config
    from tokenmill.model.weights.dummy import dummy_weights
    from tokenmill.ops.kv_forms import KV_FORMS, dequantize
    from tokenmill.ops.registry import Need, select
    from tokenmill.ops.triton import rope
    from tokenmill.ops.triton.attention.paged import attention
    from tokenmill.ops.types import DecodeInputs
    from tokenmill.sampling.sampler import Sampler
    from tokenmill.sampling.settings import Traits

    torch.manual_seed(0)
    spec, device, layer = spec_from_config(TINY), torch.device(triton_device), 1
    weights = dummy_weights(spec, torch.float32, device, 0)
    ops = select(Need("cpu", torch.float32, spec.head_dim), "reference")
    ops.rope, ops.attention = rope.rope, attention
    decoder = Decoder(spec, weights, ops, 64)
    dtype = torch.float32 if form is None else KV_FORMS[form].dtype
    state = DeviceState(spec, max_rows=4, max_len=64, num_blocks=20, block_size=8, dtype=dtype, device=device)
    state.block_tables[:4] = torch.randperm(20)[:16].view(4, 4).repeat(1, 2).to(device)
    kv = state.kv[layer]
    for one, scales in ((kv.k, kv.scales.k if form else None), (kv.v, kv.scales.v if form else None)):
        if scales is None:
            one.copy_(torch.randn(one.shape))
        else:
            one.copy_(torch.randint(-127, 128, one.shape))
            scales.copy_(torch.rand(scales.shape) / 60)
    wide = 32, 32
    head = DraftHead(
        torch.ones(32), torch.randn(wide), torch.ones(64), torch.randn(32, 64), torch.randn(32, 16), torch.ones(32),
        torch.randn(32, 32), torch.randn(32, 16), torch.ones(32), torch.randn(128, 32), torch.arange(128).int(),
        Target.of(spec, weights.final_norm), kv_layer=layer, attention_norm=torch.rand(32), q_weight=torch.randn(wide),
        o_weight=torch.randn(wide),
    ).map(lambda one: one.to(device))  # fmt: skip
    sampler = Sampler(ops, 4, spec.vocab_size, device, state.tokens, 8)
    drafter = DeviceHead(HeadRunner(head, decoder, sampler, False, state.kv), state, 20)
    hidden, tokens = torch.randn(5, 32, device=device), torch.tensor([3, 9, 27, 81, 5], device=device)
    rows, positions = torch.tensor([2, 0, 4, 3, 1]), torch.tensor([5, 33, 64, 64, 1])
    # Of a row's entries one counts
    counts = torch.arange(5) * queries + torch.randint(queries, (5,))
    of_all = [
        torch.randn(5 * queries, 32),
        torch.full((5 * queries,), 7),
        torch.full((5 * queries,), 4),
        torch.ones(5 * queries),
    ]
    for whole, part in zip(of_all, (hidden, tokens, rows, positions)):
        whole[counts] = part.cpu().to(whole.dtype)
    states, sampled, whose, after = (one.to(device) for one in of_all)
    nothing = torch.zeros(5 * queries, dtype=torch.int32, device=device)
    inputs = DecodeInputs(nothing, after.long() - 1, nothing, nothing, nothing, nothing)
    drafter.draft(Verified(inputs, states, sampled, whose, Traits(), queries))

    for entry, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        if row == state.scratch_row:
            continue
        position = min(position, 63)  # there is no angle for what is behind the last one
        blocks = state.block_tables[row].long()
        keys, values = (
            one[blocks].float() if form is None else dequantize(one[blocks], scales[blocks], torch.float32)
            for one, scales in ((kv.k, kv.scales and kv.scales.k), (kv.v, kv.scales and kv.scales.v))
        )
        keys, values = (one.flatten(0, 1)[:position].repeat_interleave(2, 1) for one in (keys, values))

        def attend(q, keys=keys, values=values, position=position):
            at = torch.tensor([position], device=device)
            turned = reference.rotated(q.view(1, spec.heads, spec.head_dim), decoder.rope_tables[layer], at)[0]
            weights = (torch.einsum("hd,thd->ht", turned, keys) * spec.attn_scale).softmax(-1)
            return torch.einsum("ht,thd->hd", weights, values).view(1, -1)

        token, chain, after = tokens[entry : entry + 1], [], head.enter(hidden[entry : entry + 1])
        for depth in range(drafter.on_device):
            after = head.step(after, decoder.weights.embedding(token), attend if depth == 0 else None)
            token = head.ids[head.logits(after).argmax(-1)].long()
            chain.append(int(token))
        assert state.drafts[row].tolist() == chain, (row, position)
