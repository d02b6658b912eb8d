"""Schedules of the simulated engine that a reader can check. A pass takes a second unless a test says otherwise."""

from __future__ import annotations

import pytest
from tests.partial_rollout.simulated_helpers import drain, sample, simulated, times

from longtail.partial_rollout.engines.simulated import Length, LinearCost, SimulatedEngine, TableCost, VirtualClock
from longtail.sample import OBSERVATION, Sample

MODES = pytest.mark.parametrize("materialise", [True, False], ids=["lists", "columns"])


@MODES
def test_slots(materialise: bool) -> None:
    """Two slots; a, b, c get 3, 10, 4 tokens.

    second   1 2 3 4 5 6 7 8 9 10
    slot 1   a a a c c c c
    slot 2   b b b b b b b b b b
    """
    engine, events = simulated({"a": 3, "b": 10, "c": 4}, slots=2, materialise=materialise)
    a, b, c = (sample(name) for name in "abc")
    engine.add([a, b])
    assert engine.num_free_slots == 0
    engine.add([c])
    out = engine.step()
    assert (engine.now(), out.finished, out.num_output_tokens, out.num_seqs) == (3.0, [a], 6, 2)
    assert (len(a.output_ids), len(b.output_ids), len(c.output_ids)) == (3, 3, 0)
    out = engine.step()
    assert (engine.now(), out.finished, out.num_output_tokens, out.num_seqs) == (7.0, [c], 8, 2)
    out = engine.step()
    assert (engine.now(), out.finished, out.num_output_tokens, out.num_seqs) == (10.0, [b], 3, 1)
    assert not engine.has_work and engine.step().num_seqs == 0 and engine.now() == 10.0
    assert times(events, "admit") == [("admit", 0.0, "a"), ("admit", 0.0, "b"), ("admit", 3.0, "c")]
    assert times(events, "first_token") == [
        (kind, t + 1, s) for (_, t, s) in times(events, "admit") for kind in ["first_token"]
    ]
    assert times(events, "finish") == [("finish", 3.0, "a"), ("finish", 7.0, "c"), ("finish", 10.0, "b")]
    # passes 1 (admissions), 2 and 3, 4 (an admission), 5 to 7, 8 to 10
    assert [
        (e.time, e.duration, e.num_passes, e.num_seqs, e.num_output_tokens) for e in events if e.kind == "step"
    ] == [
        (0.0, 1.0, 1, 2, 2),
        (1.0, 2.0, 2, 2, 4),
        (3.0, 1.0, 1, 2, 2),
        (4.0, 3.0, 3, 2, 6),
        (7.0, 3.0, 3, 1, 3),
    ]
    assert (a.timings.running, b.timings.running, c.timings.running) == (3.0, 10.0, 4.0)
    assert (c.timings.submitted, c.timings.first_token, c.timings.finished) == (3.0, 4.0, 7.0)
    assert [list(s.versions) for s in (a, c)] == [[0] * 3, [0] * 4]
    assert (engine.stats().num_steps, engine.stats().num_output_tokens) == (10, 17)


@MODES
def test_horizon_and_until(materialise: bool) -> None:
    """Three samples of 100 tokens: 3 tokens a second. The pass that reaches what the caller waits for is the last."""
    engine, _ = simulated(dict.fromkeys("abc", 100), slots=3, materialise=materialise)
    samples = [sample(name) for name in "abc"]
    engine.add(samples)
    assert (engine.step(horizon=10).num_output_tokens, engine.now()) == (12, 4.0)
    assert (engine.step(horizon=1).num_output_tokens, engine.now()) == (3, 5.0)
    assert (engine.step(until=9.0).num_output_tokens, engine.now()) == (12, 9.0)
    assert (engine.step(until=11.5).num_output_tokens, engine.now()) == (9, 12.0)
    assert (engine.step(until=0.0).num_output_tokens, engine.now()) == (3, 13.0)
    assert (engine.step(horizon=9, until=15.0).num_output_tokens, engine.now()) == (6, 15.0)
    assert [len(s.output_ids) for s in samples] == [15] * 3
    engine.check_integrity()
    assert engine.step().finished == samples and engine.now() == 100.0


