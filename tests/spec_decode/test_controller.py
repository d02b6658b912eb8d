"""Draft lengths: by hand, against every possible split, and in simulated runs of known acceptance and cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.spec_decode.simulation import Accept, padded, simulate

from longtail.spec_decode.controller import Controller, ControllerConfig, shared_part, split
from longtail.spec_decode.step_cost import StepCost
from longtail.spec_decode.worth import OPEN, Worth

# ---- the split


def test_a_split_by_hand() -> None:
    """Two sequences; every row over 2 costs half of what the first two do. Gains .9, .81, .6, .36: rates 2/2, 2.9/2.5,
    3.71/3, 4.31/3.5, 4.67/4: the second draft row is the last that pays."""
    curve = np.array([2.0, 2.0, 2.0, 2.5, 3.0, 3.5, 4.0])
    lengths, speedup = split([np.array([0.6, 0.6]), np.array([0.9, 0.9])], 2, curve)
    assert lengths == [0, 2]
    assert speedup == pytest.approx(3.71 / 3)


def test_free_rows_are_taken() -> None:
    """Of a block of 4 rows one sequence uses 1: three drafts cost nothing, however unlikely."""
    curve = np.array([1.0] * 5 + [1.5] * 4)
    assert split([np.array([0.1] * 7)], 1, curve)[0] == [3]
    assert split([np.array([0.9] * 7)], 1, curve)[0] == [7]
    assert split([np.array([0.0] * 7)], 1, curve) == ([0], 1.0)


def test_nothing_to_split() -> None:
    assert split([], 0, np.array([1.0])) == ([], 1.0)
    assert split([np.empty(0), np.empty(0)], 2, np.ones(3)) == ([0, 0], 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_split_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafts = [rng.random(rng.integers(0, 4)) for _ in range(4)]
    batch = 4 + int(rng.integers(2))
    curve = np.cumsum(rng.random(30) * (rng.random(30) < 0.5)) + 1.0
    lengths, speedup = split(drafts, batch, curve)

    def rate(lengths: tuple[int, ...]) -> float:
        emitted = batch + sum(float(np.cumprod(d[:n]).sum()) for d, n in zip(drafts, lengths, strict=True))
        return emitted / curve[batch + sum(lengths)]

    best = max(rate(choice) for choice in itertools.product(*(range(len(d) + 1) for d in drafts)))
    assert rate(tuple(lengths)) == pytest.approx(best)
    assert speedup == pytest.approx(best * curve[batch] / batch)


# ---- one step


def controller(row_seconds: float, batch: int, elapsed_steps: int = 0) -> Controller:
    """One that knows the cost of up to 40 rows."""
    c = Controller(StepCost(4))
    for rows in range(1, 41):
        for _ in range(5):
            c.cost.record(rows, 0.010 + row_seconds * 4 * -(-rows // 4))
    for _ in range(elapsed_steps):
        c.done(batch, 0, [1] * batch, float(c.cost.seconds(batch)))
    return c


def test_what_pays_is_drafted_and_what_does_not_is_off_and_says_why() -> None:
    c = controller(0.001, 4)
    plan = c.plan([np.array([0.9, 0.9, 0.9])] * 4, 4)
    assert (plan.reason, plan.lengths) == ("drafted", [3] * 4)
    # 8 rows take 18 ms for up to 4 + 4 * .2 tokens, 4 rows 14 ms for 4.
    plan = c.plan([np.array([0.2])] * 4, 4)
    assert (plan.reason, plan.lengths) == ("does not pay", [0] * 4)
    assert c.plan([np.empty(0)] * 4, 4).reason == "nothing drafted"
    assert c.reasons_of(4) == {"drafted": 1, "does not pay": 1, "nothing drafted": 1}
    # Four sequences with one draft each: 4 (1 + a) / 18 = 4 / 14 at a = 2 / 7; the margin of 1 % takes 0.013 more.
    assert c.break_even(4) == pytest.approx(1.01 * 18 / 14 - 1, abs=2e-4)
    assert c.break_even(1) == pytest.approx(0.01, abs=2e-4)  # three rows are free: only the margin
    assert Controller(StepCost()).break_even(1) is None


def test_a_cost_that_is_not_known_is_measured_first() -> None:
    c = Controller(StepCost())
    assert c.ask(2) == 0
    for _ in range(5):
        assert c.ask(2) == 0 or c.plan([np.array([0.9])] * 2, 2).reason == "measuring"
        c.done(2, 0, [1, 1], 0.01)
    assert c.plan([np.array([0.9])] * 2, 2).reason != "measuring"


def test_dear_drafts_are_made_for_a_few_to_judge_them() -> None:
    c = controller(0.0001, 8, elapsed_steps=1500)  # 10.8 ms a step
    c.done(8, 0, [1] * 8, 0.0108, drafted_for=8, draft_seconds=5.0)  # the first ones compiled something
    assert c.balance == 0.0
    c.done(8, 0, [1] * 8, 0.0108, drafted_for=8, draft_seconds=0.016)  # 2 ms each, and nothing known to gain
    c.balance = 0.0
    count = c.ask(8)
    assert count == 8  # a quarter of 1 % of 16.2 s is 40 ms
    c.balance = -0.036
    assert c.ask(8) == 2
    c.balance = -0.045
    assert c.ask(8) == 0
    assert c.plan([np.array([0.9] * 8)] * 2, 8, asked=2).reason == "cost of drafting"


def looks(c: Controller, batch: int, steps: int, acceptance: float = 0.0) -> list[int]:
    """Numbers of the steps in which drafts were made. Making them takes 1 % of a step."""
    seconds = float(c.cost.seconds(batch))
    made = []
    for step in range(steps):
        asked = c.ask(batch)
        drafts = 0
        if asked:
            made.append(step)
            drafts = c.plan([np.array([acceptance] * 3)] * asked, batch, asked=asked).rows
        c.done(batch, drafts, [1] * batch, seconds, drafted_for=asked, draft_seconds=0.01 * seconds if asked else 0.0)
    return made


def test_looks_that_bring_nothing_become_rare() -> None:
    """Drafts that take 1 % of a step and never pay. After 64 / 16 looks to learn from, pauses of 1, 2, 4, 8, 16, 32, 32
    steps: 11 looks in 163 steps, 0.07 %; without pauses it would be 163."""
    c = controller(0.001, 16, elapsed_steps=1000)
    for _ in range(2):  # what drafting costs is known
        c.done(16, 0, [1] * 16, 0.026, drafted_for=16, draft_seconds=0.00026)
    pauses = [1, 2, 4, 8, 16, 32, 32]
    expected = [0, 1, 2, *(3 + sum(pauses[:i]) + i for i in range(8))]
    assert looks(c, 16, 3 + sum(pauses) + 8) == expected
    assert c.balance > -0.0035 * 170 * 0.026 - 2 * 0.00026


def test_a_look_that_brings_something_a_rise_and_fewer_sequences_end_the_pause() -> None:
    def paused() -> Controller:
        c = controller(0.001, 16, elapsed_steps=1000)
        for _ in range(2):
            c.done(16, 0, [1] * 16, 0.026, drafted_for=16, draft_seconds=0.00026)
        looks(c, 16, 40)
        assert c.ask(16) == 0
        return c

    paused()
    c = paused()
    c.look_again()
    assert c.ask(16) == 16
    c = paused()
    assert c.ask(13) == 0
    assert c.ask(12) == 12
    c = paused()
    while not c.ask(16):
        pass
    assert c.plan([np.array([0.9] * 3)] * 16, 16).rows > 0
    assert c.ask(16) == 16  # something is expected of it


# ---- whose tokens they are


def test_a_run_that_ends_with_its_slowest_by_hand() -> None:
    """Three sequences with 9, 9 and 0 tokens left; 10 ms and 2 ms a row: 10 of 16 ms are paid once. Of the two that may
    be last each is so with 1 / (2 + e^-3), and the third hardly ever: their tokens are worth 1.30 and 0.42 of one that
    is like all others."""
    curve = 0.010 + 0.002 * np.arange(20)
    shared = shared_part(curve, 3)
    assert shared == pytest.approx(10 / 16)
    worth = Worth.of([9, 9, 0], 1.0)
    q = np.array([1.0, 1.0, np.exp(-3.0)]) / (2.0 + np.exp(-3.0))
    weights = worth.weights(shared)
    assert weights is not None
    assert weights.tolist() == pytest.approx((6 / 16 + 10 / 16 * 3 * q).tolist())
    assert weights.mean() == pytest.approx(1.0)
    # One draft of acceptance a to each: the first pays where 3 + 1.29 a is over 18/16 of 3, from .29 on; the third
    # from .88 on. All alike it is .375 for each.
    third = [np.array([]), np.array([]), np.array([0.6])]
    assert split(third, 3, curve, weights)[0] == [0, 0, 0]
    assert split(third, 3, curve)[0] == [0, 0, 1]
    first = [np.array([0.33]), np.array([]), np.array([])]
    assert split(first, 3, curve, weights)[0] == [1, 0, 0]
    assert split(first, 3, curve)[0] == [0, 0, 0]
    # What happened: the run is nearer its end by what the one with most left has made less.
    assert worth.steps([1, 1, 1], shared) == pytest.approx(1.0)
    assert worth.steps([4, 1, 1], shared) == pytest.approx(6 / 16 * 2 + 10 / 16 * 1)
    assert worth.steps([4, 4, 1], shared) == pytest.approx(6 / 16 * 3 + 10 / 16 * 4)
    assert Worth.of([9, 5, 0], 1.0).steps([3, 1, 1], shared) == pytest.approx(6 / 16 * 5 / 3 + 10 / 16 * 3)


def test_open_lengths_and_what_lies_between() -> None:
    """Slots that are refilled, and ends that are not known: all tokens are alike. Known with probability 1/2: half."""
    assert Worth.of([9, 1], 0.0) is OPEN
    assert OPEN.weights(0.5) is None
    assert OPEN.steps([4, 1, 1], 0.5) == 2.0
    assert OPEN.steps_left == 0.0
    half = Worth.of([9, 0], 0.5)
    whole = Worth.of([9, 0], 1.0)
    weights, full = half.weights(0.6), whole.weights(0.3)
    assert weights is not None and full is not None
    assert weights.tolist() == pytest.approx(full.tolist())
    assert half.steps([3, 1], 0.6) == pytest.approx(whole.steps([3, 1], 0.3))
    assert half.steps_left == 4.5
    with pytest.raises(ValueError, match="certain"):
        Worth.of([1], 1.5)


def test_no_step_stakes_more_than_may_be_lost() -> None:
    """30 steps of 14 ms are left, so 1 % of 420 ms may be lost: 4.2 ms, which is one more block of 4 rows (4 ms). All
    three drafts for each of the four would be three blocks."""
    c = controller(0.001, 4)
    drafts = [np.array([0.9, 0.9, 0.9])] * 4
    worth = Worth.of([30] * 4, 1.0)
    c._times_drafted = 2
    c._draft_seconds = 1e-6
    assert c.ask(4, worth=worth) == 4
    assert c.plan(drafts, 4, worth=worth).rows == 4
    assert c.plan(drafts, 4).rows == 12  # lengths are open


def test_losses_are_bounded() -> None:
    """Drafts that are expected to pay, and never do."""
    c = controller(0.001, 4)
    drafted = 0
    for _ in range(2000):
        plan = c.plan([np.array([0.9, 0.9, 0.9])] * 4, 4)
        seconds = float(c.cost.seconds(4 + plan.rows))
        c.done(4, plan.rows, [1] * 4, seconds)
        drafted += plan.rows > 0
    assert 0 < drafted < 100
    assert c.reasons[4, "loss bound"] > 1800
    assert -0.0165 * c.elapsed < c.balance < -0.01 * c.elapsed


def test_losses_of_a_run_whose_end_is_known_are_bounded_from_its_begin() -> None:
    """Three of four accept all, the fourth nothing: tokens a second go up, and the run of 200 tokens ends no later than
    without drafts and what may be lost (and one step's drafts, 8 ms)."""
    c = controller(0.001, 4)
    left, seconds = [200] * 4, 0.0
    c._times_drafted, c._draft_seconds = 2, 1e-6
    while max(left):
        alive = [i for i in range(4) if left[i]]
        worth = Worth.of([left[i] for i in alive], 1.0)
        lengths = [0] * len(alive)
        if c.ask(len(alive), worth=worth):
            drafts = [np.array([0.8] * min(3, left[i] - 1)) for i in alive]
            lengths = c.plan(drafts, len(alive), worth=worth).lengths
        emitted = [1 if i == 3 else 1 + n for i, n in zip(alive, lengths, strict=True)]
        for i, n in zip(alive, emitted, strict=True):
            left[i] -= n
        took = float(c.cost.seconds(len(alive) + sum(lengths)))
        c.done(len(alive), sum(lengths), emitted, took, worth=worth)
        seconds += took
    assert seconds < 200 * 0.014 * 1.015 + 0.008
    assert c.balance == pytest.approx(200 * 0.014 - seconds, abs=0.004)


def test_what_was_won_is_not_all_lost_again() -> None:
    c = controller(0.001, 4)
    for _ in range(1000):
        c.done(4, 4, [2] * 4, 0.018)
    assert c.balance == pytest.approx(10 * 0.014)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_drafts", 0),
        ("refresh", 0),
        ("longest_pause", 0),
        ("margin", -0.1),
        ("max_loss", 1.0),
        ("free", -1.0),
        ("max_credit", -1.0),
    ],
)
def test_bad_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        ControllerConfig(**{field: value})  # type: ignore[arg-type]


