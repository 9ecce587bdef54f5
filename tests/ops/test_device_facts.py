"""Which GPUs get float8 from the matrix library, and products that do not vary with the batch."""

from types import SimpleNamespace

import pytest
import torch

from tokenmill.ops import device_facts


@pytest.mark.parametrize(
    ("capability", "properties", "expected"),
    [
        ((9, 0), SimpleNamespace(shared_memory_per_block_optin=232448), True),
        ((10, 0), SimpleNamespace(shared_memory_per_block_optin=232448), True),
        ((9, 0), SimpleNamespace(), True),  # a torch that does not say
        ((12, 0), SimpleNamespace(shared_memory_per_block_optin=101376), False),
        ((8, 9), SimpleNamespace(shared_memory_per_block_optin=101376), False),
    ],
)
def test_gpus_with_little_shared_memory_are_told_apart(monkeypatch, capability, properties, expected):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_facts.usable.__wrapped__(device_facts.FLOAT8_LIBRARY, torch.device("cuda", 0)) is expected
    assert not device_facts.usable.__wrapped__(device_facts.FLOAT8_LIBRARY, torch.device("cpu"))
