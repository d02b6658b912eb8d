"""TRL's trainers on a rollout whose engine is vLLM: rows, versions, log-probabilities, ledger."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed; make test-vllm installs it")

from tests.trainer_adapter.plugins import async_helpers, grpo_helpers
from tests.trainer_adapter.plugins.trl_helpers import save_tiny, tiny_model
from tests.vllm.conftest import HEADS

from longtail import Rollout

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm import VllmEngine


def make_engine(directory: Path | str, version: int = 0) -> VllmEngine:
    from longtail.partial_rollout.engines.vllm import VllmEngine

    return VllmEngine(directory, version=version, max_num_seqs=24, kv_cache_bytes=8 << 20, block_size=32)


@pytest.fixture
def opened() -> Iterator[list[VllmEngine]]:
    """Closed in the end: a process has room for one after the other. Not a block is left."""
    engines: list[VllmEngine] = []
    yield engines
    for engine in engines:
        engine.check_integrity()
        assert engine.core.num_free_blocks == engine.core.num_blocks
        engine.close()


def test_groups_finish_in_a_later_step_than_they_started(opened: list[VllmEngine], tmp_path: Path) -> None:
    """vLLM loads from a directory; later weights it gets from the trainer's memory. Tokens of the newest weights have
    log-probabilities as the trainer computes them, within 1e-4; importance weights are 1 on those and on no older."""

    def open_rollout(model: Any, version: int) -> Rollout:
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            opened.append(make_engine(directory, version))
        return Rollout(opened[-1], strategy="over-issue:groups=2,extra=2")

    run = grpo_helpers.trainer(grpo_helpers.config(tmp_path), open_rollout, model=tiny_model(**HEADS))
    run.train()
    grpo_helpers.check_crossing(run)
    assert opened[0].version == 4


def test_async(opened: list[VllmEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM steps in the worker's thread; weights come in between from the trainer's."""
    async_helpers.run_on_a_cpu(monkeypatch)
    path = save_tiny(tmp_path / "model", **HEADS)
    opened.append(make_engine(path))
    args = async_helpers.config(tmp_path, max_steps=4)
    with Rollout(opened[0], strategy="bounded-staleness:groups=2,eta=1", background=True) as rollout:
        trainer, worker = async_helpers.train(path, args, rollout)
        async_helpers.check_records(worker)
        async_helpers.check_ledger(rollout, worker)
        assert trainer.model_version == rollout.engine.version == 5
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert abs(logs[0]["ratio"] - 1) < 1e-4  # of the first weights: vLLM's log-probabilities are the trainer's
    assert max(entry["kl"] for entry in logs) > 1e-5
    assert max(entry["sample/staleness_max"] for entry in logs) >= 1  # one waits while another is trained on
