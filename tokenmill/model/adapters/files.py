"""What the files of an adapter are called; no torch."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
