"""Attention of draft heads in training and judgement: entries' queries over what the target cached for their texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tokenmill.draft.states import States
from tokenmill.model.decoder import Decoder
from tokenmill.model.draft_head import Attend
from tokenmill.ops.reference import rotated


def attend_in_windows(
    decoder: Decoder,
    layer: int,
    states: States,
    entries: torch.Tensor,  # [n]
    window: torch.Tensor,  # [n]: which window an entry is in
    first: torch.Tensor,  # [windows]: the token of all texts that each begins with
    width: int,  # tokens of a window
) -> Attend:
    """For entries that lie close together: keys of a window are read once for all of its entries.

    Every token of a window asks, whether it is an entry or not, so that there is one product for all of them.
    """
    assert states.keys is not None and states.values is not None
    spec, at = decoder.spec, torch.arange(width, device=first.device)
    tokens = first[:, None] + at  # [windows, width]
    group = spec.heads // spec.kv_heads
    keys, values = (
        one[tokens].transpose(1, 2).repeat_interleave(group, 1) for one in (states.keys, states.values)
    )  # [windows, heads, width, dim]
    same_text = tokens[:, None, :] >= states.begins[tokens][:, :, None]
    visible = (same_text & (at[None, :] <= at[:, None]))[:, None]  # [windows, 1, width, width]
    place = window * width + states.read[entries] - first[window]
    positions = states.positions[entries]

    def attend(q: torch.Tensor) -> torch.Tensor:  # [n, heads * dim]
        turned = rotated(q.view(-1, spec.heads, spec.head_dim), decoder.rope_tables[layer], positions)
        turned = turned.to(keys.dtype)
        asked = turned.new_zeros(len(first) * width, spec.heads, spec.head_dim).index_copy(0, place, turned)
        asked = asked.view(len(first), width, spec.heads, spec.head_dim).transpose(1, 2)
        found = F.scaled_dot_product_attention(asked, keys, values, attn_mask=visible, scale=spec.attn_scale)
        return found.transpose(1, 2).reshape(len(first) * width, -1).index_select(0, place).to(q.dtype)

    return attend


def attend_anywhere(decoder: Decoder, layer: int, states: States, entries: torch.Tensor) -> Attend:  # [n]
    """For entries that lie anywhere: each has the keys of its whole text copied."""
    assert states.keys is not None and states.values is not None
    spec = decoder.spec
    read, context = states.read[entries], states.positions[entries]  # a token at position p follows p others
    at = torch.arange(int(context.max()), device=entries.device)
    tokens = torch.minimum(states.begins[read][:, None] + at, read[:, None])  # [n, longest]
    keys, values = (one[tokens].transpose(1, 2).float() for one in (states.keys, states.values))
    visible = (at < context[:, None])[:, None, None]  # [n, 1, 1, longest]

    def attend(q: torch.Tensor) -> torch.Tensor:  # [n, heads * dim]
        turned = rotated(q.float().view(-1, spec.heads, spec.head_dim), decoder.rope_tables[layer], context)
        grouped = turned.view(len(q), spec.kv_heads, -1, spec.head_dim)  # queries of a key's head are its rows
        found = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=spec.attn_scale)
        return found.reshape(len(q), -1).to(q.dtype)

    return attend
