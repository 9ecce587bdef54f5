"""Drafts and overlap together: rows are as long as the device says, steps are replayed, tokens stay the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder

sys.path.append(str(Path(__file__).parents[1]))
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.engine.core import Engine
from tokenmill.engine.request import Request
from tokenmill.engine.runner import cuda_graphs, torch_runner
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.engine.runner.recordings import WIDTHS
from tokenmill.engine.speculation.replay import ReplayProposer
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.ops import reference
from tokenmill.ops.kv_forms import KVScales, gather
from tokenmill.ops.types import AttentionBatch, Mask

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 32, "ops": "reference",
    "cuda_graphs": False, "enable_prefix_caching": False, "max_model_len": 128,
}  # fmt: skip
PROMPTS = [[3 + (7 * i + j) % 120 for j in range(3 + 5 * i)] for i in range(5)]


class Replay(Speculation):
    """Has how known answers go on verified, wrong at a set rate, whatever that brings."""

    def __init__(self, answers: dict[str, list[int]], wrong: float, length: int = 3) -> None:
        super().__init__(max_tokens=32, per_token=0.0)
        self.answers, self.known = dict(answers), ReplayProposer(1 - wrong, length, vocab=128, seed=3)

    def propose(self, requests: Sequence[Request]) -> None:
        for one in requests:
            if one.id in self.answers:
                self.known.learn(one.tokens[: one.prompt_len], self.answers.pop(one.id))
        for one, draft in zip(requests, self.known.propose(requests, 100), strict=True):
            one.drafts = [] if draft is None else draft.tokens[one.pending :]


def params(index: int, penalty: float) -> SamplingParams:
    warm = {"temperature": 0.8, "top_k": 20, "repetition_penalty": penalty} if index % 2 else {"temperature": 0.0}
    return SamplingParams(seed=index, max_tokens=12 + 5 * index, ignore_eos=True, **warm)


def requests(penalty: float) -> list[Request]:
    return [
        Request(f"r{i}", prompt, params(i, penalty), max_tokens=12 + 5 * i, seed=i) for i, prompt in enumerate(PROMPTS)
    ]


def run(engine: Engine, proposer: Replay | None = None, penalty: float = 1.2) -> tuple[dict[str, list[int]], int, int]:
    """What requests were answered, how many steps that took, and how many rows started where only the device knew."""
    some, engine.speculation = requests(penalty), proposer
    for one in some[:3]:
        engine.add(one)
    late, steps, uncertain = some[3:], 0, 0
    while engine.has_work or late:
        if steps == 6:
            for one in late:
                engine.add(one)
            late = []
        engine.step()
        steps += 1
        uncertain += sum(len(step.slack) for step, *_ in engine._in_flight)
    assert engine.scheduler.stats.failed_steps == 0
    return {one.id: one.output for one in some}, steps, uncertain


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_drafts_change_no_token(tmp_path: Path, wrong: float, overlap: bool) -> None:
    model = write_tiny(tmp_path / "model")
    with LLM(model=model, overlap=overlap, **OPTIONS) as llm:
        plain, steps, _ = run(llm._built.engine)
        drafted, fewer, uncertain = run(llm._built.engine, Replay(plain, wrong))
    assert drafted == plain
    assert wrong == 1.0 or fewer < 0.8 * steps
    assert (uncertain > 10) == overlap


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    mask: Mask,
    scale: float,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attention of single queries in terms of the device's tensors alone, as kernels compute it: it can be replayed."""
    tables = batch.block_tables[batch.rows.long()].long()
    n, heads = len(tables), q.shape[1] // k.shape[2]
    cached = (k, scales and scales.k), (v, scales and scales.v)
    floats = (gather(one, beside, tables.flatten(), q.dtype) for one, beside in cached)
    keys, values = (one.reshape(n, -1, *one.shape[2:]).repeat_interleave(heads, 2) for one in floats)
    scores = torch.einsum("nhd,nthd->nht", q, keys) * scale
    place = torch.arange(keys.shape[1])[None, :]
    seen = place < batch.context[:, None].clamp_min(1)
    if batch.tails is not None:
        behind = place - (batch.context[:, None] - 1 - torch.arange(n)[:, None] % batch.queries)
        seen = seen & ((behind < 0) | (((batch.tails[:, None] >> behind.clamp(0, 31)) & 1) > 0))
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num()  # what sees nothing gets zeros
    return torch.einsum("nht,nthd->nhd", weights, values)


def masked_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, *norms: Any, scales: KVScales | None = None,
) -> None:  # fmt: skip
    """Writes keys and values as kernels do: how many have no place changes no shape, so it can be replayed."""
    caches = [k_cache, v_cache, *(() if scales is None else (scales.k, scales.v))]
    # A place more, of which nobody knows, and each a block of its own
    longer = [torch.cat([one.flatten(0, 1), one[0, :1]])[:, None] for one in caches]
    places = torch.where(slots < 0, len(longer[0]) - 1, slots)
    beside = None if scales is None else KVScales(*longer[2:])
    reference.rope_kv_write(q, k, v, cos_sin, positions, *longer[:2], places, *norms, scales=beside)
    for one, wrote in zip(caches, longer, strict=True):
        one.copy_(wrote[:-1].view(one.shape))


