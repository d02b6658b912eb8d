"""The length-bias meter: a shift in time is no bias, what is lost is; the alarm keeps its rate."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from longtail import Group, SamplingParams
from longtail.partial_rollout.length_bias import IterationBias, LengthBias, LengthBiasWarning
from longtail.sample import Sample

GROUP = 4


def make(name: str, tokens: int, status: str = "finished", reason: str | None = None, index: int = 0) -> Sample:
    sample = Sample(id=f"{name}/{index}", group_id=name, index=index, prompt_ids=(1,), params=SamplingParams(), seed=0)
    return set_length(sample, tokens, status, reason)


def set_length(sample: Sample, tokens: int, status: str = "finished", reason: str | None = None) -> Sample:
    sample.output_ids = [0] * tokens
    sample.status = status  # type: ignore[assignment]
    sample.finish_reason = reason or ("stop" if status == "finished" else None)  # type: ignore[assignment]
    return sample


class Scripted:
    """64 slots under a token budget an iteration, 4 samples a prompt, long-tailed lengths that a prompt's samples share
    in part. keep: what an iteration does with what is unfinished."""

    def __init__(self, seed: int, keep: Callable[[Group], bool] | None = None, budget: int = 6_000) -> None:
        self.rng = np.random.default_rng(seed)
        self.keep = keep
        self.budget = budget
        self.live: list[Group] = []
        self.target: dict[str, int] = {}
        self.made = 0

    def iterate(self, bias: LengthBias, iteration: int) -> IterationBias:
        tokens = 0
        while tokens < self.budget:
            while len(self.live) < 16 or sum(not s.is_done for g in self.live for s in g.samples) < 64:
                self.live.append(self.fresh())
            running = [s for g in self.live for s in g.samples if not s.is_done][:64]
            for sample in running:
                more = min(10, self.target[sample.id] - len(sample.output_ids))
                tokens += more
                length = len(sample.output_ids) + more
                done = length == self.target[sample.id]
                set_length(sample, length, "finished" if done else "running")
        trained = [g for g in self.live if g.is_complete]
        rest = [g for g in self.live if not g.is_complete]
        kept = [g for g in rest if self.keep is None or self.keep(g)]
        dropped = [s for g in rest if g not in kept for s in g.samples]
        self.live = kept
        return bias.observe(
            iteration, [s for g in trained for s in g.samples], [s for g in kept for s in g.samples], dropped
        )

    def fresh(self) -> Group:
        group = Group.from_prompt(f"g{self.made}", [1], SamplingParams(n=GROUP))
        self.made += 1
        shared = self.rng.normal()
        for sample in group.samples:
            self.target[sample.id] = int(np.clip(np.exp(4 + 0.6 * shared + 0.6 * self.rng.normal()), 5, 600))
        return group


def test_by_hand():
    """One iteration cut at 4 tokens, then the rest arrives: a shift, no bias."""
    bias = LengthBias(window=4)
    short, long = make("a", 2), make("b", 4, "running")
    first = bias.observe(0, [short], [long])
    assert (first.num_trained, first.num_unfinished, first.num_dropped) == (1, 1, 0)
    assert (first.trained_mean, first.expected_mean, first.ratio) == (2.0, 3.0, 2 / 3)  # 1 + 1 + 1/2 + 1/2
    assert (first.trained_median, first.expected_median, first.expected_p90) == (2, 2, None)
    assert (first.num_lost, first.kept_ratio, first.chance, first.biased) == (0, 1.0, 1.0, False)
    second = bias.observe(1, [set_length(long, 10)], [])
    assert (second.trained_mean, second.expected_mean, second.num_unfinished) == (10.0, 6.0, 0)
    report = bias.report()
    assert (report["trained_mean"], report["expected_mean"], report["ratio"]) == (6.0, 6.0, 1.0)
    assert (report["num_trained"], report["num_dropped"], report["expected_p90"]) == (2, 0, 10)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_what_vanishes_was_dropped():
    bias = LengthBias(window=4)
    bias.observe(0, [make("a", 2)], [make("b", 4, "running"), make("c", 0, "waiting")])
    figures = bias.observe(1, [make("d", 2), make("e", 3, "failed"), make("f", 3, "finished", "aborted")], [])
    assert (figures.num_trained, figures.num_dropped, figures.num_lost, figures.num_cut) == (1, 3, 3, 3)
    # 2 and 2 trained; lost: longer than 4, 3 and 3. S is 1, 1, 3/5, 3/5: mean 3.2.
    assert figures.kept_ratio == pytest.approx(2 / 3.2)
    assert bias.observe(6, [], []).num_lost == 0, "out of the window"
    assert bias.report()["num_dropped"] == 3


def test_cut_sample_is_a_new_response():
    bias = LengthBias()
    sample = make("a", 8, "paused")
    bias.observe(0, [], [sample])
    figures = bias.observe(1, [set_length(sample, 5)], [])
    # Longer than 8, and ended at 5: S is 1 up to 4, then 1/2 up to 8.
    assert figures.expected_mean == 5 + 3 / 2


def test_waiting_longer_than_the_window_counts_as_lost_for_the_time_being():
    bias = LengthBias(window=3)
    old = make("old", 50, "paused")
    lost = [bias.observe(i, [make(f"g{i}", 10)], [old]).num_lost for i in range(5)]
    assert lost == [0, 0, 0, 1, 1]
    assert bias.observe(5, [set_length(old, 60)], []).num_lost == 0


@pytest.mark.parametrize("seed", range(4))
def test_partial_rollouts_shift_and_do_not_bias(seed: int):
    """Nothing is lost, so no test is even made: a false alarm is impossible. The shift of the start is visible and
    then gone: after it the window's means agree (they are of 3,000 responses; 6 standard errors)."""
    bias, run = LengthBias(), Scripted(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LengthBiasWarning)
        figures = [run.iterate(bias, i) for i in range(60)]
    assert figures[0].ratio is not None and figures[0].ratio < 0.85
    assert all(f.num_lost == 0 and f.chance == 1.0 for f in figures)
    late = figures[20:]
    total = sum(f.num_trained for f in late)
    trained = sum((f.trained_mean or 0.0) * f.num_trained for f in late) / total
    truth = np.array(list(run.target.values()), float)
    error = 6 * truth.std() * np.sqrt(2 / total * GROUP)
    assert abs(trained - truth.mean()) < error
    assert abs(np.mean([f.expected_mean for f in late]) - truth.mean()) < error
    assert abs(bias.report()["ratio"] - 1) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_dropping_the_unfinished_warns_once(seed: int):
    bias, run = LengthBias(), Scripted(seed, keep=lambda group: False)
    with pytest.warns(LengthBiasWarning, match="training sees short answers") as caught:
        figures = [run.iterate(bias, i) for i in range(12)]
    assert len(caught) == 1 and len(bias.onsets) == 1
    assert bias.onsets[0] <= 3
    assert figures[-1].biased and (figures[-1].kept_ratio or 1) < 0.9 and (figures[-1].ratio or 1) < 0.9


