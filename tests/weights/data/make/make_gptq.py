"""Makes the GPTQ checkpoints of this folder with gptqmodel, and the logits that its own dequantized weights give."""

import shutil
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file, save_file
from tiny_llama import calibration, keep_only_weights, prompt, save_tiny
from transformers import LlamaForCausalLM

FOUR_BITS = {"bits": 4, "group_size": 32, "desc_act": False, "act_group_aware": False, "sym": True, "format": "gptq"}
SETTINGS = {
    "gptq_v1": FOUR_BITS,
    "gptq_v1_asymmetric": FOUR_BITS | {"sym": False},
    "gptq_v2_asymmetric": FOUR_BITS | {"sym": False, "format": "gptq_v2"},
    "gptq_desc_act": FOUR_BITS | {"desc_act": True},
    "gptq_8bit": FOUR_BITS | {"bits": 8, "group_size": -1, "sym": False, "format": "gptq_v2"},
}


@torch.no_grad()
def expected(folder, tiny):
    """The float32 model with every quantized matrix as the library dequantizes it."""
    quantized = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model
    plain = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    for name, target in plain.named_parameters():
        module = quantized.get_submodule(name.removesuffix(".weight"))
        if hasattr(module, "qweight"):
            module.scales = module.scales.float()
            target.copy_(module.dequantize_weight().T.float())
        else:
            target.copy_(stored[name])
    return {"ids": prompt(), "plain": plain(prompt()).logits[0].contiguous()}


def make(name, out):
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    tiny = save_tiny(out / "tiny16", torch.float16)
    model = GPTQModel.load(tiny, QuantizeConfig(**SETTINGS[name], offload_to_disk=False), device="cpu")
    texts = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
    model.quantize(texts, batch_size=1, backend=BACKEND.TORCH)
    model.save(str(folder))
    logits = expected(folder, tiny)
    keep_only_weights(folder)
    save_file(logits, folder / "expected.safetensors")


if __name__ == "__main__":
    for name in sys.argv[2:] or SETTINGS:
        make(name, Path(sys.argv[1]))