def test_cost() -> None:
    """A pass: 1 s, 0.5 s a sequence, 0.25 s a row, 0.125 s a KV token. A prompt of 4, then a token at a time.

    pass   rows  KV   seconds
    1      4     4    1 + 0.5 + 1    + 0.5   = 3
    2      1     5    1 + 0.5 + 0.25 + 0.625 = 2.375
    3      1     6    1 + 0.5 + 0.25 + 0.75  = 2.5
    """
    engine, events = simulated({"a": 3}, cost=LinearCost(1.0, 0.5, 0.25, 0.125))
    engine.add([sample("a", 4)])
    assert drain(engine) == [(3 + 2.375 + 2.5, ["a"])]
    steps = [e for e in events if e.kind == "step"]
    assert [(e.num_passes, e.num_tokens, e.num_prefill_tokens, e.num_context_tokens) for e in steps] == [
        (1, 4, 4, 4),
        (2, 2, 0, 11),
    ]
    assert [e.model_seconds for e in steps] == [3.0, 4.875]


def test_table_cost() -> None:
    """Measured for 1, 4 and 8 sequences: 2 lies a third of the way from 1 to 4; 10 goes on as from 4 to 8."""
    cost = TableCost({1: 1.0, 4: 2.5, 8: 3.5}, per_prefill_token=0.01, per_context=0.001)
    assert [cost.seconds(n, n, 0) for n in (1, 2, 4, 8, 10)] == [1.0, 1.5, 2.5, 3.5, 4.0]
    assert cost.seconds(4, 24, 100) == pytest.approx(2.5 + 0.2 + 0.1)
    # KV of 100, 104 and 108 tokens
    assert cost.decode_seconds(4, 100, 3) == pytest.approx(3 * 2.5 + 0.312)


def test_chunked_prefill() -> None:
    """4 rows a pass; prompts of 2 and 9 tokens. Decodes first, what is left of the budget prefills.

    pass   a         b
    1      2 (1st)   2 of 9
    2      1         5
    3      1         8
    4      1         9 (1st)
    5      -         1: with 4 tokens a has finished
    """
    engine, events = simulated({"a": 4, "b": 2}, slots=2, max_num_batched_tokens=4)
    a, b = sample("a", 2), sample("b", 9)
    engine.add([a, b])
    assert drain(engine) == [(4.0, ["a"]), (5.0, ["b"])]
    assert times(events, "first_token") == [("first_token", 1.0, "a"), ("first_token", 4.0, "b")]
    steps = [e for e in events if e.kind == "step"]
    assert [e.num_tokens for e in steps] == [4, 4, 4, 2, 1]
    assert [e.num_prefill_tokens for e in steps] == [4, 3, 3, 1, 0]
    assert [e.num_context_tokens for e in steps] == [2 + 2, 3 + 5, 4 + 8, 5 + 9, 10]
    assert [e.num_output_tokens for e in steps] == [1, 1, 1, 2, 1]


def test_a_groups_prompt_is_computed_once() -> None:
    """A prompt of 5 tokens, three samples. The first computes it while the others wait; they bring 4 tokens of it.

    pass   rows
    1      5      first token of a
    2      3      a goes on, b and c compute the last token of the prompt
    """
    engine, events = simulated(dict.fromkeys(("a", "b", "c"), 2), slots=3)
    engine.add([sample(name, 5, group="g") for name in "abc"])
    assert drain(engine) == [(2.0, ["a"]), (3.0, ["b", "c"])]
    assert [(e.sample, e.time, e.num_tokens) for e in events if e.kind == "admit"] == [
        ("a", 0.0, 0),
        ("b", 1.0, 4),
        ("c", 1.0, 4),
    ]
    assert [e.num_tokens for e in events if e.kind == "step"] == [5, 3, 2]
    assert engine.stats().num_cached_tokens == 8
    engine, events = simulated(dict.fromkeys(("a", "b", "c"), 2), slots=3, enable_prefix_caching=False)
    engine.add([sample(name, 5, group="g") for name in "abc"])
    assert drain(engine) == [(2.0, ["a", "b", "c"])]


