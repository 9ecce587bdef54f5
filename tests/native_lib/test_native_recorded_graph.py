"""A recorded step, replayed for any number of rows, computes exactly what the ops compute one by one."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
import torch
from cases import attention_case

from tokenmill.ops.native import build, elementwise, library, ops
from tokenmill.ops.native.recording import Buffers, NotRecordableError, RecordedGraph, new, row_count
from tokenmill.ops.types import AttentionBatch, Mask

DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 4, 2, 12, 5


class Chain:
    """A stack of attention and gated blocks without products: everything a graph has to get right in its order."""

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
            update = elementwise.add(x, elementwise.add(x, residual))
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


def recorded(chain: Chain, capacity: int) -> tuple[RecordedGraph, torch.Tensor]:
    graph = RecordedGraph(capacity)
    with graph.record():
        out = chain(chain.ids, capacity)
    return graph, out


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_one_graph_serves_every_number_of_rows(level: int, native: library.Library, threads: int) -> None:
    native.threads = threads
    chain = Chain(9)
    graph, out = recorded(chain, 9)
    for rows in (1, 4, 9, 2):
        chain.ids[:rows] = torch.randint(0, 20, (rows,))
        out.fill_(7.0)
        graph.run(rows)
        assert torch.equal(out[:rows], chain(chain.ids[:rows], rows))
        assert out[rows:].eq(7.0).all()
    native.threads = 1


def test_recording_computes_nothing(native: library.Library) -> None:
    chain = Chain(3)
    marked = torch.full((3, DIM), 5.0)
    graph = RecordedGraph(3)
    with graph.record():
        ops.add_rms_norm(marked, chain.table[:3], chain.weight, 1e-5)
    assert marked.eq(5.0).all() and len(graph) == 1


def test_memory_between_ops_is_used_again(native: library.Library) -> None:
    """Layers follow each other in the same few buffers, so the graph needs no more of them for more layers."""
    chain = Chain(6)
    graph, _ = recorded(chain, 6)
    assert graph.nbytes <= 6 * (6 * DIM * 4 + 64)


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
    graph = RecordedGraph(3)
    with torch.inference_mode(), pytest.raises(NotRecordableError, match=r"aten\.mul"), graph.record():
        ops.embed(chain.ids, chain.table) * 2
    assert row_count(5) == 5  # the recording is over
    with pytest.raises(NotRecordableError, match="copy_"), RecordedGraph(3).record():
        new((3, DIM)).copy_(chain.table[:3])


def test_views_are_harmless(native: library.Library) -> None:
    chain = Chain(3)
    for context in (torch.inference_mode(), torch.no_grad()):
        with context, RecordedGraph(3).record():
            x = ops.embed(chain.ids, chain.table)
            left, right = torch.split(x, [12, 36], dim=-1)
            left.view(-1, 3, 4).flatten(1), right[:, :5].unsqueeze(0).transpose(0, 1), x.float(), x.reshape(-1, 6)


def test_rows_that_do_not_belong_to_the_step_are_refused(native: library.Library) -> None:
    x, weight = torch.zeros(7, 8), torch.zeros(8)
    with pytest.raises(NotRecordableError, match="7 rows"), RecordedGraph(4).record():
        ops.rms_norm(x, weight, 1e-5)


def test_a_graph_refuses_more_rows_than_it_has(native: library.Library) -> None:
    graph, _ = recorded(Chain(3), 3)
    with pytest.raises(RuntimeError, match="cannot run 4"):
        graph.run(4)


def test_another_level_refuses_the_graph(native: library.Library) -> None:
    if native.best_level == 0:
        pytest.skip("there is only one level here")
    graph, _ = recorded(Chain(3), 3)
    native.level = 0
    try:
        with pytest.raises(RuntimeError, match="another CPU level"):
            graph.run(3)
    finally:
        native.level = native.best_level


def test_other_threads_compute_while_one_records(native: library.Library) -> None:
    """Recording belongs to a thread: an op called by another one is computed, and not recorded."""
    chain = Chain(3)
    graph = RecordedGraph(3)
    found: list[torch.Tensor] = []
    with graph.record():
        thread = threading.Thread(target=lambda: found.append(chain(chain.ids, 3)))
        thread.start()
        thread.join()
        assert len(graph) == 0
    assert torch.equal(found[0], chain(chain.ids, 3))


def test_graphs_of_several_threads_take_turns(native: library.Library) -> None:
    native.threads = 2
    chains = [Chain(5) for _ in range(3)]
    graphs = [recorded(chain, 5) for chain in chains]
    expected = [chain(chain.ids, 5) for chain in chains]
    wrong: list[int] = []

    def replay(number: int) -> None:
        graph, out = graphs[number]
        for _ in range(50):
            out.zero_()
            graph.run(5)
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
    """Graphs replayed by several callers on a pool that changes its size: no race, no access out of bounds."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O1")
    shared, program = tmp_path / build.LIBRARY, tmp_path / "stress"
    build.compile_library(shared, extra=flags)
    source = Path(__file__).parent / "graph_stress.cpp"
    subprocess.run(
        [compiler, "-std=c++17", "-pthread", *flags, f"-I{build.SOURCES}", source, shared, f"-Wl,-rpath,{tmp_path}",
         "-o", program],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr
