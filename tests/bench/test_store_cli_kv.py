"""`longtail store` and saved KV: what verify finds, what gc removes, what show says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bench.test_store_cli import SOUND, call, output
from tests.partial_rollout.conftest import group, make_model, prompt
from tests.partial_rollout.saved_kv_helpers import (
    delete,
    flip_a_bit,
    flip_the_row,
    foreign_record,
    of_another_sample,
    rows,
    swap,
    truncate,
)
from tests.partial_rollout.store_helpers import raw

from longtail import NativeEngine, Rollout, TokenBudget


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two samples of a prompt of two whole blocks, and one of nine tokens, paused at four tokens of output."""
    directory = tmp_path_factory.mktemp("kv") / "store"
    engine = NativeEngine(make_model("llama"), kv_cache_bytes=4 << 20, block_size=16)
    with Rollout(engine, strategy=TokenBudget(4, per="sample"), store=directory) as rollout:
        rollout.submit([group("a", prompt(40), n=2), group("b", prompt(9, 1))])
        rollout.collect()
    return directory


@pytest.fixture
def directory(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path / "store")
    return tmp_path / "store"


def test_show(directory: Path) -> None:
    sample = json.loads(output("show", directory, "a/1", "--json"))
    files = [directory / "kv" / name for name in rows(directory)["a/1"]]
    assert sample["saved_kv"] == {
        "tokens": 43,
        "bytes": sum(file.stat().st_size for file in files),
        "files": [str(file) for file in files],
    }
    text = output("show", directory, "a/1")
    assert "43 tokens, 0.0 MB" in text and files[1].name in text.replace("\n", "")
    table = output("show", directory, "a")
    assert table.count("43 tokens, 0.0 MB") == 2
    (directory / "kv" / rows(directory)["b/0"][0]).unlink()
    assert "No such file" in json.loads(output("show", directory, "b/0", "--json"))["saved_kv"]["damage"]


def test_ls(directory: Path) -> None:
    nbytes = sum(file.stat().st_size for file in (directory / "kv").iterdir())
    assert json.loads(output("ls", directory, "--json"))["saved_kv"] == {"samples": 3, "tokens": 98, "bytes": nbytes}
    assert f"saved KV of 3 samples, {nbytes / 1e6:.1f} MB" in output("ls", directory)


PROBLEMS: dict[str, tuple[Callable[[Path], object], str, set[str]]] = {
    "deleted": (delete, "cannot be read", {"a/0"}),
    "truncated": (truncate, ": has 1000 bytes, not ", {"a/0"}),
    "flipped": (flip_a_bit, "the checksum differs", {"a/0"}),
    "swapped": (swap, "holds something else than its record says", {"a/0", "a/1"}),
    "row-flipped": (flip_the_row, "the record of its saved KV is damaged", {"a/0"}),
    "row-of-another": (of_another_sample, "covers other tokens than the sample holds", {"a/0"}),
    "row-foreign": (foreign_record, "its record is damaged", {"a/0"}),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_verify(directory: Path, kind: str) -> None:
    assert output("verify", directory) == SOUND
    damage, text, hit = PROBLEMS[kind]
    damage(directory)
    before = sorted(f.name for f in (directory / "kv").iterdir())
    result = call("verify", directory)
    assert result.exit_code == 1
    first, second, *problems = result.output.splitlines()
    assert (first, second) == ("samples and ledger: sound", f"saved KV: {len(hit)} problems")
    assert {p.removeprefix("sample ").split(":")[0] for p in problems} == hit and all(text in p for p in problems)
    assert sorted(f.name for f in (directory / "kv").iterdir()) == before


def test_verify_finds_saved_kv_of_a_finished_sample(directory: Path) -> None:
    from longtail.partial_rollout.database import Database

    database = Database(directory)
    (sample,) = (s for g in database.open_groups()[0] for s in g.samples if s.id == "b/0")
    sample.status, sample.finish_reason = "finished", "stop"
    with database.transaction(durable=True):
        database.save([sample])
    database.close()
    assert "sample b/0: it is finished, and its row still names saved KV" in call("verify", directory).output


def test_files_that_no_sample_refers_to(directory: Path) -> None:
    with raw(directory) as connection:
        connection.execute("UPDATE samples SET snapshot = NULL WHERE name IN ('a/0', 'b/0')")
    kv = directory / "kv"
    (kv / ("a" * 32 + ".safetensors.tmp")).write_bytes(bytes(1000))
    (kv / "note.txt").write_text("not ours")
    named = set(rows(directory)["a/1"])
    orphans = {f.name for f in kv.iterdir()} - named - {"note.txt"}
    assert len(orphans) == 3
    size = sum((kv / name).stat().st_size for name in orphans) / 1e6
    text = output("verify", directory)
    assert text.startswith(SOUND)
    listed = {os.path.basename(line.split(": ")[0]) for line in text.removeprefix(SOUND).splitlines()}
    assert listed == orphans
    found = f"3 KV files of {size:.1f} MB that no sample refers to"
    assert output("gc", directory, "--dry-run") == f"would forget 0 groups of 0 tokens, and remove {found}\n"
    assert {f.name for f in kv.iterdir()} == named | orphans | {"note.txt"}
    assert output("gc", directory).splitlines()[1] == f"removed {found}"
    assert {f.name for f in kv.iterdir()} == named | {"note.txt"}
    assert output("verify", directory) == SOUND
    assert output("gc", directory).count("\n") == 1


def test_beside_a_run(directory: Path) -> None:
    engine = NativeEngine(make_model("llama"), kv_cache_bytes=4 << 20, block_size=16)
    with Rollout(engine, strategy=TokenBudget(4, per="sample"), store=directory) as rollout:
        rollout.collect()
        assert output("verify", directory).startswith(SOUND)
        assert output("show", directory, "a") and output("ls", directory) and output("gc", directory, "--dry-run")
        rollout.store.check_integrity()
