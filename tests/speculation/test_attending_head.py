"""A head that attends to the target's cache: every way of running it computes what its definition says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny import write_tiny
from tiny_drafts import made_head

from tokenmill import LLM, SamplingParams
from tokenmill.engine.request import Request
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.head import HeadProposer
from tokenmill.engine.speculation.head_runner import HeadRunner
from tokenmill.engine.speculation.recorded_head import RecordedHead
from tokenmill.model.draft_head import DraftHead
from tokenmill.ops.kv_forms import dequantize
from tokenmill.ops.native.library import Library, load
from tokenmill.ops.reference import rotated

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4, "max_model_len": 128,
}  # fmt: skip


class Case:
    """Rows of an engine that stand at different places, each with a token that is sampled and not cached."""

    def __init__(self, llm: LLM, head: DraftHead) -> None:
        engine = llm._built.engine
        assert isinstance(engine.runner, TorchRunner)
        self.runner, self.head, self.decoder = engine.runner, head, engine.runner.decoder
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        requests = [Request(f"r{n}", [3 + n] * (5 + 20 * n), greedy, max_tokens=40, seed=0) for n in range(3)]
        for one in requests:
            engine.add(one)
        while min(one.num_output for one in requests) < 6 or any(one.pending for one in requests):
            engine.step()
        self.rows = torch.tensor([one.row for one in requests])
        self.positions = torch.tensor([len(one.tokens) - 1 for one in requests])
        self.ids = torch.tensor([one.tokens[-1] for one in requests])
        self.hidden = torch.randn(3, llm._built.spec.hidden)

    def expected(self) -> torch.Tensor:  # [rows, draft vocabulary]
        """By the definition, over the keys that lie in the rows' blocks."""
        spec, layer = self.decoder.spec, self.head.kv_layer
        assert layer is not None
        found = []
        for hidden, row, position, token in zip(self.hidden, self.rows, self.positions, self.ids, strict=True):
            keys, values = self.cached(int(row), int(position), layer)

            def attend(q: torch.Tensor, keys: Any = keys, values: Any = values, at: Any = position) -> torch.Tensor:
                table = self.decoder.rope_tables[layer]
                turned = rotated(q.view(1, spec.heads, spec.head_dim), table, at[None])[0]
                weights = (torch.einsum("hd,thd->ht", turned, keys) * spec.attn_scale).softmax(-1)
                return torch.einsum("ht,thd->hd", weights, values).view(1, -1)

            embedding, _ = self.decoder.embed(token[None]).take()
            found.append(self.head.logits(self.head.step(self.head.enter(hidden[None]), embedding, attend)))
        return torch.cat(found)

    def cached(self, row: int, count: int, layer: int) -> list[torch.Tensor]:
        kv, blocks = self.runner.state.kv[layer], self.runner.state.block_tables[row].long()
        scales = (None, None) if kv.scales is None else (kv.scales.k, kv.scales.v)
        group = self.decoder.spec.heads // self.decoder.spec.kv_heads
        return [
            (one[blocks] if scale is None else dequantize(one[blocks], scale[blocks], torch.float32))
            .flatten(0, 1)[:count]
            .float()
            .repeat_interleave(group, 1)
            for one, scale in zip((kv.k, kv.v), scales, strict=True)
        ]


@pytest.fixture(scope="module", params=["auto", "int8"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("model")
    model = write_tiny(folder, hidden_size=64, head_dim=16, intermediate_size=96)
    options = OPTIONS | {"kv_cache_dtype": request.param}
    path = made_head(model, folder / "head.safetensors", options)
    with LLM(model, speculation="off", overlap=False, **options) as llm:
        norm = llm._built.engine.runner.decoder.weights.final_norm  # type: ignore[attr-defined]
        yield Case(llm, DraftHead.load(path, llm._built.spec, norm))


@torch.inference_mode()
def logits_of(case: Case, ready: HeadRunner, recorded: RecordedHead | None) -> torch.Tensor:
    proposer = HeadProposer(ready, case.runner.state, case.runner.sampler, recorded)
    state = proposer._enter(case.hidden, case.rows, case.positions)
    behind = None if recorded is not None else proposer._behind(case.rows, case.positions)
    return proposer._step(state, case.ids, behind)[1].clone()


def ready(case: Case, native: bool) -> HeadRunner:
    return HeadRunner(case.head, case.decoder, case.runner.sampler, native, case.runner.state.kv)


def test_the_first_draft_is_what_the_definition_says(case: Case) -> None:
    found = logits_of(case, ready(case, native=False), None)
    torch.testing.assert_close(found, case.expected(), rtol=2e-3, atol=2e-3)
    case.hidden = case.hidden.flip(0)
    assert not torch.allclose(found, case.expected(), rtol=2e-3, atol=2e-3)


def test_a_recorded_head_computes_what_the_ops_do_one_by_one(case: Case) -> None:
    packed = ready(case, native=True)
    recorded = RecordedHead(packed, case.decoder, len(case.head.out_norm), case.runner.state)
    plain = logits_of(case, packed, None)
    for _ in range(2):  # a chain that begins anew attends anew
        torch.testing.assert_close(logits_of(case, packed, recorded), plain, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(recorded.step(case.ids)[0], plain)
