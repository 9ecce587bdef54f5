"""A group of ranks says what one rank says, starts from any script, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "sampling"))

from grammar_models import write_model
from rank_groups import SETTINGS, THREE, children, gone, group_of, mixed, opened, prompts, said

from tokenmill import LLM, AsyncLLM, RequestOutput, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.errors import ConfigError, ModelError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has a tokenizer."""
    return write_model(tmp_path_factory.mktemp("talker"), **THREE)


@pytest.fixture(scope="module")
def alone(talker: str):
    with opened(talker) as llm:
        yield llm


@pytest.fixture(scope="module")
def together(talker: str):
    """Three ranks, with drafts of what was said before."""
    with opened(talker, 3) as llm:
        yield llm


def test_three_ranks_say_what_one_says(alone: LLM, together: LLM) -> None:
    asked = prompts(1, 14), mixed(1, 14)
    assert said(together.generate(*asked, use_tqdm=False)) == said(alone.generate(*asked, use_tqdm=False))
    together._built.engine.scheduler.check_integrity()


def test_answers_in_a_form_and_vectors_are_the_same(alone: LLM, together: LLM) -> None:
    forms = [
        SamplingParams(structured={"regex": "(ab|true|12){3,9}"}, seed=3, max_tokens=30),
        SamplingParams(structured={"choice": ["true", "null", "ab"]}, temperature=0, max_tokens=9),
        SamplingParams(stop=["a"], seed=4, max_tokens=30),
    ]
    texts = ["abc", '{"a": 1}', "true"]
    assert said(together.generate(texts, forms, use_tqdm=False)) == said(alone.generate(texts, forms, use_tqdm=False))
    one, other = (llm.embed(texts, use_tqdm=False, pooling="mean") for llm in (alone, together))
    for mine, theirs in zip(one, other, strict=True):
        assert mine.outputs.embedding == pytest.approx(theirs.outputs.embedding, abs=1e-5)


