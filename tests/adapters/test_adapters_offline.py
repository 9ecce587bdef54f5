"""Adapters offline: answers are those of merged weights, side by side with the base's own, whatever the base is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_folders import merged, write_adapter, write_base

from tokenmill import LLM, AsyncLLM, LoRARequest, SamplingParams
from tokenmill.engine.runner.cpu_decode_graph import RecordedDecode
from tokenmill.engine.runner.cpu_prompt_graphs import RecordedChunks
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.errors import ConfigError, InvalidRequest
from tokenmill.ops.native.library import Library, load

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11] * 12, [3, 4, 5, 6, 7, 3, 20]]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "max_model_len": 128}
ADAPTERS: dict[str, dict[str, Any]] = {  # and by what the product of their factors is multiplied
    "all": {"seed": 1, "rank": 4, "alpha": 8},
    "some": {"seed": 2, "rank": 7, "alpha": 7, "targets": ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")},
    "stable": {"seed": 3, "rank": 16, "alpha": 4, "use_rslora": True},
    "high": {"seed": 4, "rank": 1, "alpha": 2, "layers": (1,)},
    "mixed": {
        "seed": 5, "rank": 2, "alpha": 4, "ranks": {"self_attn.k_proj": 8, "mlp.gate_proj": 8},
        "rank_pattern": {"k_proj": 8, r"layers\.\d+\.mlp.gate_proj": 8},
        "alpha_pattern": {"k_proj": 16, "gate_proj": 16},
    },
}  # fmt: skip
SCALES = {"all": 2.0, "some": 1.0, "stable": 1.0, "high": 2.0, "mixed": 2.0}


@dataclass(frozen=True)
class Folders:
    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    at = tmp_path_factory.mktemp("adapters")
    base = write_base(at / "base")
    adapters = {name: write_adapter(at / name, **how) for name, how in ADAPTERS.items()}
    return Folders(base, adapters, {n: merged(base, one, at / f"{n}-in", SCALES[n]) for n, one in adapters.items()})


def answers(llm: LLM, **options: Any) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY, False, **options)]


@pytest.fixture(scope="module")
def expected(folders: Folders) -> dict[str, list[list[int]]]:
    """By adapter, "" for the base: what models with merged weights say."""
    found = {}
    for name, folder in {"": folders.base, **folders.merged}.items():
        with LLM(str(folder), **OPTIONS) as llm:
            found[name] = answers(llm)
    assert len({str(one) for one in found.values()}) == len(found), "an adapter that changes nothing proves nothing"
    return found


@pytest.fixture
def llm(folders: Folders) -> Iterator[LLM]:
    with LLM(str(folders.base), enable_lora=True, max_loras=len(ADAPTERS), **OPTIONS) as one:
        for name, folder in folders.adapters.items():
            one.load_adapter(name, folder)
        yield one


def test_adapters_of_different_ranks_share_a_batch_with_the_base(llm: LLM, expected: dict[str, Any]) -> None:
    names = ["", *ADAPTERS]
    asked = [LoRARequest(name) if name else None for name in names for _ in PROMPTS]
    for turn in range(3):  # recorded steps and cached prefixes from the second on
        outputs = llm.generate(PROMPTS * len(names), GREEDY, False, lora_request=asked)
        for index, name in enumerate(names):
            mine = [one.outputs[0].token_ids for one in outputs[index * len(PROMPTS) :][: len(PROMPTS)]]
            assert mine == expected[name], (turn, name)


def test_steps_without_adapters_stay_as_they_were_beside_those_with(llm: LLM, expected: dict[str, Any]) -> None:
    for name in ("", "all", "", "stable", "", "", "some"):
        assert answers(llm, adapter=name) == expected[name], name


def test_what_one_adapter_cached_is_not_found_by_another(folders: Folders, expected: dict[str, Any]) -> None:
    options = OPTIONS | {"block_size": 4}
    with LLM(str(folders.base), enable_lora=True, **options) as llm:
        for name in ("all", "some"):
            llm.load_adapter(name, folders.adapters[name])
        llm.load_adapter("also all", folders.adapters["all"])
        for name, cached in (
            ("", False),
            ("all", False),
            ("some", False),
            ("", True),
            ("all", True),
            ("also all", True),
        ):
            outputs = llm.generate(PROMPTS, GREEDY, False, adapter=name)
            assert (outputs[1].num_cached_tokens > 0) == cached, name
            wanted = expected["all" if name == "also all" else name]
            assert [one.outputs[0].token_ids for one in outputs] == wanted, name


def test_nothing_is_left_of_the_adapter_that_had_the_slot_before(folders: Folders, expected: dict[str, Any]) -> None:
    with LLM(str(folders.base), enable_lora=True, max_loras=1, **OPTIONS) as llm:
        for name, folder in folders.adapters.items():
            llm.load_adapter(name, folder)
        for name in ("stable", "some", "all", "high", "stable", "mixed", "", "high"):
            assert answers(llm, adapter=name) == expected[name], name


def test_another_adapter_under_the_same_name_is_another(llm: LLM, folders: Folders, expected: dict[str, Any]) -> None:
    assert answers(llm, lora_request=LoRARequest("mine", 1, str(folders.adapters["all"]))) == expected["all"]
    assert answers(llm, lora_request=LoRARequest("mine", 1, str(folders.adapters["some"]))) == expected["some"]
    assert answers(llm, adapter="mine") == expected["some"]


@pytest.mark.parametrize("form", ["int8", "int4", "w8a8"])
def test_adapters_on_a_quantized_base(folders: Folders, form: str) -> None:
    """The base's products are the same with and without: what is added is that of the adapter alone."""
    options = OPTIONS | {"quantization": form}
    with LLM(str(folders.base), **options) as plain:
        base = answers(plain)
    with LLM(str(folders.base), enable_lora=True, **options) as llm:
        for name in ("all", "high"):
            llm.load_adapter(name, folders.adapters[name])
        llm.load_adapter("none", write_adapter(folders.base.parent / f"none-{form}", size=0.0))
        asked = [None, LoRARequest("none"), LoRARequest("all"), LoRARequest("high")]
        outputs = llm.generate([PROMPTS[1]] * 4, GREEDY, False, lora_request=asked)
        said = [one.outputs[0].token_ids for one in outputs]
        assert said[0] == said[1] == base[1]
        assert said[2] != base[1] and said[3] != said[2]


