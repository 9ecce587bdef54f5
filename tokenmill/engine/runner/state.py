"""DeviceState: what lives on the device between steps: token table, lengths, block tables and the KV arena."""

from __future__ import annotations

import torch

from tokenmill.engine.runner.arenas import arenas
from tokenmill.engine.step import DRAFTED, FANOUT, NODES, ON_DEVICE
from tokenmill.model.decoder import LayerKV
from tokenmill.model.spec import DecoderSpec
from tokenmill.ops.kv_forms import KVScales
from tokenmill.ops.types import DecodeTables, TreeTables


class DeviceState:
    """Everything is allocated once, here. A row of the tables belongs to one request for its whole life."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        max_rows: int,
        max_len: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,  # of floats, or of a quantized form's codes
        device: torch.device,
        native: bool = False,  # the cache is read and written by the native library
        memory: torch.Tensor | None = None,  # [bytes]: where keys and values lie; None: in memory of its own
        pruned: bool = False,  # rows may have fewer slots than positions
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_len, self.pruned = max_len, pruned
        self.beside: list[DeviceState] = []  # arenas of other models that lie in the same numbered blocks
        self.max_blocks = -(-max_len // block_size)
        self.scratch_row = max_rows  # belongs to nobody: padding of recorded steps reads and writes it
        # A row that is full and computed once more (padding of static batches) samples a token behind its last place.
        width = -(-(max_len + 1) // 16) * 16
        self.tokens = torch.zeros(max_rows + 1, width, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(max_rows + 1, self.max_blocks, dtype=torch.int32, device=device)
        # How many tokens of a row are known here; kept by steps that verify drafts, for those launched behind them
        self.lengths = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        # Tokens that the device drafted for every row, behind its newest one; see `Step.drafting`
        self.drafts = torch.zeros(max_rows + 1, DRAFTED, dtype=torch.int64, device=device)
        # And the trees that it drafted, in steps that say so
        tokens, parents = torch.zeros(2, max_rows + 1, NODES, dtype=torch.int64, device=device).unbind()
        self.trees = TreeTables(tokens, parents, FANOUT)
        # Of every row the hidden state that its newest token was sampled from, and its position; see `keep_hidden`
        self.hidden: torch.Tensor | None = None
        self.hidden_at = torch.full((max_rows + 1,), -1, dtype=torch.int64, device=device)
        # [tokens, hidden]: what an earlier stage of a pipeline has made of a step's tokens; see `enter_from_stage`
        self.entering: torch.Tensor | None = None
        # How many positions the blocks of every row hold; see `keep_room`
        self.room: torch.Tensor | None = None
        self.arena, self.scales = arenas(spec, num_blocks, block_size, dtype, device, native, memory)
        parts = self.arena.shape[1]
        rope_dim = spec.mla.rope_dim if spec.mla else 0
        self.kv = [LayerKV(layer[0], layer[1] if parts == 2 else layer[0][..., rope_dim:]) for layer in self.arena]
        if self.scales is not None:
            for layer, (k, v) in zip(self.kv, self.scales, strict=True):
                layer.scales = KVScales(k, v)

    @property
    def decode_tables(self) -> DecodeTables:
        tables = self.tokens, self.block_tables, self.lengths, self.drafts
        return DecodeTables(*tables, ON_DEVICE, self.scratch_row, self.block_size)

    def enter_from_stage(self, tokens: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """From now on steps of up to so many tokens begin with what is written here."""
        self.entering = torch.zeros(tokens, width, dtype=dtype, device=self.tokens.device)
        return self.entering

    def keep_hidden(self, width: int, dtype: torch.dtype) -> None:
        """From now on steps leave behind what a draft head starts from."""
        if self.hidden is None:
            self.hidden = torch.zeros(len(self.tokens), width, dtype=dtype, device=self.tokens.device)

    def keep_room(self) -> None:
        """From now on it is known here how far a row's blocks reach: behind them its table may name anybody's.
        Nobody's row has no room.
        """
        self.room = torch.zeros(len(self.tokens), dtype=torch.int64, device=self.tokens.device)

    def write(
        self,
        token_at: torch.Tensor,
        token_value: torch.Tensor,
        block_at: torch.Tensor,
        block_value: torch.Tensor,
    ) -> None:
        """Take over what the host changed; indices count through the flattened tables."""
        if len(token_at):
            self.tokens.view(-1).scatter_(0, token_at, token_value.int())
        if len(block_at):
            self.write_blocks(block_at, block_value)

    def write_blocks(self, at: torch.Tensor, value: torch.Tensor) -> None:
        """Entries of the block tables, from a row's first one on or behind those that it has."""
        self.block_tables.view(-1).scatter_(0, at, value.int())
        if self.room is not None:
            rows, reach = at // self.max_blocks, (at % self.max_blocks + 1) * self.block_size
            self.room.index_fill_(0, rows, 0)  # a row may begin another life
            self.room.scatter_reduce_(0, rows, reach, "amax")

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for arena in (self.arena, self.scales):
            if arena is not None:
                arena[:, :, target] = arena[:, :, source]
        for other in self.beside:
            other.copy_blocks(source, target)

    def slots(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Where in the arena the key and value of each token go; places: their positions, less what is pruned."""
        blocks = self.block_tables[rows, places // self.block_size]
        return blocks.long() * self.block_size + places % self.block_size