def test_a_groups_prompt_is_held_once() -> None:
    """KV of 10 tokens; a prompt of 5, two samples of 3 tokens. Unshared, the second would need 5 where 4 are left.

    pass   a (KV)   b (KV, beside 4 of the prompt)   used
    1      1 (5)                                     5
    2      2 (6)    1 (1)                            7
    3      3 (7)    2 (2)                            9: a ends, and b keeps the prompt
    4               3                                4 + 3
    """
    engine, events = simulated({"a": 3, "b": 3}, slots=2, kv_tokens=10)
    engine.add([sample(name, 5, group="g") for name in "ab"])
    free = []
    while engine.has_work:
        engine.step(until=engine.now())
        engine.check_integrity()
        free.append(engine.stats().num_free_blocks)
    assert free == [10 - 5, 10 - 7, 10 - 6, 10]
    assert times(events, "admit") == [("admit", 0.0, "a"), ("admit", 1.0, "b")]
    assert times(events, "preempt", "finish") == [("finish", 3.0, "a"), ("finish", 4.0, "b")]


@MODES
def test_limits_and_pauses(materialise: bool) -> None:
    """A prompt of 3, 10 tokens in all. Saving takes 0.5 s a token, restoring 0.25 s.

    limit 4: reached at 4 s; limit 3 more: at 7 s, when 3 + 7 - 1 = 9 tokens have KV: saved by 7 + 4.5 = 11.5 s.
    Added again at 20 s: restored by 22.25 s, two tokens more by 24.25 s; paused without KV.
    Added again: 3 + 9 tokens computed in one pass that makes the last token, at 25.25 s.
    """
    engine, events = simulated({"a": 10}, save_seconds=0.5, restore_seconds=0.25, materialise=materialise)
    a = sample("a")
    engine.add([a], limit=4)
    out = engine.step()
    assert (engine.now(), out.at_limit, out.finished, out.num_output_tokens) == (4.0, [a], [], 4)
    assert (a.status, len(a.output_ids)) == ("running", 4)
    engine.set_limit("a", 3)
    assert engine.step().at_limit == [a] and engine.now() == 7.0
    assert engine.pause() == [a]
    assert (engine.now(), a.status, a.snapshot.num_tokens) == (11.5, "paused", 9)
    engine.clock.advance_to(20.0)
    engine.add([a], limit=2)
    assert engine.step().at_limit == [a] and engine.now() == 24.25
    assert a.snapshot is None
    engine.pause(["a"], snapshot=False)
    assert a.snapshot is None and engine.now() == 24.25
    engine.add([a])
    assert engine.step().finished == [a] and engine.now() == 25.25
    assert [(s.start, s.end, s.kv) for s in a.segments] == [
        (0, 7, "computed"),
        (7, 9, "restored"),
        (9, 10, "recomputed"),
    ]
    # in a slot: 0 to 11.5 (saving included), 22.25 to 24.25, 24.25 to 25.25
    assert a.timings.running == 11.5 + 2 + 1
    assert times(events, "save", "restore") == [("save", 7.0, "a"), ("restore", 20.0, "a")]
    assert [e.num_tokens for e in events if e.kind == "step"] == [3, 3, 3, 1, 1, 12]
    stats = engine.stats()
    assert (stats.num_restored_tokens, stats.num_recomputed_tokens, stats.num_steps) == (9, 11, 10)


