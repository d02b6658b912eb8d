"""Saved KV in a store: samples continue from it in a later process, and every file has a row or is removed."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt
from tests.partial_rollout.store_helpers import flip, make, raw
from tests.partial_rollout.test_store_full import fill, small_disk  # noqa: F401

from longtail import Group, NativeEngine, Rollout, Sample, SampleStore, StoreError, TokenBudget
from longtail.events import Event
from longtail.kv_manager import snapshot_file
from longtail.kv_manager import tiers as tiers_module
from longtail.kv_manager.part import Part
from longtail.kv_manager.tier_config import TierConfig
from longtail.partial_rollout import saved_kv as saved_kv_module
from longtail.partial_rollout.saved_kv import names_in, parse

BLOCK = 2 * 2 * 2 * 16 * 16 * 4  # bytes
TOKENS = 4
"""Of each sample in an iteration."""


def batch() -> list:
    """Two samples that share a prompt of two blocks, and one whose prompt fills no block."""
    return [group("a", prompt(40), n=2, max_tokens=14), group("b", prompt(9, 1), max_tokens=10)]


@pytest.fixture(scope="module")
def plain(make_engine: EngineMaker) -> dict[str, Sample]:
    return {s.id: s for s in generate(make_engine(), *batch())}


def rows(directory: Path) -> dict[str, tuple[str, ...]]:
    """Files that each sample's row names."""
    with raw(directory) as connection:
        query = "SELECT name, CAST(snapshot AS BLOB) FROM samples WHERE snapshot IS NOT NULL"
        return {name: names_in(parse(text)) for name, text in connection.execute(query).fetchall()}


def files(directory: Path) -> set[str]:
    folder = directory / "kv"
    return {f.name for f in folder.iterdir()} if folder.exists() else set()


def paused(make_engine: EngineMaker, directory: Path, iterations: int = 1) -> None:
    with Rollout(make_engine(), strategy=TokenBudget(TOKENS, per="sample"), store=directory) as rollout:
        rollout.submit(batch())
        for _ in range(iterations):
            rollout.collect()
        rollout.store.check_integrity()


