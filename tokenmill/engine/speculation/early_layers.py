"""EarlyLayersProposer: the model's own first layers draft, and what they computed stays where the whole model reads it.

Nothing is read twice: keys and values of these layers are the model's. Those of a draft lie behind what is known, and
are written again by the step that verifies it.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from tokenmill.engine.request import Request
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.draft_model import DraftModelProposer
from tokenmill.errors import ConfigError
from tokenmill.model.decoder import Decoder


def early_layers(runner: TorchRunner, text: str, graphs: bool) -> TorchRunner:
    """A runner of so many of the other's layers, with its final norm and head behind them."""
    spec, whole = runner.decoder.spec, runner.decoder
    if not text.isdigit() or not 1 <= int(text) < spec.num_layers:
        raise ConfigError(
            f"speculation has layers:{text}, but this model has {spec.num_layers}; take a number of layers from 1 to "
            f"{spec.num_layers - 1}"
        )
    count = int(text)
    first = replace(spec, num_layers=count, ropes=spec.ropes[:count], windows=spec.windows[:count])
    state = copy.copy(runner.state)
    state.kv, state.hidden = state.kv[:count], None
    return TorchRunner(
        Decoder(first, whole.weights, whole.ops, max_len=state.max_len), state, max_rows=state.scratch_row,
        max_tokens=runner.max_tokens, graphs=graphs, prompt_graphs=graphs, sampler=runner.sampler,
    )  # fmt: skip


class EarlyLayersProposer(DraftModelProposer):
    name = "layers"

    def prior(self, kind: int, depth: int) -> float:
        return 0.3

    def _known(self, request: Request) -> int:
        """All but the newest token, which nobody has computed yet."""
        return len(request.tokens) - 1

    def _note(self, request: Request, known: int) -> None:
        pass