@MODES
def test_weight_updates(materialise: bool) -> None:
    """Two samples of 5 tokens, prompts of 3. After 2 passes new weights take 4 s. Their KV goes: both are admitted
    again with nothing, compute 3 + 2 tokens each, and make token 3 in that pass, at 7 s."""
    engine, events = simulated({"a": 5, "b": 5}, update_seconds=4.0, materialise=materialise)
    samples = [sample("a"), sample("b")]
    engine.add(samples)
    engine.step(horizon=4)
    engine.update_weights({}, 1)
    engine.check_integrity()
    assert engine.now() == 6.0 and engine.stats().num_waiting == 2
    assert drain(engine) == [(9.0, ["a", "b"])]
    for s in samples:
        assert list(s.versions) == [0, 0, 1, 1, 1]
        assert [(g.start, g.end, g.kv) for g in s.segments] == [(0, 2, "computed"), (2, 5, "recomputed")]
    assert [(e.sample, e.num_tokens, e.detail) for e in events if e.kind == "preempt"] == [
        ("b", 4, "weight update"),  # of 5 known tokens the last has no KV yet
        ("a", 4, "weight update"),
    ]
    assert [e.sample for e in events if e.kind == "admit"] == ["a", "b", "a", "b"]
    assert [(e.num_tokens, e.num_prefill_tokens) for e in events if e.kind == "step"] == [
        (6, 6),
        (2, 0),
        (10, 8),
        (4, 0),
    ]
    assert engine.stats().num_recomputed_tokens == 8  # 4 each had KV


@MODES
def test_weight_updates_that_keep_the_kv(materialise: bool) -> None:
    engine, events = simulated({"a": 5, "b": 6}, kv_on_update="keep", materialise=materialise)
    a, b = sample("a"), sample("b")
    engine.add([a, b])
    engine.step(until=2.0)
    engine.update_weights({}, 3)
    engine.check_integrity()
    assert [len(s.versions) for s in (a, b)] == [2, 2]
    assert drain(engine) == [(5.0, ["a"]), (6.0, ["b"])]
    assert list(b.versions) == [0, 0, 3, 3, 3, 3]
    assert [(g.start, g.end, g.version, g.kv) for g in a.segments] == [(0, 2, 0, "computed"), (2, 5, 3, "kept")]
    assert not times(events, "preempt")


@MODES
def test_preemption(materialise: bool) -> None:
    """KV of 10 tokens; a and b: prompts of 3, 5 tokens each.

    pass   a   b   used after it (known - 1, each)
    1      1   1   3 + 3
    2      2   2   4 + 4
    3      3   3   5 + 5
    4      4       b gives way (5 tokens saved); 6
    5      5       7: with b's 6 more than 10, so that it waits
    6          4   b is back with 5 tokens
    7          5
    """
    engine, events = simulated({"a": 5, "b": 5}, kv_tokens=10, materialise=materialise)
    a, b = sample("a"), sample("b")
    engine.add([a, b])
    assert engine.step(horizon=6).num_seqs == 2 and engine.stats().num_free_blocks == 0
    out = engine.step(horizon=1)
    assert (engine.now(), out.num_output_tokens, out.num_seqs) == (4.0, 1, 1)
    assert (b.status, len(b.output_ids), b.snapshot.num_tokens) == ("waiting", 3, 5)
    engine.check_integrity()
    assert drain(engine) == [(5.0, ["a"]), (7.0, ["b"])]
    assert times(events, "preempt", "restore") == [("preempt", 3.0, "b"), ("restore", 5.0, "b")]
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_restored_tokens, stats.num_recomputed_tokens) == (1, 5, 0)
    assert [(s.start, s.end, s.kv) for s in b.segments] == [(0, 3, "computed"), (3, 5, "restored")]


