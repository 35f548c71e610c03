"""Beam search: which continuations of a prompt go on, which are answers, and when no better one can come.

Knows tokens and their log probabilities; no block and no step.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.engine.core.request import Request
from kvstore.engine.outputs import TokenLogprob


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and one more token. logprob: the sum over its answer. is_drawn: whether the sampler has drawn this token,
    so that the beam's row in the batch goes on with it.
    """

    beam: Request
    token_id: int
    logprob: float
    is_drawn: bool


class BeamSearch:
    """The search of one prompt. A beam is a Request that has its tokens; each step of the search asks for the most
    likely next tokens of all of them.

    As `GenerationMixin._beam_search` of transformers 5.17 with early_stopping=False: of all continuations, the best
    first, one that ends is an answer if it is among the first `width`; its score is the sum of its log probabilities /
    length ** length_penalty. The first `width` others go on. The search is over when there are `width` answers, and the
    best beam as it is has no better score than the worst of them.
    """

    def __init__(self, first: Request) -> None:
        """first: has the prompt's tokens."""
        self.width = first.params.num_sequences
        self.sequences = range(first.sequence, first.sequence + self.width)  # of its beams, see `Roster`
        self.beams: dict[Request, float] = {first: 0.0}  # with the sums of their log probabilities, the best first
        self._found: dict[Request, TokenLogprob] = {}
        self._answers: list[tuple[float, Request]] = []  # with their scores, the best first
        self._num_made = 0
        self._params, self._most, self._ends = first.params, first.max_output_tokens, frozenset(first.stop_ids)

    def add(self, beam: Request, found: TokenLogprob) -> None:
        """Note what may follow a beam: its most likely next tokens."""
        self._found[beam] = found

    @property
    def found(self) -> list[Request]:
        """The beams of which that is known in this step of the search."""
        return list(self._found)

    @property
    def is_complete(self) -> bool:
        return len(self._found) == len(self.beams)

    def fork(self, beam: Request) -> Request:
        """A beam with the same tokens that holds nothing."""
        self._num_made += 1
        return beam.sibling(self._num_made)

    def advance(self) -> list[Continuation]:
        """The continuations that go on, the best first; none if the search is over."""
        length = next(iter(self.beams)).num_output_tokens + 1
        going_on = list[Continuation]()
        for place, one in enumerate(self._continuations()):
            if one.token_id not in self._ends and length < self._most:
                going_on.append(one)
            elif place < self.width:
                self._answers.append((self._score(one, length), self._answer(one)))
            if len(going_on) == self.width or (length == self._most and place + 1 == self.width):
                break
        self._answers.sort(key=lambda answer: answer[0], reverse=True)
        del self._answers[self.width :]
        self._found.clear()
        is_full = len(self._answers) == self.width
        is_over = not going_on or (is_full and self._score(going_on[0], length) <= self._answers[-1][0])
        return [] if is_over else going_on

    def answers(self) -> list[Request]:
        """The best n."""
        best = [answer for _, answer in self._answers[: self._params.n]]
        for index, answer in enumerate(best):
            answer.index = index
        return best

    def _continuations(self) -> list[Continuation]:
        found = (
            Continuation(beam, token_id, total + logprob, token_id == self._found[beam].token_id)
            for beam, total in self.beams.items()
            for token_id, logprob in self._found[beam].top.items()
        )
        return sorted(found, key=lambda one: one.logprob, reverse=True)

    def _score(self, one: Continuation, length: int) -> float:
        return one.logprob / length**self._params.length_penalty

    def _answer(self, one: Continuation) -> Request:
        answer = self.fork(one.beam)
        answer.cached.inherit(one.beam.cached)
        answer.append(one.token_id)
        return answer
