"""What `longtail store` shows of a store on disk. Reads only, beside a run that has it open, and never all tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from longtail.partial_rollout import saved_kv
from longtail.partial_rollout.database import Database
from longtail.sample import Sample

_VERSIONS = (
    "SELECT {what} FROM groups g JOIN samples s ON s.group_id = g.id,"
    " json_each(iif(json_valid(s.segments), s.segments, '[]')) e WHERE json_extract(e.value, '$[2]') >= 0 AND {where}"
)
"""Without observations."""
_VERSION = "json_extract(e.value, '$[2]')"


def overview(database: Database) -> dict[str, Any]:
    """Everything but the tokens: totals, open groups, deliveries that are kept."""
    with database.reading():
        samples, tokens = database.query("SELECT count(*), coalesce(sum(num_tokens), 0) FROM samples")[0]
        newest = database.query(_VERSIONS.format(what=f"max({_VERSION})", where="true"))[0][0]
        return {
            "directory": str(database.directory),
            "groups": database.num_groups(),
            "samples": samples,
            "tokens": tokens,
            "iteration": int(database.meta("iteration") or 0),
            "newest_version": newest,
            "last_delivery": database.last_delivery(),
            "pruned_up_to": database.last_pruned(),
            "bytes": database.size(),
            "saved_kv": _totals(saved_kv.overview(database)),
            "ledger": database.ledger().as_dict(),
            "open": _open_groups(database, newest or 0),
            "deliveries": _deliveries(database),
        }


def _totals(saved: dict[str, dict[str, Any]]) -> dict[str, int]:
    """A file that samples share counts once."""
    files = {file for one in saved.values() for file in one["files"]}
    nbytes = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
    return {"samples": len(saved), "tokens": sum(one["tokens"] for one in saved.values()), "bytes": nbytes}


def _open_groups(database: Database, newest: int) -> list[dict[str, Any]]:
    what = f"g.name, min({_VERSION}), max({_VERSION})"
    query = _VERSIONS.format(what=what, where="g.delivery IS NULL GROUP BY g.id")
    versions = {name: (low, high) for name, low, high in database.query(query)}
    query = (
        "SELECT g.name, count(*), sum(s.status IN ('finished', 'failed')), sum(s.status = 'failed'), sum(s.num_tokens)"
        " FROM groups g JOIN samples s ON s.group_id = g.id WHERE g.delivery IS NULL GROUP BY g.id ORDER BY g.id"
    )
    rows = []
    for name, samples, done, failed, tokens in database.query(query):
        low, high = versions.get(name, (None, None))
        rows.append(
            {
                "group": name,
                "samples": samples,
                "done": done,
                "failed": failed,
                "tokens": tokens,
                "oldest_version": low,
                "newest_version": high,
                "staleness": None if low is None else [newest - high, newest - low],
            }
        )
    return rows


def _deliveries(database: Database) -> list[dict[str, Any]]:
    query = (
        "SELECT d.number, d.iteration, d.time, count(DISTINCT g.id), count(*), sum(s.num_tokens) FROM deliveries d"
        " JOIN groups g ON g.delivery = d.number JOIN samples s ON s.group_id = g.id GROUP BY d.number ORDER BY 1"
    )
    names = ("number", "iteration", "time", "groups", "samples", "tokens")
    return [dict(zip(names, row, strict=True)) for row in database.query(query)]


def details(database: Database, name: str) -> dict[str, Any] | None:
    """Of the group or the sample of this name; None if there is none."""
    with database.reading():
        query = "SELECT g.id, g.name, g.delivery FROM groups g WHERE g.name = ?"
        of_sample = query.replace("g.name = ?", "g.id = (SELECT group_id FROM samples WHERE name = ?)")
        found = database.query(query, (name,)) or database.query(of_sample, (name,))
        if not found:
            return None
        row, group_name, delivery = found[0]
        groups, damages = database.load("g.id = ?", (row,))
        places = {s: (line, lost) for s, line, lost in database.query(_PLACES, (row,))}
        cuts: dict[str, dict[str, int]] = {s: {} for s in places}
        for s, line, tokens in database.query(_CUTS, (row,)):
            cuts[s][line] = tokens
        found_damaged = {d.sample.id: d.found for d in damages}
        pruned = delivery is not None and (delivery == -1 or 0 < delivery <= database.last_pruned())
        regrades = database.grades("g.id = ?", (row,))
        saved = saved_kv.overview(database)
        samples = [_sample(s, *places[s.id], None if pruned else found_damaged.get(s.id)) for s in groups[0].samples]
        for sample in samples:
            sample["tokens_cut"] = cuts[sample["sample"]]
            sample["saved_kv"] = saved.get(sample["sample"])
            sample["regrades"] = [dataclasses.asdict(one) for one in regrades.get(sample["sample"], [])]
    if name != group_name:
        return {"group": group_name, **next(s for s in samples if s["sample"] == name)}
    state = "open" if delivery is None else "thrown away" if delivery < 1 else f"delivery {delivery}"
    kept = {"group": group_name, "state": f"{state}, pruned" if pruned else state, "task": groups[0].task}
    return {**kept, "samples": samples}


_PLACES = "SELECT name, line, lost FROM samples WHERE group_id = ?"
_CUTS = "SELECT s.name, c.line, c.tokens FROM cuts c JOIN samples s ON s.id = c.sample_id WHERE s.group_id = ?"


def _sample(sample: Sample, line: str, lost: int, damage: str | None) -> dict[str, Any]:
    return {
        "sample": sample.id,
        "status": sample.status,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "failure": sample.failure,
        "line": line,
        "tokens": len(sample.output_ids),
        "tokens_generated": sample.num_generated,
        "masked": sample.masked,
        "multi_turn": sample.multi_turn,
        "turn_ended": sample.turn_ended,
        "attempts": sample.attempts,
        "tokens_lost_to_damage": lost,
        "damage": damage,
        "reward": sample.reward,
        "grade_failure": sample.grade_failure,
        "grader": sample.grader,
        "grade_details": sample.grade_details,
        "seed": sample.seed,
        "params": dataclasses.asdict(sample.params),
        "segments": [dataclasses.asdict(segment) for segment in sample.segments],
        "timings": dataclasses.asdict(sample.timings),
        "prompt_ids": list(sample.prompt_ids),
        "output_ids": sample.output_ids,
        "logprobs": sample.logprobs,
    }
