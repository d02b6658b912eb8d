"""Small schedules whose numbers a reader can check by hand, and laws that hold for any trace."""

from __future__ import annotations

import json
import math
import random

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail import Event, TraceError
from longtail.bench import analysis
from longtail.bench.trace import TraceWriter


def frame(**runs: list[Event]) -> pd.DataFrame:
    writer = TraceWriter()
    for name, events in runs.items():
        listen = writer.listener(name)
        for event in events:
            listen(event)
    return writer.frame()


def start(time: float, slots: int = 2) -> Event:
    return Event("run_start", time, detail=json.dumps({"slots": slots}))


#  slot 0  A A A A|C C C C C C|         bubble: slot 1 from 106 to 110
#  slot 1  B B B B B B|. . . .|         the run goes on to 113: grade, train, update
#        100     104 106     110
SYNC = [
    start(100.0),
    Event("iteration_start", 100.0, value=7),
    *(Event("submit", 100.0, sample=sample, group="g", num_tokens=3) for sample in "ABC"),
    Event("admit", 100.0, sample="A", group="g", value=3),
    Event("admit", 100.0, sample="B", group="g", value=3),
    Event("step", 100.0, 4.0, num_seqs=2, num_tokens=12, num_prefill_tokens=9, num_output_tokens=8, model_seconds=3.0,
          sample_seconds=0.5),
    Event("finish", 104.0, sample="A", group="g", num_tokens=4, detail="stop"),
    Event("admit", 104.0, sample="C", group="g", value=3),
    Event("restore", 105.0, 1.0, num_tokens=11),
    Event("finish", 106.0, sample="B", group="g", num_tokens=6, detail="stop"),
    Event("step", 104.0, 6.0, num_seqs=2, num_tokens=4, num_output_tokens=8, model_seconds=4.0, sample_seconds=0.5),
    Event("finish", 110.0, sample="C", group="g", num_tokens=6, detail="length"),
    Event("grade", 110.0, 0.5, sample="A", value=1.0),
    Event("grade", 110.5, 0.0, sample="B", value=0.0),
    Event("hand_over", 110.5, group="g", num_seqs=3, num_tokens=16),
    Event("train", 110.5, 1.0),
    Event("update", 112.0, 0.25, value=8),
    Event("iteration_end", 112.5),
    Event("run_end", 113.0),
]  # fmt: skip

#  slot 0  A A|.|     . B B|      iteration 0 until 4, iteration 1 until 8; B and C have the prompt's 10 tokens
#  slot 1  B B B|     . C C|
#          0   2 3   4 5   7
PARTIAL = [
    start(0.0),
    Event("iteration_start", 0.0, value=0),
    Event("admit", 0.0, sample="A", group="g", value=10),
    Event("admit", 0.0, sample="B", group="g", value=10),
    Event("step", 0.0, 3.0, num_tokens=20, num_output_tokens=7),
    Event("finish", 2.0, sample="A", group="g", num_tokens=3, detail="stop"),
    Event("pause", 3.0, sample="B", group="g", num_tokens=4),
    Event("iteration_end", 4.0),
    Event("iteration_start", 4.0, value=1),
    Event("admit", 5.0, sample="B", group="g", num_tokens=0, value=14),
    Event("admit", 5.0, sample="C", group="h", num_tokens=0, value=10),
    Event("step", 5.0, 2.0, num_tokens=24, num_output_tokens=6),
    Event("finish", 7.0, sample="B", group="g", num_tokens=8, detail="length"),
    Event("hand_over", 7.0, group="g", num_seqs=2, num_tokens=11),
    Event("pause", 7.0, sample="C", group="h", num_tokens=2),
    Event("iteration_end", 8.0),
    Event("run_end", 8.0),
]


def test_slots_of_a_pool_stand_by_engine() -> None:
    """Two samples in x, then one in y while x has one; another of y takes the place of the first there. Three at once
    at most, in four rows: what is counted is what is taken at once."""
    told = [("A", "x", 0.0, 2.0), ("B", "x", 0.0, 9.0), ("C", "y", 1.0, 3.0), ("D", "y", 3.0, 9.0)]
    told.append(("E", "z", 4.0, 9.0))
    events = [Event("run_start", 0.0, detail="{}")]
    for sample, engine, start, end in told:
        events.append(Event("admit", start, engine=engine, sample=sample))
        events.append(Event("finish", end, engine=engine, sample=sample))
    events = [*sorted(events, key=lambda e: (e.time, e.kind == "admit")), Event("run_end", 9.0)]
    held = analysis.intervals(frame(r=events)).set_index("sample")
    assert held["slot"].to_dict() == {"A": 0, "B": 1, "C": 2, "D": 2, "E": 3}
    assert held["engine"].to_dict() == {"A": "x", "B": "x", "C": "y", "D": "y", "E": "z"}
    assert analysis.runs(frame(r=events))["slots"].tolist() == [3]


