"""`PartialRolloutGRPOTrainer` in TRL itself, on a tiny model: rows, versions, corrections, checkpoints, ledger."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed; pip install -e '.[trl]'")

from datasets import Dataset
from tests.trainer_adapter.plugins.grpo_helpers import (
    check_batch,
    check_crossing,
    check_ledger,
    config,
    group_ids,
    trainer,
)
from tests.trainer_adapter.plugins.trl_helpers import (
    GROUP,
    additions,
    low_share,
    make_rollout,
    spans_versions,
)

from longtail import Group, Rollout, SampleStore
from longtail.partial_rollout.staleness import StalenessRule
from longtail.trainer_adapter.plugins.trl_grpo import check_config, rollout_reward


def test_groups_finish_in_a_later_step_than_they_started(tmp_path: Path) -> None:
    run = trainer(config(tmp_path))
    run.train()
    check_crossing(run)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"strategy": "token-budget:tokens=70"}, 4),
        ({"strategy": "bounded-staleness:groups=2,eta=1", "background": True}, 4),
        ({"strategy": "sync"}, 2),
    ],
    ids=lambda value: value["strategy"].split(":")[0] if isinstance(value, dict) else "",
)
def test_strategies(settings: dict[str, Any], steps: int, tmp_path: Path) -> None:
    """Also those that hand over another number of groups than a batch has."""
    run = trainer(config(tmp_path, max_steps=steps), lambda model, version: make_rollout(model, version, **settings))
    run.train()
    for _, samples, outputs in run.steps:
        check_batch(samples, outputs)
    if settings["strategy"] != "sync":
        assert any(spans_versions(sample) for _, samples, _ in run.steps for sample in samples)
    trained = sum(len(sample.output_ids) for _, samples, _ in run.steps for sample in samples)
    assert run.ledger.lines["trained"] == trained
    lines = run.ledger.lines
    assert run.ledger.generated == run.ledger.pending + sum(lines.values())


def test_a_generation_batch_of_several_steps(tmp_path: Path) -> None:
    """Weights reach the engine when it is to generate; the version counts optimizer steps."""
    args = config(tmp_path, max_steps=4, per_device_train_batch_size=GROUP, steps_per_generation=2)
    run = trainer(args)
    run.train()
    assert [max(v for s in samples for v in s.versions) for _, samples, _ in run.steps] == [0, 2]


def test_masked_tokens_are_not_trained_on(tmp_path: Path) -> None:
    rule = StalenessRule(max_staleness=0, exceeding="mask")
    run = trainer(config(tmp_path, max_steps=4), lambda model, v: make_rollout(model, v, staleness=rule))
    run.train()
    for version, (_, samples, outputs) in enumerate(run.steps):
        check_batch(samples, outputs)
        for sample in samples:
            assert all(v == version for v, counts in zip(sample.versions, sample.loss_mask, strict=True) if counts)
    assert any(sample.masked for _, samples, _ in run.steps for sample in samples)


def test_groups_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    """One lost a sample, in one a sample failed: others take their place, and the ledger does not say trained."""
    torn: list[str] = []

    class Torn(Rollout):
        def collect(self, *, wait: bool = False) -> list[Group]:
            groups = super().collect(wait=wait)
            if not torn:
                groups[0].samples.pop()
                groups[1].samples[0].status = "failed"
                torn.extend(group.id for group in groups)
            return groups

    def open_rollout(model: Any, version: int) -> Rollout:
        made = make_rollout(model, version)
        return Torn(made.engine, strategy=made.strategy)

    run = trainer(config(tmp_path, max_steps=2), open_rollout)
    run.train()
    for _, samples, outputs in run.steps:
        check_batch(samples, outputs)
        assert len(samples) == 2 * GROUP
        assert not set(torn) & set(group_ids(samples))
    assert run.ledger.lines["stale"] > 0
    assert run.ledger.lines["failed"] > 0


def test_rewards_of_the_rollouts_own_grader() -> None:
    samples = [SimpleNamespace(reward=value) for value in (0.5, None)]
    assert rollout_reward(sample=samples, prompts=[]) == [0.5, None]  # type: ignore[arg-type]


def test_evaluation_is_trls_own(tmp_path: Path) -> None:
    seen: list[str] = []

    def watched(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [low_share(ids) for ids in completion_ids]

    args = config(
        tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=GROUP, do_eval=True
    )
    run = trainer(args, reward_funcs=watched, eval_dataset=Dataset.from_list([{"prompt": "7+7=", "answer": "14"}] * 1))
    run.train()
    assert seen.count("7+7=") >= 2 * GROUP
    assert all("eval_reward" in entry for entry in run.state.log_history if "eval_loss" in entry)
    assert len(run.steps) == 2
    check_ledger(run)


# ---- checkpoints


def on_disk(directory: Path, **settings: Any) -> Callable[[Any, int], Rollout]:
    def open_rollout(model: Any, version: int) -> Rollout:
        store = SampleStore(directory, commit_every=0.0)
        store.rewind_to(version)
        return make_rollout(model, version, store, **settings)

    return open_rollout


def test_training_goes_on_from_a_checkpoint_with_what_was_in_flight(tmp_path: Path) -> None:
    args = config(tmp_path / "out", max_steps=4, save_strategy="steps", save_steps=2)
    first = trainer(args, on_disk(tmp_path / "store"))
    first.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    state = json.loads((checkpoint / "longtail-0.json").read_text())
    assert state["asked"] == 6
    open_then = set(state["untrained"])
    assert len(open_then) == 2

    # The run ends after step 4, and comes back with the weights of step 2.
    second = trainer(config(tmp_path / "out", max_steps=6), on_disk(tmp_path / "store"))
    second.train(resume_from_checkpoint=str(checkpoint))
    assert len(second.steps) == 4
    before = [name for _, samples, _ in first.steps for name in group_ids(samples)]
    after = [name for _, samples, _ in second.steps for name in group_ids(samples)]
    assert after[:4] == before[4:]  # handed over since the checkpoint, and not in its weights
    assert len(set(before[:4] + after)) == 4 + len(after)  # nothing twice
    assert open_then <= set(after)  # in flight then
    replayed = [sample.output_ids for _, samples, _ in second.steps[:2] for sample in samples]
    assert replayed == [sample.output_ids for _, samples, _ in first.steps[2:] for sample in samples]
    for version, (_, samples, outputs) in enumerate(second.steps[2:], start=4):
        check_batch(samples, outputs)
        assert max(v for sample in samples for v in sample.versions) <= version
    assert second.ledger.generated == second.ledger.pending + sum(second.ledger.lines.values())
    positions = sorted(second.prompts.position(name) for name in {*before[:4], *after})
    assert positions == list(range(len(positions)))  # no prompt was passed over


def test_samples_in_flight_continue_after_a_stop(tmp_path: Path) -> None:
    """Stopped at a checkpoint: what was unfinished goes on from its tokens under the next weights."""
    args = config(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=2)
    trainer(args, on_disk(tmp_path / "store")).train()
    with SampleStore(tmp_path / "store") as store:
        begun = {s.id: (list(s.output_ids), list(s.logprobs)) for s in store.unfinished() if s.output_ids}
    assert begun
    second = trainer(config(tmp_path / "out", max_steps=4), on_disk(tmp_path / "store"))
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    continued = {s.id: s for _, samples, _ in second.steps for s in samples if s.id in begun}
    assert continued
    for name, sample in continued.items():
        ids, logprobs = begun[name]
        assert sample.output_ids[: len(ids)] == ids
        assert sample.logprobs[: len(ids)] == logprobs
        assert min(sample.versions) < 2 <= max(sample.versions)


def test_what_a_store_in_memory_lost_is_asked_for_again(tmp_path: Path) -> None:
    args = config(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=2)
    first = trainer(args)
    first.train()
    second = trainer(config(tmp_path / "out", max_steps=4))
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    names = [name for run in (first, second) for _, samples, _ in run.steps for name in group_ids(samples)]
    assert sorted(map(first.prompts.position, names)) == list(range(8))


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    run = trainer(config(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1))
    run.train()
    (tmp_path / "out" / "checkpoint-1" / "longtail-0.json").unlink()
    with pytest.raises(ValueError, match=r"longtail-0.json is missing"):
        trainer(config(tmp_path / "out")).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vllm_importance_sampling_mode": "sequence_mask"}, "sequence_mask"),
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction is False"),
        ({"use_vllm": True}, "use_vllm"),
        ({"generation_kwargs": {"num_beams": 2}}, "no field num_beams"),
        ({"generation_kwargs": {"n": 2}}, "generation_kwargs: n is set"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        trainer(config(tmp_path, **fields))


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"lookahead": -1}, "lookahead must be"),
        ({"rollout_func": lambda *_: {}}, "rollout_func"),
        ({"tools": [len]}, "tools: .* environment"),
        ({"train_dataset": additions().rename_column("answer", "sample")}, "column sample"),
        ({"train_dataset": additions().to_iterable_dataset()}, "map-style"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        trainer(config(tmp_path), **kwargs)


def test_groups_must_be_whole_in_each_process() -> None:
    """TRL asks for this of all processes together only."""
    args = SimpleNamespace(
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        per_device_train_batch_size=6,
        steps_per_generation=1,
        num_generations=4,
    )
    with pytest.raises(ValueError, match="6 x steps_per_generation 1 = 6 must be a multiple of num_generations 4"):
        check_config(args)


def test_the_model_that_a_rollout_is_opened_with_can_be_copied(tmp_path: Path) -> None:
    """TRL's forward on the object is bound to it: a copy would compute with the trainer's weights."""
    copies = []

    def open_rollout(model: Any, version: int) -> Rollout:
        copies.append(copy.deepcopy(model))
        return make_rollout(model, version)

    run = trainer(config(tmp_path, max_steps=1), open_rollout)
    run.train()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        before = copies[0](ids).logits
        run.model.get_input_embeddings().weight.zero_()
        assert torch.equal(copies[0](ids).logits, before)


def test_an_engine_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its engine is at version 3"):
        trainer(config(tmp_path), lambda model, version: make_rollout(model, 3)).train()


def test_a_rollout_that_makes_nothing_is_an_error(tmp_path: Path) -> None:
    """Three groups are wanted by the strategy, and two asked for: it says so instead of spinning."""

    class Never(Rollout):
        def collect(self, *, wait: bool = False) -> list[Any]:
            return []

    def open_rollout(model: Any, version: int) -> Rollout:
        made = make_rollout(model, version)
        return Never(made.engine, strategy=made.strategy)

    with pytest.raises(RuntimeError, match="makes no token"):
        trainer(config(tmp_path), open_rollout).train()
