"""Log-probabilities of chosen tokens: computed on the device, copied without waiting, unpacked on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.sampling.records import TokenLogprobs


@dataclass(frozen=True)
class LogprobTensors:
    """Log-probabilities before penalties and temperature, for the entries of a batch that asked."""

    entries: list[int]  # [a]: which entries of the batch these are
    widths: list[int]  # [a]: how many best tokens each of them asked for, at most k
    token: torch.Tensor  # [a] int64; -1 where the logits were not finite
    chosen: torch.Tensor  # [a]: log-probability of the token
    rank: torch.Tensor  # [a] int64: 1 is the most likely
    top_ids: torch.Tensor  # [a, k] int64, best first
    top_values: torch.Tensor  # [a, k]

    def start_copy(self) -> LogprobTensors:
        """The same on the host. Does not wait for the device: read it once the device has passed this point."""
        return LogprobTensors(
            self.entries,
            self.widths,
            *(
                tensor.to("cpu", non_blocking=True)
                for tensor in (self.token, self.chosen, self.rank, self.top_ids, self.top_values)
            ),
        )


def measure(
    logits: torch.Tensor,  # [a, vocab]
    token: torch.Tensor,  # [a]
    entries: list[int],
    widths: list[int],
) -> LogprobTensors:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token.clamp_min(0)[:, None])  # [a, 1]
    rank = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(max(widths, default=0), logits.shape[1]), dim=-1)
    return LogprobTensors(entries, widths, token, chosen[:, 0], rank, top.indices, top.values)


def prompt_logprobs(
    logits: torch.Tensor,  # [m, vocab]: what the model says about each next token of a prompt
    targets: torch.Tensor,  # [m]: the tokens that stand there
    k: int,  # how many best tokens per position
) -> LogprobTensors:
    count = logits.shape[0]
    return measure(logits, targets.long(), list(range(count)), [k] * count)


def unpack(tensors: LogprobTensors) -> list[TokenLogprobs]:
    """Plain numbers, one per entry, from tensors that have arrived on the host."""
    columns = (tensors.token, tensors.chosen, tensors.rank, tensors.top_ids, tensors.top_values)
    return [
        TokenLogprobs(token, logprob, rank, list(zip(ids[:width], values[:width], strict=True)))
        for width, token, logprob, rank, ids, values in zip(
            tensors.widths, *(column.tolist() for column in columns), strict=True
        )
    ]
