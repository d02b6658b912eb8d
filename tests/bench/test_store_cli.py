"""`longtail store` on a store with an open group, two deliveries and one group thrown away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.partial_rollout.store_helpers import FILE, finish, flip, grow, make, observe
from typer.testing import CliRunner, Result

from longtail import Group, SampleStore, StoreLocked
from longtail.bench.cli import app

SOUND = "samples and ledger: sound\nsaved KV: sound\n"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, arguments)], env={"COLUMNS": "200"})


def output(*arguments: object) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def build(directory: Path) -> SampleStore:
    store = SampleStore(directory)
    for name, tokens in (("a", 400), ("b", 500)):
        store.add([make(name, n=2)])
        for sample in store.unfinished():
            finish(sample, tokens)
        store.hand_over(store.complete())
    store.add([make("gone")])
    (sample,) = store.unfinished()
    grow(sample, 300)
    store.discard(list(store), "stale")
    store.add([Group("open", make("open", n=3).samples, {"answer": "[bold]42"}), make("fresh")])
    first, second = store.unfinished()[:2]
    grow(first, 7, version=1)
    finish(second, 5).versions[:] = [3] * 5  # type: ignore[list-item]
    second.segments[0].version = 3  # type: ignore[assignment]
    store.watch([first, second])
    store.count(recomputed=11)
    store.commit()
    return store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    build(tmp_path / "store").close()
    return tmp_path / "store"


def test_ls(directory: Path) -> None:
    found = json.loads(output("ls", directory, "--json"))
    totals = {key: found[key] for key in ("groups", "samples", "tokens", "last_delivery", "newest_version")}
    assert totals == {"groups": 5, "samples": 9, "tokens": 2112, "last_delivery": 2, "newest_version": 3}
    assert found["open"] == [
        {
            "group": "open",
            "samples": 3,
            "done": 1,
            "failed": 0,
            "tokens": 12,
            "oldest_version": 1,
            "newest_version": 3,
            "staleness": [0, 2],
        },
        {
            "group": "fresh",
            "samples": 1,
            "done": 0,
            "failed": 0,
            "tokens": 0,
            "oldest_version": None,
            "newest_version": None,
            "staleness": None,
        },
    ]
    rows = [(d["number"], d["iteration"], d["groups"], d["samples"], d["tokens"]) for d in found["deliveries"]]
    assert rows == [(1, 0, 1, 2, 800), (2, 1, 1, 2, 1000)]
    text = output("ls", directory)
    assert "5 groups, 9 samples, 2,112 tokens" in text and "0 to 2" in text and "1 / 3" in text
    assert "... and 1 more" in output("ls", directory, "--limit", "1")


def test_show(directory: Path) -> None:
    ledger = json.loads(output("show", directory, "--json"))
    assert (ledger["generated"], ledger["pending"], ledger["trained"], ledger["stale"]) == (2112, 12, 1800, 300)
    text = output("show", directory)
    assert "1,800" in text and "85.2%" in text and "recomputed" in text
    group = json.loads(output("show", directory, "open", "--json"))
    assert group["state"] == "open" and group["task"] == {"answer": "[bold]42"}
    assert [s["status"] for s in group["samples"]] == ["paused", "finished", "waiting"]
    assert "[bold]42" in output("show", directory, "open")
    sample = json.loads(output("show", directory, "open/0", "--json"))
    assert sample["output_ids"] == list(range(100, 107)) and sample["line"] == "pending" and sample["group"] == "open"
    assert sample["segments"] == [{"start": 0, "end": 7, "version": 1, "engine": "native", "kv": "computed"}]
    assert "open/0" in output("show", directory, "open/0")
    assert json.loads(output("show", directory, "gone", "--json"))["state"] == "thrown away"
    result = call("show", directory, "nobody")
    assert isinstance(result.exception, ValueError) and "has no sample or group 'nobody'" in str(result.exception)


def test_verify(directory: Path) -> None:
    assert output("verify", directory) == SOUND
    flip(directory, "chunks", "tokens", "sample_id = (SELECT id FROM samples WHERE name = 'open/0')")
    flip(directory, "chunks", "tokens", "sample_id = (SELECT id FROM samples WHERE name = 'b/1')")
    result = call("verify", directory)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "samples and ledger: 2 problems",
        "saved KV: sound",
        "sample b/1: output tokens 0 to 499 are damaged",
        "sample open/0: output tokens 0 to 6 are damaged",
    ]
    assert "output tokens 0 to 6 are damaged" in output("show", directory, "open/0")
    (directory / FILE).write_bytes(b"no database" * 1000)
    result = call("verify", directory)
    assert result.exit_code == 1 and "is damaged, or no SQLite file" in result.output


def test_gc(directory: Path) -> None:
    before = (directory / FILE).read_bytes()
    assert output("gc", directory, "--dry-run") == "would forget 1 groups of 300 tokens\n"
    assert output("gc", directory, "--dry-run", "--before", 2) == "would forget 2 groups of 1,100 tokens\n"
    assert (directory / FILE).read_bytes() == before
    assert output("gc", directory).startswith("forgot 1 groups of 300 tokens; freed ")
    assert output("gc", directory, "--before", 2).startswith("forgot 1 groups of 800 tokens; freed ")
    assert output("gc", directory, "--before", 2).startswith("forgot 0 groups of 0 tokens")
    assert output("verify", directory) == SOUND
    assert json.loads(output("show", directory, "a", "--json"))["state"] == "delivery 1, pruned"
    found = json.loads(output("ls", directory, "--json"))
    assert found["pruned_up_to"] == 1 and [d["number"] for d in found["deliveries"]] == [2]
    with SampleStore(directory) as store:
        assert [d.number for d in store.deliveries(after=1)] == [2] and len(store) == 2
        store.check_integrity()


def test_rewind(directory: Path) -> None:
    """open/0 has 7 tokens of version 1, open/1 is finished with 5 of version 3."""
    before = (directory / FILE).read_bytes()
    says = "5 tokens of 1 samples, made by policies newer than 2\n"
    assert output("rewind", directory, "--version", 2, "--dry-run") == f"would drop {says}"
    assert (directory / FILE).read_bytes() == before
    assert output("rewind", directory, "--version", 2) == f"dropped {says}"
    assert output("verify", directory).startswith(SOUND)
    found = json.loads(output("show", directory, "open", "--json"))
    assert [s["tokens"] for s in found["samples"]] == [7, 0, 0]
    assert [s["status"] for s in found["samples"]] == ["paused", "waiting", "waiting"]
    assert [s["tokens_cut"] for s in found["samples"]] == [{}, {"stale": 5}, {}]
    assert json.loads(output("show", directory, "--json"))["stale"] == 300 + 5
    assert json.loads(output("ls", directory, "--json"))["deliveries"][-1]["tokens"] == 1000  # what left stays
    assert output("rewind", directory, "--version", 0) == (
        "dropped 7 tokens of 1 samples, made by policies newer than 0\n"
    )
    assert call("rewind", directory).exit_code != 0
    with SampleStore(directory):
        assert isinstance(call("rewind", directory, "--version", 0).exception, StoreLocked)


def test_observations_have_no_version(tmp_path: Path) -> None:
    with SampleStore(tmp_path) as store:
        store.add([make("a")])
        (sample,) = store.unfinished()
        sample.multi_turn = True
        grow(sample, 3, version=2)
        observe(sample, 4)
        store.watch([sample])
        store.commit()
    (found,) = json.loads(output("ls", tmp_path, "--json"))["open"]
    assert (found["oldest_version"], found["staleness"], found["tokens"]) == (2, [0, 0], 7)
    shown = json.loads(output("show", tmp_path, "a/0", "--json"))
    assert (shown["tokens"], shown["tokens_generated"], shown["turn_ended"]) == (7, 3, False)


def test_gc_frees_space(tmp_path: Path) -> None:
    with SampleStore(tmp_path) as store:
        store.add([make("a", n=8)])
        for sample in store.unfinished():
            finish(sample, 20_000)
        store.hand_over(store.complete())
    before = (tmp_path / FILE).stat().st_size
    assert "forgot 1 groups of 160,000 tokens; freed 2.0 MB" in output("gc", tmp_path, "--before", 2)
    assert (tmp_path / FILE).stat().st_size < before / 7


def test_beside_a_run(tmp_path: Path) -> None:
    with build(tmp_path) as store:
        before = (tmp_path / FILE).read_bytes(), (tmp_path / f"{FILE}-wal").read_bytes()
        for command in (["ls"], ["show"], ["show", "open"], ["verify"], ["gc", "--dry-run"]):
            assert output(command[0], tmp_path, *command[1:])
        assert ((tmp_path / FILE).read_bytes(), (tmp_path / f"{FILE}-wal").read_bytes()) == before
        result = call("gc", tmp_path)
        assert isinstance(result.exception, StoreLocked)
        store.check_integrity()


@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc"])
def test_a_directory_without_a_store_stays_without(command: str, tmp_path: Path) -> None:
    result = call(command, tmp_path / "none")
    assert result.exit_code != 0 and "holds no sample store" in str(result.exception)
    assert not (tmp_path / "none").exists()
