"""A Llama of 95 thousand random weights, a tokenizer for it, and the tokens that it is calibrated and asked with."""

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_tiny(folder, dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=128,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def tokenizer():
    vocabulary = Tokenizer(models.WordLevel({f"t{index}": index for index in range(64)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="t0", eos_token="t2")


def calibration():  # 16 texts of 32 tokens
    return torch.randint(3, 64, (16, 32), generator=torch.Generator().manual_seed(1)).tolist()


def prompt():  # [1, 16]
    return torch.randint(3, 64, (1, 16), generator=torch.Generator().manual_seed(2))


def keep_only_weights(folder):
    for extra in folder.iterdir():
        if extra.name not in ("config.json", "model.safetensors"):
            extra.unlink()
