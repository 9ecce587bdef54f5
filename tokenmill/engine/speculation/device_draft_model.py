"""DeviceDraftModel: a smaller model, or the model's own first layers, drafts at the end of recorded steps.

The host is a step behind and does not know what it would draft from. So a step that verifies drafts ends with a few
steps of the drafting model in terms of the device's tables: what the device has just accepted is read, then token after
token is drafted. What other steps computed (prompts, answers while nothing was drafted) the host has the drafting model
read in steps of its own, launched before the next one that drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.engine.request import Request
from tokenmill.engine.runner.drafters import Verified
from tokenmill.engine.runner.state import DeviceState
from tokenmill.engine.runner.torch_runner import TorchRunner
from tokenmill.engine.speculation.head_runner import single_queries
from tokenmill.engine.speculation.proposer import Draft
from tokenmill.engine.speculation.read_records import ReadRecords
from tokenmill.engine.step import DRAFTED, Step, StepResult
from tokenmill.model.decoder import TokenBatch
from tokenmill.model.layers import layer_kind
from tokenmill.sampling.settings import Traits


class DeviceDrafts:
    """The device's part; of early layers, whose keys and values are the model's own, it is all there is.

    A row's blocks may end before its drafts do: a token without a place is nobody's, and what is drafted from there on
    is of no worth.
    """

    kinds = 1

    def __init__(self, name: str, runner: TorchRunner, state: DeviceState, most: int) -> None:
        """runner: of the drafting model; state: of the model that it drafts for; most: tokens of a step that only
        decodes, drafts included.
        """
        self.name, self._runner, self._state = name, runner, state
        self.on_device = self.room_ahead = DRAFTED
        self.failure: Exception | None = None
        state.keep_room()
        self._longest = min(state.max_len, runner.decoder.spec.max_positions)
        self._count = torch.arange(most + 1, dtype=torch.int32, device=state.tokens.device)
        self._depths = torch.arange(DRAFTED, device=state.tokens.device)[:, None]
        decoder, kv = runner.decoder, runner.state.kv[0].k
        facts = [
            *(decoder.spec, decoder.kinds, decoder.weights.dtype, layer_kind(decoder.weights.lm_head)),
            *({op: one.name for op, one in decoder.ops.chosen.items()}, kv.dtype, kv.shape[1:], kv.numel() >> 31 > 0),
        ]
        self.kind = f"{name}, {DRAFTED} tokens: {facts}"

    def prior(self, kind: int, depth: int) -> float:
        return 0.5

    def propose(self, requests: Sequence[Request], length: int) -> list[Draft | None]:
        return [None] * len(requests)  # nobody on the host knows them

    def draft(self, verified: Verified) -> None:
        traits = Traits(verified.traits.warm, verified.traits.filtered, verified.traits.shaped, None)
        rows, newest, entries = self._newest(verified)
        rows, positions = self._with_room(rows, newest + self._depths)  # [DRAFTED, n]
        hidden = self._first(verified, rows[0], positions[0], entries)
        for depth in range(DRAFTED):
            if depth:
                hidden = self._forward(rows[depth], positions[depth])
            logits, behind = self._runner.decoder.logits(hidden, wide=False), positions[depth] + 1
            tokens = self._runner.sampler.sample(logits, rows[depth], behind, traits).tokens.clamp_min(0)
            self._state.tokens[rows[depth], behind] = tokens.int()
            self._state.drafts[rows[depth], depth] = tokens

    def _first(
        self, verified: Verified, rows: torch.Tensor, positions: torch.Tensor, entries: torch.Tensor | None
    ) -> torch.Tensor:  # [n, hidden]
        """The hidden states behind the newest tokens of all rows: all before them has been computed by the step."""
        return self._forward(rows, positions)

    def _newest(self, verified: Verified) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Rows and the positions of their newest tokens, one entry for each where rows have equal numbers of entries;
        and by which of these each was sampled. [n], [n], [n]
        """
        width, inputs = verified.queries, verified.inputs
        if width == 1:
            return verified.rows, verified.positions, None
        rows, first = inputs.rows[::width].long(), inputs.positions[::width]
        newest = self._state.lengths[rows] - 1
        held = (newest - 1 - first).clamp(0, width - 1)  # (of nobody's row the length is anything)
        return rows, newest, self._count[: len(inputs.rows) : width] + held

    def _with_room(
        self, rows: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # both as positions
        """Nobody's row for those that lie behind their row's blocks."""
        assert self._state.room is not None
        inside = positions < self._state.room.clamp(max=self._longest)[rows]
        return rows.masked_fill(~inside, self._state.scratch_row), positions * inside

    def _forward(
        self,
        rows: torch.Tensor,  # [n]
        positions: torch.Tensor,  # [n]
        queries: int = 1,
        wanted: torch.Tensor | None = None,  # [m]
    ) -> torch.Tensor:  # [n, hidden] or [m, hidden]
        """The drafting model's hidden states of tokens from the device's table."""
        decoder = self._runner.decoder
        inputs = decoder.ops.decode_inputs(self._state.decode_tables, rows, positions)
        attention = single_queries(self._state, inputs.rows, inputs.context, self._count[: len(rows) + 1])
        attention.queries = queries
        batch = TokenBatch(inputs.ids, inputs.positions, inputs.slots, attention)
        return decoder.forward(batch, self._runner.state.kv, wanted=wanted)

    def ended(self, request: Request) -> None:
        pass

    def forget(self, salt: str | None = None) -> None:
        pass


class DeviceDraftModel(DeviceDrafts):
    """A model with keys and values of its own: it reads whatever the other one computes.

    A step that drafts reads what it accepted. So from a step that drafted to the next the device goes on by itself
    (`_Place.followed`), if the row's blocks had room for its newest token.
    """

    def __init__(self, runner: TorchRunner, state: DeviceState, most: int) -> None:
        super().__init__("draft", runner, state, most)
        self._records = ReadRecords(state.block_size)
        self._followed: dict[str, int] = {}  # request -> the newest step, which drafted, and behind which all is read
        self._ready: set[str] = set()  # requests of which all that the next step starts behind is read
        self._steps = 0

    def _first(
        self, verified: Verified, rows: torch.Tensor, positions: torch.Tensor, entries: torch.Tensor | None
    ) -> torch.Tensor:
        """Reads what was sampled behind every token of the step, whether it counts or not: as many tokens, one further.
        (The first of the step was the newest one when the step before it ended.)
        """
        everything = self._with_room(verified.inputs.rows.long(), verified.positions)
        return self._forward(*everything, verified.queries, entries)

    def catch_up(self, requests: Sequence[Request]) -> int:
        """Before a step that drafts: read what no step has read, as far as one step goes. How many tokens that is."""
        self._ready.clear()
        work: list[tuple[int, int, int]] = []  # row, start, count
        chosen: list[tuple[int, int, int]] = []
        left = self._runner.max_tokens
        for request in requests:
            if self.follows(request):
                self._ready.add(request.id)
                continue
            known, sure = self._records.known(request), request.num_tokens
            # The device may be further than the host knows: what it has not sampled yet is read again when it has.
            end = sure + request.unsure
            last = min(end, len(request.blocks) * self._state.block_size, known + left)
            if end > self._longest or request.in_float32 or request.grammar is not None:
                continue  # nobody verifies what is drafted for these
            if last > known:
                work.append((request.row, known, last - known))
                left -= last - known
                # Tokens whose keys and values were found in the cache are not in the device's table.
                found = len(request.tokens) if request.metrics.preemptions else request.metrics.cached_tokens
                chosen += [(request.row, at, request.tokens[at]) for at in range(known, min(last, found))]
                self._records.note(request, min(last, sure))
            if last >= end:
                self._ready.add(request.id)
        if work:
            self._steps += 1
            rows, starts, counts = (list(column) for column in zip(*work, strict=True))
            self._runner.launch(Step(self._steps, rows, starts, counts, [0] * len(rows), chosen=chosen))
        return self._runner.max_tokens - left

    def follows(self, request: Request) -> bool:
        """Whether the newest launched step of a request drafted for it from all that there is."""
        return self._followed.get(request.id) == request.last_step and self._records.find(request) is not None

    def launched(self, step: Step) -> None:
        if not step.drafting:
            return
        for request, start, count in zip(step.requests, step.starts, step.counts, strict=True):
            newest = start + step.slack.get(request.row, 0) + count  # at most
            has_room = newest < len(request.blocks) * self._state.block_size
            if has_room and request.id in self._ready:
                self._followed[request.id] = step.number
        self._ready.clear()

    def committed(self, step: Step, result: StepResult) -> None:
        """What held is not among the requests' tokens yet."""
        for request, tokens in zip(step.requests, result.tokens, strict=True):
            if self._followed.get(request.id, 0) >= step.number and self._records.find(request) is not None:
                self._records.note(request, len(request.tokens) + len(tokens))

    def ended(self, request: Request) -> None:
        self._records.ended(request)
        self._followed.pop(request.id, None)

    def forget(self, salt: str | None = None) -> None:
        self._records.forget(salt)

    def reset(self) -> None:
        """What was launched may never have been computed."""
        self._records.forget()
        self._followed.clear()
