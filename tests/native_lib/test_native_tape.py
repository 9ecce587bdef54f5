"""A recorded step, replayed for any number of rows, computes exactly what the ops compute one by one."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
import torch
from cases import attention_case

from tokenmill.ops.native import build, library, ops
from tokenmill.ops.native.recording import Buffers, NotRecordableError, Tape, new, row_count
from tokenmill.ops.types import AttentionBatch, Mask

DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 4, 2, 12, 5


class Chain:
    """A stack of attention and gated blocks without products: everything a tape has to get right in its order."""

    def __init__(self, capacity: int) -> None:
        self.case = attention_case(
            [1] * capacity, [7 + 31 * i for i in range(capacity)], heads=HEADS, kv_heads=KV_HEADS, key_dim=HEAD_DIM
        )
        torch.manual_seed(3)
        self.weight = torch.randn(DIM)
        self.table = torch.randn(20, DIM)
        self.ids = torch.zeros(capacity, dtype=torch.int64)

    def __call__(self, ids: torch.Tensor, rows: int) -> torch.Tensor:
        residual = ops.embed(ids, self.table)
        update = ops.rms_norm(residual, self.weight, 1e-5)
        for _ in range(LAYERS):
            x, residual = ops.add_rms_norm(update, residual, self.weight, 1e-5)
            q = x.view(rows, HEADS, HEAD_DIM)
            x = ops.attention(q, self.case.k_cache, self.case.v_cache, self.batch(rows), Mask(), 0.3).flatten(1)
            update = ops.add(x, ops.add(x, residual))
        return update

    def batch(self, rows: int) -> AttentionBatch:
        whole = self.case.batch
        return AttentionBatch(
            whole.rows[:rows],
            whole.q_start[: rows + 1],
            whole.context[:rows],
            whole.block_tables,
            rows,
            1,
            0,
            [],
            [],
            [],
        )


def recorded(chain: Chain, capacity: int) -> tuple[Tape, torch.Tensor]:
    tape = Tape(capacity)
    with tape.record():
        out = chain(chain.ids, capacity)
    return tape, out


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_one_tape_serves_every_number_of_rows(level: int, native: library.Library, threads: int) -> None:
    native.threads = threads
    chain = Chain(9)
    tape, out = recorded(chain, 9)
    for rows in (1, 4, 9, 2):
        chain.ids[:rows] = torch.randint(0, 20, (rows,))
        out.fill_(7.0)
        tape.run(rows)
        assert torch.equal(out[:rows], chain(chain.ids[:rows], rows))
        assert out[rows:].eq(7.0).all()
    native.threads = 1


def test_recording_computes_nothing(native: library.Library) -> None:
    chain = Chain(3)
    marked = torch.full((3, DIM), 5.0)
    tape = Tape(3)
    with tape.record():
        ops.add_rms_norm(marked, chain.table[:3], chain.weight, 1e-5)
    assert marked.eq(5.0).all() and len(tape) == 1


def test_memory_between_ops_is_used_again(native: library.Library) -> None:
    """Layers follow each other in the same few buffers, so the tape needs no more of them for more layers."""
    chain = Chain(6)
    tape, _ = recorded(chain, 6)
    assert tape.nbytes <= 6 * (6 * DIM * 4 + 64)


def test_a_buffer_lives_as_long_as_any_view_of_it() -> None:
    buffers = Buffers(4)
    with torch.inference_mode():
        base = buffers.take((4, 8), torch.float32)
        view = base[:, 2:5].view(4, 3)
        address = base.data_ptr()
        del base
        other = buffers.take((4, 8), torch.float32)
        assert other.data_ptr() != address
        del view
        assert buffers.take((4, 8), torch.float32).data_ptr() == address


def test_torch_computations_are_refused_by_name(native: library.Library) -> None:
    chain = Chain(3)
    tape = Tape(3)
    with torch.inference_mode(), pytest.raises(NotRecordableError, match=r"aten\.mul"), tape.record():
        ops.embed(chain.ids, chain.table) * 2
    assert row_count(5) == 5  # the recording is over
    with pytest.raises(NotRecordableError, match="copy_"), Tape(3).record():
        new((3, DIM)).copy_(chain.table[:3])


def test_views_are_harmless(native: library.Library) -> None:
    chain = Chain(3)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context, Tape(3).record():
            x = ops.embed(chain.ids, chain.table)
            left, right = torch.split(x, [12, 36], dim=-1)
            left.view(-1, 3, 4).flatten(1), right[:, :5].unsqueeze(0).transpose(0, 1), x.float(), x.reshape(-1, 6)


def test_rows_that_do_not_belong_to_the_step_are_refused(native: library.Library) -> None:
    x, weight = torch.zeros(7, 8), torch.zeros(8)
    with pytest.raises(NotRecordableError, match="7 rows"), Tape(4).record():
        ops.rms_norm(x, weight, 1e-5)


def test_a_tape_refuses_more_rows_than_it_has(native: library.Library) -> None:
    tape, _ = recorded(Chain(3), 3)
    with pytest.raises(RuntimeError, match="cannot run 4"):
        tape.run(4)


def test_another_level_refuses_the_tape(native: library.Library) -> None:
    if native.best_level == 0:
        pytest.skip("there is only one level here")
    tape, _ = recorded(Chain(3), 3)
    native.level = 0
    try:
        with pytest.raises(RuntimeError, match="another CPU level"):
            tape.run(3)
    finally:
        native.level = native.best_level


def test_other_threads_compute_while_one_records(native: library.Library) -> None:
    """Recording belongs to a thread: an op called by another one is computed, and not recorded."""
    chain = Chain(3)
    tape = Tape(3)
    found: list[torch.Tensor] = []
    with tape.record():
        thread = threading.Thread(target=lambda: found.append(chain(chain.ids, 3)))
        thread.start()
        thread.join()
        assert len(tape) == 0
    assert torch.equal(found[0], chain(chain.ids, 3))


def test_tapes_of_several_threads_take_turns(native: library.Library) -> None:
    native.threads = 2
    chains = [Chain(5) for _ in range(3)]
    tapes = [recorded(chain, 5) for chain in chains]
    expected = [chain(chain.ids, 5) for chain in chains]
    wrong: list[int] = []

    def replay(number: int) -> None:
        tape, out = tapes[number]
        for _ in range(50):
            out.zero_()
            tape.run(5)
            if not torch.equal(out, expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=replay, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    native.threads = 1
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_replays_pass_the_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    """Tapes replayed by several callers on a pool that changes its size: no race, no access out of bounds."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1")
    shared, program = tmp_path / build.LIBRARY, tmp_path / "stress"
    build.compile_library(shared, extra=flags)
    source = Path(__file__).parent / "tape_stress.cpp"
    subprocess.run(
        [compiler, "-std=c++17", "-pthread", *flags, f"-I{build.SOURCES}", source, shared, f"-Wl,-rpath,{tmp_path}",
         "-o", program],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr
