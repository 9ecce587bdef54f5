"""Triton kernels; importing this package needs triton, so the registry does it only where they may be used."""

from tokenmill.ops.registry import Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = ()
