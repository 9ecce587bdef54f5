"""Mixtures of experts in Triton: routing, and the products of few, many and batch-invariant tokens."""