@pytest.mark.parametrize("options", [{"overlap": True}, {"speculation": "suffix", "dtype": "float32"}], ids=str)
def test_two_ranks_say_what_one_says_with_little_memory_and_leave_nothing_behind(
    tiny_model: str, options: dict[str, object]
) -> None:
    before = set(children())
    room = 40 * 16 * 2 * 2 * 16 * (4 if "dtype" in options else 8)  # for 40 blocks, so that requests are preempted
    options = {**options, "skip_tokenizer_init": True}
    params = [SamplingParams(max_tokens=60, ignore_eos=True, **one) for one in ({"temperature": 0}, {"seed": 3})] * 6
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    one, two = (opened(tiny_model, ranks, kv_cache_memory=room // ranks, **options) for ranks in (1, 2))
    assert torch.get_num_threads() == 1, "ranks divide them"
    ranks = set(children()) - before
    assert len(ranks) == 2 and set(group_of(two).pids) < ranks, "a fork server and a rank"
    assert os.fstat(group_of(two)._generation.meeting.file).st_nlink == 0, "without a name nothing is left behind"
    answers = [said(llm.generate(prompts(2, 12), params, use_tqdm=False)) for llm in (one, two)]
    assert answers[0] == answers[1]
    assert two._built.engine.scheduler.stats.preemptions > 0
    two._built.engine.scheduler.check_integrity()
    if "dtype" in options:
        two.shutdown()
        assert set(children()) == before
    else:  # by somebody who forgot to shut it down
        del two
        gc.collect()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert gone(list(ranks))


def test_the_report_says_how_many_ranks_there_are(together: LLM) -> None:
    lines = [line for line in together.plan_lines() if line.startswith("ranks")]
    assert lines[0].startswith("ranks        3 (tp3), 1 thread each")


SCRIPT = """
import os, sys
from tokenmill import LLM, SamplingParams
llm = LLM({model!r}, parallel="tp2", skip_tokenizer_init=True, **{settings!r})
print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)[0].outputs[0].token_ids)
print(*llm._built.engine.runner.pids, flush=True)
{then}
"""


def script(model: str, then: str) -> subprocess.Popen[str]:
    code = SCRIPT.format(model=model, settings=SETTINGS, then=then)
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


AGAIN = """
import time
pids = llm._built.engine.runner.pids
try:
    print("waits", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.2)
print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)[0].outputs[0].token_ids)
print(pids == llm._built.engine.runner.pids, flush=True)
sys.stdin.read()
"""


def test_ctrl_c_is_for_the_engine_alone_and_ranks_leave_when_it_is_killed(tiny_model: str) -> None:
    """A terminal sends Ctrl-C to all processes that it runs. And a script needs no guard against being imported."""
    with script(tiny_model, AGAIN) as engine:
        assert engine.stdout is not None
        first = engine.stdout.readline()
        assert len(first.split(",")) == 3
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert engine.stdout.readline() == "waits\n"
        everybody = children(engine.pid)
        assert len(pids) == 1 and set(pids) < set(everybody)
        for pid in (*everybody, engine.pid):
            os.kill(pid, signal.SIGINT)
        assert engine.stdout.readline() == first and engine.stdout.readline() == "True\n"
        os.kill(engine.pid, signal.SIGKILL)
    assert gone(everybody)


def test_a_group_that_cannot_load_says_why_and_is_gone(tmp_path: Path, tiny_model: str) -> None:
    before = set(children())
    with pytest.raises(ModelError):
        opened(str(tmp_path), 2)
    with pytest.raises(ConfigError, match="max_model_len is 99999"):
        opened(tiny_model, 2, skip_tokenizer_init=True, max_model_len=99999)
    assert set(children()) == before


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"parallel": "tp2,xx"}, "parallel is 'tp2,xx'; it is the kinds tp, pp, dp and ep with their sizes"),
        ({"parallel": 2}, "parallel is 2; it is the kinds tp, pp, dp and ep with their sizes"),
        ({"parallel": "tp5,pp13"}, "parallel is 'tp5,pp13', which is 65 ranks; an engine has 64 at most"),
        ({"parallel": "tp2", "speculation": "layers:1"}, "draft beside one rank only; use suffix"),
        ({"parallel": "tp2", "speculation": "draft:somewhere"}, "draft beside one rank only; use suffix"),
    ],
    ids=str,
)
def test_what_ranks_cannot_do_is_refused_in_a_sentence(
    tiny_model: str, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(tiny_model, **SETTINGS | {"skip_tokenizer_init": True} | options)


def test_ranks_that_no_gpu_is_there_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.engine.ranks.start import start_ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="parallel is 'tp2', which is 2 ranks, but torch sees 1 of the GPUs; use"):
        start_ranks(EngineConfig(parallel="tp2"), torch.device("cuda"))


def test_rank_threads_divide_what_one_rank_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.engine.ranks.start import threads_of_rank

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [threads_of_rank(ranks) for ranks in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


def test_the_asyncio_engine_goes_on_when_a_rank_is_killed_and_to_the_same_bits_if_these_are_asked_for(
    tiny_model: str,
) -> None:
    before = set(children())
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    settings = SETTINGS | {"skip_tokenizer_init": True, "dtype": "float32", "batch_invariant": True}

    def bits(output: RequestOutput) -> list[object]:
        return [output.outputs[0].token_ids, output.outputs[0].logprobs]

    async def ask(llm: AsyncLLM, prompt: list[int], begun: asyncio.Event | None = None) -> list[object]:
        heard: list[int] = []
        last: list[object] = []
        async for output in llm.generate(prompt, params):
            last = bits(output)
            assert output.outputs[0].token_ids[: len(heard)] == heard, "a token was taken back"
            heard = output.outputs[0].token_ids
            if begun is not None:
                begun.set()
        return last

    async def run() -> None:
        llm = AsyncLLM(tiny_model, parallel="tp2", **settings)
        try:
            wanted = await asyncio.gather(*(ask(llm, prompt) for prompt in prompts(3, 4)))
            await llm.reset_prefix_cache()
            begun = asyncio.Event()
            answers = [asyncio.create_task(ask(llm, prompt, begun)) for prompt in prompts(3, 4)]
            await begun.wait()
            os.kill(llm._built.engine.runner.pids[0], signal.SIGKILL)
            assert await asyncio.gather(*answers) == wanted
            assert llm._built.engine.scheduler.stats.failed_steps == 1
        finally:
            llm.shutdown()

    asyncio.run(run())
    assert set(children()) == before
