"""Attention over the paged cache in Triton; paged.py is the op, invariant.py the one whose bits no batch changes."""