def test_intervals_of_the_sync_schedule() -> None:
    held = analysis.intervals(frame(sync=SYNC))
    assert held.to_dict("records") == [
        {"run": "sync", "engine": "", "sample": "A", "start": 0.0, "end": 4.0, "outcome": "finish", "slot": 0},
        {"run": "sync", "engine": "", "sample": "B", "start": 0.0, "end": 6.0, "outcome": "finish", "slot": 1},
        {"run": "sync", "engine": "", "sample": "C", "start": 4.0, "end": 10.0, "outcome": "length", "slot": 0},
    ]


def test_active_of_the_sync_schedule() -> None:
    steps = analysis.active(frame(sync=SYNC))
    assert list(zip(steps["time"], steps["active"], strict=True)) == [(0.0, 2), (4.0, 2), (6.0, 1), (10.0, 0)]


def test_breakdown_of_the_sync_schedule() -> None:
    (row,) = analysis.breakdown(frame(sync=SYNC)).to_dict("records")
    assert row == {
        "run": "sync",
        "wall": 13.0,
        "prefill": 2.25,  # 9 of the first step's 12 tokens: 3/4 of 3 s
        "decode": 4.75,  # 0.75 s and the second step's 4 s
        "verify": 0.0,
        "drafting": 0.0,
        "sampling": 1.0,
        "scheduling": 1.0,  # 4 - 3 - 0.5 and (6 - 1 of the restore) - 4 - 0.5
        "save": 0.0,
        "restore": 1.0,  # inside the second step
        "update": 0.25,
        "grade": 0.5,
        "wait": 0.0,
        "train": 1.0,
        "evaluate": 0.0,
        "checkpoint": 0.0,
        "idle": 1.25,  # 111.5 to 112 and 112.25 to 113
        "generate": 9.0,
        "switch": 1.25,
    }


def test_a_step_eaten_by_others_shrinks_in_proportion() -> None:
    step = Event("step", 0.0, 4.0, num_tokens=1, model_seconds=3.0, sample_seconds=1.0)
    (row,) = analysis.breakdown(frame(r=[step, Event("save", 1.0, 2.0), Event("run_end", 4.0)])).to_dict("records")
    assert (row["decode"], row["sampling"], row["scheduling"], row["switch"], row["idle"]) == (1.5, 0.5, 0, 2, 0)


def test_evaluating_and_checkpoints_are_not_idle() -> None:
    """Evaluated for 4 s, of which graders had 1; a checkpoint of 2 s; nothing for 3 s."""
    events = [Event("evaluate", 0.0, 4.0), Event("grade", 1.0, 1.0), Event("checkpoint", 6.0, 2.0)]
    df = frame(r=[start(0.0), *events, Event("run_end", 9.0)])
    (row,) = analysis.breakdown(df).to_dict("records")
    assert {p: row[p] for p in analysis.PARTS if row[p]} == {"evaluate": 3, "grade": 1, "checkpoint": 2, "idle": 3}
    spans = analysis.timeline(df)
    assert set(spans.loc[spans["track"] == "training", "name"]) == {"evaluate", "checkpoint"}


def test_drafting_and_verifying_are_parts_of_their_own() -> None:
    """2 known tokens and 3 drafts in the rows of 3 of the step's 5 seconds."""
    step = Event(
        "step",
        0.0,
        5.0,
        num_tokens=5,
        num_output_tokens=4,
        model_seconds=3.0,
        sample_seconds=0.5,
        num_draft_tokens=3,
        num_accepted_tokens=2,
        draft_seconds=1.0,
    )
    events = frame(r=[step, Event("run_end", 5.0)])
    (row,) = analysis.breakdown(events).to_dict("records")
    assert (row["decode"], row["verify"]) == (pytest.approx(1.2), pytest.approx(1.8))
    assert (row["sampling"], row["drafting"], row["scheduling"]) == (0.5, 1.0, 0.5)
    numbers = analysis.summary(events)["r"]
    assert (numbers["tokens_drafted"], numbers["tokens_accepted"]) == (3, 2)


def test_iteration_of_the_sync_schedule() -> None:
    (row,) = analysis.iterations(frame(sync=SYNC)).to_dict("records")
    assert row == {
        "run": "sync",
        "iteration": 0,
        "start": 0.0,
        "end": 12.5,
        "wall": 12.5,
        "version": 7,
        "generated": 16,
        "groups": 1,
        "samples": 3,
        "tokens": 16,
        "finished": 3,
        "paused": 0,
        "tail_seconds": 0.0,  # of three, the 90th percentile sample is the third
        "generating_start": 0.0,
        "generating": 10.0,
        "slot_seconds": 20.0,
        "bubble_seconds": 4.0,
        "bubble": 0.2,
    }