# ---- runs

COSTS = {
    "a row costs": padded(0.008, 0.001),
    "rows are cheap": padded(0.020, 0.0001),
    "rows are dear": padded(0.001, 0.002),
}
TAIL = [(32, 60), (16, 60), (8, 60), (4, 100), (2, 200), (1, 400)]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("batches", [[(1, 1000)], [(4, 600)], [(32, 500)], TAIL], ids=["1", "4", "32", "tail"])
def test_regret_against_the_best_fixed_length(cost: str, acceptance: float, batches: list[tuple[int, int]]) -> None:
    """Within 8 % of the best of fixed lengths 0 to 8 (which is known in hindsight only): what learning costs."""
    chosen = simulate(batches, COSTS[cost], lambda step, number: acceptance).seconds
    fixed = [simulate(batches, COSTS[cost], lambda *_: acceptance, fixed=n).seconds for n in range(9)]
    assert chosen <= 1.08 * min(fixed)


ADVERSE: dict[str, Accept] = {
    "never": lambda step, number: 0.0,
    "good, then never": lambda step, number: 0.9 if step < 150 else 0.0,
    "never, then good": lambda step, number: 0.0 if step < 150 else 0.9,
    "by turns of 50": lambda step, number: 0.9 if step // 50 % 2 else 0.0,
    "by turns of 5": lambda step, number: 0.9 if step // 5 % 2 else 0.0,
    "every other sample": lambda step, number: 0.9 if number % 2 else 0.0,
    "near break-even": lambda step, number: 0.3,
}
CLAIMS: dict[str, Callable[[float], float] | None] = {
    "honest": lambda chance: chance,
    "boasting": lambda chance: 0.95,
    "silent": None,
}


