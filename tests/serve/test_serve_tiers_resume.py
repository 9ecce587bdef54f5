"""A server whose engine has little memory, host memory and a disk is killed: answers are those of one with plenty."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

from sim_service import run

from tokenmill import LLM
from tokenmill.config import EngineConfig
from tokenmill.params import SamplingParams
from tokenmill.serve.engine_client.service import Service
from tokenmill.serve.settings import ServeSettings

# float64, as in test_serve_resume.py
TINY: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float64", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 4,
    "max_model_len": 256, "speculation": "off",
}  # fmt: skip
TOKEN = 2 * 2 * 2 * 8 * 8  # bytes of KV
CASE = SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)


def test_an_engine_killed_amid_transfers_changes_no_token(tiny_model: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 128) for _ in range(rng.randrange(60, 150))] for _ in range(12)]
    with LLM(tiny_model, **TINY) as llm:
        undisturbed = [
            one.outputs[0].token_ids for one in llm.generate([{"prompt_token_ids": one} for one in prompts], CASE)
        ]
    little = {"kv_cache_memory": 24 * 16 * TOKEN, "kv_host_memory": 60 * 16 * TOKEN, "kv_disk_path": str(tmp_path)}

    async def main() -> None:
        config = EngineConfig(model=tiny_model, **TINY, **little, kv_disk_bytes=32 << 20)
        service = Service(config, ServeSettings())
        await service.start()
        shot: list[int] = []

        async def follow(index: int) -> list[int]:
            async for output in await service.submit(prompts[index], CASE):
                said = output.outputs[0].token_ids
                if len(said) >= 20 and not shot:
                    shot.append(service._supervisor.pid)
                    os.kill(shot[0], signal.SIGKILL)
            return said

        for _ in range(2):  # the second time much of it is somewhere
            assert await asyncio.gather(*map(follow, range(len(prompts)))) == undisturbed
        assert service.stats().restarts == 1
        assert await service.view() is not None
        tiers = service._counters.engine.tiers
        assert set(tiers) == {"host memory", "disk"} and tiers["host memory"].written > 0
        assert all(0 < one.held <= one.room for one in tiers.values())
        await service.stop()

    run(main())
