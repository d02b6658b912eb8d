"""What became of the tokens: the ledger as a trace tells it, and their age when they were handed over."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import Any

import pandas as pd

from longtail.bench.analysis.base import Run, ratio, read_json, split_runs, table

LINES = ("trained", "pending", "stale", "aborted", "surplus", "zero-variance", "repetition", "failed", "unaccounted")
"""Columns of `ledger`, which add up to `generated`."""
BESIDE = ("recomputed", "restored", "rejected-drafts")
_OF_FINISH = {"error": "failed", "aborted": "aborted", "repetition": "repetition"}


def ledger(df: pd.DataFrame) -> pd.DataFrame:
    """Where the tokens that the policy wrote went, one row a run: run, generated, the columns of LINES (they add up to
    generated), and beside them those of BESIDE.

    trained: handed over, in samples that ended well. pending: in samples that are not handed over when the run ends and
    have left their slot. unaccounted: the rest, 0 unless a run was cut with samples in slots or its emitter lost
    events. The other lines are those of `partial_rollout/ledger.py`. Observations are not generated: the tokens that
    an environment added are in no line.
    """
    result = []
    for run in split_runs(df):
        account = settle(run)
        lines = {line: account.lines[line] for line in LINES}
        beside = (reprefilled(run), int(run.total("restore", "num_tokens")), _rejected(run))
        row = {"run": run.name, "generated": int(run.total("step", "num_output_tokens")), **lines}
        result.append(row | dict(zip(BESIDE, beside, strict=True)))
    return table(result, ["run", "generated", *LINES, *BESIDE])


def staleness(df: pd.DataFrame) -> pd.DataFrame:
    """Generated tokens that were handed over, by age: run, age (version of the weights at the hand-over less that of
    the weights that made the token), tokens, share. Ages that no token has are left out. Traces that do not say it
    (imported ones) have no rows."""
    result = []
    for run in split_runs(df):
        counts = ages(run)
        total = sum(counts.values())
        for age in sorted(counts):
            result.append({"run": run.name, "age": age, "tokens": counts[age], "share": ratio(counts[age], total)})
    return table(result, ["run", "age", "tokens", "share"])


def ages(run: Run) -> Counter[int]:
    """Of the handed-over tokens: age to tokens."""
    counts: Counter[int] = Counter()
    for event in run.of("hand_over"):
        for age, tokens in read_json(event.detail).get("staleness", {}).items():
            counts[int(age)] += int(tokens)
    return counts


@dataclasses.dataclass
class Account:
    """Where the tokens of a run stand, kept event by event."""

    lines: Counter[str] = dataclasses.field(default_factory=Counter)
    handed_over: int = 0
    """In groups that were handed over, however their samples ended."""
    lost: int = 0
    """In samples that ended by an abort or an error, in groups that were not handed over."""
    last: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The last word of each sample on its output,"""
    observed: Counter[str] = dataclasses.field(default_factory=Counter)
    """and the tokens of observations in it."""
    members: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))

    def written(self, sample: str) -> int:
        """Tokens of it that the policy wrote, as last heard."""
        return self.last[sample].num_tokens - self.observed[sample] if sample in self.last else 0

    def forget(self, sample: str) -> None:
        self.last.pop(sample, None)
        self.observed.pop(sample, None)

    def hear(self, event: Any) -> None:
        if event.sample and event.group:
            self.members[event.group].add(event.sample)
        if event.kind == "observe":
            self.observed[event.sample] += event.num_tokens
        elif event.kind in ("pause", "park", "finish"):
            self.last[event.sample] = event
        elif event.kind == "retry":  # what failed is cut off whole, and starts again
            self.lines["failed"] += self.written(event.sample)
            self.forget(event.sample)
        elif event.kind in ("cut", "discard"):
            self.lines[event.detail or "aborted"] += event.num_tokens
            for sample in [event.sample] if event.sample else self.members.pop(event.group, ()):
                self.forget(sample)
        elif event.kind == "hand_over":
            self._hand_over(event)

    def _hand_over(self, event: Any) -> None:
        """Each sample of a group to the line of its end. Tokens of samples that never said how they ended (a trace
        without their finish) count as trained."""
        known = [sample for sample in self.members.pop(event.group, ()) if sample in self.last]
        rest = event.num_tokens - sum(self.last[sample].num_tokens for sample in known)
        self.lines["trained"] += rest
        self.handed_over += rest
        for sample in known:
            last = self.last[sample]
            self.lines[_OF_FINISH.get(last.detail, "trained") if last.kind == "finish" else "trained"] += (
                self.written(sample)
            )
            self.handed_over += self.written(sample)
            self.forget(sample)

    def close(self, generated: int) -> None:
        """The run is over: what is left is pending or lost, and what nobody spoke of is unaccounted."""
        for sample, event in self.last.items():
            line = _OF_FINISH.get(event.detail, "pending") if event.kind == "finish" else "pending"
            line = "pending" if line == "repetition" else line
            self.lines[line] += self.written(sample)
            self.lost += self.written(sample) if line != "pending" else 0
        self.lines["unaccounted"] = generated - sum(self.lines.values())


def settle(run: Run) -> Account:
    """The account of a run when it ends."""
    account = Account()
    for event in run.of("submit", "admit", "observe", "pause", "park", "finish", "cut", "retry", "discard",
                        "hand_over"):  # fmt: skip
        account.hear(event)
    account.close(int(run.total("step", "num_output_tokens")))
    return account


def reprefilled(run: Run) -> int:
    """Tokens computed a second time: at each admission after a release, what had been computed less what comes with it.

    Computed at a preemption: the event says it. At the end of a turn, or a pause with output: all tokens known then but
    the last, which no step has read yet; what an environment answered since is new. At a pause before the first token:
    taken as none.
    """
    left: dict[str, Any] = {}
    observed: dict[str, int] = {}
    again = 0
    for event in run.of("admit", "pause", "park", "preempt", "observe"):
        if event.kind == "observe":
            observed[event.sample] = event.num_tokens
            continue
        if event.kind != "admit":
            left[event.sample] = event
            continue
        again += recomputed_at(event, left.pop(event.sample, None), observed.pop(event.sample, 0))
    return again


def recomputed_at(admit: Any, release: Any, answered: int) -> int:
    """Tokens that this admission makes compute again. release: the sample's last one, or None; answered: tokens of
    observations since."""
    if release is None or (release.kind == "pause" and release.num_tokens == 0):
        return 0
    computed = release.num_tokens if release.kind == "preempt" else int(admit.value) - answered - 1
    return max(0, int(computed - admit.num_tokens))


def _rejected(run: Run) -> int:
    return int(run.total("step", "num_draft_tokens") - run.total("step", "num_accepted_tokens"))
