"""Parts of the simulated engine: columns, scripts, costs, the clock, faults, what it refuses, and its traces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.simulated_helpers import drain, sample, simulated

from longtail import Event, Group, Rollout, SamplingParams
from longtail.bench import analysis
from longtail.bench.trace import TraceWriter
from longtail.partial_rollout.engine import Engine
from longtail.partial_rollout.engines.simulated import (
    Faults,
    Length,
    LinearCost,
    SimulatedEngine,
    StepSeconds,
    TableCost,
    VirtualClock,
    log_normal,
    scripted,
)
from longtail.partial_rollout.engines.simulated.records import Column
from longtail.partial_rollout.strategies import Sync, TokenBudget
from longtail.sample import OBSERVATION


def test_it_is_an_engine() -> None:
    engine: Engine = SimulatedEngine()
    assert engine.tiers is None and engine.name == "simulated"


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, longtail.partial_rollout.engines.simulated; print({'torch', 'numpy', 'numba'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# ---- columns


def test_columns_are_like_lists() -> None:
    """Read, compared, extended and cut as the lists that they stand for; also while the sample runs."""
    lengths: dict[str, int | Length] = {"a": Length(99, turns=(6, 5))}
    engines = [simulated(lengths, materialise=materialise)[0] for materialise in (True, False)]
    lists, columns = (sample("a", multi_turn=True, max_tokens=40) for _ in engines)

    def same() -> None:
        assert isinstance(columns.output_ids, Column) and isinstance(lists.output_ids, list)
        for got, expected in (
            (columns.output_ids, lists.output_ids),
            (columns.logprobs, lists.logprobs),
            (columns.versions, lists.versions),
        ):
            n = len(expected)
            assert len(got) == n and got == expected and list(got) == expected and got != [*expected, 1]
            assert [got[i] for i in range(-n, n)] == expected * 2
            for start in range(-n - 1, n + 2):
                for end in (None, *range(-n - 1, n + 2)):
                    assert got[start:end] == expected[start:end]
            assert (got[::-1], got[1:7:2], got[7:2:-2]) == (expected[::-1], expected[1:7:2], expected[7:2:-2])
            with pytest.raises(IndexError):
                got[n]
        assert columns.segments == lists.segments or columns.status == "running"
        assert columns.num_generated == lists.num_generated and columns.loss_mask == lists.loss_mask
        columns.check_integrity()

    def both(act: Any) -> None:
        for engine, s in zip(engines, (lists, columns), strict=True):
            act(engine, s)
        same()

    both(lambda engine, s: (engine.add([s]), engine.step(horizon=4)))
    assert columns.status == "running"
    both(lambda engine, s: engine.step())
    assert columns.turn_ended
    both(lambda engine, s: s.append_observation([5, 6, 7]))
    both(lambda engine, s: (engine.update_weights({}, 2), engine.add([s]), engine.step(until=engine.now() + 2)))
    both(lambda engine, s: engine.pause())
    assert columns.versions == [0] * 6 + [OBSERVATION] * 3 + [2] * 2
    both(lambda engine, s: s.cut(10))
    both(lambda engine, s: (engine.add([s]), engine.step()))
    assert len(columns.output_ids) == 9 + 5 and columns.turn_ended
    both(lambda engine, s: s.cut(8))  # inside the observation: back to where the turn ended
    assert len(columns.output_ids) == 6 and columns.turn_ended
    both(lambda engine, s: s.append_observation([8]))
    both(lambda engine, s: (engine.add([s]), engine.step()))
    assert columns.output_ids[6] == 8 and len(columns.output_ids) == 12
    both(lambda engine, s: s.cut(0))
    both(lambda engine, s: (engine.add([s]), engine.step()))
    assert len(columns.output_ids) == 6


def test_columns_keep_what_another_engine_wrote() -> None:
    a = sample("a")
    first, _ = simulated({"a": 9}, vocab_size=100, name="first")
    first.add([a])
    first.step(horizon=4)
    first.pause(snapshot=False)
    ids, logprobs = list(a.output_ids), list(a.logprobs)
    second, _ = simulated({"a": 9}, vocab_size=7, materialise=False, name="second")
    second.add([a])
    assert second.step().finished == [a]
    assert a.output_ids[:4] == ids and a.logprobs[:4] == logprobs and max(a.output_ids[4:]) < 7
    assert [(s.start, s.end, s.engine) for s in a.segments] == [(0, 4, "first"), (4, 9, "second")]
    a.check_integrity()


# ---- scripts, costs, time


def test_log_normal_lengths() -> None:
    """10,000 seeds: the share above the median is 0.5 +- 0.02 (4 standard errors; false alarms: 1 in 16,000), and so is
    the share above the 90th percentile 0.1 +- 0.012 (median x e^(1.2816 sigma))."""
    lengths = log_normal(200.0, 1.0, shortest=4, longest=2000)
    tokens = []
    for group in range(1250):
        tokens += [lengths(s).tokens for s in Group.from_prompt(f"g{group}", [1], SamplingParams(n=8)).samples]
    assert abs(sum(t > 200 for t in tokens) / 10_000 - 0.5) < 0.02
    assert abs(sum(t > 720 for t in tokens) / 10_000 - 0.1) < 0.012
    assert min(tokens) >= 4 and max(tokens) == 2000


def test_a_cost_of_ones_own_is_summed() -> None:
    class Squares(StepSeconds):
        def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
            return float(context_tokens**2)

    engine, _ = simulated({"a": 4}, cost=Squares())
    engine.add([sample("a")])
    assert drain(engine) == [(3**2 + 4**2 + 5**2 + 6**2, ["a"])]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_duration_is_refused(seconds: float) -> None:
    class Wrong(StepSeconds):
        def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
            return 1.0 if context_tokens < 5 else seconds

    engine, _ = simulated({"a": 9}, cost=Wrong())
    a = sample("a")
    engine.add([a])
    with pytest.raises(ValueError, match=r"^cost: "):
        engine.step(horizon=1), engine.step(horizon=1), engine.step(horizon=1)
    engine.check_integrity()
    assert (engine.now(), len(a.output_ids)) == (2.0, 2)


def test_the_clock_follows_what_a_pause_and_an_update_take() -> None:
    engine, _ = simulated({"a": 9}, save_seconds=0.5, update_seconds=4.0)
    engine.add([sample("a")])
    engine.step(horizon=2)
    engine.pause()  # 3 + 2 - 1 tokens
    assert engine.clock.now() == engine.now() == 4.0
    engine.update_weights({}, 1)
    assert engine.clock.now() == engine.now() == 8.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LinearCost(-1.0), "base must be a finite number of seconds"),
        (lambda: LinearCost(per_seq=float("nan")), "per_seq must be"),
        (lambda: TableCost({}), "decode is empty"),
        (lambda: TableCost({0: 1.0}), "number of sequences must be"),
        (lambda: TableCost({1: -1.0}), r"decode\[1\] must be"),
        (lambda: VirtualClock(float("inf")), "start must be a finite"),
        (lambda: VirtualClock().advance_to(float("nan")), "time must be a finite"),
        (lambda: Length(0), "tokens must be an integer of at least 1"),
        (lambda: Length(5, turns=(1, 0)), "turns must be an integer of at least 1"),
        (lambda: Length(5, "eos"), "reason must be"),  # type: ignore[arg-type]
        (lambda: log_normal(0.0, 1.0), "median must be"),
        (lambda: SimulatedEngine(slots=0), "slots must be an integer of at least 1"),
        (lambda: SimulatedEngine(slots=8, max_num_batched_tokens=4), "max_num_batched_tokens 4 is below slots 8"),
        (lambda: SimulatedEngine(kv_tokens=0), "kv_tokens must be"),
        (lambda: SimulatedEngine(preemption="swap"), "preemption must be one of"),
        (lambda: SimulatedEngine(save_seconds=-1.0), "save_seconds must be"),
        (lambda: SimulatedEngine(bytes_per_token=0.5), "bytes_per_token must be"),
        (lambda: SimulatedEngine(max_num_seqs=4), "has no field max_num_seqs"),
        (lambda: SimulatedEngine(version=-1), "version must be"),
        (lambda: Faults().in_step(OSError(), steps=0), "steps must be"),
    ],
)
def test_bad_settings(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_bad_samples() -> None:
    engine, _ = simulated({"a": 5, "m": 5}, kv_tokens=10, max_model_len=20)
    a = sample("a")
    with pytest.raises(ValueError, match="b is not in the script"):
        engine.add([a, sample("b")])
    with pytest.raises(ValueError, match="two samples have the same id"):
        engine.add([a, sample("a")])
    with pytest.raises(ValueError, match="limit must be at least 1"):
        engine.add([a], limit=0)
    with pytest.raises(ValueError, match="gets up to 11 tokens, and kv_tokens 10"):
        engine.add([sample("a", 6)])
    with pytest.raises(ValueError, match="gets up to 20 tokens"):
        engine.add([sample("m", 6, multi_turn=True)])
    with pytest.raises(ValueError, match="max_model_len 20 leaves no room"):
        engine.add([sample("a", 20)])
    assert not engine.has_work
    engine.add([a])
    with pytest.raises(ValueError, match="already in the engine"):
        engine.check(a)
    for call in (lambda: engine.pause(["x"]), lambda: engine.abort(["x"]), lambda: engine.set_limit("x", 1)):
        with pytest.raises(ValueError, match="'x' is not in the engine"):
            call()
    engine.step(horizon=2)
    engine.update_weights({}, 4)
    for version in (4, 3, True):
        with pytest.raises(ValueError, match="version must be"):
            engine.update_weights({}, version)
    engine.step(horizon=1)
    engine.pause()
    with pytest.raises(ValueError, match="tokens of version 4, newer than the engine's 3"):
        simulated({"a": 5}, version=3)[0].add([a])
    with pytest.raises(ValueError, match="has already ended"):
        simulated({"a": 3}, version=4)[0].add([a])
    with pytest.raises(ValueError, match="lengths gave 5, not a Length"):
        SimulatedEngine(lengths=lambda s: 5).add([sample("z")])  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="max_tokens is None"):
        SimulatedEngine().check(sample("z"))
    engine.add([a])
    engine.abort(["a"])
    assert (a.status, a.finish_reason, engine.has_work) == ("finished", "aborted", False)
    with pytest.raises(ValueError, match="only unfinished samples"):
        engine.add([a])


# ---- faults


@pytest.mark.parametrize("materialise", [True, False])
def test_a_failing_sample(materialise: bool) -> None:
    """a is ordered to fail after 2 tokens more, b by its script after 4; a failure takes the place of a token."""
    engine, events = simulated(
        {"a": 9, "b": Length(4, failure="the logits have NaN"), "c": 6}, slots=3, materialise=materialise
    )
    a, b, c = (sample(name) for name in "abc")
    engine.add([a, b, c])
    engine.step(horizon=3)
    engine.fail("a", "a worker died", after=2)
    out = engine.step()
    assert (out.finished, engine.now(), out.num_output_tokens) == ([a], 4.0, 3 * 3 - 1)
    assert (a.status, a.finish_reason, a.failure, len(a.output_ids)) == ("failed", "error", "a worker died", 3)
    out = engine.step()
    assert (out.finished, engine.now(), out.num_output_tokens) == ([b], 5.0, 1)
    assert (b.status, b.failure, len(b.output_ids)) == ("failed", "the logits have NaN", 4)
    assert engine.step().finished == [c]
    assert engine.stats().num_output_tokens == 3 + 4 + 6
    assert [(e.sample, e.num_tokens, e.detail) for e in events if e.kind == "finish"][:2] == [
        ("a", 3, "error"),
        ("b", 4, "error"),
    ]
    for s in (a, b, c):
        s.check_integrity()


def test_a_sample_that_fails_at_once() -> None:
    engine, events = simulated({"a": Length(0, failure="no")}, materialise=False)
    a = sample("a")
    engine.add([a])
    out = engine.step()
    assert (out.finished, out.num_output_tokens, list(a.output_ids), a.failure) == ([a], 0, [], "no")
    assert not any(e.kind == "first_token" for e in events)
    a.check_integrity()


def test_errors_of_a_step() -> None:
    """Before it does anything; and when its tokens are made: a has finished then, and what the step would have reported
    of b's limit the next one does."""
    engine, _ = simulated({"a": 3, "b": 9}, slots=2)
    a, b = sample("a"), sample("b")
    engine.faults.in_step(OSError("link down"))
    engine.faults.in_step(KeyboardInterrupt(), steps=2, after_tokens=True)
    engine.add([a])
    engine.add([b], limit=3)
    with pytest.raises(OSError, match="link down"):
        engine.step()
    assert engine.now() == 0.0 and not a.output_ids
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_integrity()
    assert (engine.now(), a.status, len(b.output_ids)) == (3.0, "finished", 3)
    out = engine.step()
    assert (out.at_limit, out.finished, len(b.output_ids)) == ([b], [], 4)
    assert engine.step().finished == [b]


