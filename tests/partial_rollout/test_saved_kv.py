"""Saved KV in a store: samples continue from it in a later process, and files come and go with their rows."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, group, prompt
from tests.partial_rollout.saved_kv_helpers import BLOCK, TOKENS, batch, files, finish, paused, rows
from tests.partial_rollout.store_helpers import make, raw

from longtail import Group, Rollout, Sample, SampleStore, TokenBudget
from longtail.kv_manager import snapshot_file
from longtail.kv_manager.part import Part
from longtail.partial_rollout import saved_kv as saved_kv_module
from longtail.partial_rollout.ledger import BESIDE

NONE = dict.fromkeys(BESIDE, 0)

# ---- a later process


def test_a_later_process_continues_from_saved_kv(
    make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample]
) -> None:
    paused(make_engine, tmp_path)
    assert {name: len(names) for name, names in rows(tmp_path).items()} == {"a/0": 2, "a/1": 2, "b/0": 1}
    assert len(files(tmp_path)) == 4  # the prompt of a is written once
    found = finish(make_engine(enable_prefix_caching=False), tmp_path, plain)
    assert found["damages"] == [] and found["refused"] == {}
    assert found["kinds"] == {name: ["computed", "restored"] for name in plain}
    # 40 or 9 tokens of prompt and 4 of output; the KV of the last one was not computed
    assert found["restored"] == {"a/0": 43, "a/1": 43, "b/0": 12}
    assert found["beside"] == NONE | {"restored": 98}


def test_the_ledger_by_hand(make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample]) -> None:
    """One pause and two lives: the first resumes with KV, the second in part (its last KV is not on disk), the third
    without."""

    def life(snapshots: bool, iterations: int) -> dict[Any, int]:
        engine = make_engine(enable_prefix_caching=False)
        budget = TokenBudget(TOKENS, per="sample")
        with Rollout(engine, strategy=budget, store=tmp_path, snapshots=snapshots) as rollout:
            if "b" not in rollout.store:
                rollout.submit(batch()[1:])
            for _ in range(iterations):
                rollout.collect()
            rollout.store.check_integrity()
            return dict(rollout.store.ledger.beside)

    assert life(True, 1) == NONE  # 9 + 4 tokens known, KV of 12
    assert life(True, 1) == NONE | {"restored": 12}  # 9 + 8 known, KV of 16
    # Restored 16, to 9 + 10 known, and then it is finished.
    assert life(True, 1) == NONE | {"restored": 28}
    assert rows(tmp_path) == {}


def test_the_ledger_by_hand_without_kv(make_engine: EngineMaker, tmp_path: Path) -> None:
    def life(**settings: Any) -> dict[Any, int]:
        engine = make_engine(enable_prefix_caching=False)
        budget = TokenBudget(TOKENS, per="sample")
        with Rollout(engine, strategy=budget, store=tmp_path, **settings) as rollout:
            if "b" not in rollout.store:
                rollout.submit([group("b", prompt(9, 1), max_tokens=16)])
            rollout.collect()
            return dict(rollout.store.ledger.beside)

    assert life() == NONE  # 13 known, KV of 12
    (names,) = rows(tmp_path).values()
    assert life(snapshots=False) == NONE | {"recomputed": 12}  # 17 known, KV dropped
    assert list(rows(tmp_path).values()) == [names]  # still a valid prefix
    assert life() == NONE | {"recomputed": 16, "restored": 12}  # 12 restored, 4 computed again
    assert rows(tmp_path)["b/0"] != names and len(files(tmp_path)) == 1


# ---- the life of a file


def test_files_come_and_go_with_their_rows(make_engine: EngineMaker, tmp_path: Path) -> None:
    """Looked at after each iteration."""
    engine = make_engine()
    store = SampleStore(tmp_path, commit_every=0.0)
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=store) as rollout:
        rollout.submit(batch())
        assert rows(tmp_path) == {} and files(tmp_path) == set()
        seen = []
        for _ in range(4):
            rollout.collect()
            store.flush()
            engine.tiers.close()  # its thread removes files
            named = rows(tmp_path)
            assert files(tmp_path) == {name for names in named.values() for name in names}
            store.check_integrity()
            engine.check_integrity()
            seen.append(named)
        # tokens after each: 4, 8, 12 (b is finished with 10), 14
        assert [sorted(named) for named in seen] == [["a/0", "a/1", "b/0"], ["a/0", "a/1", "b/0"], ["a/0", "a/1"], []]
        prompts = {named[name][0] for named in seen[:3] for name in ("a/0", "a/1")}
        assert len(prompts) == 1  # written once, in the first
        for name in ("a/0", "a/1"):
            assert len({named[name][1] for named in seen[:3]}) == 3  # a new one each time
        assert engine.tiers.disk_used == engine.tiers.host_used == 0


def test_a_snapshot_stays_while_its_sample_runs_on(
    make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample]
) -> None:
    """A process that is killed then leaves it, and what it had made since is prefilled on top."""
    directory, copy = tmp_path / "store", tmp_path / "copy"
    paused(make_engine, directory)
    before = rows(directory)
    engine = make_engine(enable_prefix_caching=False)
    with Rollout(engine, store=SampleStore(directory, commit_every=0.0)) as rollout:
        step, steps = engine.step, []

        def copying(**asked):
            if all(s.status == "running" for s in rollout.store.unfinished()):  # not waiting for the disk
                steps.append(1)
            if len(steps) == 3 and not copy.exists():
                shutil.copytree(directory, copy)
                assert engine.tiers.host_used == 2 * BLOCK  # only the prompt that siblings may ask for
            return step(**asked)

        engine.step = copying  # type: ignore[method-assign]
        rollout.collect()
    assert rows(copy) == before
    with raw(copy) as connection:
        (tokens,) = connection.execute("SELECT sum(num_tokens) FROM samples").fetchone()
    assert tokens > 12
    found = finish(make_engine(enable_prefix_caching=False), copy, plain)
    assert found["restored"] == {"a/0": 43, "a/1": 43, "b/0": 12}
    assert found["beside"]["recomputed"] == tokens - 12 and found["refused"] == {}


def test_a_finished_sample_has_no_saved_kv_while_its_group_stays(make_engine: EngineMaker, tmp_path: Path) -> None:
    long, short = group("a", prompt(40), n=2, max_tokens=14).samples
    short.params = dataclasses.replace(short.params, max_tokens=6)
    engine = make_engine()
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=tmp_path) as rollout:
        rollout.submit([Group("a", [long, short])])
        for finished in (set(), {"a/1"}):
            rollout.collect()
            rollout.store.flush()
            engine.tiers.close()
            assert {s.id for s in (long, short) if s.is_done} == finished
            named = rows(tmp_path)
            assert named.keys() == {"a/0", "a/1"} - finished
            assert files(tmp_path) == {name for names in named.values() for name in names}
            rollout.store.check_integrity()


def test_files_go_only_after_a_durable_commit(
    make_engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may take the commits since the last durable one, and with them the rows that named newer files."""
    engine, store, commits, given = make_engine(), SampleStore(tmp_path, commit_every=0.0), [], []
    transaction, give_back = store._database.transaction, Part.give_back

    def logged(*, durable: bool) -> Any:
        commits.append(durable)
        return transaction(durable=durable)

    def checked(part: Part) -> None:
        given.append(commits[-1])
        give_back(part)

    monkeypatch.setattr(store._database, "transaction", logged)
    monkeypatch.setattr(Part, "give_back", checked)
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=store) as rollout:
        rollout.submit(batch())
        for _ in range(2):
            rollout.collect()
            engine.tiers.flush()
            store.commit()
    assert len(given) >= 3 and all(given)


