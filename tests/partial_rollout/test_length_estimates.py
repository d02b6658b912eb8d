"""Length estimates: each source by hand, conditions, censoring, memory, state, calibration."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from longtail import Group, SamplingParams
from longtail.partial_rollout.length_calibration import Calibration, kendall_tau_b
from longtail.partial_rollout.length_estimates import Estimate, LengthEstimates
from longtail.sample import Sample

CAP = 1_000


def make_group(
    name: str, prompt: tuple[int, ...] = (1, 2, 3), n: int = 4, cap: int | None = CAP, task: Any = None
) -> Group:
    return Group.from_prompt(name, prompt, SamplingParams(n=n, max_tokens=cap), task)


def at(sample: Sample, tokens: int) -> Sample:
    sample.output_ids = [0] * tokens
    sample.status = "running"
    return sample


def end(sample: Sample, tokens: int, reason: Any = "stop", status: Any = "finished") -> Sample:
    at(sample, tokens)
    sample.status, sample.finish_reason = status, reason
    return sample


def finish(estimates: LengthEstimates, group: Group, *lengths: int) -> None:
    """Ends the first samples of the group."""
    estimates.add(group)
    for sample, tokens in zip(group.samples, lengths, strict=False):
        estimates.observe(end(sample, tokens, "length" if tokens == sample.params.max_tokens else "stop"))


# ---- sources


def test_cap_when_nothing_is_known():
    estimates = LengthEstimates()
    sample = make_group("a").samples[0]
    assert estimates.estimate(sample) == Estimate(1_000.0, "cap")
    assert estimates.remaining(at(sample, 400)) == 600
    assert LengthEstimates(context=500).estimate(sample) == Estimate(497.0, "cap")
    assert LengthEstimates(context=5_000).estimate(sample) == Estimate(1_000.0, "cap")
    assert LengthEstimates(context=500).estimate(make_group("b", cap=None).samples[0]).tokens == 497
    with pytest.raises(ValueError, match="no max_tokens"):
        LengthEstimates().estimate(make_group("c", cap=None).samples[0])


@pytest.mark.parametrize(
    ("rule", "fresh", "beyond_20", "beyond_30"),
    [("longest", 40, 40, 40), ("mean", 27.5, 40, 40), (0.5, 20, 40, 40), (0.25, 10, 40, 40), (1.0, 40, 40, 40)],
)
def test_siblings(rule: Any, fresh: float, beyond_20: float, beyond_30: float):
    """Of 40, 10, 40, 20; what is running is longer than what it has."""
    estimates = LengthEstimates(siblings=rule)
    group = make_group("a", n=6)
    finish(estimates, group, 40, 10, 40, 20)
    sample = group.samples[4]
    assert estimates.estimate(sample) == Estimate(fresh, "siblings")
    assert estimates.estimate(at(sample, 20)) == Estimate(beyond_20, "siblings")
    assert estimates.estimate(at(sample, 30)) == Estimate(beyond_30, "siblings")
    assert estimates.estimate(at(sample, 39)).tokens == 40
    assert estimates.estimate(at(sample, 40)) == Estimate(1_000.0, "cap"), "all siblings are outgrown"


def test_quantile_is_the_inverse_of_the_distribution():
    rng = np.random.default_rng(0)
    for q in (0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        for n in (1, 2, 3, 7, 10, 20):
            lengths = rng.integers(1, 60, n)
            estimates, group = LengthEstimates(siblings=q), make_group("a", n=n + 1)
            finish(estimates, group, *lengths)
            for now in (0, 10, 30):
                above = lengths[lengths > now]
                expected = np.quantile(above, q, method="inverted_cdf") if len(above) else 1_000
                assert estimates.estimate(at(group.samples[n], now)).tokens == expected, (q, n, now)


def test_earlier_epochs():
    estimates = LengthEstimates()
    finish(estimates, make_group("a"), 10, 20, 30, 60)
    again = make_group("b")
    assert estimates.estimate(again.samples[0]).source == "cap", "the group has not left yet"
    estimates.forget("a")
    assert estimates.estimate(again.samples[0]) == Estimate(30.0, "epochs")
    assert estimates.estimate(at(again.samples[0], 25)) == Estimate(45.0, "epochs")
    assert estimates.estimate(make_group("c", prompt=(1, 2, 4)).samples[0]).source == "cap"
    estimates.observe(end(again.samples[1], 12))
    assert estimates.estimate(at(again.samples[0], 5)) == Estimate(12.0, "siblings")
    assert estimates.estimate(at(again.samples[0], 15)) == Estimate((20 + 30 + 60) / 3, "epochs"), "12 is outgrown"


def test_newest_responses_of_a_prompt_are_kept():
    estimates = LengthEstimates(per_prompt=4, epochs="mean")
    for epoch, length in enumerate((100, 200, 300)):
        finish(estimates, make_group(f"e{epoch}", n=2), length, length)
        estimates.forget(f"e{epoch}")
    assert estimates.estimate(make_group("x").samples[0]).tokens == 250
    # A larger group is thinned to even ranks: 2, 4, 6 and 8 of 8.
    finish(estimates, make_group("big", n=8), 80, 70, 60, 50, 40, 30, 20, 10)
    estimates.forget("big")
    assert estimates.estimate(make_group("y").samples[0]).tokens == (20 + 40 + 60 + 80) / 4


def test_task_quantile():
    estimates = LengthEstimates(task_of=lambda group: group.task, task=0.5, min_task=4, window=6)
    finish(estimates, make_group("a", (1,), n=3, task="sum"), 10, 20, 30)
    other = make_group("b", (2,), task="sum")
    assert estimates.estimate(other.samples[0], other).source == "cap", "three lengths are too few"
    finish(estimates, make_group("c", (3,), n=3, task="sum"), 40, 50, 60)
    assert estimates.estimate(other.samples[0]) == Estimate(30.0, "task")
    assert estimates.estimate(at(other.samples[0], 30)) == Estimate(50.0, "task")
    finish(estimates, make_group("d", (4,), n=3, task="sum"), 70, 80, 90)
    assert estimates.estimate(at(other.samples[0], 0)) == Estimate(60.0, "task"), "10, 20 and 30 left the window"
    logic = make_group("l", (5,), task="logic")
    assert estimates.estimate(logic.samples[0], logic).source == "cap"


def test_capped_lengths_are_endless():
    """A sibling that ended at its cap of 50: at least that long, so with a cap of 1,000 it may take all of it."""
    estimates = LengthEstimates(siblings="mean")
    group = make_group("a", cap=50)
    finish(estimates, group, 50, 10)
    assert estimates.estimate(group.samples[2]) == Estimate(30.0, "siblings"), "min(length, 50): exact"
    estimates.forget("a")
    wider = make_group("b")
    assert estimates.estimate(wider.samples[0]) == Estimate(505.0, "epochs")
    assert estimates.estimate(at(wider.samples[0], 60)) == Estimate(1_000.0, "epochs")
    tighter = make_group("c", cap=8)
    assert estimates.estimate(tighter.samples[0]) == Estimate(8.0, "epochs")


@pytest.mark.parametrize(("reason", "status"), [("aborted", "finished"), ("error", "failed"), (None, "failed")])
def test_cut_short_is_left_out(reason: Any, status: Any):
    estimates = LengthEstimates()
    group = make_group("a")
    estimates.admit(group.samples[0])
    estimates.observe(end(group.samples[0], 3, reason, status))
    assert estimates.interrupted == 1 and estimates.report()["all"]["count"] == 0
    assert estimates.estimate(group.samples[1]).source == "cap"
    estimates.observe(end(group.samples[2], 60))
    estimates.admit(at(group.samples[0], 0))  # it is tried again: what was said the first time is void
    estimates.observe(end(group.samples[0], 70))
    assert estimates.estimate(group.samples[1]) == Estimate(70.0, "siblings")
    report = estimates.report()
    assert (report["siblings"]["count"], report["cap"]["count"], report["interrupted"]) == (1, 0, 1)


def test_never_below_what_it_has():
    """Random lives: total and remaining, whatever the source."""
    rng = np.random.default_rng(1)
    estimates = LengthEstimates(min_task=2, siblings="mean", task=0.3)
    for i in range(60):
        cap = int(rng.integers(1, 200))
        group = make_group(f"g{i}", (i % 7,), cap=cap)
        for sample in group.samples:
            for _ in range(3):
                at(sample, int(rng.integers(0, cap + 1)))
                now = len(sample.output_ids)
                tokens, _ = estimates.admit(sample)
                assert now <= tokens <= cap and (tokens > now or now == cap) and tokens >= 1
                assert estimates.remaining(sample) == tokens - now
            finish_at = int(rng.integers(1, cap + 1))
            estimates.observe(end(sample, finish_at, "length" if finish_at == cap else "stop"))
            assert estimates.remaining(sample) == 0
        estimates.forget(group.id)


# ---- memory and state


def test_memory_is_bounded():
    estimates = LengthEstimates(
        task_of=lambda group: group.task, prompts=5, tasks=3, window=8, min_task=1, per_prompt=2
    )
    for i in range(50):
        group = make_group(f"g{i}", (i,), task=i)
        finish(estimates, group, 10, 20, 30, 40)
        estimates.forget(group.id)
        seen = make_group(f"again{i}", (0,), task="again")
        estimates.add(seen)  # prompt 0 comes again and again: it stays
        estimates.forget(seen.id)
        assert len(estimates._groups) == 0 and len(estimates._prompts) <= 5 and len(estimates._tasks) <= 3
        assert all(len(task.ordered) == len(task.arrived) <= 8 for task in estimates._tasks.values())
        assert all(len(prompt.arrived) == 2 for prompt in estimates._prompts.values())
    last = [make_group(f"x{i}", (i,), task="x") for i in (0, 44, 45, 46, 49)]
    assert [estimates.estimate(g.samples[0], g).source for g in last] == ["epochs", "cap", "cap", "epochs", "epochs"]


def test_state_goes_on_through_json():
    """A run that is saved in the middle and continued says the same as one that is not."""

    def task_of(group: Group) -> Any:
        return ("task", group.task, (None, True))

    def run(interrupt: bool) -> tuple[list[Estimate], dict[str, Any], dict[str, Any]]:
        rng = np.random.default_rng(2)
        estimates, said = LengthEstimates(task_of=task_of, min_task=4, window=16, prompts=4, calibration=40), []
        for i in range(40):
            group = make_group(f"g{i}", (int(rng.integers(0, 6)),), cap=100, task=i % 3)
            estimates.add(group)
            for k, sample in enumerate(group.samples):
                said.append(estimates.admit(sample))
                if interrupt and (i, k) in ((20, 2), (31, 0)):
                    state = json.loads(json.dumps(estimates.to_dict(), allow_nan=False))
                    estimates = LengthEstimates.from_dict(state, task_of=task_of)
                if (i, k) == (3, 1):
                    estimates.observe(end(sample, 1, "aborted"))
                    continue
                tokens = int(min(100, rng.geometric(1 / 50)))
                estimates.observe(end(sample, tokens, "length" if tokens == 100 else "stop"))
            if i % 2:
                estimates.forget(group.id)
        return said, estimates.report(), estimates.to_dict()

    whole, parts = run(False), run(True)
    assert whole == parts and whole[1]["interrupted"] == 1
    assert {estimate.source for estimate in whole[0]} == {"siblings", "epochs", "task", "cap"}


def test_bad_state():
    estimates = LengthEstimates(task_of=lambda group: frozenset([1]))
    estimates.add(make_group("a"))
    with pytest.raises(ValueError, match="to be saved"):
        estimates.to_dict()
    state = LengthEstimates().to_dict()
    rest = {name: value for name, value in state.items() if name != "tasks"}
    damaged: list[Any] = [{}, {"state": 99}, [], rest, state | {"groups": 3}]
    for damage in damaged:
        with pytest.raises(ValueError, match="state"):
            LengthEstimates.from_dict(damage)


# ---- calibration


def test_calibration_by_hand():
    estimates = LengthEstimates()
    group = make_group("a", n=4, cap=400)
    for sample in group.samples[:2]:
        estimates.admit(sample)  # 400, cap
    estimates.observe(end(group.samples[0], 100))
    estimates.admit(group.samples[2])  # 100, siblings
    estimates.admit(at(group.samples[1], 150))  # the first one counts
    estimates.observe(end(group.samples[1], 400, "length"))
    estimates.admit(group.samples[3])  # 400, siblings
    assert estimates.admit(at(group.samples[2], 110)).tokens == 400  # but 100 was said first
    estimates.observe(end(group.samples[2], 200))
    estimates.observe(end(group.samples[3], 50))
    report = estimates.report()
    assert report["cap"] == {
        "count": 2,
        "measured": 2,
        "mean_log_ratio": pytest.approx(math.log(4) / 2),
        "median_abs_error": 150.0,
        "coverage": 1.0,
        "tau_b": None,
    }
    assert report["siblings"] == {
        "count": 2,
        "measured": 2,
        "mean_log_ratio": pytest.approx(math.log(8 / 2) / 2),
        "median_abs_error": 225.0,
        "coverage": 0.5,
        "tau_b": -1.0,
    }
    assert report["all"]["count"] == 4 and report["all"]["coverage"] == 0.75 and report["epochs"]["tau_b"] is None
    assert json.loads(json.dumps(report, allow_nan=False))


def test_calibration_window():
    calibration = Calibration(3)
    for estimate, length in ((1, 100), (5, 5), (6, 6), (7, 7)):
        calibration.add(estimate, length)
    report = calibration.report()
    assert (report["count"], report["measured"], report["median_abs_error"], report["tau_b"]) == (4, 3, 0.0, 1.0)


@pytest.mark.parametrize("values", [3, 10, 1000])
def test_kendall_against_all_pairs(values: int):
    rng = np.random.default_rng(values)
    for n in (2, 3, 10, 80):
        x, y = rng.integers(0, values, n), rng.integers(0, values, n)
        signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in itertools.combinations(range(n), 2)]
        a, b = np.array(signs).T
        norm = math.sqrt(int((a != 0).sum()) * int((b != 0).sum()))
        expected = int((a * b).sum()) / norm if norm else None
        assert kendall_tau_b(x.tolist(), y.tolist()) == (None if expected is None else pytest.approx(expected))


def test_siblings_beat_the_cap_where_prompts_decide():
    """The order by siblings' longest agrees with the lengths (6 standard errors above 0: 1e-9)."""
    rng = np.random.default_rng(3)
    estimates = LengthEstimates()
    for i in range(200):
        group = make_group(f"g{i}", (i,), n=4)
        scale = rng.uniform(20, 500)
        for sample in group.samples:
            estimates.admit(sample)
            estimates.observe(end(sample, int(scale * rng.uniform(0.8, 1.2))))
        estimates.forget(group.id)
    report = estimates.report()
    assert report["siblings"]["tau_b"] > 0.6 > 6 * 2 / 3 / math.sqrt(600)
    assert report["siblings"]["median_abs_error"] < report["task"]["median_abs_error"]


