"""The check of the distribution: many samples of one prompt against the probabilities of every outcome.

For each case (parameters, a prompt, its outcome tree) the number of samples is computed before anything is drawn: as
many as find with probability `target` that wrong drafts are accepted with probability `effect`, where the drafter
drafts what is unlikely. With other drafters the same fault shows less, and each test reports the bias that it finds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longtail.bench.spec_audit_cases import DEPTH, OutcomeCase
from longtail.bench.spec_audit_engine import AuditDrafter, AuditedEngine, Completion, DraftChoice
from longtail.bench.spec_audit_reference import Book
from longtail.bench.spec_audit_statistics import draws_needed, goodness_of_fit, smallest_bias
from longtail.bench.spec_audit_streams import OFF, Finding, end_problem

DRAFT_LENGTHS = (1, 3)
"""Taken in turns: with 1 the third token is a bonus where the draft was accepted, with 3 it is a draft."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizing:
    level: float
    """False-alarm rate of one test."""
    target: float
    """Probability with which a bias of `effect` is to be found."""
    effect: float
    most: int
    """Samples of one test at the most."""
    noise: float
    """Relative error that probabilities of outcomes may have by rounding."""

    def draws(self, case: OutcomeCase, likely: bool) -> int:
        biased = case.tree.biased(case.tree.guess(likely), self.effect)
        return draws_needed(case.tree.probs, biased, self.level, self.target, self.most, self.noise)


def drafters_of(case: OutcomeCase, names: Sequence[str], vocab_size: int) -> dict[str, DraftChoice]:
    """What drafts for this case: `likely` and `unlikely` guess from the tree."""
    own: dict[str, DraftChoice] = {
        name: AuditDrafter(name, vocab_size, case.tree.guess(name == "likely")) for name in ("likely", "unlikely")
    }
    return {name: own.get(name, name) for name in names if name != OFF}


def check_distribution(
    engine: AuditedEngine,
    case: OutcomeCase,
    name: str,
    choice: DraftChoice | None,
    sizing: Sizing,
    draws: int,
    *,
    seed: int,
    enough: Callable[[], bool] = lambda: False,
    batch: int = 1024,
    first_batches: int = 256,
) -> Finding:
    """name: of the drafter (OFF: without). draws: samples; fewer if `enough` says so between batches, which looks at
    the clock and at nothing drawn. seed: of this test; no two tests share their samples. batch: samples of one call of
    the engine; first_batches: of each of the first two, so that little time still gives some."""
    tree, counts = case.tree, Counter[Any]()
    accepted = rejected = places = done = turn = 0
    told, problem = True, ""
    rng = np.random.default_rng([seed, 3])
    while done < draws and not (done and enough()):
        size = min(first_batches if turn < len(DRAFT_LENGTHS) else batch, draws - done)
        engine.use(choice, DRAFT_LENGTHS[turn % len(DRAFT_LENGTHS)])
        turn += 1
        seeds = rng.integers(2**63, size=size).tolist()
        made = engine.generate([tree.prompt] * size, [case.params] * size, seeds)
        counts.update(tree.outcome(sample.tokens) for sample in made)
        for sample in made:
            told = told and sample.drafts is not None
            problem = problem or end_problem(sample, case.params, engine) or ""
            good, bad = _decided(sample)
            accepted, rejected = accepted + good, rejected + bad
            places += max(min(len(sample.tokens), DEPTH) - 1, 0)
        done += size
    engine.use(None)
    observed = np.array([counts.get(outcome, 0) for outcome in tree.outcomes])
    strangers = [(outcome, n) for outcome, n in counts.items() if outcome not in tree.outcomes]
    coverage = (accepted + rejected) / places if places and told else None
    data: dict[str, Any] = {
        "cells": len(tree.outcomes),
        "draft_coverage": coverage,
        "acceptance": accepted / max(accepted + rejected, 1) if told else None,
    }
    bias = None
    if choice is not None and coverage != 0.0:
        bias = smallest_bias(tree.probs, _biased(case, name, coverage), done, sizing.level, sizing.target, sizing.noise)
    if problem:
        statistic = "a sample ends in another way or place than it has to"
        return Finding("distribution", case.name, name, False, statistic, done, 0.0, problem, bias, data)
    if strangers:
        outcome, n = max(strangers, key=lambda item: item[1])
        detail = f"{sum(n for _, n in strangers)} samples are impossible, as {n} times {list(outcome)}"
        statistic = f"{sum(n for _, n in strangers)} of {done:,} samples have probability 0"
        return Finding("distribution", case.name, name, False, statistic, done, 0.0, detail, bias, data)
    fit = goodness_of_fit(observed, tree.probs, sizing.level, sizing.noise)
    data |= {"chi2": fit.statistic, "df": fit.df, "threshold": fit.threshold, "p_value": fit.p_value}
    statistic = f"chi-square {fit.statistic:.1f} of {fit.df} degrees of freedom, fails above {fit.threshold:.1f}"
    if coverage is not None and choice is not None:
        statistic += f"; {coverage:.0%} of places drafted, {data['acceptance']:.0%} accepted"
    detail = "" if fit.passed else f"p = {fit.p_value:.2g}; {_worst(observed, tree.probs, list(tree.outcomes))}"
    return Finding("distribution", case.name, name, fit.passed, statistic, done, sizing.level, detail, bias, data)


def _decided(sample: Completion) -> tuple[int, int]:
    """Drafts accepted and rejected at the places of the tree that may hold drafts."""
    return sample.decided(1, DEPTH)


def _biased(case: OutcomeCase, name: str, coverage: float | None) -> Callable[[float], np.ndarray]:
    """Outcomes under a bias. What a drafter that is not the audit's guesses is not known beforehand: it is taken to
    guess what is most likely, with which a bias shows least."""
    guess: Book = case.tree.guess(name != "unlikely")
    share = 1.0 if coverage is None else min(coverage, 1.0)
    return lambda bias: case.tree.biased(guess, bias * share)


def _worst(observed: np.ndarray, probs: np.ndarray, outcomes: Sequence[Any]) -> str:
    expected = observed.sum() * probs
    at = int(np.argmax((observed - expected) ** 2 / expected))
    return f"outcome {list(outcomes[at])} came {observed[at]} times, expected {expected[at]:.1f}"