def test_thrown_away(make_engine: EngineMaker, tmp_path: Path) -> None:
    with Rollout(make_engine(), strategy=TokenBudget(TOKENS, per="sample"), store=tmp_path) as rollout:
        rollout.submit(batch())
        rollout.collect()
        rollout.store.flush()
        assert len(files(tmp_path)) == 4
        a, b = list(rollout.store)
        rollout.store.discard([a], "stale")
        rollout.engine.tiers.close()  # type: ignore[union-attr]
        assert rows(tmp_path).keys() == {"b/0"} and len(files(tmp_path)) == 1
        rollout.store.check_integrity()
        rollout.store.discard([b], "stale")
    assert files(tmp_path) == set()


def test_without_an_engine_files_go_too(make_engine: EngineMaker, tmp_path: Path) -> None:
    paused(make_engine, tmp_path)
    with SampleStore(tmp_path) as store:
        store.discard(list(store), "surplus")
        assert files(tmp_path) == set()


def test_no_commit_waits_for_a_write(make_engine: EngineMaker, tmp_path: Path, may_write: threading.Event) -> None:
    engine = make_engine()
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=tmp_path) as rollout:
        rollout.submit(batch())
        for _ in range(2):
            rollout.collect()
            rollout.store.commit()
            assert rows(tmp_path) == {}
        may_write.set()
        engine.tiers.flush()
        rollout.submit([make("c")])  # any later commit records them
        assert rows(tmp_path).keys() == {"a/0", "a/1", "b/0"}
        rollout.store.check_integrity()


def test_a_file_is_never_recorded_before_it_is_whole(
    make_engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every commit of a run, each row names files that are whole."""
    record_of = saved_kv_module.record_of
    checked = []

    def checking(snapshot: Any) -> str | None:
        for part in () if snapshot is None else snapshot.parts:
            assert snapshot_file.check_part(part.file) == part.header
            checked.append(part)
        return record_of(snapshot)

    monkeypatch.setattr("longtail.partial_rollout.store.record_of", checking)
    engine, store = make_engine(), SampleStore(tmp_path, commit_every=0.0)
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=store) as rollout:
        rollout.submit(batch())
        while len(store):
            rollout.collect()
            engine.tiers.flush()  # on a slow disk no file would be whole before the run ends
            store.commit()
    assert checked
