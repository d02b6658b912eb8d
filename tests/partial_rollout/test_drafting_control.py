"""What the native engine tells the controller of drafts, and what it keeps from one drafter to the next."""

from __future__ import annotations

import itertools

import pytest
from tests.partial_rollout.conftest import EngineMaker, generate, group, prompt

from longtail.spec_decode.controller import Controller
from longtail.spec_decode.step_cost import KNOWN, StepCost
from longtail.spec_decode.worth import OPEN, Worth


class Records(Controller):
    """Drafts nothing; keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(StepCost())
        self.told: list[tuple[int, Worth]] = []

    def ask(self, batch: int, context: float = 0.0, prefill: int = 0, worth: Worth = OPEN) -> int:
        self.told.append((batch, worth))
        return 0


def test_the_controller_is_told_when_slots_are_no_longer_refilled(make_engine: EngineMaker) -> None:
    """Three samples in two slots, with 5, 9 and 4 tokens to make; EOS is ignored. While the third waits, or is computed
    for the first time, lengths are open; then they are known to the end."""
    engine, controller = make_engine(max_num_seqs=2, max_num_batched_tokens=64), Records()
    engine.use_drafter("ngram", controller)
    samples = [group(f"g{i}", prompt(8, i), n=1, max_tokens=n) for i, n in enumerate((5, 9, 4))]
    generate(engine, *samples)
    told = [(batch, None if w.left is None else w.left.tolist(), w.certain) for batch, w in controller.told]
    # Four steps in which the first ends, one that prefills the third beside the second, then both; in the last step
    # there is no room for drafts.
    assert told == [
        *[(2, None, 0.0)] * 4,
        (1, None, 0.0),
        (2, [3.0, 3.0], 1.0),
        (2, [2.0, 2.0], 1.0),
    ]


def test_a_sample_that_may_stop_is_only_likely_to_come_to_its_cap(make_engine: EngineMaker) -> None:
    engine, controller = make_engine(), Records()
    engine.use_drafter("ngram", controller)
    generate(engine, group("g", prompt(8), n=1, max_tokens=6, ignore_eos=False, min_tokens=6))
    assert controller.told
    for _, worth in controller.told:
        assert worth.left is not None
        assert 0.9 < worth.certain < 1.0


def test_a_new_drafter_knows_what_steps_cost(make_engine: EngineMaker) -> None:
    """The clock goes on by one with each look at it, so that every step takes time."""
    clock = itertools.count()
    engine = make_engine(clock=lambda: float(next(clock)), drafter="ngram")
    generate(engine, group("g", prompt(8), n=2, max_tokens=12))
    assert engine.speculation is not None
    cost, steps = engine.speculation.cost, engine.speculation.cost.num_steps
    assert steps > KNOWN
    assert engine.speculation.controller.reasons[2, "measuring"] > 0
    engine.use_drafter(None)
    engine.use_drafter("group")
    assert engine.speculation is not None
    assert engine.speculation.cost is cost
    assert engine.speculation.acceptance.by_position() == {}
    assert engine.speculation.controller.elapsed == 0.0
    generate(engine, group("h", prompt(8, 1), n=2, max_tokens=12))
    assert cost.num_steps > steps
    assert engine.speculation.controller.reasons[2, "measuring"] == 0


def test_steps_tell_what_they_cost_without_a_drafter(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts in one pass; then both decode, and a third prompt is computed beside them."""
    clock = itertools.count()
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=64, clock=lambda: float(next(clock)))
    cost = engine.stepper.cost
    passes: list[tuple[int, int, bool]] = []

    def record(rows: int, seconds: float, *, context: float = 0.0, prefill: int = 0) -> None:
        passes.append((rows, prefill, seconds > 0))

    monkeypatch.setattr(cost, "record", record)
    monkeypatch.setattr(cost, "record_prompts", lambda rows, seconds: passes.append((0, rows, seconds > 0)))
    for name, length in (("g", 20), ("h", 30)):
        engine.add(group(name, prompt(length), n=1, max_tokens=4).samples)
    engine.step()
    engine.step()
    engine.add(group("i", prompt(9, 2), n=1, max_tokens=3).samples)
    while engine.has_work:
        engine.step()
    assert passes == [(0, 50, True), (2, 0, True), (2, 9, True), (3, 0, True), (1, 0, True)]


def test_a_drafter_knows_what_steps_cost_before_it(make_engine: EngineMaker) -> None:
    clock = itertools.count()
    engine = make_engine(clock=lambda: float(next(clock)))
    generate(engine, group("g", prompt(8), n=2, max_tokens=12))
    engine.use_drafter("group")
    assert engine.speculation is not None and engine.speculation.cost.is_known(2)
    generate(engine, group("h", prompt(8, 1), n=2, max_tokens=12))
    assert engine.speculation.controller.reasons[2, "measuring"] == 0