def test_iterations_of_the_partial_schedule() -> None:
    rows = analysis.iterations(frame(partial=PARTIAL))
    assert list(rows["generating_start"]) == [0.0, 5.0]
    assert list(rows["slot_seconds"]) == [6.0, 4.0]
    assert list(rows["bubble_seconds"]) == [1.0, 0.0]
    assert list(rows["paused"]) == [1, 1]
    assert list(rows["tokens"]) == [0, 11]
    assert list(rows["version"]) == [0, 1]


def test_summary_of_the_partial_schedule() -> None:
    numbers = analysis.summary(frame(partial=PARTIAL))["partial"]
    expected = {
        "wall_seconds": 8.0,
        "complete": True,
        "slots": 2,
        "groups_trained": 1,
        "samples_trained": 2,
        "tokens_trained": 11,
        "tokens_per_second": 11 / 8,
        "seconds_per_1000_tokens": 8000 / 11,
        "tokens_generated": 13,
        "tokens_pending": 2,  # C
        "tokens_aborted": 0,
        "tokens_unaccounted": 0,
        "tokens_reprefilled": 13,  # B comes back with 14 known tokens, the last of them never computed
        "tokens_restored": 0,
        "pauses": 2,
        "preemptions": 0,
        "bubble_share": 0.1,
        "samples_finished": 2,
        "length_p50": 3,
        "length_p90": 8,
        "length_max": 8,
        "capped_share": 0.5,
        "mean_reward": None,
    }
    assert {key: numbers[key] for key in expected} == expected
    json.dumps(numbers, allow_nan=False)


def test_tail_of_ten_samples() -> None:
    finishes = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 15.0]
    events = [start(0.0, slots=10), Event("iteration_start", 0.0)]
    events += [Event("admit", 0.0, sample=f"s{i}") for i in range(10)]
    events += [Event("finish", time, sample=f"s{i}", num_tokens=1, detail="stop") for i, time in enumerate(finishes)]
    numbers = analysis.summary(frame(r=[*events, Event("iteration_end", 16.0), Event("run_end", 20.0)]))["r"]
    assert numbers["tail_seconds"] == 6.0  # from the ninth finish to the tenth
    assert numbers["tail_share"] == 0.3
    assert numbers["bubble_share"] == pytest.approx(1 - 60 / 150)


def test_tail_time_is_per_iteration() -> None:
    events = [start(0.0, slots=10)]
    for begin in (0.0, 20.0):
        events.append(Event("iteration_start", begin))
        names = [f"{begin}/{i}" for i in range(10)]
        events += [Event("admit", begin, sample=name) for name in names]
        events += [Event("finish", begin + 1.0 + (i == 9), sample=name) for i, name in enumerate(names)]
        events.append(Event("iteration_end", begin + 5.0))
    assert analysis.summary(frame(r=events))["r"]["tail_seconds"] == 2.0


@pytest.mark.parametrize(("count", "rank"), [(1, 1), (2, 2), (9, 9), (10, 9), (11, 10), (20, 18), (30, 27), (100, 90)])
def test_nearest_rank(count: int, rank: int) -> None:
    values = list(range(1, count + 1))
    random.Random(count).shuffle(values)
    assert analysis.nearest_rank(values, 90) == rank


def test_preemption_says_what_is_computed_again() -> None:
    events = [
        Event("admit", 0.0, sample="A", value=10),
        Event("preempt", 1.0, sample="A", num_tokens=6),
        Event("admit", 2.0, sample="A", num_tokens=4, value=10),  # 4 tokens from the prefix cache
        Event("pause", 3.0, sample="A", num_tokens=0),
        Event("admit", 4.0, sample="A", num_tokens=0, value=10),  # paused before the first token: nothing counted
        Event("pause", 5.0, sample="A", num_tokens=2),
        Event("admit", 6.0, sample="A", num_tokens=11, value=12),  # a whole snapshot
    ]
    assert analysis.summary(frame(r=events))["r"]["tokens_reprefilled"] == 2


def test_aborted_and_lost_tokens_are_told_apart() -> None:
    events = [
        Event("admit", 0.0, sample="A", group="g", value=1),
        Event("step", 0.0, 1.0, num_output_tokens=10),
        Event("pause", 1.0, sample="A", group="g", num_tokens=4),
        Event("finish", 2.0, sample="A", group="g", num_tokens=4, detail="aborted"),
        Event("admit", 2.0, sample="B", group="g", value=1),  # running when the trace ends
    ]
    numbers = analysis.summary(frame(r=events))["r"]
    assert (numbers["tokens_aborted"], numbers["tokens_pending"], numbers["tokens_unaccounted"]) == (4, 0, 6)
    assert not numbers["complete"]
    assert list(analysis.intervals(frame(r=events))["outcome"]) == ["pause", "open"]


