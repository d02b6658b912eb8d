"""Stores of an older schema are brought up, and what was damaged in them stays so."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tests.partial_rollout.store_helpers import FILE, flip, grow, opened, raw, records

from longtail import StoreError
from longtail.partial_rollout.database import Database

SCHEMA_2 = Path(__file__).with_name("data") / "store_schema_2.sqlite.gz"
"""Made by longtail with schema 2: groups open (3 samples of 12, 7 and 0 tokens), done (2 of 9, delivery 2), gone (2
tokens, surplus), old (9, delivery 1, pruned) and damaged (6 and 5 tokens, open)."""


def old_store(directory: Path) -> Path:
    directory.mkdir()
    (directory / FILE).write_bytes(gzip.decompress(SCHEMA_2.read_bytes()))
    return directory


def test_a_store_of_schema_2_is_brought_up(tmp_path: Path) -> None:
    directory = old_store(tmp_path / "store")
    with pytest.raises(StoreError, match="has schema 2: open it for writing once to bring it to 4"):
        Database(directory, read_only=True)
    with opened(directory) as store:
        assert store.damages == []
        by = {s.id: s for g in store for s in g.samples}
        assert {name: len(s.output_ids) for name, s in by.items()} == {
            "open/0": 12,
            "open/1": 7,
            "open/2": 0,
            "damaged/0": 6,
            "damaged/1": 5,
        }
        assert by["open/1"].versions == [0] * 3 + [1] * 4
        assert by["open/1"].reward != by["open/1"].reward  # NaN
        assert by["damaged/0"].failure == "caf\u00e9"
        assert not any(s.multi_turn or s.turn_ended or s.masked or s.attempts or s.grade_failure for s in by.values())
        ledger = store.ledger.as_dict()
        assert (ledger["generated"], ledger["trained"], ledger["surplus"], ledger["recomputed"]) == (59, 27, 2, 11)
        (delivery,) = store.deliveries(after=1)
        assert [len(s.output_ids) for s in delivery.groups[0].samples] == [9, 9]
        assert store.cut(by["open/1"], 3, "stale") == 4
        store.watch([by["open/0"]])
        by["open/0"].masked = 3
        grow(by["open/0"], 2, version=2)
        store.commit()
        want = records(list(store))
        want["open"][0]["status"] = "paused"
    with opened(directory) as store:
        assert records(list(store)) == want


@pytest.mark.parametrize(
    ("table", "column", "where", "found"),
    [
        ("samples", "num_tokens", "name = 'damaged/0'", "sample damaged/0: its record is damaged; it starts again"),
        ("samples", "seed", "name = 'damaged/0'", "sample damaged/0: its prompt or its parameters are damaged"),
        ("chunks", "tokens", "sample_id = (SELECT id FROM samples WHERE name = 'damaged/0')", "output tokens 0 to 5"),
    ],
)
def test_damage_in_a_store_of_schema_2_is_still_damage(
    tmp_path: Path, table: str, column: str, where: str, found: str
) -> None:
    directory = old_store(tmp_path / "store")
    flip(directory, table, column, where)
    with opened(directory) as store:
        assert len(store.damages) == 1
        assert found in store.damages[0]


def test_text_in_a_store_of_schema_2_that_is_no_text(tmp_path: Path) -> None:
    directory = old_store(tmp_path / "store")
    with raw(directory) as connection:
        connection.execute("UPDATE samples SET failure = CAST(x'636166c3' AS TEXT) WHERE name = 'damaged/0'")
    with opened(directory) as store:
        assert store.damages == ["sample damaged/0: its record is damaged; it starts again"]
