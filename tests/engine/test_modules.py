"""Modules of prompts: copied to where they stand with keys turned, computed once, and never taken for what was read.

What a layer caches of a token depends on the layers below it. In a model of one layer that is nothing but the token and
its position, so a module that is copied well gives exactly what reading it gives: that is the oracle here.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_tiny

from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.engine.core import Engine
from tokenmill.engine.modules import _why_not
from tokenmill.engine.request import Finish
from tokenmill.engine.scheduler.modules import LEAST_COPIED
from tokenmill.errors import ConfigError, InvalidRequest
from tokenmill.outputs import RequestOutput

REREAD = 5
Part = tuple[list[int], bool]  # tokens, and whether they are a module
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


def opened(folder: Any, layers: int = 1, **options: Any) -> LLM:
    model = write_tiny(folder, num_hidden_layers=layers, rope_theta=500.0)
    usual = {"kv_cache_memory": 96 * 16 * layers * 2 * 2 * 8 * 8, "max_num_seqs": 4, "speculation": "off"}
    usual |= {"module_reread_tokens": REREAD, "dtype": "float64", "max_num_batched_tokens": 64}
    return LLM(model, load_format="dummy", skip_tokenizer_init=True, device="cpu", **(usual | options))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Of one layer."""
    return opened(tmp_path_factory.mktemp("shallow") / "tiny")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return opened(tmp_path_factory.mktemp("deep") / "tiny", layers=3)


def words(seed: int, count: int) -> list[int]:
    return [(seed * 31 + 7 * k * (k + seed)) % 120 + 3 for k in range(count)]


def prompt(*parts: Part, marked: bool = True) -> dict[str, Any]:
    return {"prompt": [{"prompt_token_ids": ids, "cache_module": marked and is_module} for ids, is_module in parts]}


def answer(
    llm: LLM, *parts: Part, marked: bool = True, params: SamplingParams = GREEDY, **options: Any
) -> RequestOutput:
    return llm.generate(prompt(*parts, marked=marked), params, use_tqdm=False, **options)[0]


def engine_of(llm: LLM) -> Engine:
    return llm._built.engine


def logprobs(output: RequestOutput) -> list[float]:
    tables = output.outputs[0].logprobs
    assert tables is not None
    return [tables[at][token].logprob for at, token in enumerate(output.outputs[0].token_ids)]


def steps_tokens(llm: LLM) -> int:
    return engine_of(llm).scheduler.stats.tokens


LATENT = {"kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
LATENT |= {"n_shared_experts": 2, "first_k_dense_replace": 1}
LAYOUTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.booleans()), min_size=1, max_size=6)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=LAYOUTS)
def test_where_nothing_depends_on_context_a_copied_module_is_a_read_one(layout: Any, shallow: LLM) -> None:
    shallow.reset_prefix_cache()
    parts = [(words(seed, count), is_module) for seed, count, is_module in layout]
    parts = [*parts[:4], (words(9, 3), False)]
    copied = [answer(shallow, *parts), answer(shallow, *parts)]
    shallow.reset_prefix_cache()
    read = answer(shallow, *parts, marked=False)
    assert read.num_module_tokens == 0
    for output in copied:
        assert output.outputs[0].token_ids == read.outputs[0].token_ids
        assert logprobs(output) == pytest.approx(logprobs(read), abs=1e-5)
    fits = [len(ids) - REREAD for ids, is_module in parts if is_module and len(ids) >= REREAD + LEAST_COPIED]
    assert copied[0].num_module_tokens == sum(fits)
    engine_of(shallow).scheduler.check_integrity()


