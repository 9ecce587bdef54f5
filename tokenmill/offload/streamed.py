"""StreamedWeights: a store whose layers are not all on the device at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenmill.model.layers import LayerWeights, ResidentWeights, Weight
from tokenmill.model.spec import DecoderSpec
from tokenmill.offload.feed import Feed


class StreamedWeights(ResidentWeights):
    """Weights of streamed layers are views of buffers; the feed sees to it that the right layer lies there."""

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Weight], dtype: torch.dtype, device: torch.device, feed: Feed
    ) -> None:
        super().__init__(spec, weights, dtype, device)
        self.feed = feed

    def layer(self, index: int) -> LayerWeights:
        self.feed.enter(index)
        return self.peek(index)
