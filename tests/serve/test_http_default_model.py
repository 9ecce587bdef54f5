"""The default model says over HTTP what it says offline."""

from __future__ import annotations

import openai
import pytest
from http_server import Server

from tokenmill import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.slow
def test_the_default_model_says_the_same_offline_and_served(default_model: str) -> None:
    llm = LLM(default_model, max_model_len=512, max_num_seqs=16, dtype="float32", device="cpu")
    expected = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
    llm.shutdown()
    assert "Paris" in expected.text
    server = Server.start(default_model, "--load-format", "auto", "--dtype", "float32", "--max-model-len", "512")
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        chunks = client.chat.completions.create(
            model=model, messages=MESSAGES, temperature=0, max_tokens=40, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    finally:
        assert server.stop() == 0
