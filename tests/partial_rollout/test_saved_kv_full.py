"""Saved KV in a store: a full disk, and rows that cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from tests.partial_rollout.conftest import EngineMaker
from tests.partial_rollout.saved_kv_helpers import TOKENS, batch, files, finish, rows
from tests.partial_rollout.test_store_full import fill, small_disk  # noqa: F401

from longtail import Rollout, Sample, StoreError, TokenBudget
from longtail.kv_manager import snapshot_file
from longtail.kv_manager import tiers as tiers_module
from longtail.kv_manager.tier_config import TierConfig


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
