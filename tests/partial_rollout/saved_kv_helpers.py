"""Samples that were paused with saved KV: what a store says of them, how they are run to their end, and damage."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from tests.partial_rollout.conftest import EngineMaker, assert_same, group, prompt
from tests.partial_rollout.store_helpers import flip, raw

from longtail import NativeEngine, Rollout, Sample, TokenBudget
from longtail.events import Event
from longtail.partial_rollout.saved_kv import names_in, parse

BLOCK = 2 * 2 * 2 * 16 * 16 * 4  # bytes
TOKENS = 4
"""Of each sample in an iteration."""


def batch() -> list:
    """Two samples that share a prompt of two blocks, and one whose prompt fills no block."""
    return [group("a", prompt(40), n=2, max_tokens=14), group("b", prompt(9, 1), max_tokens=10)]


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


# ---- damage


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
    with raw(directory) as connection:
        inner = json.dumps({"parts": [], "layouts": 7, "num_tokens": 3})
        text = json.dumps({"checksum": zlib.crc32(inner.encode()), "snapshot": inner})
        connection.execute("UPDATE samples SET snapshot = ? WHERE name = 'a/0'", (text,))


def link(directory: Path) -> None:
    file = own(directory, "a/0")
    file.rename(directory / "elsewhere")
    file.symlink_to(directory / "elsewhere")
