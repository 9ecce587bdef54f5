"""BeamGroup: which beams of one request live on, which are finished, and how the finished ones rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BeamHypothesis:
    """One sequence that beam search found."""

    tokens: list[int]  # what was generated, with the stop token if one ended it
    cumulative_logprob: float
    score: float  # cumulative_logprob / len(tokens) ** length_penalty
    finished_by_stop: bool  # False: it reached the length limit, or the search was cut short


@dataclass(frozen=True)
class _Candidate:
    parent: int
    token: int
    cumulative: float


@dataclass(frozen=True)
class _Beam:
    tokens: list[int]
    cumulative: float


@dataclass
class BeamGroup:
    """Beam search over one prompt, with the choices that transformers' beam search makes.

    Every round the `width` best continuations of all live beams are looked at: those that stop join the
    finished ones (of which the `width` best by score are kept), and the best ones that do not stop live on.
    The search ends at the length limit, or once `width` are finished and either `early_stopping` is set or the
    best live beam, scored at its present length, does not beat the worst finished one.
    """

    width: int
    num_return: int
    length_penalty: float
    early_stopping: bool
    stop_ids: frozenset[int]
    max_new_tokens: int
    _live: list[_Beam] = field(default_factory=lambda: [_Beam([], 0.0)], init=False)
    _finished: list[BeamHypothesis] = field(default_factory=list, init=False)  # best first, at most `width`

    @property
    def done(self) -> bool:
        return not self._live

    def advance(self, candidates: list[list[tuple[int, float]]]) -> list[tuple[int, int]]:
        """One round: for every live beam its best (token, logprob), best first, at least width + the number of
        stop ids of them. Returns the next live beams, best first, as (parent index, token); [] when the search is over.

        The first round has one live beam, the prompt itself.
        """
        if len(candidates) != len(self._live):
            raise ValueError(f"there are {len(self._live)} live beams, but candidates for {len(candidates)}")
        ranked = self._ranked(candidates)
        length = len(self._live[0].tokens) + 1
        at_limit = length >= self.max_new_tokens
        for candidate in ranked[: self.width]:
            if at_limit or candidate.token in self.stop_ids:
                self._finish(candidate)
        chosen = [] if at_limit else [c for c in ranked if c.token not in self.stop_ids][: self.width]
        if chosen and self._is_over(best_live=chosen[0].cumulative, length=length):
            chosen = []
        self._live = [_Beam([*self._live[c.parent].tokens, c.token], c.cumulative) for c in chosen]
        return [(c.parent, c.token) for c in chosen]

    def results(self) -> list[BeamHypothesis]:
        """The best `num_return`, best first. Before the search is over, live beams make up for missing ones."""
        found = list(self._finished)
        if len(found) < self.num_return:
            found += [self._hypothesis(beam.tokens, beam.cumulative, False) for beam in self._live if beam.tokens]
        return found[: self.num_return]

    def _ranked(self, candidates: list[list[tuple[int, float]]]) -> list[_Candidate]:
        everything = [
            _Candidate(parent, token, self._live[parent].cumulative + logprob)
            for parent, best in enumerate(candidates)
            for token, logprob in best
        ]
        return sorted(everything, key=lambda candidate: -candidate.cumulative)

    def _finish(self, candidate: _Candidate) -> None:
        tokens = [*self._live[candidate.parent].tokens, candidate.token]
        self._finished.append(self._hypothesis(tokens, candidate.cumulative, candidate.token in self.stop_ids))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]

    def _is_over(self, best_live: float, length: int) -> bool:
        if len(self._finished) < self.width:
            return False
        return self.early_stopping or best_live / length**self.length_penalty <= self._finished[-1].score

    def _hypothesis(self, tokens: list[int], cumulative: float, finished_by_stop: bool) -> BeamHypothesis:
        return BeamHypothesis(tokens, cumulative, cumulative / len(tokens) ** self.length_penalty, finished_by_stop)
