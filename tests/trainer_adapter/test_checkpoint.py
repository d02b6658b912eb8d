"""Checkpoints: whole or not there, and bit for bit."""

from __future__ import annotations

import errno
import math
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer_adapter.test_trainer import VERSION, is_same, make_groups, make_trainer, weights

from longtail.trainer_adapter import checkpoint as module
from longtail.trainer_adapter.checkpoint import CheckpointError, Checkpoints, kept_rng, rng_state, set_rng_state
from longtail.trainer_adapter.metrics import MetricsLog, flat, read_metrics

STATE: dict[str, Any] = {
    "number": 3,
    "floats": [0.1, math.inf, -0.0, 1e-310],
    "text": "a/b \u00e9",
    "nothing": None,
    "flag": True,
    "tuple": (1, (2.5, "x")),
    "by number": {0: {"step": torch.tensor(3.0)}, 7: {}},
    "$tensor": "a name of ours",
    "tensors": {
        "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "nan": torch.tensor([math.nan, math.inf]),
        "empty": torch.zeros(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "transposed": torch.arange(6.0).view(2, 3).t(),
    },
    "tensors/bytes": torch.ones(2),
    "tensors/empty": {1: torch.zeros(1), "1": torch.ones(1)},
}


def check(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (found, expected)))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            check(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    else:
        assert repr(found) == repr(expected)


def test_what_comes_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    checkpoints.save(4, STATE)
    found = checkpoints.newest()
    assert found is not None and found.step == 4
    check(found.state, STATE)


def test_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (3, 10, 9, 11):
        checkpoints.save(step, {"step": step})
    assert checkpoints.steps() == [10, 11]
    checkpoints.save(11, {"step": "again"})
    found = checkpoints.newest()
    assert found is not None and found.state == {"step": "again"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_one_is_passed_over(file: str, damage: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, STATE)
    path = checkpoints.save(2, STATE) / file
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    elif damage == "cut":
        path.write_bytes(data[:-1] if file != "checkpoint.json" else data[: len(data) // 2])
    else:
        path.unlink()
    found = checkpoints.newest()
    assert found is not None and found.step == 1
    assert len(checkpoints.damages) == 1 and "step-00000002" in checkpoints.damages[0]
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        checkpoints.newest()


@pytest.mark.parametrize("step", [2, 1], ids=["another step", "the same again"])
def test_stopped_at_any_moment(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each call that reaches the disk in turn: what is there afterwards is the old checkpoint or the new one,
    whole, and the next save goes through."""

    class Stop(BaseException):
        pass

    stopped = 0
    for calls in range(100):
        directory = tmp_path / str(calls)
        checkpoints = Checkpoints(directory, keep=1)
        checkpoints.save(1, STATE)
        left = calls
        with monkeypatch.context() as patch:
            for target, name in ((os, "fsync"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (module, "_digest")):
                call = getattr(target, name)

                def counted(*arguments: Any, call: Any = call, **options: Any) -> Any:
                    nonlocal left
                    if not left:
                        raise Stop
                    left -= 1
                    return call(*arguments, **options)

                patch.setattr(target, name, counted)
            try:
                checkpoints.save(step, STATE | {"number": 4})
                done = True
            except Stop:
                done, stopped = False, stopped + 1
        found = Checkpoints(directory, keep=1).newest()
        assert found is not None and found.step in ((step,) if done else (1, step))
        number = found.state["number"]
        assert number == 4 if done or found.step == 2 else number in (3, 4)
        check(found.state, STATE | {"number": number})
        again = Checkpoints(directory, keep=1)
        again.save(3, STATE)
        assert [p.name for p in directory.iterdir()] == ["step-00000003"]
        if done:
            break
    assert stopped >= 8


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, STATE)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoints.save(2, STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_what_it_refuses(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="state/a/0 is a set"):
        checkpoints.save(1, {"a": [{1, 2}]})
    with pytest.raises(ValueError, match="step must be"):
        checkpoints.save(-1, {})
    with pytest.raises(ValueError, match="keep must be"):
        Checkpoints(tmp_path, keep=0)
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Three steps, a checkpoint, three more; and the last three from the checkpoint."""
    first = make_trainer(warmup=5)
    for _ in range(3):
        first.step(make_groups(), VERSION)
    Checkpoints(tmp_path).save(3, {"trainer": first.state_dict()})
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    second = make_trainer(warmup=5)
    second.load_state_dict(found.state["trainer"])
    for _ in range(3):
        assert first.step(make_groups(), VERSION).as_dict() == second.step(make_groups(), VERSION).as_dict()
    assert is_same(weights(first), weights(second))


def test_generators(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), np.random.rand(2).tolist(), random.random(), np.random.randn(1).tolist()]

    np.random.randn()  # leaves a second number behind
    Checkpoints(tmp_path).save(0, {"rng": rng_state()})
    first = draw()
    found = Checkpoints(tmp_path).newest()
    assert found is not None
    set_rng_state(found.state["rng"])
    assert draw() == first
    with kept_rng():
        before = draw()
    assert draw() == before


# ---- metrics


def test_metrics_are_cut_where_a_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(5):
            log.write({"step": step, "loss": step / 3})
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert [line["step"] for line in read_metrics(path)] == list(range(5))
    with MetricsLog(path, read_metrics(path)[:3]) as log:
        log.write({"step": 3, "loss": 1.0})
    assert [line["loss"] for line in read_metrics(path)] == [0.0, 1 / 3, 2 / 3, 1.0]
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1 is no line of metrics"):
        read_metrics(path)
    assert read_metrics(tmp_path / "none") == []


def test_flat() -> None:
    assert flat({"step": 1, "a": {"b": 0.5, "c": {"d": 2}}, "e": None, "f": True, "g": [1]}) == {
        "step": 1.0,
        "a/b": 0.5,
        "a/c/d": 2.0,
    }
