"""The worker and the weight transfer in TRL's `AsyncGRPOTrainer` itself, on a tiny model and a CPU."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed; pip install -e '.[trl]'")

from tests.trainer_adapter.plugins.async_helpers import (
    check_ledger,
    check_records,
    config,
    load_example,
    run_on_a_cpu,
    train,
)
from tests.trainer_adapter.plugins.trl_helpers import (
    GROUP,
    additions,
    reward,
    save_tiny,
    spans_versions,
    tiny_tokenizer,
)

from longtail import NativeEngine, Rollout, SampleStore
from longtail.trainer_adapter.plugins.trl_async import RolloutWorker
from longtail.version import PolicyVersion


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_a_cpu(monkeypatch)


def open_rollout(path: str, store: SampleStore | None = None, version: int = 0, **settings: Any) -> Rollout:
    engine = NativeEngine(path, version=version, max_num_seqs=24, kv_cache_bytes=8 << 20, block_size=16)
    known: dict[str, Any] = {"strategy": "bounded-staleness:groups=2,eta=1", "background": True}
    return Rollout(engine, store=store, **known | settings)


def test_samples_cross_versions_while_the_trainer_trains(path: str, tmp_path: Path) -> None:
    with open_rollout(path) as rollout:
        trainer, worker = train(path, config(tmp_path, max_steps=6), rollout)
        check_records(worker)
        check_ledger(rollout, worker)
        assert trainer.model_version == rollout.engine.version == 7
        taken = {record.sample_id for _, record in worker.taken}
        crossed = [s for record, s in worker.queued if spans_versions(s) and record.sample_id in taken]
        assert crossed
        assert all(version - record.model_version <= 4 for version, record in worker.taken)
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert abs(logs[0]["ratio"] - 1) < 1e-4  # of the first weights: the rollout's log-probabilities are the trainer's
    assert logs[0]["kl"] < 1e-6
    assert max(entry["kl"] for entry in logs) > 1e-5
    assert max(entry["sample/staleness_max"] for entry in logs) >= 1
    assert any(entry.get("rollout/resumed_samples", 0) > 0 for entry in logs)
    assert threading.active_count() < 20
    assert worker._thread is None


def test_what_is_too_old_is_dropped_on_the_ledger(path: str, tmp_path: Path) -> None:
    """Nothing may lag: every sample that waited over an update goes, one by one, and by name."""
    with open_rollout(path) as rollout:
        trainer, worker = train(path, config(tmp_path, max_staleness=0, max_steps=4), rollout)
        check_ledger(rollout, worker)
        assert all(version == record.model_version for version, record in worker.taken)
        assert rollout.store.ledger.lines["stale"] > 0
    logs = trainer.state.log_history
    assert sum(entry.get("sample/dropped_stale_total") or 0 for entry in logs) > 0


def test_a_rollout_that_waits_between_iterations(path: str, tmp_path: Path) -> None:
    with open_rollout(path, strategy="over-issue:groups=2,extra=2", background=False) as rollout:
        _, worker = train(path, config(tmp_path, max_steps=4), rollout)
        check_records(worker)
        check_ledger(rollout, worker)


def test_a_later_run_goes_on_with_what_is_unfinished(path: str, tmp_path: Path) -> None:
    with open_rollout(path, SampleStore(tmp_path / "store")) as rollout:
        train(path, config(tmp_path / "out", max_steps=2), rollout)
    store = SampleStore(tmp_path / "store")
    begun = {s.id: list(s.output_ids) for s in store.unfinished() if s.output_ids}
    newest = max(v for s in store.unfinished() for v in s.versions)
    assert begun
    with open_rollout(path, store, version=newest) as rollout:
        _, worker = train(path, config(tmp_path / "out", max_steps=3), rollout)
        continued = [(record, s) for record, s in worker.queued if s.id in begun]
        assert continued
        for record, sample in continued:
            assert sample.output_ids[: len(begun[sample.id])] == begun[sample.id]
            assert record.model_version == min(sample.versions) - newest  # in the trainer's own count, from 1
        rollout.check_integrity()


def test_an_error_of_a_reward_reaches_the_trainer(path: str, tmp_path: Path) -> None:
    def wrong(**_: Any) -> list[float]:
        raise KeyError("no answer")

    with open_rollout(path) as rollout:
        with pytest.raises(RuntimeError, match="the rollout worker has failed: KeyError"):
            train(path, config(tmp_path), rollout, wrong)
        rollout.check_integrity()
        lines = rollout.store.ledger.lines
        assert lines["trained"] == 0 and lines["surplus"] > 0


def test_rewards(path: str, tmp_path: Path) -> None:
    """Several functions sum; None is left out; an async function; without any, the rollout's own."""

    async def later(completions: list[str], **_: Any) -> list[float | None]:
        return [None if i == 0 else 2.0 * i for i in range(len(completions))]

    def sooner(completions: list[str], **_: Any) -> list[float | None]:
        return [None if i == 0 else 1.0 for i in range(len(completions))]

    with open_rollout(path) as rollout:
        args, dataset, tokenizer = config(tmp_path), additions(), tiny_tokenizer()
        worker = RolloutWorker(rollout, args, dataset, tokenizer, [later, sooner])
        rollout.update_weights(rollout_weights(path), 1)
        worker.update_model_version(1)
        worker.start()
        records = [worker.rollout_buffer.get(timeout=60) for _ in range(GROUP)]
        worker.stop()
        ledger = rollout.store.ledger
        assert ledger.lines["trained"] == sum(int(record.completion_mask.sum()) for record in records)
        assert ledger.lines["surplus"] > 0  # scored, and not taken: the other group of the batch
    assert [record.metrics["rewards/later"] for record in records[1:]] == [2.0, 4.0, 6.0]
    rewards = np.array([3.0, 5.0, 7.0])
    assert np.isnan(records[0].metrics["reward"])
    want = [0.0, *((rewards - 5.0) / rewards.std()).tolist()]
    assert [record.advantage for record in records] == pytest.approx(want)


