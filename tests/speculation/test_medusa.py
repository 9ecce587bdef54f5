"""Medusa's heads: read as its own code writes them, drafting without changing an answer, refused in a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY, write_tiny
from tiny_drafts import drafted, make_drafts_free

from tokenmill import LLM, SamplingParams
from tokenmill.errors import ModelError
from tokenmill.model.families import spec_from_config
from tokenmill.model.medusa import FILE, MedusaHeads
from tokenmill.ops.native.library import Library, load

pytestmark = pytest.mark.skipif(not isinstance(load(), Library), reason="needs the native library")

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8, "max_model_len": 128,
}  # fmt: skip
WIDTH, VOCAB = 64, TINY["vocab_size"]
SHAPE = {"hidden_size": WIDTH, "head_dim": 16, "intermediate_size": 96}


class ResBlock(torch.nn.Module):
    """As the project has it: its linear layer starts as zeros, here it does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.silu(self.linear(x))


def medusa(heads: int, layers: int) -> torch.nn.ModuleList:
    torch.manual_seed(heads)
    blocks = [[ResBlock(WIDTH) for _ in range(layers)] for _ in range(heads)]
    return torch.nn.ModuleList(torch.nn.Sequential(*one, torch.nn.Linear(WIDTH, VOCAB, bias=False)) for one in blocks)


def written(
    folder: Path, heads: int = 3, layers: int = 1, prefix: str = "", **changes: torch.Tensor
) -> torch.nn.ModuleList:
    folder.mkdir(exist_ok=True)
    made = medusa(heads, layers)
    tensors = {prefix + name: one.detach().clone() for name, one in made.state_dict().items()} | changes
    save_file(tensors, folder / FILE)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": layers}))
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.mark.parametrize(("heads", "layers", "prefix"), [(3, 1, ""), (2, 2, "medusa_head."), (1, 0, "")])
def test_heads_compute_what_their_own_code_does(tmp_path: Path, heads: int, layers: int, prefix: str) -> None:
    made = written(tmp_path / "heads", heads, layers, prefix)
    read = MedusaHeads.load(tmp_path / "heads", spec_from_config(TINY | SHAPE))
    hidden = torch.randn(4, WIDTH)
    assert len(read.heads) == heads
    for i, head in enumerate(made):
        torch.testing.assert_close(read.logits(hidden, i), head(hidden))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_answer_is_changed(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    make_drafts_free(monkeypatch)
    written(tmp_path / "heads")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=50, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + i] * (6 + 5 * i)} for i in range(4)]
    found = []
    for speculation in ("off", f"head:{tmp_path / 'heads'}"):
        with LLM(model, **OPTIONS, speculation=speculation) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
            assert speculation == "off" or drafted(llm) > 50
    assert found[0] == found[1]


def test_what_does_not_fit_is_refused_in_a_sentence(model: str, tmp_path: Path) -> None:
    spec, folder = spec_from_config(TINY | SHAPE), tmp_path / "heads"
    wrong: list[tuple[dict[str, torch.Tensor], str]] = [
        ({"1.0.linear.weight": torch.zeros(8, 8)}, r"1\.0\.linear\.weight of shape \(8, 8\)"),
        ({"2.1.weight": torch.zeros(VOCAB + 1, WIDTH)}, r"2\.1\.weight of shape"),
        ({"0.0.linear.bias": torch.full((WIDTH,), torch.nan)}, "NaN or infinite"),
    ]
    for changes, sentence in wrong:
        written(folder, **changes)
        with pytest.raises(ModelError, match=sentence):
            MedusaHeads.load(folder, spec)
    written(folder)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 99, "medusa_num_layers": 1}))
    with pytest.raises(ModelError, match="medusa_num_heads 99"):
        LLM(model, **OPTIONS, speculation=f"head:{folder}")
    written(folder)
    (folder / FILE).write_bytes(b"\x00" * 20)
    with pytest.raises(ModelError, match="truncated, or no safetensors file"):
        LLM(model, **OPTIONS, speculation=f"head:{folder}")
    (folder / FILE).unlink()
    (folder / "medusa_lm_head.pt").write_bytes(b"pickled")
    with pytest.raises(ModelError, match="may run code when it is read"):
        LLM(model, **OPTIONS, speculation=f"head:{folder}")
