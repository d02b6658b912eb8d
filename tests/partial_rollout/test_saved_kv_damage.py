"""Saved KV in a store: what a kill leaves, damage, other weights, and files that are not ours."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout import saved_kv_helpers as saved
from tests.partial_rollout.conftest import EngineMaker, assert_same, make_model
from tests.partial_rollout.saved_kv_helpers import TOKENS, batch, files, finish, paused, rows
from tests.partial_rollout.store_helpers import raw

from longtail import Rollout, Sample, SampleStore, StoreError, TokenBudget
from longtail.events import Event
from longtail.kv_manager import snapshot_file
from longtail.kv_manager import tiers as tiers_module
from longtail.kv_manager.tier_config import TierConfig

# ---- what a kill leaves


def test_a_kill_at_every_moment(
    make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the directory is what a process leaves that is killed there: at every statement, write, rename and
    removal of two iterations. Each is opened and run to its end."""
    directory, copies = tmp_path / "store", tmp_path / "copies"
    engine = make_engine()
    count = 0

    def copy() -> None:
        nonlocal count
        shutil.copytree(directory, copies / str(count), ignore_dangling_symlinks=True)
        count += 1

    def then_copied(module: Any, name: str) -> None:
        call = getattr(module, name)

        def both(*arguments: Any, **keywords: Any) -> Any:
            result = call(*arguments, **keywords)
            copy()
            return result

        monkeypatch.setattr(module, name, both)

    with Rollout(
        engine, strategy=TokenBudget(TOKENS, per="sample"), store=SampleStore(directory, commit_every=3600)
    ) as rollout:
        rollout.submit(batch())
        engine.tiers._thread("write").shutdown()
        # The writes happen where they are asked for, so that this thread alone changes the directory.
        monkeypatch.setattr(engine.tiers, "_thread", lambda name: Inline())
        rollout.collect()
        rollout.store._database.connection.set_trace_callback(lambda statement: copy())
        then_copied(snapshot_file, "_write")
        then_copied(os, "replace")
        then_copied(tiers_module, "_remove")
        rollout.collect()
        rollout.store.flush()
        rollout.collect()
        rollout.store._database.connection.set_trace_callback(None)
        monkeypatch.undo()
    assert count >= 60
    seen = set()
    for i in range(count):
        found = finish(make_engine(), copies / str(i), plain)
        assert found["damages"] == [] and found["refused"] == {}
        assert all(kinds[-1] == "restored" for kinds in found["kinds"].values() if len(kinds) > 1)
        seen |= set(found["restored"].values())
    assert len(seen) >= 2


class Inline:
    """A thread pool without threads."""

    def submit(self, work: Callable[..., object], *arguments: object) -> Future:
        done: Future = Future()
        done.set_result(work(*arguments))
        return done


# ---- damage between two lives


DAMAGE: dict[str, tuple[Callable[[Path], None], set[str], str]] = {
    "deleted": (saved.delete, {"a/0"}, "is missing; it continues from its tokens"),
    "truncated": (saved.truncate, {"a/0"}, "refused: "),
    "shortened": (saved.shorten, {"a/0"}, "refused: "),
    "flipped": (saved.flip_a_bit, {"a/0"}, "refused: "),
    "swapped": (saved.swap, {"a/0", "a/1"}, "refused: "),
    "row-flipped": (saved.flip_the_row, {"a/0"}, "the record of its saved KV is damaged; it continues from its tokens"),
    "row-digit": (saved.a_wrong_digit, {"a/0"}, "the record of its saved KV is damaged; it continues from its tokens"),
    "row-no-text": (saved.no_text, {"a/0"}, "the record of its saved KV is damaged; it continues from its tokens"),
    "row-escapes": (saved.escape, {"a/0"}, "'../samples.sqlite' is not the name of a KV file; it continues"),
    "row-of-another": (saved.of_another_sample, {"a/0"}, "refused: "),
    "row-foreign": (saved.foreign_record, {"a/0"}, "its record is damaged"),
    "link": (saved.link, {"a/0"}, "is missing; it continues from its tokens"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_between_two_lives(
    make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample], kind: str
) -> None:
    damage, hit, text = DAMAGE[kind]
    paused(make_engine, tmp_path)
    damage(tmp_path)
    events: list[Event] = []
    engine = make_engine(enable_prefix_caching=False, listener=events.append)
    with Rollout(engine, store=tmp_path) as rollout:
        store = rollout.store
        samples = {s.id: s for g in rollout.collect() for s in g.samples}
        for sample in samples.values():
            assert_same(sample, plain[sample.id])
            assert [s.kv for s in sample.segments][1] == ("recomputed" if sample.id in hit else "restored"), sample.id
        assert samples.keys() == plain.keys()
        refused = {e.sample: e.detail for e in events if e.kind == "restore" and e.detail}
        told = dict(d.removeprefix("sample ").split(": ", 1) for d in store.damages) | refused
        assert told.keys() == hit and all(text in t for t in told.values()), told
        assert store.ledger.beside["recomputed"] == 43 * len(hit)
        assert store.ledger.beside["restored"] == 98 - 43 * len(hit)
        assert store.ledger.lines["trained"] == 38 == store.ledger.generated
        store.check_integrity()
    left = {f.name for f in (tmp_path / "kv").iterdir()}
    assert rows(tmp_path) == {} and (len(left) == 1 if kind == "link" else not left)  # a link is not ours to remove


def test_other_weights(make_engine: EngineMaker, tmp_path: Path) -> None:
    paused(make_engine, tmp_path)
    events: list[Event] = []
    engine = make_engine(make_model("llama", seed=1), enable_prefix_caching=False, listener=events.append)
    with Rollout(engine, store=tmp_path) as rollout:
        samples = [s for g in rollout.collect() for s in g.samples]
        assert {s.segments[1].kv for s in samples} == {"recomputed"}
        refused = {e.sample: e.detail for e in events if e.kind == "restore"}
        assert refused.keys() == {"a/0", "a/1", "b/0"}
        assert all("is of other weights" in detail for detail in refused.values())
        assert rollout.store.ledger.beside == {"recomputed": 98, "restored": 0, "rejected-drafts": 0, "overrun": 0}


def test_an_update_between_two_lives(make_engine: EngineMaker, tmp_path: Path) -> None:
    weights = {name: p.detach() for name, p in make_model("llama", seed=1).named_parameters()}
    paused(make_engine, tmp_path)
    for on_update, kv in (("recompute", "recomputed"), ("keep", "kept")):
        shutil.copytree(tmp_path, copy := tmp_path.with_name(f"{tmp_path.name}-{on_update}"))
        engine = make_engine(kv_on_update=on_update)
        with Rollout(engine, store=copy) as rollout:
            rollout.update_weights(weights, 1)
            samples = [s for g in rollout.collect() for s in g.samples]
            assert {s.segments[1].kv for s in samples} == {kv}


@pytest.mark.parametrize(
    ("written", "asked", "kv"),
    [
        ("int8", "int8", "approximate"),
        ("fp8", "fp8", "approximate"),
        ("fp8", "int8", "approximate"),
        ("int8", "exact", "recomputed"),
        ("fp8", "exact", "recomputed"),
    ],
)
def test_loss_comes_back_where_it_is_asked_for(
    make_engine: EngineMaker, tmp_path: Path, written: str, asked: str, kv: str
) -> None:
    engine = make_engine(snapshot_encoding=written)
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=tmp_path) as rollout:
        rollout.submit(batch())
        rollout.collect()
    with Rollout(make_engine(snapshot_encoding=asked), store=tmp_path) as rollout:
        samples = [s for g in rollout.collect() for s in g.samples]
        assert {s.segments[1].kv for s in samples} == {kv}


