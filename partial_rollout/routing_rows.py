"""Routed experts of samples as rows of a store (table `routing`): consecutive positions, int16, with a CRC-32."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from longtail.routing import RoutedExperts
from longtail.sample import Sample

TABLE = """
CREATE TABLE routing (
    sample_id INTEGER NOT NULL REFERENCES samples (id),
    start INTEGER NOT NULL,     -- position (of prompt and output) of the first row
    layers INTEGER NOT NULL,
    top_k INTEGER NOT NULL,
    experts BLOB NOT NULL,      -- int16: positions x layers x top_k
    checksum INTEGER NOT NULL,  -- CRC-32 of these four
    PRIMARY KEY (sample_id, start)
);
"""


def checksum_of(start: int, layers: int, top_k: int, experts: bytes) -> int:
    return zlib.crc32(experts, zlib.crc32(repr((start, layers, top_k)).encode()))


def create(connection: sqlite3.Connection) -> None:
    """The migration of a store from schema 1 to 2."""
    connection.execute(TABLE)


def save(connection: sqlite3.Connection, samples: Iterable[tuple[int, Sample, bool]]) -> None:
    """What samples gained. samples: (row, sample, whole), whole: everything again, as one row."""
    find = "SELECT start, layers, top_k, length(experts) FROM routing WHERE sample_id = ? ORDER BY start DESC LIMIT 1"
    for row, sample, whole in samples:
        routed = sample.routed_experts
        if routed is None:
            continue
        found = None if whole else connection.execute(find, (row,)).fetchone()
        if found is None:
            connection.execute("DELETE FROM routing WHERE sample_id = ?", (row,))
        saved = 0 if found is None else found[0] + found[3] // routed.row_bytes
        data = bytes(routed.data[saved * routed.row_bytes :])
        if data:
            values = (
                row,
                saved,
                routed.layers,
                routed.top_k,
                data,
                checksum_of(saved, routed.layers, routed.top_k, data),
            )
            connection.execute("INSERT INTO routing VALUES (?, ?, ?, ?, ?, ?)", values)


def load(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> dict[int, RoutedExperts]:
    """By row of the sample, up to the first row that is missing or damaged; empty where that is the first."""
    loaded: dict[int, RoutedExperts] = {}
    query = (
        "SELECT r.sample_id, r.start, r.layers, r.top_k, r.experts, r.checksum FROM groups g JOIN samples s"
        f" ON s.group_id = g.id JOIN routing r ON r.sample_id = s.id WHERE {where} ORDER BY g.id, s.id, r.start"
    )
    for row, start, layers, top_k, data, checksum in connection.execute(query, values):
        try:
            part = RoutedExperts(layers, top_k, data)
        except (TypeError, ValueError):  # damaged
            part = RoutedExperts(1, 1)
        routed = loaded.setdefault(row, RoutedExperts(part.layers, part.top_k))
        same = (part.layers, part.top_k) == (routed.layers, routed.top_k)
        if same and len(routed) == start and checksum_of(start, layers, top_k, data) == checksum:
            routed.extend(part.data)
    return loaded


def attach(sample: Sample, routed: RoutedExperts | None) -> tuple[str, str] | None:
    """Gives a sample what was read of its routing. -> what is damaged, and what that means; None if nothing is."""
    if routed is None:
        return None
    wanted = sample.num_tokens - 1
    if len(routed) >= wanted:
        routed.truncate(wanted)
        sample.routed_experts = routed
        return None
    found = f"sample {sample.id}: the routing of positions {len(routed)} to {wanted - 1} is damaged"
    if sample.is_done:
        return found, "it has no routed_experts"
    sample.routed_experts = routed if len(routed) else None
    return found, "these positions are routed again when it continues"