@pytest.mark.parametrize("claims", CLAIMS)
@pytest.mark.parametrize("adverse", ADVERSE)
def test_never_slower_than_off_by_more_than_3_percent(adverse: str, claims: str) -> None:
    """At batch 1 to 32, with drafts that cost next to nothing and drafts that cost 1 ms each, on a noisy machine
    (10 % a step, and now and then a step that takes six times as long)."""
    for batches in ([(1, 400)], [(3, 300)], [(8, 200)], [(32, 60)]):
        off = simulate(batches, COSTS["a row costs"], lambda *_: 0.0, fixed=0).seconds
        for draft_seconds in (2e-5, 1e-3):
            run = simulate(
                batches,
                COSTS["a row costs"],
                ADVERSE[adverse],
                claims=CLAIMS[claims],
                draft_seconds=draft_seconds,
                disturb=lambda step: 6.0 if step * 7919 % 41 == 0 else 1.0,
            )
            assert off / run.seconds >= 0.97, (batches, draft_seconds, run.speculation.report())


@pytest.mark.parametrize("claims", CLAIMS)
@pytest.mark.parametrize("adverse", ADVERSE)
@pytest.mark.parametrize("tokens", [32, 64, 200])
def test_a_run_to_its_last_token_is_never_slower_by_more_than_3_percent(adverse: str, claims: str, tokens: int) -> None:
    """All have as many tokens to make and nothing waits for the slots, so the run ends with its slowest sequence."""
    for batch in (1, 4, 16, 32):
        off = simulate([(batch, tokens)], COSTS["a row costs"], lambda *_: 0.0, fixed=0, drain=True).seconds
        run = simulate([(batch, tokens)], COSTS["a row costs"], ADVERSE[adverse], claims=CLAIMS[claims], drain=True)
        assert off / run.seconds >= 0.97, (batch, run.speculation.report())