@pytest.mark.parametrize("seed", range(3))
def test_half_of_the_unfinished_dropped_is_seen_too(seed: int):
    rng = np.random.default_rng(seed)
    bias, run = LengthBias(), Scripted(seed, keep=lambda group: bool(rng.random() < 0.5))
    with pytest.warns(LengthBiasWarning):
        for i in range(16):
            run.iterate(bias, i)


def test_starving_the_long_ones_warns():
    """Nothing is dropped, but what exceeds 80 tokens is never resumed."""
    rng = np.random.default_rng(0)
    bias = LengthBias(window=4)
    waiting: list[Sample] = []
    with pytest.warns(LengthBiasWarning) as caught:
        for i in range(12):
            lengths = rng.geometric(1 / 60, 50)
            waiting += [make(f"w{i}.{k}", 80, "paused") for k in np.flatnonzero(lengths > 80)]
            bias.observe(i, [make(f"t{i}.{k}", int(x)) for k, x in enumerate(lengths) if x <= 80], waiting)
    assert len(caught) == 1 and bias.onsets[0] in range(4, 8)


def test_second_onset_warns_again():
    bias, run = LengthBias(window=4), Scripted(1, keep=lambda group: not dropping)
    dropping = True
    with pytest.warns(LengthBiasWarning) as caught:
        for i in range(30):
            dropping = i < 8 or i >= 20
            run.iterate(bias, i)
            if i == 19:
                assert not bias.biased
    assert len(caught) == 2 and bias.onsets[0] < 8 and bias.onsets[1] >= 20


