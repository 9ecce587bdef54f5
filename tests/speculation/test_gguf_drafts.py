"""GGUF files as draft models: quantized as they are, beside any other model with the same tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
sys.path += [str(Path(__file__).parents[1] / one) for one in ("weights", "speculation", "")]
from gguf_files import tiny_model
from test_device_drafters import drafting
from tiny_drafts import drafted, make_drafts_free

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ConfigError
from tokenmill.ops.native.library import Library, load

needs_native = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 256}
PLAINLY: dict[str, Any] = OPTIONS | {"ops": "reference", "cuda_graphs": False, "overlap": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gguf") / "target.gguf")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gguf") / "draft.gguf", layers=1, hidden=32, seed=1)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, seed=3)
    outputs = llm.generate(["hello", "the helm of a ship", "a" * 40], params, use_tqdm=False)
    assert all(one.error is None for one in outputs)
    return [list(one.outputs[0].token_ids) for one in outputs]


@needs_native
@pytest.mark.parametrize("load_format", ["auto", "gguf"])
def test_a_gguf_file_drafts_on_a_cpu(
    model: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    make_drafts_free(monkeypatch)
    with LLM(str(model), **OPTIONS, speculation="off") as llm:
        plain = answers(llm)
    for path in (model, stranger):
        with LLM(str(model), **OPTIONS, load_format=load_format, speculation=f"draft:{path}") as llm:
            assert answers(llm) == plain
            assert drafted(llm) > 20
            stats = llm._built.engine.speculation.stats["draft"]  # type: ignore[union-attr]
        assert path == stranger or stats.accepted == stats.drafted


@needs_native
def test_a_gguf_file_drafts_on_a_device(model: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(model), **PLAINLY) as llm:
        plain = answers(llm)
    for path in (model, stranger):
        with monkeypatch.context() as patch, LLM(str(model), **PLAINLY) as llm:
            speculation = drafting(llm, f"draft:{path}", patch)
            assert answers(llm) == plain
            stats = speculation.stats["draft"]
        assert stats.drafted > 20 and (path == stranger or stats.accepted == stats.drafted)


def test_a_gguf_file_with_other_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other.gguf", layers=1, tokens=4)
    with pytest.raises(ConfigError, match="knows 264 tokens, not 260"):
        LLM(str(model), **OPTIONS, speculation=f"draft:{other}")
