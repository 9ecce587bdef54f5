"""Logits whose columns lie on several ranks: each chooses among its own tokens, and one of these is the answer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from tokenmill.ops import cpu, reference
from tokenmill.ops.types import LOGPROB_WORDS, SampleBatch
from tokenmill.parallel.communicator import Communicator

_MOST_RANKED = 256  # a larger top_k asks for whole rows


@dataclass(frozen=True)
class VocabPart:
    """Which tokens this rank has the logits of, and who has the others.

    All ranks make the same calls for the same rows, and get the same tokens: those that one rank would choose.
    """

    tokens: range
    parts: tuple[range, ...]  # of all ranks
    ranks: Communicator
    same_bits: bool = False  # log-probabilities have those of one rank: they are computed of whole rows

    def whole(self, logits: torch.Tensor) -> torch.Tensor:  # [n, part] -> [n, vocab]
        """The logits of all tokens."""
        widest = max(map(len, self.parts))
        mine = logits.new_zeros(logits.shape[0], widest)
        mine[:, : logits.shape[1]] = logits
        found = self.ranks.all_gather(mine)  # [ranks, n, widest]
        return torch.cat([one[:, : len(part)] for one, part in zip(found, self.parts, strict=True)], dim=1)

    def sample(
        self,
        logits: torch.Tensor,  # [n, part]
        batch: SampleBatch,  # on a GPU without filters
    ) -> torch.Tensor:  # [n] int64; -1 where the row's logits hold a NaN or no finite value
        """One value and one token per row and rank are exchanged; for top_k as many values, for top_p whole rows."""
        if logits.device.type != "cpu":
            return self._largest(*reference.best_of(logits, batch, self.tokens.start))
        if not batch.any_filter or batch.all_greedy:
            return self._largest(*cpu.best_of(logits, batch, self.tokens.start))
        ranked = (batch.top_k > 0) & (batch.top_k < self.parts[-1].stop)
        warm = batch.temperature >= 1e-5
        in_whole = warm & ((batch.top_p < 1) | (ranked & (batch.top_k > _MOST_RANKED)))
        tokens = torch.empty(len(logits), dtype=torch.int64)
        for wanted, choose in ((in_whole, self._of_whole_rows), (~in_whole, self._above_floors)):
            some = wanted.nonzero()[:, 0]
            if len(some):
                tokens[some] = choose(logits[some], _rows(batch, some))
        return tokens

    def logprobs(
        self,
        logits: torch.Tensor,  # [n, part], before anything shaped them
        tokens: torch.Tensor,  # [n] int64; -1 where none could be chosen
        widths: torch.Tensor,  # [n] int32: how many best tokens a row asked for; -1: nothing
        k: int,  # no width is larger
    ) -> torch.Tensor:  # [n, LOGPROB_WORDS + 2 * k]
        """As the op of that name, of each rank's best tokens and the sum of its exponentials."""
        if self.same_bits:
            return reference.logprobs(self.whole(logits), tokens, widths, k)
        word, real = (torch.int64, torch.float64) if logits.dtype == torch.float64 else (torch.int32, torch.float32)
        out = torch.zeros(len(logits), LOGPROB_WORDS + 2 * k, dtype=word)
        out[:, 0] = tokens
        asked = (widths >= 0).nonzero()[:, 0]
        if not len(asked):
            return out
        logits, chosen = logits[asked].double(), tokens[asked].clamp_min(0)
        best = self._best(logits, k)  # [asked, 2, ranks * k]
        sums = self.ranks.all_gather(logits.logsumexp(-1)).logsumexp(0)  # [asked]
        column = chosen - self.tokens.start
        mine = (column >= 0) & (column < logits.shape[1])
        own = logits.gather(1, torch.where(mine, column, 0)[:, None])[:, 0]
        value = self.ranks.all_gather(torch.where(mine, own, -torch.inf)).amax(0)
        larger = self.ranks.all_gather((logits > value[:, None]).sum(-1)).sum(0)
        top = min(k, best.shape[2])
        values, where = best[:, 0].topk(top, dim=-1)
        out[asked, 1] = (larger + 1).to(word)
        out[asked, 2] = (value - sums).to(real).view(word)
        out[asked, LOGPROB_WORDS : LOGPROB_WORDS + top] = best[:, 1].gather(1, where).to(word)
        out[asked, LOGPROB_WORDS + k : LOGPROB_WORDS + k + top] = (values - sums[:, None]).to(real).view(word)
        return out

    def _largest(self, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # [n] each -> [n]
        """The token of the largest value of all ranks."""
        found = self.ranks.all_gather(torch.stack([values.double(), tokens.double()], dim=1))  # [ranks, n, 2]
        top, rank = found[..., 0].max(0)  # of equal ones the first, which has the smaller token; NaN above all
        token = found[..., 1].gather(0, rank[None])[0].long()
        return torch.where(torch.isfinite(top), token, -1)

    def _of_whole_rows(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        return cpu.sample(self.whole(logits), batch)

    def _above_floors(self, logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
        """Rows that are greedy, or whose floor follows from the best of each rank: of top_k and min_p."""
        scaled = logits / batch.temperature[:, None]
        top_k, min_p = batch.top_k.tolist(), batch.min_p.tolist()
        vocab = self.parts[-1].stop
        most = max((k for k in top_k if k < vocab), default=0)
        best = self._best(scaled.nan_to_num(nan=torch.inf), max(1, most))[:, 0]  # of a NaN the row ends in any case
        best = best.sort(-1, descending=True).values.to(scaled.dtype)
        floors: list[torch.Tensor | None] = []
        for row, (k, p) in enumerate(zip(top_k, min_p, strict=True)):
            floor = best[row, k - 1] if 0 < k < vocab else None
            if p > 0:
                likely = best[row, 0] + torch.log(batch.min_p[row])
                floor = likely if floor is None else torch.maximum(floor, likely)
            floors.append(floor)
        return self._largest(*cpu.best_of(logits, batch, self.tokens.start, floors))

    def _best(self, logits: torch.Tensor, k: int) -> torch.Tensor:  # [n, part] -> [n, 2, ranks * k]: values, tokens
        """Every rank's k best tokens; where a rank has fewer, some without any likelihood."""
        values, columns = logits.topk(min(k, logits.shape[1]), dim=-1)
        mine = torch.full((len(logits), 2, k), -torch.inf, dtype=torch.float64)
        mine[:, 0, : values.shape[1]] = values
        mine[:, 1] = 0
        mine[:, 1, : values.shape[1]] = columns + self.tokens.start
        return self.ranks.all_gather(mine).permute(1, 2, 0, 3).flatten(2)


def _rows(batch: SampleBatch, some: torch.Tensor) -> SampleBatch:
    changes = {
        field.name: getattr(batch, field.name)[some]
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor)
    }
    return replace(batch, **changes)