@pytest.mark.parametrize("whole", [True, False], ids=["prompts", "responses"])
def test_false_alarm_rate(whole: bool):
    """Lost by lot, 100 runs of 12 iterations at an alarm rate of 0.05, tolerance off. The prompt decides most of the
    length. Were the rate 0.05, 19 alarms would have probability below 1e-6 (binomial, mean 5)."""
    alarms = 0
    for run in range(100):
        rng = np.random.default_rng([run, whole])
        bias = LengthBias(alarm=0.05, tolerance=1e-9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LengthBiasWarning)
            for i in range(12):
                lengths = np.exp(4 + rng.normal(size=(12, 1)) + 0.3 * rng.normal(size=(12, 4))).astype(int) + 1
                lost = np.broadcast_to(rng.random((12, 1 if whole else 4)) < 0.15, (12, 4))
                samples = [[make(f"{i}.{g}", int(lengths[g, k]), index=k) for k in range(4)] for g in range(12)]
                split = [[s for g in range(12) for k, s in enumerate(samples[g]) if lost[g, k] == x] for x in (0, 1)]
                bias.observe(i, split[0], [], split[1])
        alarms += bool(bias.onsets)
    assert alarms < 19


@pytest.mark.parametrize("seed", range(4))
def test_few_random_failures_do_not_warn(seed: int):
    """Three in a hundred groups that stay are lost each iteration, the first iterations among them, which hand over
    short responses only. What lives longer is lost more often: a bias, and too small to matter."""
    rng = np.random.default_rng(seed)
    bias, run = LengthBias(), Scripted(seed, keep=lambda group: bool(rng.random() > 0.03))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LengthBiasWarning)
        figures = [run.iterate(bias, i) for i in range(40)]
    assert figures[-1].num_lost > 0 and 0.95 < (figures[-1].kept_ratio or 0) < 1


def test_losing_short_ones_is_not_this_bias():
    bias = LengthBias()
    for i in range(10):
        bias.observe(i, [make(f"{i}.{k}", 100 + k) for k in range(20)], [], [make(f"s{i}.{k}", 5) for k in range(10)])
    assert bias.onsets == [] and (bias.report()["kept_ratio"] or 0) > 1


def test_small_bias_is_reported_without_a_warning():
    """Significant, but 2 % of the mean."""
    bias = LengthBias()
    for i in range(16):
        bias.observe(i, [make(f"{i}.{k}", 90 + k) for k in range(20)], [], [make(f"s{i}.{k}", 120) for k in range(2)])
    report = bias.report()
    assert report["chance"] < 1e-6 and 0.95 < report["kept_ratio"] < 1 and bias.onsets == []


def test_memory_is_bounded():
    bias = LengthBias(window=3, max_samples=50)
    for i in range(20):
        bias.observe(i, [make(f"{i}.{k}", 5) for k in range(40)], [make(f"u{i}.{k}", 5, "paused") for k in range(7)])
        assert len(bias._decided) <= 50 and len(bias._recent) <= 3 and len(bias._open) == 7


def test_same_run_same_figures():
    runs = []
    for _ in range(2):
        bias, run = LengthBias(), Scripted(5, keep=lambda group: len(group.id) % 2 == 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LengthBiasWarning)
            runs.append(([run.iterate(bias, i) for i in range(8)], bias.report()))
    assert runs[0] == runs[1]


def test_empty_iterations():
    bias = LengthBias()
    figures = bias.observe(0, [], [])
    assert figures.trained_mean is None and figures.expected_mean is None and figures.ratio is None
    assert figures.kept_ratio is None and not figures.biased
    assert LengthBias().report()["expected_mean"] is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"window": 0}, "window"), ({"tolerance": 1.0}, "tolerance"), ({"alarm": 0.0}, "alarm"),
     ({"max_samples": 1.5}, "max_samples"), ({"alarm": float("nan")}, "alarm")],
)  # fmt: skip
def test_bad_settings(setting: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LengthBias(**setting)


def test_bad_calls():
    bias = LengthBias()
    sample = make("a", 3)
    with pytest.raises(ValueError, match="named twice"):
        bias.observe(0, [sample], [sample])
    bias.observe(0, [sample], [])
    with pytest.raises(ValueError, match="must rise"):
        bias.observe(0, [], [])
