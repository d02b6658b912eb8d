"""Where every generated token went: exactly one line each (promise P2).

    generated = pending + trained + stale + aborted + surplus + zero-variance + repetition + failed

A token is *pending* from the moment the policy wrote it until its group is handed over or thrown away, or until it is
cut off its sample (`SampleStore.cut`); then it is *settled*: trained, or wasted for a named reason. A trainer that
drops a group that was handed over settles it again (`SampleStore.settle`), which moves its tokens from one line to
another. Observations are not generated, and stand nowhere. Work that made no token of a sample is counted beside:
tokens whose KV was computed again or restored, drafts that were rejected, and what an engine that runs ahead made for
samples that had ended or left (overrun).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from longtail.sample import Sample

Line = Literal["trained", "stale", "aborted", "surplus", "zero-variance", "repetition", "failed"]
LINES: tuple[Line, ...] = get_args(Line)
WASTED = LINES[1:]

CutLine = Literal["stale", "aborted", "surplus", "failed"]
CUT: tuple[CutLine, ...] = get_args(CutLine)
"""Why output of a sample that goes on can be dropped."""

Beside = Literal["recomputed", "restored", "rejected-drafts", "overrun"]
BESIDE: tuple[Beside, ...] = get_args(Beside)


def line_of(sample: Sample) -> Line:
    """The line of a sample that is handed over, from how it ended."""
    if sample.status == "failed":
        return "failed"
    if sample.finish_reason == "aborted":
        return "aborted"
    return "repetition" if sample.finish_reason == "repetition" else "trained"


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of tokens, as read from a store."""

    generated: int = 0
    lines: dict[Line, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(LINES, 0))
    beside: dict[Beside, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(BESIDE, 0))

    @property
    def pending(self) -> int:
        return self.generated - sum(self.lines.values())

    @property
    def places(self) -> dict[str, int]:
        """Tokens by line, pending among them: together they are what was generated."""
        counts: dict[str, int] = {"pending": self.pending}
        counts.update({line: self.lines[line] for line in LINES})
        return counts

    @property
    def wasted(self) -> int:
        return sum(self.lines[line] for line in WASTED)

    def as_dict(self) -> dict[str, int]:
        """All of it, by name, for reports."""
        counts = {"generated": self.generated, **self.places}
        counts.update({name: self.beside[name] for name in BESIDE})
        return counts