def test_samples_beams_logprobs_and_vectors_are_the_adapters(llm: LLM, folders: Folders) -> None:
    ways = [
        SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=6, ignore_eos=True),
        SamplingParams(beam_width=3, temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True),
    ]
    with LLM(str(folders.merged["all"]), **OPTIONS) as other:
        for params in ways:
            mine, theirs = (one.generate([PROMPTS[1]], params, False, **how)[0] for one, how in (
                (llm, {"adapter": "all"}), (other, {})
            ))  # fmt: skip
            assert [one.token_ids for one in mine.outputs] == [one.token_ids for one in theirs.outputs]
            if params.prompt_logprobs:
                assert mine.prompt_logprobs is not None and theirs.prompt_logprobs is not None
        vectors = [torch.tensor(one.embed([PROMPTS[1]], False, **how)[0].outputs.embedding) for one, how in (
            (llm, {"adapter": "all"}), (other, {}), (llm, {})
        )]  # fmt: skip
        assert torch.allclose(vectors[0], vectors[1], atol=1e-4)
        assert not torch.allclose(vectors[0], vectors[2], atol=1e-2)


@pytest.mark.parametrize("speculation", ["suffix", "layers:1"])
def test_drafts_do_not_change_an_adapters_answer(folders: Folders, expected: dict[str, Any], speculation: str) -> None:
    with LLM(str(folders.base), enable_lora=True, speculation=speculation, **OPTIONS) as llm:
        llm.load_adapter("all", folders.adapters["all"])
        for _ in range(3):
            for name in ("all", ""):
                assert answers(llm, adapter=name) == expected[name]