def test_damaged_tokens_drop_the_saved_kv(make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample]) -> None:
    paused(make_engine, tmp_path, iterations=2)
    with raw(tmp_path) as connection:
        connection.execute("UPDATE chunks SET checksum = 0 WHERE sample_id = 1 AND start > 0")
    with Rollout(make_engine(), store=tmp_path) as rollout:
        assert len(rollout.store.damages) == 1 and "it continues from token" in rollout.store.damages[0]
        assert rows(tmp_path).keys() == {"a/1", "b/0"} and len(files(tmp_path)) == 3
        for sample in (s for g in rollout.collect() for s in g.samples):
            assert_same(sample, plain[sample.id])


# ---- what is not ours


def test_opening_removes_what_no_row_names_and_nothing_else(
    make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample]
) -> None:
    paused(make_engine, tmp_path)
    kv, outside = tmp_path / "kv", tmp_path / ("c" * 32 + ".safetensors")
    outside.write_text("outside")
    ours = ["a" * 32 + ".safetensors", "b" * 32 + ".safetensors.tmp"]
    others = ["note.txt", "model.safetensors", "a" * 31 + ".safetensors", "A" * 32 + ".safetensors", "a.tmp"]
    for name in (*ours, *others):
        (kv / name).write_text("x")
    (kv / ("d" * 32 + ".safetensors")).mkdir()
    (kv / ("e" * 32 + ".safetensors")).symlink_to(outside)
    with SampleStore(tmp_path) as store:
        assert store.damages == []
    named = {name for names in rows(tmp_path).values() for name in names}
    left = files(tmp_path) - named
    assert left == {*others, "d" * 32 + ".safetensors", "e" * 32 + ".safetensors"}
    assert named <= files(tmp_path) and outside.read_text() == "outside"


def test_a_link_for_a_directory_is_refused(make_engine: EngineMaker, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    paused(make_engine, directory)
    (directory / "kv").rename(tmp_path / "moved")
    (directory / "kv").symlink_to(tmp_path / "moved")
    count = len(list((tmp_path / "moved").iterdir()))
    with pytest.raises(StoreError, match="is a symbolic link"):
        SampleStore(directory)
    assert len(list((tmp_path / "moved").iterdir())) == count


def test_tiers_that_write_elsewhere(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine(tiers=TierConfig(disk=tmp_path / "mine"))
    with pytest.raises(ValueError, match=r"saved KV goes to .*mine already"):
        Rollout(engine, store=tmp_path / "store")
    SampleStore(tmp_path / "store").close()  # and it is free again
    with Rollout(make_engine(tiers=TierConfig(disk=tmp_path / "store" / "kv")), store=tmp_path / "store"):
        pass


def test_one_engine_for_two_stores(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine()
    with Rollout(engine, store=tmp_path / "a"):
        with pytest.raises(ValueError, match="close the store that uses this engine"):
            Rollout(engine, store=tmp_path / "b")
        with Rollout(engine) as in_memory:
            in_memory.submit(batch())
            assert len(in_memory.collect()) == 2
    with Rollout(engine, store=tmp_path / "b"):
        assert engine.tiers.directory == tmp_path / "b" / "kv"