@pytest.mark.parametrize("batch", [4, 16, 32])
@pytest.mark.parametrize("seed", range(3))
def test_a_machine_whose_speed_jumps_is_not_taken_for_a_gain(batch: int, seed: int) -> None:
    """By 2.5, every 5 to 200 steps, while half of the sequences are hard to draft for."""
    rng, speeds = random.Random(100 + seed), list[float]()
    while len(speeds) < 2_000:
        speeds += [rng.choice([1.0, 2.5])] * rng.randint(5, 200)
    cost = padded(0.0185, 0.0008)
    off = simulate([(batch, 256)], cost, lambda *_: 0.0, fixed=0, drain=True).seconds
    run = simulate(
        [(batch, 256)],
        cost,
        lambda step, number: (0.1, 0.7)[number % 2],
        claims=None,
        drain=True,
        seed=seed,
        disturb=lambda step: speeds[step],
    )
    assert off / run.seconds >= 0.97, run.speculation.report()


@pytest.mark.parametrize("batch", [1, 4])
def test_a_tail_is_quicker_to_its_last_token(batch: int) -> None:
    """Acceptance 0.8 in every sequence, and costs that are known. (Best would be 3.0 and 1.9.)"""
    cost = COSTS["rows are cheap"]
    known = StepCost.from_points([(n, cost(n)) for n in range(1, 40) for _ in range(5)], 4)
    off = simulate([(batch, 64)], cost, lambda *_: 0.0, fixed=0, drain=True).seconds
    run = simulate([(batch, 64)], cost, lambda *_: 0.8, drain=True, known=known)
    assert off / run.seconds > 1.5


def test_a_drafter_that_becomes_good_is_noticed() -> None:
    accept: Accept = lambda step, number: 0.0 if step < 300 else 0.8  # noqa: E731
    off = simulate([(4, 2000)], COSTS["rows are cheap"], accept, fixed=0).seconds
    run = simulate([(4, 2000)], COSTS["rows are cheap"], accept)
    assert off / run.seconds > 1.8
    reasons = run.speculation.controller.reasons
    assert 280 < reasons[4, "does not pay"] + reasons[4, "cost of drafting"] < 400
    assert reasons[4, "cost of drafting"] > 200  # it was looked at now and then only