# ---- misuse


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"siblings": "short"}, "siblings must be"),
        ({"task": 0.0}, "task must be"),
        ({"epochs": float("nan")}, "epochs must be"),
        ({"siblings": True}, "siblings must be"),
        ({"window": 0}, "window must be"),
        ({"context": 0}, "context must be"),
        ({"prompts": 2.0}, "prompts must be"),
        ({"window": 4, "min_task": 5}, "min_task 5 exceeds"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LengthEstimates(**settings)


def test_bad_calls():
    estimates = LengthEstimates()
    group = make_group("a")
    with pytest.raises(ValueError, match="observe it when it has ended"):
        estimates.observe(group.samples[0])
    estimates.observe(end(group.samples[0], 3))
    with pytest.raises(ValueError, match="observed before"):
        estimates.observe(group.samples[0])
    with pytest.raises(ValueError, match="nothing to estimate"):
        estimates.estimate(group.samples[0])
    with pytest.raises(ValueError, match="without an output token"):
        estimates.observe(end(group.samples[1], 0))
    with pytest.raises(ValueError, match="not of b"):
        LengthEstimates().estimate(group.samples[2], make_group("b"))
    with pytest.raises(ValueError, match="is not known"):
        LengthEstimates(task_of=lambda group: 1).estimate(group.samples[2])
    with pytest.raises(ValueError, match="hashable"):
        LengthEstimates(task_of=lambda group: []).add(group)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="no samples"):
        estimates.add(Group("empty", []))
    with pytest.raises(ValueError, match="NaN"):
        kendall_tau_b([1.0, float("nan")], [1.0, 2.0])
    with pytest.raises(ValueError, match="one length"):
        kendall_tau_b([1.0], [])
