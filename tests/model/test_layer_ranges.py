"""A pass may be cut into ranges of layers, and asks for the weights of each layer once, in order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from decoder_driver import Sequence, make_decoder

sys.path.append(str(Path(__file__).parents[1]))
from tiny import TINY

from tokenmill.model.decoder import Decoder, Hidden
from tokenmill.model.families import spec_from_config
from tokenmill.model.weights.dummy import dummy_weights
from tokenmill.quant.schemes.dense import Dense
from tokenmill.quant.schemes.scheme import Schemes

PROMPT = [5, 9, 3, 77, 21]


@pytest.fixture()
def decoder() -> Decoder:
    spec = spec_from_config(TINY | {"num_hidden_layers": 4})
    weights = dummy_weights(spec, torch.float32, torch.device("cpu"), 0, Schemes(Dense()))
    return make_decoder(spec, weights, 64)


def test_weights_are_asked_for_once_per_layer_and_pass(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    layer = decoder.weights.layer
    monkeypatch.setattr(decoder.weights, "layer", lambda index: (asked.append(index), layer(index))[1])
    sequence = Sequence(decoder, 32)
    sequence.push(PROMPT, wanted=[4])
    sequence.push([1])
    assert asked == [0, 1, 2, 3] * 2


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_ranges_of_layers_give_what_all_of_them_give(
    decoder: Decoder, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Sequence(decoder, 32).push(PROMPT)

    def in_two(tokens, kv, watch=None, wanted=None):
        residual, update = decoder.layers(range(cut), decoder.embed(tokens.ids), tokens, kv).take()
        sent = Hidden(residual.clone(), None if update is None else update.clone())  # to another rank
        return decoder.norm(decoder.layers(range(cut, 4), sent, tokens, kv))

    monkeypatch.setattr(decoder, "forward", in_two)
    assert torch.equal(Sequence(decoder, 32).push(PROMPT), whole)
