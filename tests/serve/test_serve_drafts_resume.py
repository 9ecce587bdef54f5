"""An engine that drafts is killed under the server: answers go on token for token as those of an undisturbed one."""

from __future__ import annotations

import asyncio
import signal
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sim_service import run, strike

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("", "sampling", "speculation")]
import grammar_models
from tiny import TINY, write_tiny
from tiny_drafts import made_eagle, made_head

from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.ops.native.library import Library, load
from tokenmill.outputs import RequestOutput
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.settings import ServeSettings

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")

COMMAND = (sys.executable, str(Path(__file__).with_name("drafting_engine.py")))
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 16, "max_model_len": 400,
}  # fmt: skip
SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
PROPOSERS = ["suffix", "head:HEAD", "head:EAGLE", "suffix,head:HEAD,draft:STRANGER,layers:1"]
LENGTH = {"max_tokens": 300, "ignore_eos": True}
CASES = [
    SamplingParams(temperature=0, **LENGTH),
    SamplingParams(temperature=0.4, seed=1, **LENGTH),
    SamplingParams(temperature=0.4, seed=2, top_p=0.9, top_k=40, min_p=0.01, **LENGTH),
    SamplingParams(temperature=0, repetition_penalty=1.02, frequency_penalty=0.01, **LENGTH),
    SamplingParams(temperature=0.4, seed=4, n=3, **LENGTH),
    SamplingParams(temperature=0.3, seed=5, logprobs=2, **LENGTH),
]
PROMPTS = [[3 + (7 * i + j) % (5 + i) for j in range(12 + 9 * i)] for i in range(len(CASES))]

LEDGER: dict[str, Any] = {  # long names, which a grammar leaves no choice about
    "type": "object",
    "properties": {f"number_of_sacks_on_floor_{floor}": {"type": "integer", "maximum": 99} for floor in range(6)},
    "required": [f"number_of_sacks_on_floor_{floor}" for floor in range(6)],
    "additionalProperties": False,
}


def said(output: RequestOutput) -> list[Any]:
    assert output.error is None
    return [
        (list(one.token_ids), one.finish_reason, [list(table) for table in one.logprobs or []])
        for one in output.outputs
    ]


@pytest.mark.parametrize("speculation", PROPOSERS)
def test_an_engine_killed_while_it_drafts_changes_no_token(tmp_path: Path, speculation: str) -> None:
    model = write_tiny(tmp_path / "model", **SHAPE)
    made = {
        "HEAD": lambda: made_head(model, tmp_path / "head.safetensors", OPTIONS),
        "EAGLE": lambda: made_eagle(tmp_path / "eagle", TINY | SHAPE, [0, 1]),
        "STRANGER": lambda: write_tiny(tmp_path / "stranger", hidden_size=32, head_dim=8, num_hidden_layers=1),
    }
    for name, make in made.items():
        if name in speculation:
            speculation = speculation.replace(name, str(make()))
    killed_and_compared(model, speculation, OPTIONS, CASES)


def test_an_engine_killed_while_it_drafts_under_grammars_changes_no_token(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    model = grammar_models.write_model(tmp_path / "bytes")
    options = OPTIONS | {"skip_tokenizer_init": False}
    head = made_head(model, tmp_path / "head.safetensors", options, vocab=300)
    forms: list[Any] = [{"json": LEDGER}, {"regex": "(item [0-9]{2}: a[bc]-[xyz]{3}; ){12}done"}, None]
    cases = [
        SamplingParams(temperature=temperature, seed=seed, structured=form, max_tokens=250, ignore_eos=form is None)
        for seed, (form, temperature) in enumerate(product(forms, (0.0, 0.8)))
    ]
    killed_and_compared(model, f"suffix,head:{head}", options, cases)


def killed_and_compared(model: str, speculation: str, options: dict[str, Any], cases: list[SamplingParams]) -> None:
    """Answers without drafts of an undisturbed engine, and with drafts of one that is killed halfway."""
    with LLM(model, **(options | {"speculation": "off"})) as llm:
        prompts = [{"prompt_token_ids": one} for one in PROMPTS]
        undisturbed = [said(output) for output in llm.generate(prompts, cases, use_tqdm=False)]

    async def main() -> None:
        config = EngineConfig(model=model, **(options | {"speculation": speculation}))
        service = Service(config, ServeSettings(command=COMMAND))
        await service.start()
        shot: list[int] = []  # drafts that the killed engine had verified

        async def drafted() -> int:
            assert await service.view() is not None  # with it comes what the engine counts
            return sum(one[0] for one in service._counters.engine.drafts.values())

        async def follow(index: int) -> list[Any]:
            async for output in await service.submit(PROMPTS[index], cases[index]):
                if len(output.outputs[0].token_ids) >= 30 and not shot:  # well under way
                    shot.append(0)
                    shot[0] = await drafted()
                    await strike(service, signal.SIGKILL)
            return said(output)

        disturbed = await asyncio.gather(*map(follow, range(len(cases))))
        assert shot[0] > 10 and service.stats().restarts == 1
        assert disturbed == undisturbed
        assert await drafted() > 10  # the next engine drafts, too
        await service.stop()

    run(main())
