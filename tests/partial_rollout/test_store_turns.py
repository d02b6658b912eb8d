"""The store and samples of several turns: observations are kept and never generated, cuts are booked for good."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, prompt, run
from tests.partial_rollout.store_helpers import finish, flip, grow, make, observe, opened, raw, record, records
from tests.partial_rollout.turns import answer, play, turn_group

from longtail import Sample, SampleStore, StoreFull
from longtail.kv_manager.tier_config import TierConfig
from longtail.partial_rollout.database import Database
from longtail.partial_rollout.ledger import CUT
from longtail.sample import OBSERVATION


def fill(store: SampleStore) -> dict[str, Sample]:
    """Group a, open: a/0 waits for its environment (4 + 6 + 3 tokens of which 6 are an observation), a/1 has its answer
    (5 + 2), a/2 is fresh. Group b: finished, with a reward (3 + 4 + 2)."""
    store.add([turns(make("a", n=3)), turns(make("b", n=1))])
    by = {s.id: s for g in store for s in g.samples}
    store.watch(by.values())
    grow(by["a/0"], 4)
    observe(by["a/0"], 6)
    grow(by["a/0"], 3, version=1)
    by["a/0"].status, by["a/0"].turn_ended, by["a/0"].stop_reason = "paused", True, "</tool>"
    by["a/0"].masked, by["a/0"].attempts = 2, 1
    grow(by["a/1"], 5)
    observe(by["a/1"], 2)
    grow(by["b/0"], 3)
    observe(by["b/0"], 4)
    finish(by["b/0"], 2)
    by["b/0"].grade_failure, by["b/0"].masked = "timed out after 3 s", 9
    return by


def turns(group: Any) -> Any:
    for sample in group.samples:
        sample.multi_turn = True
    return group


# ---- given back as they were


@pytest.mark.parametrize("killed", [False, True])
def test_a_store_gives_back_what_it_was_given(tmp_path: Path, killed: bool) -> None:
    store = SampleStore(tmp_path)
    by = fill(store)
    want = records(list(store))
    store.commit()
    store.check_integrity()
    if killed:
        store._database.close()
    else:
        store.close()
    with opened(tmp_path) as store:
        assert store.damages == []
        assert records(list(store)) == want
        waiting = {s.id: s for s in store.unfinished()}["a/0"]
        assert (waiting.turn_ended, waiting.stop_reason, waiting.attempts) == (True, "</tool>", 1)
        assert waiting.loss_mask == [False] * 2 + [True] * 2 + [False] * 6 + [True] * 3
        assert waiting.logprobs[4:10] == [0.0] * 6
        assert [s.engine for s in waiting.segments] == ["native", "environment", "native"]
        assert store.ledger.generated == store.ledger.pending == 7 + 5 + 5
        number = store.hand_over(store.complete())
        assert (store.ledger.lines["trained"], store.ledger.lines["stale"]) == (0, 5)  # all of b/0 is masked
        (delivery,) = store.deliveries(after=number - 1)
        assert record(delivery.groups[0].samples[0]) == want["b"][0]
        assert by["b/0"].logprobs == delivery.groups[0].samples[0].logprobs


def test_observations_are_never_generated(tmp_path: Path) -> None:
    """By hand, commit after commit, and on every line."""
    with opened(tmp_path) as store:
        store.add([turns(make("a", n=2))])
        a, b = store.unfinished()
        store.watch([a, b])
        generated = 0
        for tokens, observed in ((3, 5), (2, 1), (4, 7)):
            grow(a, tokens)
            store.commit()
            generated += tokens
            observe(a, observed)
            store.watch([a])
            store.commit()
            assert store.ledger.generated == store.ledger.pending == generated
            store.check_integrity()
        assert a.num_tokens == 3 + generated + 13
        finish(a)
        finish(b, 2)
        store.watch([a, b])
        store.hand_over(store.complete())
        assert store.ledger.lines["trained"] == generated + 2
        store.settle(["a/0"], "zero-variance")
        assert (store.ledger.lines["trained"], store.ledger.lines["zero-variance"]) == (2, generated)
        store.add([turns(make("b"))])
        (c,) = store.unfinished()
        store.watch([c])
        grow(c, 3)
        observe(c, 5)
        store.discard(list(store), "surplus")
        assert store.ledger.lines["surplus"] == 3
        assert store.ledger.pending == 0


def test_an_observation_that_nobody_watched_is_seen(tmp_path: Path) -> None:
    with SampleStore(tmp_path) as store:
        fill(store)
        store.commit()
        a = store.unfinished()[0]
        a.append_observation([9])
        with pytest.raises(AssertionError, match="a/0 grew unseen"):
            store.check_balance()
        store.watch([a])
        store.commit()
        store.check_integrity()


# ---- cuts


@pytest.mark.parametrize("line", CUT)
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_cut_is_booked_for_good(tmp_path: Path, line: Any, on_disk: bool) -> None:
    directory = tmp_path if on_disk else None
    store = SampleStore(directory)
    by = fill(store)  # and nothing of it committed: it was generated all the same
    assert store.cut(by["a/0"], 5, line) == 3  # inside the observation: back to where its turn ended
    a = by["a/0"]
    assert (len(a.output_ids), a.turn_ended, a.status, a.masked, a.attempts) == (4, True, "paused", 2, 1)
    store.check_integrity()
    assert store.ledger.lines[line] == 3
    assert store.ledger.generated == 4 + 3  # of the others nothing was committed yet
    store.commit()
    assert (store.ledger.generated, store.ledger.pending) == (17, 14)
    assert store.cut(by["b/0"], 0, line) == 5
    assert (by["b/0"].status, by["b/0"].finish_reason, by["b/0"].grade_failure) == ("waiting", None, None)
    assert store.cut(by["a/0"], 2, "aborted") == 2
    assert store.cut(by["a/2"], 0, "failed") == 0
    store.check_integrity()
    if on_disk:
        want = records(list(store))
        store._database.close()  # as a kill would
        with opened(tmp_path) as store:
            assert records(list(store)) == want
            assert store.ledger.lines["aborted"] == 2 + (8 if line == "aborted" else 0)
            assert store.ledger.pending == 7
            for sample in store.unfinished():
                store.watch([sample])
                finish(sample, 3)
            store.hand_over(store.complete())
            assert store.ledger.lines["trained"] == 7 + 4 * 3 - 2  # two of a/0 are masked: stale
            assert store.ledger.lines["stale"] == 2 + (8 if line == "stale" else 0)
            store.settle(["a/0"], "surplus")  # what was cut stays where it was
            assert store.ledger.lines["aborted"] == 2 + (8 if line == "aborted" else 0)
            store.prune(1)


def test_what_cannot_be_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        by = fill(store)
        store.commit()
        before = records(list(store))
        with pytest.raises(ValueError, match="line must be one of stale, aborted, surplus, failed, not 'trained'"):
            store.cut(by["a/0"], 2, "trained")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="length must be 0 to 13"):
            store.cut(by["a/0"], 14, "stale")
        by["a/1"].status = "running"
        with pytest.raises(ValueError, match="is in an engine"):
            store.cut(by["a/1"], 2, "stale")
        by["a/1"].status = "paused"
        with pytest.raises(ValueError, match="is not in an open group"):
            store.cut(make("z").samples[0], 0, "stale")
        with pytest.raises(ValueError, match="is not in an open group"):
            store.cut(make("a").samples[0], 0, "stale")  # of the same name, and not the store's
        assert records(list(store)) == before
        store.hand_over(store.complete())
        with pytest.raises(ValueError, match="is not in an open group"):
            store.cut(by["b/0"], 0, "stale")


def test_a_cut_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        by = fill(store)
        before, ledger = records(list(store)), store.ledger
        query = store._database.query
        pages = query("PRAGMA max_page_count")[0][0]
        grow(by["a/1"], 9000)
        by["a/1"].status = "paused"
        long = record(by["a/1"])
        query(f"PRAGMA max_page_count = {query('PRAGMA page_count')[0][0]}")
        with pytest.raises(StoreFull):
            store.cut(by["a/1"], 8000, "stale")
        assert record(by["a/1"]) == long
        assert store.ledger == ledger
        query(f"PRAGMA max_page_count = {pages}")
        assert store.cut(by["a/1"], 7, "stale") == 9000
        before["a"][1]["status"] = "paused"
        assert records(list(store)) == before
        assert store.ledger.lines["stale"] == 9000


def test_rewind_to(tmp_path: Path) -> None:
    """Everything that newer policies wrote goes, of finished samples too; observations before it stay."""
    with opened(tmp_path) as store:
        store.add([turns(make("a", n=3)), make("b", n=2), make("c")])
        by = {s.id: s for g in store for s in g.samples}
        store.watch(by.values())
        grow(by["a/0"], 4, version=1)
        observe(by["a/0"], 3)
        grow(by["a/0"], 5, version=2)
        grow(by["a/1"], 4, version=2)
        observe(by["a/1"], 3)
        grow(by["a/2"], 2, version=1)
        grow(by["b/0"], 3, version=1)
        grow(by["b/0"], 3, version=2)
        grow(by["b/0"], 3, version=3)
        finish(by["b/0"])
        finish(by["b/1"])
        grow(by["c/0"], 2, version=3)
        finish(by["c/0"])
        store.hand_over([g for g in store if g.id == "c"])
        with pytest.raises(ValueError, match="is in an engine"):
            store.rewind_to(1)
        assert len(by["b/0"].output_ids) == 9  # all or none
        for sample in by.values():
            sample.status = "paused" if not sample.is_done else sample.status
        for bad in (-1, True, 1.0):
            with pytest.raises(ValueError, match="version must be an integer of at least 0"):
                store.rewind_to(bad)  # type: ignore[arg-type]
        assert store.rewind_to(3) == 0
        assert store.rewind_to(1) == 5 + 4 + 6
        assert [len(by[name].output_ids) for name in ("a/0", "a/1", "a/2", "b/0")] == [7, 0, 2, 3]
        assert by["a/0"].versions[-1] == OBSERVATION
        assert [by[name].status for name in ("a/0", "a/1", "b/0", "b/1")] == ["paused", "waiting", "paused", "finished"]
        assert (store.ledger.lines["stale"], store.ledger.lines["trained"]) == (15, 2)
        assert store.rewind_to(1) == 0
        want = records(list(store))
    with opened(tmp_path) as store:
        assert records(list(store)) == want


def test_a_kill_anywhere_in_a_cut(tmp_path: Path) -> None:
    """Before every statement of it: a store that is opened again has all of the cut, or nothing."""
    with SampleStore(tmp_path / "start") as store:
        by = fill(store)
        store.commit()
        before = records(list(store))
        after = SampleStore(None)
        fill(after)
        cut(after)
    seen = set()
    for statements in range(60):
        directory = tmp_path / str(statements)
        shutil.copytree(tmp_path / "start", directory)
        child = os.fork()
        if child == 0:
            try:
                store = SampleStore(directory)
                store._database.connection.set_trace_callback(Countdown(statements))
                cut(store)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        with opened(directory) as store:
            got = records(list(store))
            want = before if got == before else records(list(after))
            assert got == want
            assert store.ledger.lines["stale"] == (0 if got == before else 4 + 3)
            seen.add(got == before)
        if not os.WIFSIGNALED(status):
            break
    assert seen == {True, False}
    assert not os.WIFSIGNALED(status)
    assert statements > 10
    assert by


class Countdown:
    def __init__(self, statements: int) -> None:
        self.left = statements

    def __call__(self, statement: str) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def cut(store: SampleStore) -> None:
    by = {s.id: s for g in store for s in g.samples}
    store._cut([(by["a/0"], 3), (by["b/0"], 2)], "stale")


# ---- with an engine


def test_saved_kv_of_a_cut_sample_goes(make_engine: EngineMaker, tmp_path: Path) -> None:
    """Parked samples come back with their KV, cut ones without; with the same weights all end as if undisturbed."""
    want = turn_group("a", prompt(20), n=4).samples
    play(make_engine(), want, turns=2)
    engine = make_engine()
    with opened(tmp_path) as store:
        store.use_tiers(engine.tiers)
        group = turn_group("a", prompt(20), n=4)
        store.add([group])
        store.watch(group.samples)
        run(engine, group.samples)
        assert all(s.turn_ended for s in group.samples)
        store.flush()
        assert len(store._database.saved_kv()) == 4
        group.samples[0].append_observation(answer(group.samples[0]))
        store.watch([group.samples[0]])
        store.cut(group.samples[1], 1, "stale")
        store.cut(group.samples[2], len(group.samples[2].output_ids), "failed")  # nothing, but its KV
        assert store._database.saved_kv().keys() == {"a/0", "a/3"}
        store.commit()
        store.check_integrity()
        del group
    engine = make_engine()
    with opened(tmp_path) as store:
        store.use_tiers(engine.tiers)
        samples = store.unfinished()
        assert [s.snapshot is not None for s in samples] == [True, False, False, True]
        assert [s.turn_ended for s in samples] == [False, False, True, True]
        store.watch(samples)
        for sample in samples:
            if sample.turn_ended:
                sample.append_observation(answer(sample))
        play(engine, samples, turns=2)
        for a, b in zip(samples, want, strict=True):
            assert_same(a, b)
        store.commit()
        dropped = len(want[1].output_ids[: want[1].segments[0].end]) - 1
        assert store.ledger.lines["stale"] == dropped
        assert store.ledger.generated == sum(s.num_generated for s in samples) + dropped
        store.hand_over(store.complete())
    assert not list((tmp_path / "kv").iterdir())


def test_a_cut_while_its_kv_is_being_written(make_engine: EngineMaker, tmp_path: Path, may_write: Any) -> None:
    """No row ever names KV of tokens that are gone, and no file is left."""
    engine = make_engine(tiers=TierConfig())
    with opened(tmp_path) as store:
        store.use_tiers(engine.tiers)
        group = turn_group("a", prompt(20), n=1)
        store.add([group])
        store.watch(group.samples)
        run(engine, group.samples)
        store.commit()  # pending: the write is held
        store.cut(group.samples[0], 0, "stale")
        may_write.set()
        store.flush()
        assert store._database.saved_kv() == {}
        store.check_integrity()
    assert not list((tmp_path / "kv").iterdir())


# ---- damage


def damaged_chunk(tmp_path: Path, sizes: list[int]) -> None:
    """A sample a/0 of 4 + 6 (observation) + 5 tokens, committed in chunks of these sizes."""
    whole = turns(make("a")).samples[0]
    grow(whole, 4)
    observe(whole, 6)
    grow(whole, 5, version=1)
    with SampleStore(tmp_path) as store:
        store.add([turns(make("a"))])
        (sample,) = store.unfinished()
        ends = list(itertools.accumulate(sizes))
        for at in range(15):
            segment = next(s for s in whole.segments if s.start <= at < s.end)
            token = whole.output_ids[at], whole.logprobs[at]
            sample.append(*token, segment.version, segment.engine, segment.kv)
            if at + 1 in ends:
                sample.status = "paused"
                store.watch([sample])
                store.commit()
        assert sample.output_ids == whole.output_ids


@pytest.mark.parametrize(
    ("sizes", "start", "kept", "lost", "turn_ended"),
    [
        ([2, 5, 8], 2, 2, 7, False),  # in the first turn
        ([7, 8], 7, 4, 5, True),  # in the observation: back to where it starts
        ([4, 11], 4, 4, 5, True),
        ([10, 5], 10, 10, 5, False),  # right behind it
        ([12, 3], 12, 12, 3, False),
    ],
)
def test_damage_never_leaves_half_an_observation(
    tmp_path: Path, sizes: list[int], start: int, kept: int, lost: int, turn_ended: bool
) -> None:
    damaged_chunk(tmp_path, sizes)
    flip(tmp_path, "chunks", "tokens", f"start = {start}", byte=1, bit=1)
    with opened(tmp_path) as store:
        text = f"sample a/0: output tokens {start} to 14 are damaged; it continues from token {kept}"
        assert store.damages == [text]
        (sample,) = store.unfinished()
        assert (len(sample.output_ids), sample.turn_ended, sample.multi_turn) == (kept, turn_ended, True)
        assert (store.ledger.lines["failed"], store.ledger.generated) == (lost, 9)
        sample.check_integrity()
    with opened(tmp_path) as store:
        assert store.damages == []


@pytest.mark.parametrize("column", ["segments", "masked", "turn_ended", "attempts", "num_observed", "grade_failure"])
def test_a_damaged_record_starts_again(tmp_path: Path, column: str) -> None:
    """Still one of several turns; what was lost is what was generated, whatever the record says of it."""
    damaged_chunk(tmp_path, [7, 8])
    with raw(tmp_path) as connection:
        value = "'?'" if column in ("segments", "grade_failure") else f"{column} + 1"
        connection.execute(f"UPDATE samples SET {column} = {value}")
    with opened(tmp_path) as store:
        assert store.damages == ["sample a/0: its record is damaged; it starts again"]
        (sample,) = store.unfinished()
        assert (sample.output_ids, sample.multi_turn, sample.turn_ended, sample.status) == ([], True, False, "waiting")
        assert (store.ledger.lines["failed"], store.ledger.generated, store.ledger.pending) == (9, 9, 0)


def test_a_damaged_kind_of_sample_fails(tmp_path: Path) -> None:
    damaged_chunk(tmp_path, [7, 8])
    with raw(tmp_path) as connection:
        connection.execute("UPDATE samples SET multi_turn = 0")
    with opened(tmp_path) as store:
        ((sample,),) = [g.samples for g in store]
        assert "its prompt or its parameters are damaged; it cannot go on" in store.damages[0]
        assert sample.status == "failed"


def test_a_cut_that_belongs_to_nothing_is_found(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        by = fill(store)
        store.cut(by["a/0"], 2, "stale")
    with raw(tmp_path) as connection:
        connection.execute("UPDATE cuts SET tokens = tokens + 1")
    database = Database(tmp_path, read_only=True)
    assert database.check() == ["ledger: stale says 5, the samples say 6"]
    database.close()
