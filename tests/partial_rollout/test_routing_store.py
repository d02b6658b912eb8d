"""Routed experts in a store: saved as they grow, read back as they were, damage named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.partial_rollout.store_helpers import finish, flip, grow, make, raw

from longtail import Group, RoutedExperts, Sample, SampleStore
from longtail.partial_rollout.records import checksum_of

LAYERS, TOP_K = 2, 3


def route(sample: Sample, shift: int = 0) -> None:
    """Up to the last token but one, as an engine does; rows that depend on the sample and the position."""
    if sample.routed_experts is None:
        sample.routed_experts = RoutedExperts(LAYERS, TOP_K)
    start = positions(sample)
    rows = np.arange(start, sample.num_tokens - 1)[:, None, None] + 100 * sample.index + shift
    sample.routed_experts.extend((rows + np.zeros((1, LAYERS, TOP_K))).astype(np.int16).tobytes())


def positions(sample: Sample) -> int:
    assert sample.routed_experts is not None
    return len(sample.routed_experts)


def open_group(directory: Path) -> Group:
    """Two samples of a prompt of three tokens, saved at four and at ten output tokens; a third without routing."""
    group = make("a", n=3)
    with SampleStore(directory) as store:
        store.add([group])
        store.watch(group.samples)
        for tokens in (4, 6):
            for sample in group.samples:
                grow(sample, tokens)
                if sample.index < 2:
                    route(sample)
            store.commit()
    return group


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    group = open_group(tmp_path)
    with raw(tmp_path) as connection:  # what was gained, not everything again
        starts = connection.execute("SELECT sample_id, start FROM routing ORDER BY 1, 2").fetchall()
        assert starts == [(1, 0), (1, 6), (2, 0), (2, 6)]
    with SampleStore(tmp_path) as store:
        (again,) = store
        for got, want in zip(again.samples, group.samples, strict=True):
            assert got.routed_experts == want.routed_experts
            assert (want.routed_experts is None) == (want.index == 2)
        assert positions(again.samples[0]) == 12
        store.watch(again.samples)
        for sample in again.samples[:2]:  # and grows on
            finish(sample, 5)
            route(sample)
        store.commit()
        assert not store._database.check()
        finish(again.samples[2])
        store.hand_over([again])
        assert store._database.query("SELECT sample_id, start FROM routing") == [(1, 0), (2, 0)]
        (delivery,) = store.deliveries()
        assert np.asarray(delivery.groups[0].samples[1].routed_experts)[:, 1, 2].tolist() == list(range(100, 117))
        store.prune(1)
        assert store._database.query("SELECT count(*) FROM routing") == [(0,)]


@pytest.mark.parametrize(("start", "left"), [(0, 0), (6, 6)])
@pytest.mark.parametrize("column", ["experts", "layers", "checksum"])
def test_a_damaged_row_is_named_and_routed_again(tmp_path: Path, start: int, left: int, column: str) -> None:
    open_group(tmp_path)
    flip(tmp_path, "routing", column, f"sample_id = 2 AND start = {start}")
    with SampleStore(tmp_path) as store:
        assert store.damages == [
            f"sample a/1: the routing of positions {left} to 11 is damaged; these positions are routed again when it "
            "continues"
        ]
        first, second, _ = store.unfinished()
        assert positions(first) == 12 and len(second.output_ids) == 10
        assert second.routed_experts is None if left == 0 else positions(second) == left
        route(second)
        store.watch([second])
        grow(second, 1)
        route(second)
        store.commit()
        assert not store._database.check()
    with SampleStore(tmp_path) as store:
        assert positions(store.unfinished()[1]) == 13


def test_a_finished_sample_with_damaged_routing_has_none(tmp_path: Path) -> None:
    group = open_group(tmp_path)
    with SampleStore(tmp_path) as store:
        (group,) = store
        store.watch(group.samples)
        finish(group.samples[0])
        store.commit()
    flip(tmp_path, "routing", "experts", "sample_id = 1 AND start = 0")
    with SampleStore(tmp_path) as store:
        (group,) = store
        assert group.samples[0].status == "finished" and len(group.samples[0].output_ids) == 10
        assert group.samples[0].routed_experts is None
        assert "sample a/0: the routing of positions 0 to 11 is damaged; it has no routed_experts" in store.damages


def test_tokens_that_are_lost_take_their_routing_along(tmp_path: Path) -> None:
    open_group(tmp_path)
    flip(tmp_path, "chunks", "tokens", "sample_id = 1 AND start = 4")
    with SampleStore(tmp_path) as store:
        sample = store.unfinished()[0]
        assert len(sample.output_ids) == 4 and positions(sample) == 6


def test_a_store_of_schema_1_gets_the_table(tmp_path: Path) -> None:
    with SampleStore(tmp_path) as store:
        store.add([make("a")])
    with raw(tmp_path) as connection:
        connection.execute("DROP TABLE routing")
        connection.execute("DROP TABLE cuts")
        connection.execute("DROP TABLE removed")
        connection.execute("DROP TABLE grades")
        for column in ("multi_turn", "num_observed", "turn_ended", "masked", "num_masked", "attempts", "grade_failure"):
            connection.execute(f"ALTER TABLE samples DROP COLUMN {column}")
        for column in ("grader", "grade_details"):
            connection.execute(f"ALTER TABLE samples DROP COLUMN {column}")
        identity = "name, position, seed, prompt, params"
        state = "status, finish_reason, stop_reason, failure, num_tokens, segments, submitted, first_token, finished"
        for columns, checksum in ((identity, "identity"), (f"{state}, running, reward", "checksum")):
            for row, *values in connection.execute(f"SELECT id, {columns} FROM samples").fetchall():
                connection.execute(f"UPDATE samples SET {checksum} = ? WHERE id = ?", (checksum_of(values), row))
        connection.execute("PRAGMA user_version = 1")
    with SampleStore(tmp_path) as store:
        (sample,) = store.unfinished()
        store.watch([sample])
        grow(sample, 3)
        route(sample)
        store.commit()
        assert not store._database.check()


def test_a_cut_takes_its_routing_along(tmp_path: Path) -> None:
    """And what is routed anew behind it is what is read back."""
    with SampleStore(tmp_path) as store:
        store.add([make("a")])
        (sample,) = store.unfinished()
        for tokens in (3, 4):
            grow(sample, tokens)
            route(sample)
            store.watch([sample])
            store.commit()
        sample.status = "paused"
        store.cut(sample, 2, "stale")
        assert positions(sample) == 3 + 2 - 1
        grow(sample, 5)
        route(sample, 7)
        store.watch([sample])
        store.commit()
        want = sample.routed_experts
        assert positions(sample) == 3 + 7 - 1
        assert not store._database.check()
    with SampleStore(tmp_path) as store:
        (sample,) = store.unfinished()
        assert (sample.routed_experts, store.damages) == (want, [])
        store.cut(sample, 0, "stale")
    with SampleStore(tmp_path) as store:
        assert not store._database.check()
        assert not store._database.query("SELECT * FROM routing")