def test_a_killed_run_ends_with_its_last_event() -> None:
    events = [start(0.0), Event("iteration_start", 0.0), Event("step", 1.0, 2.5)]
    (run,) = analysis.runs(frame(r=events)).to_dict("records")
    assert (run["wall"], run["complete"]) == (3.5, False)
    (row,) = analysis.iterations(frame(r=events)).to_dict("records")
    assert (row["wall"], row["bubble"], row["tail_seconds"]) == (3.5, 0.0, 0.0)


def test_slots_are_the_most_seen_where_settings_do_not_say() -> None:
    events = [event for event in SYNC if event.kind != "run_start"]
    assert list(analysis.runs(frame(r=events))["slots"]) == [2]
    assert list(analysis.runs(frame(r=[start(100.0, slots=1), *events]))["slots"]) == [2]


def test_a_sample_in_two_slots_is_refused() -> None:
    events = [Event("admit", 1.0, sample="A"), Event("admit", 2.0, sample="A")]
    with pytest.raises(TraceError, match=r"run r: sample A is admitted .* again"):
        analysis.intervals(frame(r=events))


def test_compare_is_against_the_first_run() -> None:
    ratios = analysis.compare(analysis.summary(frame(sync=SYNC, partial=PARTIAL)))
    assert ratios["sync"]["tokens_per_second"] == 1.0
    assert ratios["partial"]["tokens_per_second"] == pytest.approx((11 / 8) / (16 / 13))
    assert ratios["partial"]["bubble_share"] == pytest.approx(0.1 / 0.2)
    assert ratios["partial"]["tail_seconds"] is None  # the first run has none
    assert analysis.compare({}) == {}


def test_a_run_of_one_event_has_no_rates() -> None:
    numbers = analysis.summary(frame(r=[Event("run_start", 5.0)]))["r"]
    assert numbers["wall_seconds"] == 0.0
    assert numbers["tokens_per_second"] is numbers["bubble_share"] is numbers["length_max"] is None


def test_laws_on_a_realistic_trace(synthetic: pd.DataFrame) -> None:
    held, parts, numbers = analysis.intervals(synthetic), analysis.breakdown(synthetic), analysis.summary(synthetic)
    for run, own in held.groupby("run"):
        for _, slot in own.sort_values("start").groupby("slot"):
            assert (slot["start"].iloc[1:].to_numpy() >= slot["end"].iloc[:-1].to_numpy()).all()
        assert own["slot"].max() == 15
        assert numbers[str(run)]["tokens_unaccounted"] == 0
        assert sum(step["slot_seconds"] - step["bubble_seconds"] for step in numbers[str(run)]["iterations"]) == (
            pytest.approx((own["end"] - own["start"]).sum())
        )
    assert parts[list(analysis.PARTS)].sum(axis=1).to_numpy() == pytest.approx(parts["wall"].to_numpy())
    assert numbers["token-budget"]["bubble_share"] < numbers["sync"]["bubble_share"]


KINDS = ["step", "save", "restore", "update", "grade", "train", "evaluate", "checkpoint", "admit"]
SPANS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.integers(0, 8), st.floats(0, 1)), max_size=12)


@given(SPANS)
def test_breakdown_adds_up_whatever_overlaps(spans: list[tuple[str, int, int, float]]) -> None:
    events = [start(2.0)]
    for index, (kind, time, duration, share) in enumerate(spans):
        shape = {"num_tokens": 4, "num_prefill_tokens": 1, "model_seconds": share * duration}
        events.append(Event(kind, time, duration, sample=str(index), **shape))  # type: ignore[arg-type]
    (row,) = analysis.breakdown(frame(r=[*events, Event("run_end", 18.0)])).to_dict("records")
    assert all(row[part] >= 0 for part in analysis.PARTS)
    assert math.fsum(row[part] for part in analysis.PARTS) == pytest.approx(16.0, abs=1e-9)
    owners = owners_by_second(spans, 2, 18)
    assert row["generate"] == pytest.approx(owners.count("step"))
    assert row["switch"] == pytest.approx(sum(owner in ("save", "restore", "update") for owner in owners))
    assert row["idle"] == pytest.approx(owners.count("none"), abs=1e-9)


def owners_by_second(spans: list[tuple[str, int, int, float]], begin: int, end: int) -> list[str]:
    """The plain reading of the rule, second by second: the last started has it; of equal starts, the first to end."""
    owners = []
    for second in range(begin, end):
        going = [
            (max(time, begin), -min(time + duration, end), -index, kind)
            for index, (kind, time, duration, _) in enumerate(spans)
            if kind != "admit" and time <= second < time + duration
        ]
        owners.append(max(going)[3] if going else "none")
    return owners