def test_bfloat16_is_within_its_rounding(folders: Folders) -> None:
    """Of equal tokens nothing is said in a narrow type: what is compared is the likelihood of the prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    options = OPTIONS | {"dtype": "bfloat16"}
    found = []
    for folder, how in ((folders.merged["all"], {}), (folders.base, {"lora_request": LoRARequest("a", 1, "")})):
        with LLM(str(folder), enable_lora=bool(how), **options) as llm:
            if how:
                llm.load_adapter("a", folders.adapters["all"])
            output = llm.generate([PROMPTS[1]], params, False, **how)[0]
            assert output.prompt_logprobs is not None
            of = [next(iter(one.values())).logprob for one in output.prompt_logprobs if one]
            found.append(torch.tensor(of))
    assert (found[0] - found[1]).abs().mean() < 0.05


@pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
def test_beside_weights_of_16_bits_adapters_have_as_many(folders: Folders, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    found = []
    for folder, how in ((folders.merged["all"], {}), (folders.base, {"adapter": "a"})):
        copy = tmp_path / folder.name
        copy.mkdir()
        (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
        (copy / "config.json").write_text(json.dumps(config))
        with LLM(str(copy), enable_lora=bool(how), **OPTIONS | {"dtype": "auto"}) as llm:
            if how:
                llm.load_adapter("a", folders.adapters["all"])
                assert any("on the device in bfloat16" in line for line in llm.plan_lines())
            for _ in range(3):  # recorded, too
                output = llm.generate([PROMPTS[1]], params, False, **how)[0]
            assert output.prompt_logprobs is not None
            found.append(torch.tensor([next(iter(one.values())).logprob for one in output.prompt_logprobs if one]))
    assert (found[0] - found[1]).abs().mean() < 0.05


def test_names_that_nobody_knows_are_refused_and_the_base_goes_on(llm: LLM, expected: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"there is no adapter 'no'$"):
        answers(llm, adapter="no")
    with pytest.raises(InvalidRequest, match="both name an adapter"):
        answers(llm, adapter="all", lora_request=LoRARequest("some"))
    with pytest.raises(InvalidRequest, match="3 prompts came with 2 lora_requests"):
        answers(llm, lora_request=[None, LoRARequest("some")])
    llm.unload_adapter("all")
    with pytest.raises(InvalidRequest, match="there is no adapter 'all'"):
        answers(llm, adapter="all")
    with pytest.raises(InvalidRequest, match="there is no adapter 'all'; there are high"):
        llm.unload_adapter("all")
    assert answers(llm) == expected[""]


def test_an_engine_without_the_setting_refuses_adapters(folders: Folders) -> None:
    with LLM(str(folders.base), **OPTIONS) as llm:
        with pytest.raises(InvalidRequest, match="set enable_lora=True"):
            llm.load_adapter("a", folders.adapters["all"])
        with pytest.raises(InvalidRequest, match="set enable_lora=True"):
            answers(llm, adapter="a")


@pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
def test_with_batch_invariance_an_adapters_bits_are_the_same_in_any_batch(folders: Folders) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    names = ["all", "some", "", "high", "all"]
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[2]]
    found = []
    for options in ({}, {"max_num_batched_tokens": 16}):
        with LLM(str(folders.base), enable_lora=True, batch_invariant=True, **OPTIONS | options) as llm:
            for name, folder in folders.adapters.items():
                llm.load_adapter(name, folder)
            for _ in range(2):  # recorded from the second on
                alone = [llm.generate([p], params, False, adapter=n)[0] for p, n in zip(prompts, names, strict=True)]
                asked = [LoRARequest(name) if name else None for name in names]
                for outputs in (alone, llm.generate(prompts, params, False, lora_request=asked)):
                    llm.reset_prefix_cache()
                    found.append([(one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs])
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("other", [{"parallel": "dp2"}, {"parallel": "tp2", "batch_invariant": True}])
def test_what_cannot_be_had_together_is_refused(folders: Folders, other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="leave one of"):
        LLM(str(folders.base), enable_lora=True, **other, **OPTIONS)


def test_an_adapter_is_unloaded_and_replaced_while_it_is_in_use(
    llm: LLM, folders: Folders, expected: dict[str, Any]
) -> None:
    stream = llm.stream(PROMPTS[1], GREEDY, adapter="all")
    next(stream)
    llm.unload_adapter("all")
    llm.load_adapter("all", folders.adapters["some"])
    assert answers(llm, adapter="all") == expected["some"]
    assert list(stream)[-1].outputs[0].token_ids == expected["all"][1]


def test_the_asyncio_twin_serves_adapters(folders: Folders, expected: dict[str, Any]) -> None:
    asyncio.run(_ask_the_twin(folders, expected))


async def _ask_the_twin(folders: Folders, expected: dict[str, Any]) -> None:
    llm = AsyncLLM(str(folders.base), enable_lora=True, **OPTIONS)
    try:
        await llm.load_adapter("some", folders.adapters["some"])
        of_path = LoRARequest("all", 1, str(folders.adapters["all"]))
        for name, how in (("some", {"adapter": "some"}), ("all", {"lora_request": of_path}), ("", {})):
            last = None
            async for output in llm.generate(PROMPTS[1], GREEDY, **how):  # type: ignore[arg-type]
                last = output
            assert last is not None and last.outputs[0].token_ids == expected[name][1]
        await llm.unload_adapter("some")
        with pytest.raises(InvalidRequest, match="there is no adapter 'some'"):
            async for _ in llm.generate(PROMPTS[1], GREEDY, adapter="some"):
                pass
    finally:
        llm.shutdown()


@pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
def test_steps_with_and_without_adapters_have_recordings_of_their_own(llm: LLM, expected: dict[str, Any]) -> None:
    runner = llm._built.engine.runner
    assert isinstance(runner, TorchRunner)
    plain, adapted = (one for one in runner.decode_paths if isinstance(one, RecordedDecode))
    chunks, adapted_chunks = (one for one in runner.forward_paths if isinstance(one, RecordedChunks))
    answers(llm)
    assert adapted._graph is None and adapted_chunks._graphs is None
    used = plain._uses, chunks._uses
    for _ in range(2):
        assert answers(llm, adapter="all") == expected["all"]
    llm.reset_prefix_cache()
    assert answers(llm, adapter="all") == expected["all"]
    assert adapted._graph is not None and adapted_chunks._graphs is not None
    assert (plain._uses, chunks._uses) == used


def test_marked_parts_of_a_prompt_with_an_adapter_are_read(folders: Folders) -> None:
    """What stands alone was computed by the model as it is."""
    document = [3 + 7 * k % 90 for k in range(70)]
    module, question = {"prompt_token_ids": document, "cache_module": True}, {"prompt_token_ids": [7, 8]}
    parts = {"prompt": [{"prompt_token_ids": [5, 6]}, module, question]}
    with LLM(str(folders.base), enable_lora=True, module_reread_tokens=4, **OPTIONS) as llm:
        llm.load_adapter("all", folders.adapters["all"])
        marked = llm.generate(parts, GREEDY, False, adapter="all")[0]
        plain = llm.generate({"prompt_token_ids": [5, 6, *document, 7, 8]}, GREEDY, False, adapter="all")[0]
        assert marked.outputs[0].token_ids == plain.outputs[0].token_ids
        assert llm._built.engine.scheduler.parts[0].kv.stats.placed == 0
        llm.generate(parts, GREEDY, False)
        assert llm._built.engine.scheduler.parts[0].kv.stats.placed > 0
