"""Makes the compressed-tensors checkpoints of this folder with llmcompressor, and the logits that they must give."""

import json
import shutil
import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file
from tiny_llama import calibration, keep_only_weights, prompt, save_tiny, tokenizer
from transformers import AutoModelForCausalLM

WEIGHT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
INT8_INPUT = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP8_INPUT = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"strategy": "tensor", "dynamic": False}
ASYMMETRIC = {"symmetric": False}


def group(weights, inputs=None, targets=("Linear",)):
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


def simple(weights, inputs=None):
    return QuantizationModifier(config_groups={"group_0": group(weights, inputs)}, ignore=["lm_head"])


RECIPES = {
    "w4a16_group": lambda: GPTQModifier(
        config_groups={"group_0": group(WEIGHT4 | {"actorder": "weight"})}, ignore=["lm_head"]
    ),
    "w4a16_group_asymmetric": lambda: simple(WEIGHT4 | ASYMMETRIC),
    "w4a16_channel_asymmetric": lambda: simple({**WEIGHT4, **ASYMMETRIC, "strategy": "channel", "group_size": None}),
    "w8a16_channel": lambda: simple(INT8),
    "w8a8_dynamic": lambda: QuantizationModifier(
        config_groups={"group_0": group(INT8, INT8_INPUT)}, ignore=["lm_head", r"re:.*layers\.1\.mlp\..*"]
    ),
    "w8a8_static": lambda: simple(INT8, {**INT8_INPUT, **STATIC}),
    "fp8_dynamic": lambda: simple(FP8, FP8_INPUT),
    "fp8_static": lambda: simple({**FP8, "strategy": "tensor"}, {**FP8_INPUT, **STATIC}),
    "fp8_block": lambda: simple(
        {**FP8, "strategy": "block", "block_structure": [128, 128]},
        {**FP8_INPUT, "strategy": "group", "group_size": 32},
    ),
    "mixed": lambda: QuantizationModifier(
        config_groups={
            "group_0": group(WEIGHT4, targets=[r"re:.*self_attn\.[qkvo]_proj$"]),
            "group_1": group(FP8, FP8_INPUT, targets=[r"re:.*mlp\.(gate|up|down)_proj$"]),
        },
        ignore=["lm_head"],
    ),
}


@torch.no_grad()
def expected(folder):
    """What the library itself computes with the saved checkpoint, in float32: as it is, and with inputs unrounded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {"ids": prompt(), "rounded": model(prompt()).logits[0].float()}
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            scheme.input_activations = None
    found["plain"] = model(prompt()).logits[0].float()
    return {name: value.contiguous() for name, value in found.items()}


def make(name, out):
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(save_tiny(out / "tiny", torch.bfloat16), dtype=torch.bfloat16)
    oneshot(
        model=model,
        processor=tokenizer(),
        dataset=Dataset.from_dict({"input_ids": calibration(), "attention_mask": [[1] * 32] * 16}),
        recipe=RECIPES[name](),
        max_seq_length=32,
        num_calibration_samples=16,
    )
    model.save_pretrained(folder, save_compressed=True)
    keep_only_weights(folder)
    save_file(expected(folder), folder / "expected.safetensors")
    print(name, json.dumps(json.loads((folder / "config.json").read_text())["quantization_config"]))


if __name__ == "__main__":
    for name in sys.argv[2:] or RECIPES:
        make(name, Path(sys.argv[1]))
