"""Products of linear layers in Triton, one kernel family per file; matmul.py declares what each can do."""
