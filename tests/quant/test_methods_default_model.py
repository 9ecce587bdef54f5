"""On the default model and real text, the methods keep their promise: calibrated four bits beat rounded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenmill.model.families import spec_from_config
from tokenmill.quant.tool.layer_source import LayerSource
from tokenmill.quant.tool.report import candidates, measure

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.mark.slow
def test_gptq_and_awq_beat_rounding_on_the_default_model(default_model):
    from tokenmill.model.tokenizer import Tokenizer
    from tokenmill.model.weights.gguf import GGUFCheckpoint

    files = [DATA / name for name in ("wikitext2_raw_test.txt", "wikitext2_valid.txt")]
    if not all(file.is_file() for file in files):
        pytest.skip("needs the WikiText-2 files beside the checkout")
    model = GGUFCheckpoint(default_model)
    tokenizer = Tokenizer.from_gguf(model)
    texts = (tokenizer.encode(file.read_text()[:20_000])[:2048] for file in files)
    judged, calibration = (torch.tensor(ids).view(4, 512) for ids in texts)
    wanted = {"int4-g32 rtn, clipped", "int4-g32 awq", "int4-g32 gptq"}
    chosen = [one for one in candidates() if one.name in wanted]
    source = LayerSource(spec_from_config(model.config), model)
    found = {}
    for line in measure(source, chosen, judged, calibration, lambda done, total, what: None):
        found[line.candidate.name] = line.quality
        print(line.candidate.name, line.quality)
    nearest = found["int4-g32 rtn, clipped"]
    for name in ("int4-g32 awq", "int4-g32 gptq"):
        assert found[name].divergence < 0.85 * nearest.divergence
        assert found[name].perplexity < nearest.perplexity
