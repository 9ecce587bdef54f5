"""What the kernels declare, and their launch shapes, picked by rule so that nothing has to be tuned at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenmill.ops.device_facts import multiprocessors, reads_shared, room
from tokenmill.ops.registry import Implementation
from tokenmill.ops.triton.launch import MOST_PROGRAMS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 576

# Partial results of a split decode never take more than this, so the memory plan can count on it.
DECODE_WORKSPACE_BYTES = 32 << 20

# Programs per multiprocessor that a decode aims at: enough to keep memory busy and to even out the tail.
_DECODE_WAVES = 8
_FEW_ROWS_WAVES = 4
_ONE_ROW_WAVES = 1  # more parts of a lone row only make its join longer
_LONE_WARPS = 2  # times as many programs where each is a single warp
_MOST_PREFIX_SPLITS = 8
_LEAST_KEYS_OF_MANY = 512


def declare(fn: Callable[..., Any], **capabilities: Any) -> Implementation:
    """A Triton op, named as the op that it implements; `capabilities`: fields of Implementation that differ."""
    usual: dict[str, Any] = {"name": "triton", "devices": ("cuda",), "dtypes": DTYPES, "rank": 10}
    usual |= {"capture_safe": True, "batch_invariant": True}
    return Implementation(op=fn.__name__, fn=fn, **(usual | capabilities))


@dataclass(frozen=True)
class Tile:
    """Shape of one attention program: queries x keys, and how the hardware runs it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def fitting(tile: Tile, key_dim: int, value_dim: int, itemsize: int, device: torch.device) -> Tile:
    """With fewer stages, then fewer queries or keys, until these and the keys and values on their way fit.

    About half of the stages hold keys and values: the block table, which says where they are, is loaded ahead of them.
    Weights of the keys take room, too, where heads are wide (as compiled: scripts/compile_kernels.py).
    """

    def too_large(tile: Tile) -> bool:
        ahead = (tile.num_stages + (tile.block_m >= 64 and reads_shared(device))) // 2
        elements = tile.block_m * key_dim + ahead * tile.block_n * (key_dim + value_dim)
        elements += tile.block_m * tile.block_n * (key_dim > 128)
        return elements * itemsize > room(device)

    while tile.num_stages > 2 and too_large(tile):
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while tile.block_m > 16 and too_large(tile):
        tile = replace(tile, block_m=tile.block_m // 2)
    while tile.block_n > 16 and too_large(tile):
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def pipeline(wanted: int, block_k: int, column_bytes: int, most: int, device: torch.device) -> tuple[int, int]:
    """The step over an inner dimension and its stages: as many of those wanted as fit, of shorter steps where fewer
    than three do. `column_bytes`: of a column of all operands; `most`: bytes that the pipeline may take.
    """
    most = min(most, room(device))

    def fits(stages: int, block_k: int) -> bool:
        return max(1, stages - (not reads_shared(device))) * block_k * column_bytes <= most

    while block_k > 32 and not fits(min(wanted, 3), block_k):
        block_k //= 2
    return block_k, next((stages for stages in range(wanted, 1, -1) if fits(stages, block_k)), 1)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def reads_transposed(form: str, key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether a decode reads codes as left operands (kv_transposed): for queries of 16 bits, heads of a usual size."""
    return form != "" and key_dim == value_dim and key_dim in (64, 128, 256) and dtype.itemsize == 2


# For heads of 128, where a part of each row and kv head gives 128 to 1,024 programs: with short pipelines several share
# a multiprocessor and all run at once (32 x 2.2k keys, 4 kv heads: 54 to 44 us; 64 x 1.1k, 8 kv heads: 84 to 75).
_SOME_PROGRAMS, _SEVERAL_PROGRAMS, _MANY_PROGRAMS = 128, 512, 1025
_SHORT = {Tile(16, 64, 2, 4): 4, Tile(16, 64, 4, 4): 3}  # for some, and for several: how many waves they are cut into


def decode_tile(
    group: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    programs: int,  # rows x kv heads
    transposed: str | None = None,  # the form of a cache whose codes are the left operands of products
) -> Tile:
    """One kv head's group of queries against a run of keys.

    The load of the block table takes pipeline stages too: five stages keep two tiles of keys on their way.
    """
    if transposed is not None:  # as measured (scripts/gpu_kv.py)
        block_m = min(max(4, power_of_two(group)), 16)
        return Tile(block_m, 64 if transposed == "fp8" else 32, 1, 5 if transposed == "int4" else 4)
    token_bytes = (key_dim + value_dim) * dtype.itemsize
    block_m = max(16, power_of_two(group))
    if dtype == torch.float32:
        return Tile(16, 32 if token_bytes <= 1024 else 16, 8, 3 if token_bytes <= 2048 else 2)
    if token_bytes > 1024:
        return Tile(min(block_m, 64), 32, 8, 3 if block_m <= 32 else 2)
    if token_bytes > 512:
        return Tile(min(block_m, 32), 32, 4, 5)
    if token_bytes == 512 and block_m == 16 and _SOME_PROGRAMS <= programs < _MANY_PROGRAMS:
        some, several = _SHORT
        return some if programs < _SEVERAL_PROGRAMS else several
    return Tile(min(block_m, 64), 64, 2 if block_m == 16 else 4, 5)


def prefill_tile(queries: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """`queries`: the most query rows (tokens x group) that any row of the batch brings."""
    widest = max(key_dim, value_dim)
    if dtype == torch.float32:
        return Tile(16, 32 if widest <= 128 else 16, 4 if widest <= 256 else 8, 2)
    if widest > 256:
        return Tile(16 if queries <= 16 else 64, 16, 8, 3)
    if queries <= 16:
        return Tile(16, 64 if widest <= 128 else 32, 4, 3)
    if queries <= 64:
        return Tile(64, 64, 4 if widest <= 128 else 8, 3)
    if widest > 128:
        return Tile(128, 32, 8, 3)
    return Tile(128, 64, 8, 5)


def decode_splits(
    rows: int,
    kv_programs: int,  # programs that one part of one row takes
    heads: int,
    value_dim: int,
    tile: Tile,
    device: torch.device,
    queries: int = 1,  # of a row
) -> tuple[int, int]:
    """How many parts there may be beyond one per row, and the fewest tiles a part may have.

    The device deals the parts to the rows by what they really have to read, so a recorded step stays balanced.
    """
    programs = max(rows * kv_programs, 1)
    waves = _DECODE_WAVES if programs >= multiprocessors(device) else _FEW_ROWS_WAVES
    waves = _ONE_ROW_WAVES if rows == 1 else waves
    waves *= _LONE_WARPS if tile.num_warps == 1 else 1
    waves = _SHORT.get(tile, waves)
    extra = waves * multiprocessors(device) // kv_programs
    if tile in _SHORT and programs < _SEVERAL_PROGRAMS:  # so that all of these start early, and are one kernel
        extra = min(extra, MOST_PROGRAMS // kv_programs - rows)
    room = DECODE_WORKSPACE_BYTES // 2 // partial_bytes(heads, value_dim)
    extra = max(1, min(extra, max(room - rows, room // 2)))
    least_keys = 256 if programs >= multiprocessors(device) else 64
    least_keys = 128 if tile in _SHORT else least_keys
    if queries > 1 and rows >= 8 and tile.block_m > 16:  # more to join: 32 x 17 queries at 300 keys 24.9 to 13.8 us
        least_keys = _LEAST_KEYS_OF_MANY
    return extra, max(1, least_keys // tile.block_n)


def partial_bytes(heads: int, value_dim: int) -> int:
    """What a partial result of one row takes: a sum, its largest score and its total per head, in float32."""
    return 4 * heads * (value_dim + 2)


def prefix_tile(queries: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """`queries`: rows that share the prefix x group."""
    widest = max(key_dim, value_dim)
    if dtype == torch.float32:
        return Tile(16, 32 if widest <= 128 else 16, 4 if widest <= 256 else 8, 2)
    if widest > 256:
        return Tile(64, 16, 8, 3)
    if queries <= 64 or widest > 128:
        return Tile(64, 64 if widest <= 128 else 32, 4, 3)
    return Tile(128, 64, 8, 5)


def prefix_splits(
    rows: int,
    own_parts: int,  # partial results that the rows' own keys may take
    programs: int,  # programs that one split of the prefix takes
    heads: int,
    value_dim: int,
    device: torch.device,
) -> int:
    """Into how many parts a shared prefix is cut; 0 if there is no room for their partial results."""
    room = DECODE_WORKSPACE_BYTES // partial_bytes(heads, value_dim) - own_parts
    wanted = max(1, multiprocessors(device) // programs)
    return max(0, min(wanted, _MOST_PREFIX_SPLITS, room // rows))
