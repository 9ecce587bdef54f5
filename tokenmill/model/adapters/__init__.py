"""LoRA adapters: folders as PEFT writes them, and their factors in slots on the device."""
