"""Stores whose weights are not all on the device at once: StreamedWeights, and a mixture's CachedExpertWeights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from tokenmill.model.experts import ExpertSource
from tokenmill.model.layers import LayerWeights, ResidentWeights, Weight
from tokenmill.model.spec import DecoderSpec
from tokenmill.offload.feed import Feed, LayerFeed


class StreamedWeights(ResidentWeights):
    """Weights of streamed layers are views of buffers; the feed sees to it that the right layer lies there."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        feed: LayerFeed,
    ) -> None:
        super().__init__(spec, weights, dtype, device)
        self.feed = feed

    def layer(self, index: int) -> LayerWeights:
        self.feed.enter(index)
        return self.peek(index)


class ExpertFeed(ExpertSource, Feed, Protocol):
    """Brings experts where a step that has chosen them finds them."""


class CachedExpertWeights(ResidentWeights):
    """All weights but experts are there; of these every layer has some, and asks its feed for others."""

    experts: ExpertFeed

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        device: torch.device,
        feed: ExpertFeed,
    ) -> None:
        """weights: of experts those that have a slot."""
        super().__init__(spec, weights, dtype, device)
        self.feed = self.experts = feed