def finish(engine: NativeEngine, directory: Path, plain: dict[str, Sample]) -> dict[str, Any]:
    """Opens, runs to the end, compares with the undisturbed run. -> what was seen."""
    events: list[Event] = []
    engine.listener = events.append
    with Rollout(engine, store=directory) as rollout:
        store = rollout.store
        store.check_integrity()
        named = rows(directory)
        assert files(directory) == {name for names in named.values() for name in names}, "a file without a row, or none"
        found: dict[str, Any] = {"damages": list(store.damages), "before": store.ledger.beside}
        rollout.collect(wait=True)
        samples = {s.id: s for d in store.deliveries(after=0) for g in d.groups for s in g.samples}
        assert samples.keys() == plain.keys()
        for sample in samples.values():
            assert_same(sample, plain[sample.id])
        found["kinds"] = {name: [s.kv for s in sample.segments] for name, sample in samples.items()}
        found["refused"] = {e.sample: e.detail for e in events if e.kind == "restore" and e.detail}
        found["restored"] = {e.sample: e.num_tokens for e in events if e.kind == "restore" and not e.detail}
        assert store.ledger.generated == sum(len(s.output_ids) for s in plain.values()) == store.ledger.lines["trained"]
        found["beside"] = store.ledger.beside
        store.check_integrity()
    assert rows(directory) == {} and files(directory) == set()
    return found


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
    assert found["beside"] == {"recomputed": 0, "restored": 98, "rejected-drafts": 0}


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

    none = {"recomputed": 0, "restored": 0, "rejected-drafts": 0}
    assert life(True, 1) == none  # 9 + 4 tokens known, KV of 12
    assert life(True, 1) == none | {"restored": 12}  # 9 + 8 known, KV of 16
    # Restored 16, to 9 + 10 known, and then it is finished.
    assert life(True, 1) == none | {"restored": 28}
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

    assert life() == {"recomputed": 0, "restored": 0, "rejected-drafts": 0}  # 13 known, KV of 12
    (names,) = rows(tmp_path).values()
    assert life(snapshots=False) == {"recomputed": 12, "restored": 0, "rejected-drafts": 0}  # 17 known, KV dropped
    assert list(rows(tmp_path).values()) == [names]  # still a valid prefix
    assert life() == {"recomputed": 16, "restored": 12, "rejected-drafts": 0}  # 12 restored, 4 computed again
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

        def copying():
            if all(s.status == "running" for s in rollout.store.unfinished()):  # not waiting for the disk
                steps.append(1)
            if len(steps) == 3 and not copy.exists():
                shutil.copytree(directory, copy)
                assert engine.tiers.host_used == 2 * BLOCK  # only the prompt that siblings may ask for
            return step()

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


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write of a file until it is set."""
    write, event = snapshot_file.write_part, threading.Event()

    def held(*arguments: Any) -> Path:
        assert event.wait(30)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(tiers_module, "write_part", held)
        yield event
        event.set()


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


def own(directory: Path, sample: str) -> Path:
    return directory / "kv" / rows(directory)[sample][-1]


def delete(directory: Path) -> None:
    own(directory, "a/0").unlink()


def truncate(directory: Path) -> None:
    os.truncate(own(directory, "a/0"), 1000)


def shorten(directory: Path) -> None:
    file = own(directory, "a/0")
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(directory: Path) -> None:
    file = own(directory, "a/0")
    data = bytearray(file.read_bytes())
    data[-700] ^= 4
    file.write_bytes(data)


def swap(directory: Path) -> None:
    first, second = own(directory, "a/0"), own(directory, "a/1")
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def flip_the_row(directory: Path) -> None:
    flip(directory, "samples", "snapshot", "name = 'a/0'", byte=200, bit=1)


def a_wrong_digit(directory: Path) -> None:
    with raw(directory) as connection:
        (text,) = connection.execute("SELECT snapshot FROM samples WHERE name = 'a/0'").fetchone()
        assert ": 43," in text
        changed = text.replace(": 43,", ": 42,")
        connection.execute("UPDATE samples SET snapshot = ? WHERE name = 'a/0'", (changed,))


def no_text(directory: Path) -> None:
    with raw(directory) as connection:
        connection.execute("UPDATE samples SET snapshot = CAST(x'7bff7d' AS TEXT) WHERE name = 'a/0'")


def escape(directory: Path) -> None:
    """A record that leads out of the directory, with the right checksum."""
    import json
    import zlib

    with raw(directory) as connection:
        (text,) = connection.execute("SELECT snapshot FROM samples WHERE name = 'a/0'").fetchone()
        record = json.loads(json.loads(text)["snapshot"])
        record["parts"][1]["file"] = "../samples.sqlite"
        inner = json.dumps(record)
        text = json.dumps({"checksum": zlib.crc32(inner.encode()), "snapshot": inner})
        connection.execute("UPDATE samples SET snapshot = ? WHERE name = 'a/0'", (text,))


def of_another_sample(directory: Path) -> None:
    """A sound record, of another sample."""
    with raw(directory) as connection:
        (text,) = connection.execute("SELECT snapshot FROM samples WHERE name = 'a/1'").fetchone()
        connection.execute("UPDATE samples SET snapshot = ? WHERE name = 'a/0'", (text,))


def foreign_record(directory: Path) -> None:
    import json
    import zlib

    with raw(directory) as connection:
        inner = json.dumps({"parts": [], "layouts": 7, "num_tokens": 3})
        text = json.dumps({"checksum": zlib.crc32(inner.encode()), "snapshot": inner})
        connection.execute("UPDATE samples SET snapshot = ? WHERE name = 'a/0'", (text,))


def link(directory: Path) -> None:
    file = own(directory, "a/0")
    file.rename(directory / "elsewhere")
    file.symlink_to(directory / "elsewhere")


DAMAGE: dict[str, tuple[Callable[[Path], None], set[str], str]] = {
    "deleted": (delete, {"a/0"}, "is missing; it continues from its tokens"),
    "truncated": (truncate, {"a/0"}, "refused: "),
    "shortened": (shorten, {"a/0"}, "refused: "),
    "flipped": (flip_a_bit, {"a/0"}, "refused: "),
    "swapped": (swap, {"a/0", "a/1"}, "refused: "),
    "row-flipped": (flip_the_row, {"a/0"}, "the record of its saved KV is damaged; it continues from its tokens"),
    "row-digit": (a_wrong_digit, {"a/0"}, "the record of its saved KV is damaged; it continues from its tokens"),
    "row-no-text": (no_text, {"a/0"}, "the record of its saved KV is damaged; it continues from its tokens"),
    "row-escapes": (escape, {"a/0"}, "'../samples.sqlite' is not the name of a KV file; it continues"),
    "row-of-another": (of_another_sample, {"a/0"}, "refused: "),
    "row-foreign": (foreign_record, {"a/0"}, "its record is damaged"),
    "link": (link, {"a/0"}, "is missing; it continues from its tokens"),
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
        assert rollout.store.ledger.beside == {"recomputed": 98, "restored": 0, "rejected-drafts": 0}


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


def test_int8_comes_back_as_int8(make_engine: EngineMaker, tmp_path: Path) -> None:
    for encoding, kv in (("int8", "approximate"), ("exact", "recomputed")):
        directory = tmp_path / encoding
        engine = make_engine(snapshot_encoding="int8")
        with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=directory) as rollout:
            rollout.submit(batch())
            rollout.collect()
        with Rollout(make_engine(snapshot_encoding=encoding), store=directory) as rollout:
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


# ---- a full disk


@pytest.mark.parametrize("kind", ["injected", "file system"])
def test_no_space_for_saved_kv(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_engine: EngineMaker,
    plain: dict[str, Sample],
    may_write: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = tmp_path if kind == "injected" else request.getfixturevalue("small_disk")
    directory, engine = disk / "store", make_engine(tiers=TierConfig(disk_spare_bytes=0))
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=directory) as rollout:
        rollout.submit(batch())
        rollout.collect()
        if kind == "injected":
            monkeypatch.setattr(snapshot_file, "_write", half_a_write)
        else:
            fill(disk / "ballast")
        may_write.set()
        engine.tiers.flush()
        assert len(engine.tiers.failures) == 4 and all("No space left" in text for text in engine.tiers.failures)
        assert files(directory) == set()
        if kind == "file system":
            (disk / "ballast").unlink()
        rollout.collect()  # in this process it goes on from host memory
        engine.tiers.flush()
        assert rollout.store.ledger.beside["recomputed"] == 0 < rollout.store.ledger.beside["restored"]
        rollout.store.check_integrity()
    if kind == "injected":
        monkeypatch.setattr(snapshot_file, "_write", real_write)
    assert rows(directory).keys() == (set() if kind == "injected" else plain.keys())
    found = finish(make_engine(enable_prefix_caching=False), directory, plain)
    assert found["kinds"]["a/0"] == ["computed", "restored", *(["recomputed"] if kind == "injected" else [])]
    assert found["beside"]["recomputed"] == (2 * 47 + 16 if kind == "injected" else 0)


def test_tokens_come_first_on_a_disk_that_is_nearly_full(
    make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved KV leaves disk_spare_bytes free, and is written when there is room."""
    usage, engine = shutil.disk_usage, make_engine(tiers=TierConfig(disk_spare_bytes=100_000))
    free = 100_000
    monkeypatch.setattr(tiers_module.shutil, "disk_usage", lambda path: usage(path)._replace(free=free))  # type: ignore[attr-defined]
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=tmp_path) as rollout:
        rollout.submit(batch())
        rollout.collect()
        assert {text.split(" (")[1] for text in engine.tiers.failures} == {
            f"{free} are free, and disk_spare_bytes is 100000)"
        }
        rollout.store.flush()
        assert rows(tmp_path) == {}
        monkeypatch.undo()
        rollout.store.commit(durable=True)
        rollout.store.flush()
        assert rows(tmp_path).keys() == plain.keys()
        rollout.store.check_integrity()
    finish(make_engine(), tmp_path, plain)


