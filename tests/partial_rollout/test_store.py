"""The sample store: what it takes it gives back, each group once, every token in one line."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt
from tests.partial_rollout.store_helpers import finish, grow, make, raw, record, records

from longtail import Group, Rollout, Sample, SampleStore, SamplingParams, StoreError, TokenBudget
from longtail.partial_rollout.ledger import LINES, WASTED, Line
from longtail.partial_rollout.memory_tables import MemoryTables
from longtail.partial_rollout.repetition import RepetitionDetector

Where = Path | None


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    return tmp_path / "store" if request.param == "disk" else None


# ---- reopening


def test_reopened_after_every_iteration_a_rollout_ends_the_same(make_engine: EngineMaker, tmp_path: Path) -> None:
    def batch() -> list[Group]:
        return [group(f"g{i}", prompt(5 + i, i), n=2, max_tokens=m) for i, m in enumerate([3, 40, 17, 60])]

    plain = {s.id: s for s in generate(make_engine(), *batch())}
    handed: list[str] = []
    iterations = 0
    with Rollout(make_engine(max_num_seqs=3), store=tmp_path) as rollout:
        rollout.submit(batch())
    while True:
        # Each time a new engine: nothing but the directory leads from one iteration to the next.
        with Rollout(make_engine(max_num_seqs=3), strategy=TokenBudget(23), store=tmp_path) as rollout:
            assert rollout.iteration == iterations
            before = {s.id: record(s) for g in rollout.store for s in g.samples}
            groups = rollout.collect()
            for g in groups:
                handed.append(g.id)
                for sample in g.samples:
                    assert_same(sample, plain[sample.id])
            for sample in rollout.store.unfinished():
                assert sample.output_ids[: len(before[sample.id]["output_ids"])] == before[sample.id]["output_ids"]  # type: ignore[arg-type]
                assert sample.output_ids == plain[sample.id].output_ids[: len(sample.output_ids)]
            rollout.store.check_integrity(groups)
            iterations += 1
            if not len(rollout.store):
                break
    assert sorted(handed) == ["g0", "g1", "g2", "g3"] and iterations >= 8
    with SampleStore(tmp_path) as store:
        assert store.ledger.lines["trained"] == store.ledger.generated == 240
        assert store.ledger.beside["restored"] > 0 == store.ledger.beside["recomputed"]  # from the KV on disk
        again = [g for delivery in store.deliveries() for g in delivery.groups]
        assert [g.id for g in again] == handed
        for sample in (s for g in again for s in g.samples):
            assert_same(sample, plain[sample.id])


def test_reopened_at_every_commit(make_engine: EngineMaker, tmp_path: Path) -> None:
    """A copy of the files at any moment is a store (this is what a kill leaves), and continues to the same end."""
    plain = generate(make_engine(), group("a", prompt(9), n=2, max_tokens=12))
    engine = make_engine()
    store = SampleStore(tmp_path / "live", commit_every=0.0)
    rollout = Rollout(engine, store=store)
    rollout.submit([group("a", prompt(9), n=2, max_tokens=12)])
    step = engine.step
    copies: list[tuple[Path, list[int]]] = []

    def copying(**asked):
        out = step(**asked)
        store.commit()
        made = [len(s.output_ids) for g in store for s in g.samples]
        copies.append((shutil.copytree(tmp_path / "live", tmp_path / str(len(copies))), made))
        return out

    engine.step = copying  # type: ignore[method-assign]
    rollout.collect()
    store.close()
    assert len(copies) >= 12
    for directory, made in copies:
        with Rollout(make_engine(), store=directory) as resumed:
            resumed.store.check_balance()
            assert [len(s.output_ids) for g in resumed.store for s in g.samples] == made
            (g,) = resumed.collect()
            for got, expected in zip(g.samples, plain, strict=True):
                assert_same(got, expected)


def test_everything_of_a_sample_comes_back(tmp_path: Path) -> None:
    groups = [
        make("plain", n=3),
        make("params", temperature=0.0, top_k=5, stop=("a", "\u0436\n"), stop_token_ids=(3, 9), seed=2**63 - 1, n=2),
        Group("task", make("task").samples, {"question": "1 + 1?", "choices": [1, 2.5, None, True], "deep": {"x": []}}),
    ]
    mixed = Group("mixed", [])
    for i, seed in enumerate((0, 2**63 - 1, 2**63, 2**64 - 1)):
        own = SamplingParams(max_tokens=10 + i)
        mixed.samples.append(
            Sample(id=f"m{i}", group_id="mixed", index=i, prompt_ids=(1, i, 2**31 - 1), params=own, seed=seed)
        )
    groups.append(mixed)
    with SampleStore(tmp_path) as store:
        store.add(groups)
        a, b, c = groups[0].samples
        grow(a, 4)
        grow(a, 3, version=2)
        grow(a, 2, version=2, engine="other")
        a.logprobs[1], a.logprobs[2] = -math.inf, 5e-324
        a.reward = -0.0
        finish(b, 5, "stop")
        b.stop_reason, b.reward = "a \u0436", math.inf
        b.timings.submitted, b.timings.first_token, b.timings.finished, b.timings.running = 1.5, 2.25, 1e9 / 3, 0.1
        finish(c, 2, "error")
        c.status, c.failure, c.reward = "failed", "sampling token 2: NaN \udc80 \x00", math.nan
        finish(groups[1].samples[0], 3)
        groups[1].samples[0].stop_reason = 9
        store.watch(s for g in groups for s in g.samples)
        store.commit()
    a.status = groups[1].samples[1].status = "waiting"  # as nobody runs them
    a.status = "paused"
    c.failure = "sampling token 2: NaN \\udc80 \x00"
    b.reward, c.reward = math.inf, math.nan
    with SampleStore(tmp_path) as store:
        assert store.damages == []
        assert records(list(store)) == records(groups)
        assert [g.task for g in store] == [g.task for g in groups]
        assert [g.id for g in store] == ["plain", "params", "task", "mixed"]
        store.check_integrity()


def test_a_stored_sample_behaves_like_any(tmp_path: Path) -> None:
    import copy

    with SampleStore(tmp_path) as store:
        store.add([make("a", n=3)])
        for sample in store.unfinished():
            grow(sample, 4)
        store.watch(store.unfinished())
    with SampleStore(tmp_path) as store:
        first, second, third = store.unfinished()
        assert isinstance(first, Sample) and first.status == "paused"
        assert repr(copy.deepcopy(first)) == repr(first)  # before and after its tokens were looked at
        second.output_ids = [1, 2, 3, 4]  # set before it was read
        assert len(second.logprobs) == 4 and second.output_ids == [1, 2, 3, 4]
        grow(third, 2)
        third.check_integrity()
        assert third.output_ids == [100, 101, 102, 103, 104, 105] and len(third.segments) == 1
        with pytest.raises(AttributeError, match="no attribute 'tokens'"):
            _ = third.tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "bad", [object(), {1: 2}, {"a": {2.5: 1}}, [set()], {"x": b"bytes"}], ids=["object", "1", "2.5", "set", "bytes"]
)
def test_a_task_that_json_cannot_say(bad: object, tmp_path: Path) -> None:
    with SampleStore(tmp_path) as store:
        with pytest.raises(ValueError, match=r"group 'odd': task cannot be stored.*keep other objects yourself"):
            store.add([make("fine"), Group("odd", make("odd").samples, bad)])
        assert len(store) == 0 and "fine" not in store  # all or none
        store.add([make("fine")])
    with SampleStore() as memory:
        memory.add([Group("odd", make("odd").samples, bad)])
        finish(memory.unfinished()[0])
        (back,) = memory.complete()
        memory.hand_over([back])
        assert back.task is bad


# ---- once


def test_ids_stay_taken(where: Where) -> None:
    with SampleStore(where) as store:
        store.add([make("a"), make("b"), make("c")])
        a, b, _ = store
        finish(a.samples[0], 3)
        store.hand_over([a])
        store.discard([b], "surplus")
        store.prune(1)
        for name in ("a", "b", "c"):
            assert name in store
            with pytest.raises(ValueError, match=f"group id '{name}' was submitted before"):
                store.add([make("new"), make(name)])
        with pytest.raises(ValueError, match="sample id 'a/0' was submitted before"):
            twin = make("a").samples
            twin[0].group_id = "new"
            store.add([Group("new", twin)])
        assert "new" not in store and store.num_submitted == 3
    if where is not None:
        with SampleStore(where) as store:
            assert all(name in store for name in "abc") and [g.id for g in store] == ["c"]
            with pytest.raises(ValueError, match="group id 'a' was submitted before"):
                store.add([make("a")])


def test_names_that_a_reopened_rollout_gives_are_free(make_engine: EngineMaker, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for expected in (["g0", "g1"], ["g2", "g3"]):
        with Rollout(make_engine(), store=tmp_path) as rollout:
            assert [g.id for g in rollout.submit([prompt(4), prompt(5)], params)] == expected


def test_only_complete_groups_of_the_store_leave(where: Where) -> None:
    with SampleStore(where) as store:
        store.add([make("a", n=2), make("b")])
        a, b = store
        finish(a.samples[0], 3)
        finish(b.samples[0], 1)
        with pytest.raises(ValueError, match="group 'a' is not complete"):
            store.hand_over([b, a])
        assert len(store) == 2 and store.last_delivery == 0
        assert store.hand_over([b, b]) == 1
        for call in (lambda: store.hand_over([b]), lambda: store.discard([b], "stale")):
            with pytest.raises(ValueError, match="group 'b' is not in the store"):
                call()
        with pytest.raises(ValueError, match="group 'a' is not in the store"):
            store.hand_over([make("a", n=2)])  # another of the same name
        with pytest.raises(ValueError, match="line must be one of stale"):
            store.discard([a], "trained")
        store.watch([a.samples[0]])
        assert store.hand_over([]) == 0 and store.last_delivery == 1 and store.iteration == 2
        store.check_balance()


@pytest.mark.parametrize("late", [False, True], ids=["before it is written", "after it is written"])
def test_an_interrupt_leaves_nothing_half_done(where: Where, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C in the middle of each call, which is then repeated."""

    @contextlib.contextmanager
    def interrupted(*, durable: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(transaction(durable=durable))
            yield
            if late:
                stack.close()
            raise KeyboardInterrupt

    with SampleStore(where) as store:
        transaction = store._database.transaction
        store.add([make("a"), make("b")])
        a, b = store
        finish(a.samples[0], 5)
        grow(b.samples[0], 4)
        store.watch([*a.samples, *b.samples])
        calls = (store.commit, lambda: store.hand_over([a]), lambda: store.settle(["a/0"], "stale"))
        for call in (*calls, lambda: store.discard([b], "surplus"), lambda: store.prune(0)):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(store._database, "transaction", interrupted)
                call()
            call()
            store.check_integrity()
        assert store.ledger.places == dict.fromkeys(LINES, 0) | {"pending": 0, "stale": 5, "surplus": 4}
        if where is not None:
            assert [g.id for d in store.deliveries(after=0) for g in d.groups] == ["a"]
            assert store._database.check() == []


def deliver(store: SampleStore, *names: str) -> int:
    store.add([make(name) for name in names])
    for sample in store.unfinished():
        finish(sample, 4)
    return store.hand_over(store.complete())


def test_a_trainer_asks_for_what_it_has_not_seen(tmp_path: Path) -> None:
    with SampleStore(tmp_path) as store:
        assert [deliver(store, "a", "b"), deliver(store, "c"), deliver(store, "d")] == [1, 2, 3]
    with SampleStore(tmp_path) as store:
        seen = [(d.number, d.iteration, [g.id for g in d.groups]) for d in store.deliveries(after=0)]
        assert seen == [(1, 0, ["a", "b"]), (2, 1, ["c"]), (3, 2, ["d"])]
        assert [d.number for d in store.deliveries(after=2)] == [3] and list(store.deliveries(after=3)) == []
        with pytest.raises(StoreError, match="the last delivery is 3, not 4; is this the right store"):
            store.deliveries(after=4)
        assert store.prune(2) == 3
        assert [d.number for d in store.deliveries()] == [3] == [d.number for d in store.deliveries(after=2)]
        with pytest.raises(StoreError, match="deliveries 2 to 2 were pruned"):
            store.deliveries(after=1)
    with SampleStore() as memory, pytest.raises(ValueError, match="a store in memory keeps no deliveries"):
        memory.deliveries()


def test_numbers_of_deliveries_are_never_used_again(tmp_path: Path) -> None:
    """Else a trainer that has seen delivery 2 would take the next one for known."""
    with SampleStore(tmp_path) as store:
        deliver(store, "a")
        deliver(store, "b")
        assert store.prune(10) == 2 and store.last_delivery == 2
    with SampleStore(tmp_path) as store:
        assert store.last_delivery == 2 and deliver(store, "c") == 3
        assert [d.number for d in store.deliveries(after=2)] == [3]


def test_pruning_takes_the_tokens_and_leaves_the_ledger(tmp_path: Path) -> None:
    with SampleStore(tmp_path) as store:
        deliver(store, "a", "b")
        store.add([make("gone"), make("open")])
        for sample in store.unfinished():
            grow(sample, 6)
        store.watch(store.unfinished())
        store.commit()
        store.discard([g for g in store if g.id == "gone"], "stale")
        before = store.ledger
        assert store.prune(0) == 1 and store.prune(0) == 0  # what was thrown away
        assert store.prune(1) == 2
        assert store.ledger == before and before.places == dict.fromkeys(LINES, 0) | {
            "pending": 6,
            "trained": 8,
            "stale": 6,
        }
        store.check_balance()
        store.settle(["a/0"], "zero-variance")  # also when it is pruned
        assert store.ledger.lines["zero-variance"] == 4
    with raw(tmp_path) as connection:
        assert connection.execute("SELECT count(*), sum(length(tokens)) FROM chunks").fetchone() == (1, 24)
    with SampleStore(tmp_path) as store:
        assert [len(s.output_ids) for s in store.unfinished()] == [6]


# ---- the ledger


def test_each_line_of_the_ledger(where: Where) -> None:
    reasons = {"stop": "trained", "length": "trained", "repetition": "repetition", "aborted": "aborted"}
    with SampleStore(where) as store:
        store.add([make("g", n=5), make("brought")])
        for tokens, (sample, reason) in enumerate(zip(store.unfinished(), reasons, strict=False), 1):
            finish(sample, tokens, reason)  # type: ignore[arg-type]
        failed, other = store.unfinished()
        finish(failed, 10, "error").status = "failed"
        grow(other, 7)
        store.watch(s for g in store for s in g.samples)
        assert store.ledger.generated == 0  # as of the last commit
        store.commit()
        assert store.ledger.places == dict.fromkeys(LINES, 0) | {"pending": 1 + 2 + 3 + 4 + 10 + 7}
        store.hand_over(store.complete())
        lines = dict.fromkeys(LINES, 0) | {"trained": 1 + 2, "repetition": 3, "aborted": 4, "failed": 10}
        assert store.ledger.lines == lines and store.ledger.pending == 7 and store.ledger.wasted == 17
        store.settle(["g/0", "g/2", "g/0"], "stale")
        assert store.ledger.lines == lines | {"trained": 2, "repetition": 0, "stale": 4}
        store.settle(["g/0"], "trained")  # and back
        assert store.ledger.lines == lines | {"repetition": 0, "stale": 3}
        for sample_id in ("brought/0", "unknown"):
            with pytest.raises(ValueError, match=f"sample_ids: '{sample_id}' was not handed over"):
                store.settle(["g/1", sample_id], "stale")
        assert store.ledger.lines["trained"] == 3  # all or none
        with pytest.raises(ValueError, match="line must be one of trained"):
            store.settle(["g/0"], "pending")  # type: ignore[arg-type]
        store.check_integrity()


@pytest.mark.parametrize("line", WASTED)
def test_what_is_thrown_away_stands_under_its_reason(where: Where, line: Line) -> None:
    with SampleStore(where) as store:
        store.add([make("g", n=2)])
        first, second = store.unfinished()
        finish(first, 3)
        grow(second, 5)
        store.watch([second])
        store.discard(list(store), line)
        assert store.ledger.places == dict.fromkeys(LINES, 0) | {"pending": 0, line: 8}
        store.commit()
        store.check_balance()
        assert len(store) == 0 and store.iteration == 0


def test_tokens_that_a_sample_brings_count(where: Where) -> None:
    brought = make("a", n=2)
    grow(brought.samples[0], 5)
    finish(brought.samples[1], 2)
    with SampleStore(where) as store:
        store.add([brought])
        assert (store.ledger.generated, store.ledger.pending) == (7, 7)
        store.check_balance()
    if where is not None:
        with SampleStore(where) as store:
            assert [len(s.output_ids) for g in store for s in g.samples] == [5, 2]
            assert [s.id for s in store.unfinished()] == ["a/0"]


def test_counts_beside_survive_until_they_are_written(where: Where) -> None:
    with SampleStore(where) as store:
        store.count(recomputed=3, restored=4)
        store.count(recomputed=10, rejected_drafts=1)
        assert store.ledger.beside["recomputed"] == 0
        store.commit()
        store.commit()
        assert store.ledger.beside == {"recomputed": 13, "restored": 4, "rejected-drafts": 1, "overrun": 0}
        with pytest.raises(ValueError, match="the ledger counts no recompute; it counts recomputed"):
            store.count(recompute=1)
        assert store.ledger.as_dict()["rejected-drafts"] == 1


def damage(tables: Any, statement: str) -> None:
    """On disk by the statement; in memory by what it says."""
    if not isinstance(tables, MemoryTables):
        tables.connection.execute(statement)
        return
    tokens = int(re.search(r"= (\d)", statement).group(1))  # type: ignore[union-attr]
    if "ledger" in statement:
        tables._tokens["generated"] = tokens
    else:
        tables._samples["a/0"] = tables._samples["a/0"]._replace(tokens=tokens)


def test_check_balance_sees_what_does_not_add_up(where: Where) -> None:
    with SampleStore(where) as store:
        store.add([make("a")])
        (sample,) = store.unfinished()
        grow(sample, 3)
        with pytest.raises(AssertionError, match="a/0 grew unseen"):
            store.check_balance()
        store.watch([sample])
        store.check_balance()
        store.commit()
        for statement in ("UPDATE ledger SET tokens = 4 WHERE name = 'generated'", "UPDATE samples SET num_tokens = 4"):
            damage(store._database, statement)
            with pytest.raises(AssertionError):
                store.check_balance()
            damage(store._database, statement.replace("4", "3"))
        store.check_balance()
        sample.output_ids.pop()
        with pytest.raises(AssertionError, match="lost tokens"):
            store.commit()
        sample.output_ids.append(102)


def test_the_ledger_of_a_rollout(make_engine: EngineMaker, where: Where) -> None:
    """Loops, an abort and pauses without KV, in memory and on disk."""
    model = make_model("llama", initializer_range=0.02)
    detector = RepetitionDetector(max_period=32, min_tokens=32, min_repeats=2, every=8)
    engine = make_engine(model, enable_prefix_caching=False)
    with Rollout(engine, strategy=TokenBudget(40), store=where, snapshots=False, repetition=detector) as rollout:
        rollout.submit([group(f"g{i}", prompt(5, i), temperature=0.0, max_tokens=100) for i in range(3)])
        rollout.submit([group("warm", prompt(5, 9), max_tokens=30)])
        groups = rollout.collect()
        engine.add(rollout.store.unfinished()[:1])
        rollout.store.watch(engine.abort([rollout.store.unfinished()[0].id]))
        while len(rollout.store):
            groups += rollout.collect()
            rollout.store.check_integrity(groups)
        ends = {g.id: (g.samples[0].finish_reason, len(g.samples[0].output_ids)) for g in groups}
        ledger = rollout.store.ledger
        assert ledger.lines["repetition"] == sum(n for reason, n in ends.values() if reason == "repetition") > 0
        assert ledger.lines["aborted"] == ends["g0"][1] > 0 and ends["g0"][0] == "aborted"
        assert ledger.lines["trained"] == sum(n for reason, n in ends.values() if reason in ("length", "stop")) > 0
        assert ledger.pending == 0 and ledger.generated == engine.stats().num_output_tokens
        assert ledger.beside["recomputed"] == engine.stats().num_recomputed_tokens > 0


# ---- versions


def test_a_trainer_comes_back_with_weights_of_a_later_version(make_engine: EngineMaker, tmp_path: Path) -> None:
    later = make_model("llama", seed=1)
    with Rollout(make_engine(), strategy=TokenBudget(20), store=tmp_path) as rollout:
        rollout.submit([group("a", prompt(9), max_tokens=50)])
        rollout.collect()
        rollout.update_weights(later.state_dict(), 3)
        rollout.collect()
    with Rollout(make_engine(later, version=3), store=tmp_path) as rollout:
        assert rollout.engine.version == 3
        (g,) = rollout.collect()
    (sample,) = g.samples
    assert sample.versions == [0] * 20 + [3] * 30
    kinds = [(s.start, s.end, s.version, s.kv) for s in sample.segments]
    assert kinds == [(0, 20, 0, "computed"), (20, 40, 3, "recomputed"), (40, 50, 3, "restored")]

    plain = Rollout(make_engine(), strategy=TokenBudget(20))
    plain.submit([group("a", prompt(9), max_tokens=50)])
    plain.collect()
    plain.update_weights(later.state_dict(), 3)
    (expected,) = plain.collect(wait=True)
    assert_same(sample, expected.samples[0])


def test_an_engine_that_is_older_than_the_samples_says_so(make_engine: EngineMaker, tmp_path: Path) -> None:
    with Rollout(make_engine(version=2), strategy=TokenBudget(5), store=tmp_path) as rollout:
        rollout.submit([group("a", prompt(9), max_tokens=10)])
        rollout.collect()
    with Rollout(make_engine(), store=tmp_path) as rollout:
        with pytest.raises(ValueError, match=r"sample a/0.*version 2, newer than the engine's 0.*version="):
            rollout.collect()
        assert len(rollout.store) == 1 and not rollout.engine.has_work
        rollout.store.check_integrity()


@pytest.mark.parametrize("version", [-1, True, 1.0, "3"])
def test_version_of_an_engine_is_checked(make_engine: EngineMaker, version: object) -> None:
    with pytest.raises(ValueError, match="version must be an integer of at least 0"):
        make_engine(version=version)
