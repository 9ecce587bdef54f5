"""Makes the float8 checkpoints of this folder with transformers, and the logits that it computes with them itself."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from tiny_llama import prompt, save_tiny
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

BLOCKS = {"fp8_files_block": (32, 32), "fp8_files_tensor": None}


@torch.no_grad()
def make(name, out):
    folder, tiny = out / name, Path(save_tiny(out / "tiny16", torch.bfloat16))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = FineGrainedFP8Config(weight_block_size=BLOCKS[name], modules_to_not_convert=["lm_head"])
    quantize, tensors = Fp8Quantize(SimpleNamespace(quantization_config=settings)), {}
    for key, value in load_file(tiny / "model.safetensors").items():
        tensors |= quantize.convert({key: value}) if key.endswith("_proj.weight") else {key: value}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny / "config.json").read_text()) | {"quantization_config": settings.to_dict()}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    # There is no GPU: the library then dequantizes while it loads.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = {"ids": prompt(), "plain": model(prompt()).logits[0].contiguous()}
    save_file(logits, folder / "expected.safetensors")


if __name__ == "__main__":
    for name in BLOCKS:
        make(name, Path(sys.argv[1]))
