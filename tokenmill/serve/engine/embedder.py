"""Embedder: the vector of a text, from the hidden states of the model that the engine serves. In the engine process."""

from __future__ import annotations

import torch

from tokenmill.engine.runner.state import DeviceState
from tokenmill.errors import InvalidRequest
from tokenmill.model.decoder import Decoder, TokenBatch
from tokenmill.ops.types import AttentionBatch

MOST_TOKENS = 8192  # its keys and values are not in the engine's memory plan, so they are kept small
POOLINGS = ("mean", "last")


class Embedder:
    """Runs one prompt at a time through the decoder, with keys and values of its own, made when first needed."""

    def __init__(self, decoder: Decoder, max_len: int, max_step_tokens: int, block_size: int) -> None:
        self._decoder = decoder
        self._longest = min(max_len, MOST_TOKENS)
        self._chunk = max_step_tokens
        self._block_size = block_size
        self._state: DeviceState | None = None

    @torch.inference_mode()
    def vector(self, tokens: list[int], pooling: str) -> list[float]:
        """Of unit length."""
        if len(tokens) > self._longest:
            raise InvalidRequest(f"a text to embed may have {self._longest} tokens; this one has {len(tokens)}")
        if pooling not in POOLINGS:
            raise InvalidRequest(f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}")
        state = self._state = self._state or self._make_state()
        total = torch.zeros(self._decoder.spec.hidden, dtype=torch.float64, device=state.tokens.device)
        for start in range(0, len(tokens), self._chunk):
            chunk = tokens[start : start + self._chunk]
            hidden = self._decoder.forward(_batch(state, chunk, start), state.kv)  # [chunk, hidden]
            total = total + hidden.double().sum(0) if pooling == "mean" else hidden[-1].double()
        found: list[float] = torch.nn.functional.normalize(total, dim=0).tolist()
        return found

    def _make_state(self) -> DeviceState:
        weights = self._decoder.weights
        blocks = -(-self._longest // self._block_size)
        state = DeviceState(
            self._decoder.spec,
            max_rows=1,
            max_len=self._longest,
            num_blocks=blocks,
            block_size=self._block_size,
            dtype=weights.dtype,
            device=torch.device(weights.device),
        )
        state.block_tables[0] = torch.arange(blocks, dtype=torch.int32)
        return state


def _batch(state: DeviceState, chunk: list[int], start: int) -> TokenBatch:
    device, end = state.tokens.device, start + len(chunk)
    positions = torch.arange(start, end, device=device)
    return TokenBatch(
        ids=torch.tensor(chunk, dtype=torch.int32, device=device),
        positions=positions,
        slots=state.slots(torch.zeros_like(positions), positions),
        attention=AttentionBatch(
            rows=torch.zeros(1, dtype=torch.int32, device=device),
            q_start=torch.tensor([0, len(chunk)], dtype=torch.int32, device=device),
            context=torch.tensor([end], dtype=torch.int32, device=device),
            block_tables=state.block_tables,
            num_singles=int(len(chunk) == 1),
            max_query=len(chunk),
            max_context=end,
            host_rows=[0],
            host_counts=[len(chunk)],
            host_context=[end],
        ),
    )