def test_a_refused_add() -> None:
    engine, _ = simulated({"a": 3, "b": 3})
    a, b = sample("a"), sample("b")
    engine.faults.in_add("b", ValueError("no room for b"))
    with pytest.raises(ValueError, match="no room for b"):
        engine.add([a, b])
    assert not engine.has_work
    engine.add([a, b])
    assert drain(engine) == [(3.0, ["a", "b"])]


def test_a_listener_that_raises_leaves_nothing_half_done() -> None:
    engine, events = simulated({"a": 2, "b": 2}, slots=2)

    def listen(event: Any) -> None:
        events.append(event)
        if event.kind == "first_token":
            raise RuntimeError(event.sample)

    engine.listener = listen
    a, b = sample("a"), sample("b")
    engine.add([a, b])
    with pytest.raises(RuntimeError, match="a"):
        engine.step(horizon=1)
    engine.check_integrity()
    assert [e.kind for e in events] == ["admit", "admit", "first_token", "first_token", "step"]
    assert len(a.output_ids) == 1 and engine.step().finished == [a, b]


# ---- traces


@pytest.mark.parametrize("leap", [True, False])
def test_what_a_trace_says_does_not_depend_on_the_leaps(leap: bool) -> None:
    """Two slots, prompts of 4, lengths 3, 10, 4 (`test_slots`): occupied 3 + 10 + 4 of 2 x 10 slot-seconds, the rest is
    bubble. Model time is split by rows: passes 1 (8 of 8 rows prefill) and 4 (4 of 5) are 1.8 s of prefill.
    """
    trace = TraceWriter()
    listener = trace.listener("run")
    lengths = scripted({"g0/0": 3, "g1/0": 10, "g2/0": 4})
    engine = SimulatedEngine(slots=2, lengths=lengths, listener=listener)
    if not leap:
        step = engine.step
        engine.step = lambda **_: step(until=engine.now())  # type: ignore[method-assign]
    rollout = Rollout(engine, strategy=Sync(), listener=listener)
    rollout.submit([[1, 2, 3, 4]] * 3, SamplingParams())
    assert len(rollout.collect()) == 3
    frame = trace.frame()
    assert frame.loc[frame["kind"] == "step", "num_passes"].sum() == 10
    numbers = analysis.summary(frame)["run"]
    assert (numbers["wall_seconds"], numbers["tokens_generated"], numbers["tokens_unaccounted"]) == (10.0, 17, 0)
    assert numbers["bubble_slot_seconds"] == 3.0 and numbers["bubble_share"] == 0.15
    assert numbers["breakdown"]["prefill"] == pytest.approx(1.8)
    assert numbers["breakdown"]["decode"] == pytest.approx(8.2)
    assert numbers["breakdown"]["idle"] == pytest.approx(0.0)