def test_groups_that_say_nothing(path: str, tmp_path: Path) -> None:
    """Advantages of exactly 0, also where the mean of equal rewards is rounded; an infinite reward is an error."""
    rewards: list[float] = [0.1] * GROUP
    with open_rollout(path) as rollout:
        worker = RolloutWorker(rollout, config(tmp_path), additions(), tiny_tokenizer(), lambda **_: rewards)
        group = worker.prompts.group(0)
        for sample in group.samples:
            sample.status, sample.output_ids, sample.logprobs = "finished", [5], [-1.0]
            sample.versions = [PolicyVersion(0)]
        assert [record.advantage for record in worker._score(group)] == [0.0] * GROUP
        rewards[1] = math.inf
        with pytest.raises(ValueError, match="infinite reward"):
            worker._score(group)


def rollout_weights(path: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict())


@pytest.fixture
def blocked(path: str, tmp_path: Path) -> Iterator[RolloutWorker]:
    """A worker whose reward function hangs until the test is over."""
    over = threading.Event()

    def hangs(completions: list[str], **_: Any) -> list[float]:
        over.wait(60)
        return [0.0] * len(completions)

    with open_rollout(path, strategy="over-issue:groups=2,extra=0", background=False) as rollout:
        worker = RolloutWorker(rollout, config(tmp_path), additions(), tiny_tokenizer(), hangs)
        yield worker
        over.set()
        worker.stop()


def test_health(blocked: RolloutWorker) -> None:
    with pytest.raises(RuntimeError, match="not running"):
        blocked.check_health(1.0)
    blocked.start()
    deadline = time.monotonic() + 60
    with pytest.raises(RuntimeError, match=r"has done nothing for \d+ s"):
        while time.monotonic() < deadline:
            blocked.check_health(0.3)
            time.sleep(0.05)


def test_stop_ends_an_iteration_that_would_take_long(path: str, tmp_path: Path) -> None:
    """Interrupted after a step: what is unfinished stays pending."""
    args = config(tmp_path)
    with open_rollout(path, strategy="sync", background=False) as rollout:
        worker = RolloutWorker(rollout, args, additions(), tiny_tokenizer(), reward, lookahead=24)
        worker.start()
        while rollout.engine.stats().num_output_tokens < 30:
            time.sleep(0.01)
        worker.stop()
        assert len(rollout.store.unfinished()) > 0
        assert rollout.store.ledger.pending > 0
        rollout.check_integrity()
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get(timeout=0.01)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_budget": None}, "token_budget"),
        ({"token_budget": 512}, "token_budget"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], says: str, path: str, tmp_path: Path) -> None:
    with open_rollout(path) as rollout, pytest.raises(ValueError, match=says):
        RolloutWorker(rollout, config(tmp_path, **fields), additions(), tiny_tokenizer(), reward)


def test_examples_run(path: str, tmp_path: Path) -> None:
    ledger = load_example("trl_async_grpo").main(path, 2, str(tmp_path / "async"))
    assert ledger["trained"] > 0
    example = load_example("trl_grpo")
    assert example.main(path, 5, tmp_path / "sync").ledger.lines["trained"] > 0
    resumed = example.main(path, 6, tmp_path / "sync", resume=True)
    assert resumed.state.global_step == 6
    assert resumed.ledger.pending > 0