@MODES
def test_turns(materialise: bool) -> None:
    """Turns of 2 and 3 tokens, a prompt of 2, at most 10 tokens of output.

    turn 1 ends at 2 s with KV of 2 + 2 - 1 = 3 tokens. The environment answers with 4 tokens; added at 10 s, it brings
    3, computes the turn's last token and the 4 of the observation, and makes its output token 7 by 11 s. Turn 2 ends
    at 13 s with 9. An answer of one token fills its 10: the next step finishes it and makes no pass.
    """
    engine, events = simulated({"a": Length(99, turns=(2, 3))}, materialise=materialise)
    a = sample("a", 2, multi_turn=True, max_tokens=10)
    engine.add([a])
    out = engine.step()
    assert (out.turns, out.finished, out.num_output_tokens, engine.now()) == ([a], [], 2, 2.0)
    assert (a.status, a.turn_ended, a.snapshot.num_tokens, engine.has_work) == ("paused", True, 3, False)
    with pytest.raises(ValueError, match="waits for its environment"):
        engine.add([a])
    a.append_observation([7, 8, 9, 10])
    engine.clock.advance_to(10.0)
    engine.add([a])
    out = engine.step(horizon=1)
    assert (len(a.output_ids), engine.now()) == (7, 11.0)
    assert engine.step().turns == [a] and engine.now() == 13.0
    a.append_observation([7])
    engine.add([a])
    out = engine.step()
    assert (out.finished, out.num_output_tokens, engine.now()) == ([a], 0, 13.0)
    assert (a.finish_reason, list(a.output_ids)[2:6], a.num_generated) == ("length", [7, 8, 9, 10], 5)
    assert list(a.versions) == [0, 0, *[OBSERVATION] * 4, 0, 0, 0, OBSERVATION]
    assert times(events, "park", "finish") == [("park", 2.0, "a"), ("park", 13.0, "a"), ("finish", 13.0, "a")]
    assert [e.num_tokens for e in events if e.kind == "step"] == [2, 1, 5, 2]
    a.check_integrity()


def test_caps() -> None:
    """max_tokens cuts what the script says, and the end is then by length; so does max_model_len."""
    engine, _ = simulated({"a": 7, "b": 7, "c": 7}, max_model_len=9)
    a, b, c = sample("a", max_tokens=5), sample("b", max_tokens=8), sample("c", 2, max_tokens=7)
    engine.add([a, b, c])
    assert drain(engine) == [(5.0, ["a"]), (6.0, ["b"]), (7.0, ["c"])]
    assert [s.finish_reason for s in (a, b, c)] == ["length", "length", "stop"]


def test_engines_on_one_clock_run_side_by_side() -> None:
    """a takes a second a pass, b 1.5 s. Whoever is further behind is stepped; the clock is where that one stands."""
    clock = VirtualClock()
    a = SimulatedEngine(clock=clock, name="a")
    b = SimulatedEngine(clock=clock, name="b", cost=LinearCost(1.5))
    a.add([sample("x", max_tokens=4)])
    b.add([sample("y", max_tokens=2)])
    seen = []
    while engines := [engine for engine in (a, b) if engine.has_work]:
        engine = min(engines, key=lambda engine: engine.now())
        engine.step(horizon=1)
        seen.append((engine.name, engine.now(), clock.now()))
    assert seen == [
        ("a", 1.0, 0.0),
        ("b", 1.5, 1.0),
        ("a", 2.0, 1.5),
        ("b", 3.0, 2.0),  # it is done
        ("a", 3.0, 3.0),
        ("a", 4.0, 4.0),
    ]
    clock.advance_to(6.0)
    clock.advance_to(5.0)  # it is 6 already
    assert a.now() == b.now() == clock.now() == 6.0


def test_a_sample_is_the_same_under_every_schedule() -> None:
    def run(**settings: object) -> list[Sample]:
        engine, _ = simulated({"a": 40, "b": 25, "c": Length(30, "length")}, **settings)
        samples = [sample(name) for name in "abc"]
        engine.add(samples)
        drain(engine)
        return samples

    plain = run()
    for other in (run(slots=1), run(kv_tokens=60, slots=2), run(max_num_batched_tokens=3, slots=3)):
        for one, two in zip(plain, other, strict=True):
            assert (one.output_ids, one.logprobs, one.finish_reason) == (
                two.output_ids,
                two.logprobs,
                two.finish_reason,
            )
    assert plain[0].output_ids[:25] != plain[1].output_ids
    assert len(set(plain[0].output_ids)) > 35
    assert all(0 <= token < 32_000 for token in plain[0].output_ids)
    assert all(-8 < logprob <= 0 for logprob in plain[0].logprobs)