def test_a_wrong_turn_would_be_seen(shallow: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail: keys that are not turned give another answer."""
    from tokenmill.engine.runner import placing

    parts = [(words(1, 20), False), (words(2, 80), True), (words(3, 80), True), (words(9, 3), False)]
    shallow.reset_prefix_cache()
    read = logprobs(answer(shallow, *parts, marked=False))
    turns = placing._turns
    monkeypatch.setattr(placing, "_turns", lambda table, factor, ways: turns(table, factor, 0 * ways))
    shallow.reset_prefix_cache()
    assert logprobs(answer(shallow, *parts)) != pytest.approx(read, abs=1e-3)


def test_a_module_is_computed_once_and_its_first_tokens_every_time(deep: LLM) -> None:
    deep.reset_prefix_cache()
    one, other, end = (words(1, 100), True), (words(2, 70), True), (words(9, 3), False)
    before = steps_tokens(deep)
    first = answer(deep, (words(5, 20), False), one, other, end)
    assert first.num_module_tokens == 100 + 70 - 2 * REREAD
    assert steps_tokens(deep) - before > 190
    before = steps_tokens(deep)
    again = answer(deep, (words(6, 30), False), other, one, end)
    assert again.num_module_tokens == 100 + 70 - 2 * REREAD and again.num_cached_tokens == again.num_module_tokens
    read = 30 + 2 * REREAD + 3  # and the answer, whose last token is no input
    assert steps_tokens(deep) - before == read + GREEDY.max_tokens - 1
    assert engine_of(deep).scheduler.kv.stats.placed >= 2 * (100 + 70 - 2 * REREAD)


def test_a_module_at_the_end_of_a_prompt_leaves_its_last_token_to_compute(deep: LLM) -> None:
    for _ in range(2):
        output = answer(deep, (words(5, 20), False), (words(1, 100), True))
        assert output.num_module_tokens == 100 - REREAD - 1 and len(output.outputs[0].token_ids) == GREEDY.max_tokens


def test_nothing_behind_a_copy_is_ever_found_by_those_who_read(deep: LLM) -> None:
    parts = [(words(5, 50), False), (words(1, 100), True), (words(7, 90), False)]
    deep.reset_prefix_cache()
    wanted = answer(deep, *parts, marked=False)
    deep.reset_prefix_cache()
    blended = [answer(deep, *parts), answer(deep, *parts)]
    assert [one.num_module_tokens for one in blended] == [100 - REREAD] * 2
    assert blended[1].metrics.cached_tokens == 48, "what stands before the module is exact, and found"
    assert logprobs(blended[0]) != pytest.approx(logprobs(wanted), abs=1e-6), "it is bounded, not exact"
    assert blended[0].outputs[0].token_ids == blended[1].outputs[0].token_ids
    read = answer(deep, *parts, marked=False)
    assert read.metrics.cached_tokens == 48
    assert logprobs(read) == pytest.approx(logprobs(wanted), abs=1e-9)


def test_a_module_whose_beginning_was_read_exactly_is_not_copied(deep: LLM) -> None:
    """As a prefix of what is cached it is exact: it stays so."""
    parts = [(words(5, 16), False), (words(1, 96), True), (words(7, 3), False)]
    deep.reset_prefix_cache()
    wanted = answer(deep, *parts, marked=False)
    again = answer(deep, *parts)
    assert again.metrics.cached_tokens == 112 and again.num_module_tokens == 0
    assert logprobs(again) == pytest.approx(logprobs(wanted), abs=1e-9)
    [start] = engine_of(deep).scheduler.modules.start  # type: ignore[union-attr]
    deep.reset_prefix_cache()
    behind = [([start], False), (words(1, 96), True), (words(7, 30), False)]
    wanted = answer(deep, *behind, marked=False)
    deep.reset_prefix_cache()
    answer(deep, (words(6, 40), False), (words(1, 96), True))
    direct = answer(deep, *behind)
    assert direct.metrics.cached_tokens == 96 and direct.num_module_tokens == 0, "it stands behind its own start"
    assert logprobs(direct) == pytest.approx(logprobs(wanted), abs=1e-9)


def test_a_tenant_never_uses_anothers_module(deep: LLM) -> None:
    deep.reset_prefix_cache()
    parts = [(words(5, 20), False), (words(1, 100), True), (words(7, 3), False)]

    def tokens(salt: str) -> int:
        before = steps_tokens(deep)
        answer(deep, *parts, cache_salt=salt)
        return steps_tokens(deep) - before

    first, own, other, own_again = tokens("a"), tokens("a"), tokens("b"), tokens("a")
    assert other == first > own == own_again
    deep.reset_prefix_cache("a")
    assert tokens("b") == own and tokens("a") == first, "what is wiped is computed again, and no other's"


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_keys_are_turned_too(tmp_path: Any, form: str) -> None:
    options = {"dtype": "float32", "kv_cache_dtype": form, "kv_cache_memory": 1 << 20}
    model = write_tiny(tmp_path / form, num_hidden_layers=1, head_dim=32, hidden_size=128)
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, device="cpu", speculation="off", **options)
    parts = [(words(1, 20), False), (words(2, 80), True), (words(3, 80), True), (words(9, 3), False)]
    copied = answer(llm, *parts)
    llm.reset_prefix_cache()
    read = answer(llm, *parts, marked=False)
    assert copied.num_module_tokens > 100
    assert logprobs(copied)[0] == pytest.approx(logprobs(read)[0], abs={"int8": 0.01, "int4": 0.1}[form])


def test_the_answer_does_not_depend_on_chunks_company_or_preemption(deep: LLM, tmp_path: Any) -> None:
    prompts = [
        prompt((words(n, 10 + 5 * n), False), (words(1, 90), True), (words(n, 7), False), (words(2, 60), True))
        for n in range(6)
    ]
    several = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    deep.reset_prefix_cache()
    alone = [deep.generate(one, several, use_tqdm=False)[0] for one in prompts]
    wanted = [one.outputs[0].token_ids for one in alone]
    variants = {"max_num_batched_tokens": 7}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    for number, options in enumerate(
        [*variants, {"kv_cache_memory": 34 * 16 * 3 * 2 * 2 * 8 * 8, "max_model_len": 256}]
    ):
        llm = opened(tmp_path / f"m{number}", layers=3, **options)
        found = llm.generate(prompts, several, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in found] == wanted
        engine_of(llm).scheduler.check_integrity()
    states = [deep._processor.prepare(one, several) for one in prompts[:4]]
    for state in states:
        deep._processor.submit(state)
    scheduler, steps = engine_of(deep).scheduler, 0
    while not all(state.finished for state in states):
        deep._processor.step()
        steps += 1
        if steps % 9 == 0 and scheduler.running:
            scheduler.life.preempt(scheduler.running[-1])
            if steps % 36 == 0:
                deep.reset_prefix_cache()  # its modules are computed again, too
    assert [state.output().outputs[0].token_ids for state in states] == wanted[:4]
    assert scheduler.stats.preemptions > 3
    scheduler.check_integrity()


@pytest.mark.parametrize("speculation", ["suffix", "layers:1"])
def test_drafts_change_nothing(tmp_path: Any, deep: LLM, speculation: str) -> None:
    loops = [(words(5, 20), False), (words(1, 40) * 2, True), (words(1, 20), False)]
    several = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = answer(deep, *loops, params=several).outputs[0].token_ids
    llm = opened(tmp_path / "drafting", layers=3, speculation=speculation)
    for _ in range(2):
        output = answer(llm, *loops, params=several)
        assert output.num_module_tokens == 80 - REREAD and output.outputs[0].token_ids == wanted
    engine_of(llm).scheduler.check_integrity()


def test_siblings_and_those_who_come_together_share_one_module(deep: LLM) -> None:
    deep.reset_prefix_cache()
    parts = [(words(5, 20), False), (words(1, 100), True), (words(7, 20), False)]
    before = steps_tokens(deep)
    few = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    outputs = deep.generate([prompt(*parts)] * 3, few, use_tqdm=False)
    siblings = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=4, ignore_eos=True)
    outputs += deep.generate(prompt(*parts), siblings, use_tqdm=False)
    assert all(len(one.token_ids) == 4 for output in outputs for one in output.outputs)
    assert {output.num_module_tokens for output in outputs} == {100 - REREAD}
    assert steps_tokens(deep) - before <= 112 + 4 * (20 + REREAD + 20) + 2 + 6 * 3, "the module was computed once"
    engine_of(deep).scheduler.check_integrity()


def test_who_waits_for_modules_may_leave_and_nobody_computes_them_in_vain(deep: LLM) -> None:
    deep.reset_prefix_cache()
    engine = engine_of(deep)
    scheduler = engine.scheduler
    state = deep._processor.prepare(prompt((words(5, 20), False), (words(1, 200), True)), GREEDY)
    deep._processor.submit(state)
    engine.step()
    assert {request.is_module for request in scheduler.requests.values()} == {True, False}
    scheduler.check_integrity()
    engine.cancel(state.id, Finish.CANCELLED)
    assert not scheduler.requests
    while engine.has_work:
        assert all(not delta.request.is_module for delta in engine.step())
    scheduler.check_integrity()
    deep._processor.cancel(state)


def test_a_module_that_fails_is_read_like_other_text(deep: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    deep.reset_prefix_cache()
    parts = [(words(5, 20), False), (words(1, 100), True), (words(7, 3), False)]
    wanted = answer(deep, *parts, marked=False)
    deep.reset_prefix_cache()
    engine = engine_of(deep)
    launch = engine.runner.launch

    def broken(step: Any) -> Any:
        if any(request.is_module for request in step.requests):
            raise RuntimeError("injected")
        return launch(step)

    monkeypatch.setattr(engine.runner, "launch", broken)
    output = answer(deep, *parts)
    assert output.error is None and output.num_module_tokens == 0
    assert logprobs(output) == pytest.approx(logprobs(wanted), abs=1e-9)
    engine.scheduler.check_integrity()


def test_what_asks_for_every_token_reads_its_modules(deep: LLM) -> None:
    parts = [(words(5, 20), False), (words(1, 100), True), (words(7, 3), False)]
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = answer(deep, *parts, params=scored)
    assert output.num_module_tokens == 0 and output.prompt_logprobs is not None and len(output.prompt_logprobs) == 123


def test_a_cache_too_small_for_copies_and_sources_reads_modules(tmp_path: Any) -> None:
    llm = opened(tmp_path / "small", layers=1, kv_cache_memory=16 * 16 * 2 * 2 * 8 * 8, max_model_len=200)
    output = answer(llm, (words(5, 20), False), (words(1, 150), True), (words(7, 3), False))
    assert output.error is None and output.num_module_tokens == 0
    engine_of(llm).scheduler.check_integrity()


def test_models_and_settings_that_cannot_have_modules_say_so(tmp_path: Any) -> None:
    parts = [(words(5, 20), False), (words(1, 100), True), (words(7, 3), False)]
    llm = opened(tmp_path / "off", enable_prefix_caching=False)
    assert any(line.startswith("modules      off: modules are kept in the prefix cache") for line in llm.plan_lines())
    assert answer(llm, *parts).num_module_tokens == 0
    with pytest.raises(ConfigError, match="prompt_modules is set, but modules are kept in the prefix cache"):
        opened(tmp_path / "refused", enable_prefix_caching=False, prompt_modules=True)
    with pytest.raises(ConfigError, match="kv_pruning drops keys and values"):
        opened(tmp_path / "pruned", kv_pruning="window", prompt_modules=True)
    groups = EngineConfig(parallel="dp2")
    assert "groups of ranks (dp)" in (_why_not(groups, llm._built.spec) or "")
    latent = write_tiny(
        tmp_path / "latent", architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", **LATENT
    )
    with pytest.raises(ConfigError, match="prompt_modules is set, but this model caches latents"):
        LLM(latent, load_format="dummy", skip_tokenizer_init=True, device="cpu", prompt_modules=True)
    with pytest.raises(ConfigError, match="module_start is '/no/such/file', which cannot be read"):
        opened(tmp_path / "no start", module_start="/no/such/file")
    assert answer(opened(tmp_path / "no", prompt_modules=False), *parts).num_module_tokens == 0


def test_wrong_parts_are_refused_with_a_sentence(shallow: LLM) -> None:
    for wrong, why in (
        ([{"cache_module": True}], "it must have text or token ids"),
        ([{"prompt_token_ids": [5], "cache_module": "yes"}], "cache_module is 'yes'; it must be true or false"),
        ([[5], 7.5], "it must have text or token ids"),
        ([[]], "the prompt is empty"),
        ([[5, 4000]], "token id 4000 is outside the vocabulary"),
        (["text"], "a prompt with text needs a tokenizer"),
        ([{"prompt_token_ids": [5], "cache_module": True}] * 1025, "over 1024 parts marked"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            shallow.generate({"prompt": wrong}, GREEDY, use_tqdm=False)
