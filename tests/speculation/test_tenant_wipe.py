"""What is wiped of a tenant's texts is drafted for nobody; others keep theirs, and the index stays within its room."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from tiny import write_tiny
from tiny_drafts import make_drafts_free

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.engine.request import Request
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.engine.speculation.suffix import SuffixProposer
from tokenmill.errors import InvalidRequest
from tokenmill.ops.native.library import Library, load

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 4, "max_model_len": 256,
    "speculation": "suffix",
}  # fmt: skip
PROMPT = {"prompt_token_ids": [5, 9, 12]}
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafts_free(monkeypatch)


class Foreign:
    """Counts drafts that stand nowhere in the text that they were made for: they come from another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        propose = SuffixProposer.propose

        def watched(one: SuffixProposer, requests: Sequence[Request], length: int) -> list[Draft | None]:
            drafts = propose(one, requests, length)
            for request, draft in zip(requests, drafts, strict=True):
                self.count += draft is not None and not stands_in(request.tokens, draft.tokens)
            return drafts

        monkeypatch.setattr(SuffixProposer, "propose", watched)

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


def stands_in(text: list[int], part: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Foreign:
    return Foreign(monkeypatch)


@pytest.fixture
def llm(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as llm:
        yield llm


def index_of(llm: LLM) -> SuffixProposer:
    speculation = llm._built.engine.speculation
    assert speculation is not None
    return next(one for one in speculation.proposers if isinstance(one, SuffixProposer))


def pages(llm: LLM) -> int:
    index = index_of(llm)
    return int(index._c.tm_suffix_pages_in_use(index._index))


def ask(llm: LLM, salt: str) -> list[int]:
    [output] = llm.generate([PROMPT], SAMPLED, use_tqdm=False, cache_salt=salt)
    return list(output.outputs[0].token_ids)


def test_nothing_is_drafted_from_what_was_wiped(llm: LLM, foreign: Foreign) -> None:
    first = ask(llm, "alice")
    assert foreign.taken() == 0 and ask(llm, "alice") == first and foreign.taken() > 2  # its own earlier answer helps
    assert ask(llm, "bob") == first and foreign.taken() == 0
    before = pages(llm)
    llm.reset_prefix_cache(cache_salt="alice")
    assert 0 < pages(llm) < before
    assert ask(llm, "alice") == first and foreign.taken() == 0
    assert ask(llm, "bob") == first and foreign.taken() > 2
    for salt in ("alice", "bob"):
        llm.reset_prefix_cache(cache_salt=salt)
    assert pages(llm) == 0 and not llm._built.engine.scheduler.kv.index.blocks()


def test_a_request_that_runs_goes_on_and_does_not_draft_from_what_it_said_before(llm: LLM, foreign: Foreign) -> None:
    whole = ask(llm, "alice")
    llm.reset_prefix_cache()
    foreign.taken()
    said: list[int] = []
    for output in llm.stream(PROMPT, SAMPLED, cache_salt="alice"):
        if len(said) < 20 <= len(output.outputs[0].token_ids):
            llm.reset_prefix_cache(cache_salt="alice")
            assert pages(llm) == 0
        said = list(output.outputs[0].token_ids)
    assert said == whole
    llm._built.engine.scheduler.check_integrity()


def test_the_index_keeps_to_its_room_while_tenants_come_and_are_wiped(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SuffixProposer.__init__, "__defaults__", (512, 10))  # tokens, and places for their hashes
    with LLM(model, **OPTIONS) as llm:
        room = 512 // index_of(llm)._c.tm_suffix_page()
        for turn in range(12):
            ask(llm, f"tenant {turn % 5}")
            assert pages(llm) <= room
            if turn % 4 == 3:
                llm.reset_prefix_cache(cache_salt=f"tenant {turn % 5}")
        for turn in range(5):
            llm.reset_prefix_cache(cache_salt=f"tenant {turn}")
        assert pages(llm) == 0


def test_how_the_drafts_of_others_did_is_not_forgotten() -> None:
    speculation = Speculation(8, 0.0)
    requests = [Request(salt, [1, 2], SAMPLED, max_tokens=9, seed=0, salt=salt) for salt in ("alice", "bob")]
    alice, bob = map(speculation._record, requests)
    speculation.forget("alice")
    assert speculation._record(requests[1]) is bob and speculation._record(requests[0]) is not alice
    speculation.forget()
    assert speculation._record(requests[1]) is not bob


def test_a_salt_must_be_text(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt is int 3; it must be text"):
        llm.reset_prefix_cache(cache_salt=3)  # type: ignore[arg-type]


def test_the_asyncio_twin_wipes_one_salt(model: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(model, **(OPTIONS | {"speculation": "off"}))
        index = llm._processor.engine.scheduler.kv.index  # type: ignore[attr-defined]
        for salt in ("alice", "bob"):
            async for _ in llm.generate(PROMPT, SAMPLED, cache_salt=salt):
                pass
        both = len(index)
        await llm.reset_prefix_cache(cache_salt="alice")
        assert not index.blocks("alice") and len(index.blocks("bob")) == len(index) == both // 2
        llm.shutdown()

    asyncio.run(main())
