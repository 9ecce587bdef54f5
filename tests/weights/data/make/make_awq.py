"""Makes the AWQ checkpoint of this folder with autoawq, and the logits that its own dequantized weights give."""

import shutil
import sys
from pathlib import Path

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from tiny_llama import calibration, keep_only_weights, prompt, save_tiny, tokenizer
from transformers import LlamaForCausalLM

SETTINGS = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


@torch.no_grad()
def expected(folder, tiny):
    """The float32 model with every tensor as the file has it, the quantized ones as the library dequantizes them."""
    plain = LlamaForCausalLM.from_pretrained(tiny).float()
    stored = load_file(folder / "model.safetensors")
    for name, target in plain.named_parameters():
        module = name.removesuffix(".weight")
        if f"{module}.qweight" in stored:
            parts = [stored[f"{module}.{part}"] for part in ("qweight", "qzeros")]
            value = dequantize_gemm(*parts, stored[f"{module}.scales"].float(), 4, 32).T
        else:
            value = stored[name].float()
        target.copy_(value)
    return {"ids": prompt(), "plain": plain(prompt()).logits[0].contiguous()}


def make(name, out):
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    tiny = save_tiny(out / "tiny16", torch.float16)
    model = AutoAWQForCausalLM.from_pretrained(tiny, device_map="cpu", torch_dtype=torch.float32, safetensors=True)
    texts = [" ".join(f"t{token}" for token in row) for row in calibration()]
    model.quantize(tokenizer(), quant_config=SETTINGS, calib_data=texts, max_calib_seq_len=32, apply_clip=False)
    model.save_quantized(str(folder))
    keep_only_weights(folder)
    save_file(expected(folder, tiny), folder / "expected.safetensors")


if __name__ == "__main__":
    make("awq", Path(sys.argv[1]))