real_write = snapshot_file._write


def half_a_write(descriptor: int, data: memoryview) -> None:
    os.write(descriptor, data[: len(data) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_row_that_cannot_be_written_does_not_lose_the_file(
    make_engine: EngineMaker, tmp_path: Path, plain: dict[str, Sample], may_write: threading.Event
) -> None:
    engine = make_engine()
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=tmp_path) as rollout:
        rollout.submit(batch())
        rollout.collect()
        may_write.set()
        engine.tiers.flush()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(StoreError):
            patch.setattr(rollout.store._database, "save_kv", broken)
            rollout.store.commit()
        assert rows(tmp_path) == {} and len(files(tmp_path)) == 4
        rollout.store.commit()
        assert len(rows(tmp_path)) == 3
        rollout.store.check_integrity()
        rollout.store.flush()
        assert len(files(tmp_path)) == 4
    finish(make_engine(), tmp_path, plain)


def test_a_file_whose_row_could_not_be_written_goes_with_its_sample(
    make_engine: EngineMaker, tmp_path: Path, may_write: threading.Event
) -> None:
    engine = make_engine()
    with Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=tmp_path) as rollout:
        rollout.submit(batch())
        rollout.collect()
        may_write.set()
        engine.tiers.flush()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(StoreError):
            patch.setattr(rollout.store._database, "save_kv", broken)
            rollout.store.commit()
        rollout.store.discard(list(rollout.store), "stale")
        engine.tiers.close()
        assert files(tmp_path) == set() and engine.tiers.disk_used == 0


def broken(records: object) -> None:
    raise OSError(errno.EIO, "broken")


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
    store = SampleStore(tmp_path, commit_every=0.0)
    with Rollout(make_engine(), strategy=TokenBudget(TOKENS, per="sample"), store=store) as rollout:
        rollout.submit(batch())
        while len(store):
            rollout.collect()
    assert checked
