"""What a drafter is: it guesses how a sample goes on, and may be wrong at no cost but time.

    propose -> drafts -> verify step of the target -> tokens committed -> observe

A drafter sees a sample only through the tokens that the target has committed (`sample.output_ids`); a draft never
enters its state. What it proposes is a pure function of what it observed, in order: the same run gives the same drafts.
The verification (kernels/verify.py) makes the stream independent of the drafts; nothing here can change a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from longtail.sample import Sample
from longtail.version import PolicyVersion

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sample that may be drafted for."""

    sample: Sample
    max_tokens: int
    """Tokens that the verify step could take; 0 asks for nothing."""


@dataclasses.dataclass(slots=True)
class Draft:
    """How a sample may go on. Empty where the drafter has nothing to say."""

    tokens: list[int]
    drafter: str
    """Name of the drafter that made it: acceptance is measured under it."""
    probs: list[float] | None = None
    """For each token the drafter's estimate that it is accepted, given that those before it on its path are; None if
    it makes none. An estimate only: what counts is the acceptance measured at estimates like it."""
    parents: list[int] | None = None
    """None for one path. Else a tree: index of the token that each one follows, -1 for the sample's last token;
    parents stand before their children."""
    distributions: torch.Tensor | None = None
    """float32 [tokens, vocabulary]: what each token was drawn from, with noise that the target does not use; None if
    nothing was drawn. Needed for verification by rejection, which makes a token the target's by what it was drawn from:
    so whether a token is verified may depend on the tokens before it, but not on itself, nor on those behind it."""

    def __len__(self) -> int:
        return len(self.tokens)

    def paths(self) -> list[tuple[list[int], float | None]]:
        """Each way from the sample's last token to a leaf: its tokens, and the drafter's estimate that all of them are
        accepted (None if it makes none). The likeliest first; of a path there is one, of nothing none."""
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        reached: list[tuple[list[int], float | None]] = []
        for i, (token, parent) in enumerate(zip(self.tokens, parents, strict=True)):
            before, prob = reached[parent] if parent >= 0 else ([], None if self.probs is None else 1.0)
            reached.append(([*before, token], None if self.probs is None or prob is None else prob * self.probs[i]))
        inner = set(parents)
        leaves = [node for i, node in enumerate(reached) if i not in inner]
        return sorted(leaves, key=lambda leaf: -(leaf[1] or 0.0))

    def cut(self, length: int) -> Draft:
        """The first `length` tokens: a prefix of the path, or the tree's first nodes, which are a tree as well."""
        if length >= len(self.tokens):
            return self
        return Draft(
            self.tokens[:length],
            self.drafter,
            None if self.probs is None else self.probs[:length],
            None if self.parents is None else self.parents[:length],
            None if self.distributions is None else self.distributions[:length],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A part of what a sample wrote elsewhere: in another engine, with a drafter of its own."""

    sample_id: str
    start: int
    """Output tokens of it before these."""
    tokens: list[int]
    runs: Sequence[tuple[int, PolicyVersion]]
    """(tokens, their version), one after the other."""


class Drafter(Protocol):
    """All calls come from the thread that steps the engine, between steps. One that has also `hears` (True) and
    `hear(prompt_ids, heard)` is told what samples of a prompt write in other engines of a pool (`Heard`)."""

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order, of at most `max_tokens` tokens each."""
        ...

    def observe(self, sample: Sample, num_new: int) -> None:
        """The target committed the last num_new tokens of sample.output_ids. Told of every sample, also of those that
        were not drafted for: siblings learn from each other. A drafter catches up by itself with a sample that comes
        with tokens it has not seen (a resumed one; an observation, version OBSERVATION, is among them). Samples of
        earlier epochs are observed, then forgotten."""
        ...

    def forget(self, sample_id: str) -> None:
        """The sample is done, or its turn is, or it comes back with other tokens: what was kept for it alone goes. What
        its siblings can learn from it may stay."""
        ...