@pytest.mark.parametrize("with_kv", [True, False])
def test_a_parked_sample_gives_its_slot_back(with_kv: bool) -> None:
    """A prompt of 2, a turn of 3 tokens: in a slot until 3 s; the answer of 5 tokens comes at 10 s, and a turn of 1
    token takes until 11 s. Of the 2 + 3 tokens known at the end of the first turn, 4 had KV: computed again if lost."""
    trace = TraceWriter()
    listener = trace.listener("run")
    engine = SimulatedEngine(lengths=scripted({"a": Length(9, turns=(3, 1))}), listener=listener)
    a = sample("a", 2, multi_turn=True, max_tokens=20)
    engine.add([a])
    engine.step()
    if not with_kv:
        a.snapshot = None
    engine.clock.advance_to(10.0)
    a.append_observation([7] * 5)
    listener(Event("observe", 3.0, 7.0, sample="a", group="a", num_tokens=5))
    engine.add([a])
    assert engine.step().turns == [a]
    frame = trace.frame()
    held = [(row.start, row.end, row.outcome) for row in analysis.intervals(frame).itertuples()]
    assert held == [(0.0, 3.0, "park"), (10.0, 11.0, "park")]
    assert analysis.summary(frame)["run"]["tokens_reprefilled"] == (0 if with_kv else 4)


def test_a_store_keeps_columns(tmp_path: Path) -> None:
    """A rollout over several iterations, opened anew in between; samples as one engine makes them at once."""
    lengths = log_normal(30.0, 1.0, longest=200)
    params = SamplingParams(n=4, max_tokens=100)
    plain = SimulatedEngine(lengths=lengths)
    expected = [s for i in range(6) for s in Group.from_prompt(f"g{i}", [1, 2, 3], params).samples]
    plain.add(expected)
    drain(plain)
    got: dict[str, Any] = {}
    for iteration in range(100):
        engine = SimulatedEngine(slots=5, lengths=lengths, materialise=False, version=iteration)
        with Rollout(engine, strategy=TokenBudget(150), store=tmp_path) as rollout:
            if iteration == 0:
                rollout.submit([[1, 2, 3]] * 6, params)
            got |= {s.id: s for group in rollout.collect() for s in group.samples}
            rollout.store.check_integrity()
            if not len(rollout.store):
                break
    assert iteration > 2 and len(got) == len(expected)
    for s in expected:
        assert (got[s.id].output_ids, got[s.id].logprobs) == (s.output_ids, s.logprobs)
        got[s.id].check_integrity()
    assert any(len(s.segments) > 1 for s in got.values())