class Graphs(DecodeGraphs):
    """What is recorded on a GPU does not happen; here it does, and is undone."""

    def _record(self, *args: Any) -> None:
        changed = self._state.lengths, self._state.tokens
        before = [one.clone() for one in changed]
        super()._record(*args)
        for now, then in zip(changed, before, strict=True):
            now.copy_(then)


class Unrecorded(DecodeGraphs):
    """Steps with the inputs of recorded ones, each computed anew: what a CPU computes of log-probabilities has another
    shape in every step."""

    def _record(self, recording: Any, *args: Any) -> None:
        recording.refused = True


class FakeStaging:
    def __init__(self, words: int, buffers: int = 4) -> None:
        self.words = words

    def send(self, parts: list[Any], target: torch.Tensor) -> torch.Tensor:
        count = sum(map(len, parts))
        target[:count] = torch.cat([torch.from_numpy(part) for part in parts])
        return target[:count]


def behind_the_host(monkeypatch: pytest.MonkeyPatch, runner: torch_runner.TorchRunner) -> None:
    """Have a CPU treated as a GPU is: rows stand where its own memory says, and results are copied in order."""
    monkeypatch.setattr(torch_runner, "ASYNC_DEVICES", {"cpu"})
    monkeypatch.setattr(torch_runner, "_to_host", lambda tensor: tensor.clone())
    plainly = runner.decoder.ops.attention

    def attention(q: Any, k: Any, v: Any, batch: AttentionBatch, *rest: Any, **more: Any) -> torch.Tensor:
        singles = batch.num_singles
        if singles == len(batch.host_rows):
            return masked_attention(q, k, v, batch, *rest, **more)
        if not singles:
            return plainly(q, k, v, batch, *rest, **more)
        parts = []
        for rows in (slice(0, singles), slice(singles, None)):
            counts = batch.host_counts[rows]
            first = int(batch.q_start[rows.start])
            part = replace(
                batch, rows=batch.rows[rows], context=batch.context[rows], q_start=batch.q_start[rows.start :] - first,
                num_singles=singles if rows.start == 0 else 0, host_rows=batch.host_rows[rows], host_counts=counts,
                host_context=batch.host_context[rows], max_query=max(counts),
            )  # fmt: skip
            run = masked_attention if rows.start == 0 else plainly
            parts.append(run(q[first : first + sum(counts)], k, v, part, *rest, **more))
        return torch.cat(parts)

    always = property(lambda self: attention, lambda self, fn: None)  # of a draft model that comes later, too
    monkeypatch.setattr(type(runner.decoder.ops), "attention", always, raising=False)
    always = property(lambda self: masked_write, lambda self, fn: None)
    monkeypatch.setattr(type(runner.decoder.ops), "rope_kv_write", always, raising=False)


def runner_of(llm: LLM) -> torch_runner.TorchRunner:
    runner = llm._built.engine.runner
    assert isinstance(runner, torch_runner.TorchRunner)
    return runner


@pytest.mark.parametrize("recorded", [False, True])
def test_rows_start_where_the_device_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    """Prompts beside drafts are computed op by op, steps that only decode are replayed: as on a GPU."""
    model = write_tiny(tmp_path / "model")
    penalty = 1.0 if recorded else 1.2  # a CPU counts tokens in a loop, which is not recorded
    with LLM(model=model, overlap=False, **OPTIONS) as llm:
        plain, _, _ = run(llm._built.engine, penalty=penalty)
    monkeypatch.setattr(cuda_graphs, "_Staging", FakeStaging)
    monkeypatch.setattr(cuda_graphs, "Capture", lambda device: FakeRecorder())
    with LLM(model=model, overlap=True, **OPTIONS) as llm:
        runner = runner_of(llm)
        behind_the_host(monkeypatch, runner)
        decoding = Graphs(runner.decoder, runner.state, runner.sampler, 32)
        runner.decode_paths = [decoding] if recorded else []
        drafted, _, uncertain = run(llm._built.engine, Replay(plain, 0.3), penalty)
        kinds = {kind for (_, _, kind), one in decoding.recordings._of.items() if one.graph is not None}
    assert drafted == plain
    assert uncertain > 10
    assert not recorded or (kinds & {*WIDTHS} and decoding.replays > 10)


