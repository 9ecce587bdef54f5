"""Replays of block traces: what policies of eviction find again, beside what nobody could better."""
