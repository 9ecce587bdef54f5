"""Weights that live outside the device: on disk beside a CPU, in the host's memory beside a GPU."""