def test_log_probabilities_stay_with_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are padded where a row has fewer drafts than others: that must not shift what is said of later rows."""
    model = write_tiny(tmp_path / "model")

    def said(engine: Engine, proposer: Replay | None) -> dict[str, list[tuple[int, float]]]:
        some = requests(1.0)
        for one in some:
            one.params = replace(one.params, logprobs=8)
            engine.add(one)
        engine.speculation = proposer
        found: dict[str, list[tuple[int, float]]] = {one.id: [] for one in some}
        while engine.has_work:
            for delta in engine.step():
                found[delta.request.id] += [(one.token, one.logprob) for one in delta.logprobs]
        assert engine.scheduler.stats.failed_steps == 0
        return found

    with LLM(model=model, overlap=False, **OPTIONS) as llm:
        plain = said(llm._built.engine, None)
    monkeypatch.setattr(cuda_graphs, "_Staging", FakeStaging)
    monkeypatch.setattr(cuda_graphs, "Capture", lambda device: FakeRecorder())
    with LLM(model=model, overlap=True, **OPTIONS) as llm:
        runner = runner_of(llm)
        behind_the_host(monkeypatch, runner)
        decoding = Unrecorded(runner.decoder, runner.state, runner.sampler, 32)
        runner.decode_paths = [decoding]
        answers = {name: [token for token, _ in tokens] for name, tokens in plain.items()}
        drafted = said(llm._built.engine, Replay(answers, 0.3))
        kinds = {kind for _, _, kind in decoding.recordings._of}
    assert kinds & {*WIDTHS}
    for name, tokens in plain.items():
        assert [token for token, _ in drafted[name]] == [token for token, _ in tokens]
        assert [value for _, value in drafted[name]] == pytest.approx([value for _, value in tokens], abs=1e-4)


def three() -> list[Request]:
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    return [
        Request("a", [3, 4, 5], greedy, max_tokens=40, seed=0, arrival=0.0),
        Request("b", [9, 8, 7], greedy, max_tokens=20, seed=0, arrival=2.0),
        Request("c", list(range(20, 34)), greedy, max_tokens=8, seed=0, arrival=1.0, priority=0),
    ]


def with_a_rest(engine: Engine, proposer: Replay | None) -> tuple[dict[str, list[int]], list[list[int]]]:
    """`b` was preempted and reads its answer again; of one step's tokens, beside a's drafts and c's prompt, one is left
    for it, which is not its last. Outputs, and what the rows of that step sample.
    """
    a, b, c = three()
    engine.speculation, pace = proposer, engine.scheduler.pace
    whole, samples = pace.step_tokens, []
    engine.add(a)
    engine.add(b)
    while b.num_output < 8:
        engine.step()
    if proposer is not None:
        engine.scheduler.life.preempt(b)
        pace.step_tokens = 9
        while b.num_computed < 4:
            engine.step()
        pace.step_tokens = 1 + 3 + len(c.tokens) + 1
    engine.add(c)
    engine.step()
    samples += [step.samples for step, *_ in engine._in_flight]
    pace.step_tokens = whole
    while engine.has_work:
        engine.step()
    return {one.id: one.output for one in (a, b, c)}, samples


@pytest.mark.parametrize("device", ["host", "behind"])
def test_a_row_that_reads_its_answer_again_is_no_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    with LLM(model=write_tiny(tmp_path / "model"), overlap=True, **OPTIONS) as llm:
        engine = llm._built.engine
        plain, _ = with_a_rest(engine, None)
        if device == "behind":
            behind_the_host(monkeypatch, runner_of(llm))
        drafted, samples = with_a_rest(engine, Replay(plain, 0.0))
    read_again = [some for some in samples if 0 in some]
    assert read_again and all(max(some) == 1 for some in read_again)  # beside it nobody's drafts are verified
    assert drafted == plain


class Guess(Speculation):
    """Proposes the same for everybody that it is told of; or fails."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(max_tokens=32, per_token=0.0)
        self.fails = fails

    def propose(self, requests: Sequence[Request]) -> None:
        for one in requests:
            one.drafts = [5, 6, 7]
        if self.fails:
            raise RuntimeError("no draft model")


@pytest.mark.parametrize("overlap", [False, True])
def test_beams_have_no_drafts(tmp_path: Path, overlap: bool) -> None:
    """The host chooses how they go on: what the device samples after a draft is somebody else's choice."""
    params = SamplingParams(
        beam_width=3, n=3, max_tokens=10, temperature=0.0, stop_token_ids=[75, 59, 31, 117, 57], length_penalty=0.2
    )
    with LLM(model=write_tiny(tmp_path / "model"), overlap=overlap, **OPTIONS) as llm:
        answers = []
        for proposer in (None, Guess()):
            llm._built.engine.speculation = proposer
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([list(one.token_ids) for output in outputs for one in output.outputs])
    assert answers[0] == answers[1]


def test_a_proposer_that_fails_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(model=write_tiny(tmp_path / "model"), overlap=True, **OPTIONS) as llm:
        plain, _, _ = run(llm._built.engine)
        engine = llm._built.engine
        found, _, _ = run(engine, Guess(fails=True))  # type: ignore[arg-type]
        assert found == plain and engine.speculation is None
    assert "the proposer failed: RuntimeError: no draft model" in caplog.text
