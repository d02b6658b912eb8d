"""TRL 1.16's `GRPOTrainer` on partial rollouts: a group may finish in a later step than it started.

    def open_rollout(model, version):                    # called when training begins, or goes on from a checkpoint
        store = SampleStore("run/store")
        store.rewind_to(version)
        return Rollout(NativeEngine(model, version=version), strategy="over-issue:groups=8,extra=8", store=store)

    trainer = PartialRolloutGRPOTrainer(
        model, reward, GRPOConfig(..., vllm_importance_sampling_mode="token_truncate"), train_dataset=dataset,
        rollout=open_rollout,
    )

What differs from `GRPOTrainer`: prompts come from the dataset by position, `lookahead` groups ahead, and a batch is
made of the groups that are complete, whichever prompts those are of. Each goes with its own row: reward functions see
the columns of the row that the completion answers, and the `Sample` itself (tokens, log-probabilities, versions,
segments) as `sample`. TRL's own importance-sampling correction weighs every token by what it was sampled with.

                 asked for ------------------------> in flight (the rollout's store) --> complete --> batch of a step
    step t       p8 p9                               p5 p6 p7 p8 p9                      p4 p6        p4 p6
    step t + 1   p10 p11                             p5 p7 p8 ...                        p5 p8        p5 p8

The version of the weights is the number of optimizer steps behind them (`state.global_step`). One rollout a process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from longtail.sample import Group, Sample
from longtail.trainer_adapter.plugins.trl_prompts import Line, Prompts, Rollout, collect_some, sampling_params

OpenRollout = Callable[[Any, int], Rollout]
"""(model, version) -> a rollout whose engine has these weights, under this version. The model may be copied, and must
neither be changed nor kept. The trainer closes the rollout when training ends, however it does."""


class PartialRolloutGRPOTrainer(GRPOTrainer):
    """model, reward_funcs, args and further keywords: `GRPOTrainer`'s. Evaluation is TRL's own, with `model.generate`.

    rollout: opens the rollout (`OpenRollout`). lookahead: so many groups are asked for beyond those that a batch needs
    (None: as many again); without any, nothing could stay in flight.

    Checkpoints say how far the rollout was (`longtail-<rank>.json`). With a store on disk, training that goes on from
    one continues the samples that were in flight, and trains on groups that were handed over since, once. (What a
    store in memory loses is asked for again, from its prompt.) A batch of which a checkpoint saw a part is trained on
    again from its start.

    ledger: of the store, as it was when training ended; what is unfinished stands there as pending, groups that were
    complete and not used as surplus. Groups that are not whole (a sample failed, or was thrown away) are left out.

    ValueError for settings that would train on something else than they say: see `check_config`.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *,
        rollout: OpenRollout,
        lookahead: int | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            raise ValueError('args: give a GRPOConfig with vllm_importance_sampling_mode="token_truncate"')
        check_config(args)
        for name in ("rollout_func", "tools", "environment_factory", "peft_config", "quantization_config"):
            if kwargs.get(name):
                raise ValueError(f"{name}: {_NOT_WITH[name]}")
        if not callable(rollout):
            raise ValueError("rollout must be a function of (model, version) that opens a rollout, not an open one")
        super().__init__(model, reward_funcs, args, **kwargs)
        if is_peft_model(self.model):
            raise ValueError(f"model: {_NOT_WITH['peft_config']}")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError("the weights are sharded (DeepSpeed, FSDP); the rollout needs them whole: use DDP")
        if self._is_vlm:
            raise ValueError("processing_class: images are not supported; give a tokenizer")
        self.prompts = Prompts(
            self.train_dataset,
            lambda prompt: self._tokenize_prompts([prompt])[0][0],
            sampling_params(args, self.eos_token_ids),
            seed=args.seed,
            shuffle=self.shuffle_dataset,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        self.num_groups = args.per_device_train_batch_size * args.steps_per_generation // self.num_generations
        """Of a generation batch of this process."""
        self.lookahead = self.num_groups if lookahead is None else lookahead
        if isinstance(self.lookahead, bool) or not isinstance(self.lookahead, int) or self.lookahead < 0:
            raise ValueError(f"lookahead must be an integer of at least 0, not {lookahead!r}")
        self._open_rollout = rollout
        self.rollout: Rollout | None = None
        """While it trains."""
        self.ledger: Any = None
        self._ready: list[tuple[Group, int]] = []
        """Handed over by the rollout, not trained on: each with the number of its delivery."""
        self._batch: list[tuple[Group, int]] = []
        """What the current generation batch is made of."""
        self._samples: list[Sample] = []
        self._resumed: dict[str, Any] | None = None
        self.vllm_generation = None
        self._generate_by_rollout()

    def _generate_by_rollout(self) -> None:
        # TRL reads log-probabilities that are not its own, and corrects by them, where it believes that vLLM made them.
        self.use_vllm = True
        self.rollout_func: Any = _hand_over

    # -- a step --------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """inputs: the rows that TRL's loader chose. Only their number counts."""
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        rollout = self._begin()
        self._push_weights(rollout)
        self._batch = self._take(rollout, len(inputs) // self.num_generations)
        self._samples = _samples(self._batch)
        rows = [group.task | {"sample": sample} for group, _ in self._batch for sample in group.samples]
        outputs = super()._generate_and_score_completions(rows)
        self._log_rollout(rollout, outputs)
        return outputs

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation wants answers to its own prompts, at once: TRL's own generation, where nothing is to be corrected.
        self.use_vllm, self.rollout_func = False, None
        try:
            return super().prediction_step(*args, **kwargs)
        finally:
            self._generate_by_rollout()

    def _push_weights(self, rollout: Rollout) -> None:
        version = self.state.global_step
        if version > rollout.engine.version:
            rollout.update_weights(self.accelerator.unwrap_model(self.model).state_dict(), version)
        self._last_loaded_step = version

    def _take(self, rollout: Rollout, count: int) -> list[tuple[Group, int]]:
        """Whole groups, those first that were complete first."""
        while len(self._ready) < count:
            self.prompts.keep_open(rollout, count + self.lookahead - len(self._ready))
            groups = collect_some(rollout)
            number = rollout.store.last_delivery
            for group in groups:
                if line := self._lacks(group):
                    _settle(rollout, group.samples, line)
                else:
                    looped = [s for s in group.samples if s.finish_reason == "repetition"]
                    _settle(rollout, looped, "trained")  # which the store does not expect
                    self._ready.append((group, number))
        taken, self._ready = self._ready[:count], self._ready[count:]
        return taken

    def _lacks(self, group: Group) -> Line | None:
        """Why a group is not whole: the line of the ledger for what it has."""
        for sample in group.samples:
            if sample.status == "failed" or not sample.output_ids:
                return "failed"
            if sample.finish_reason == "aborted":
                return "aborted"
        return None if len(group.samples) == self.num_generations else "stale"

    def _log_rollout(self, rollout: Rollout, outputs: dict[str, Any]) -> None:
        """Beside TRL's sampling/sampling_logp_difference, which is of all tokens, that of tokens of the newest version:
        how far the rollout's arithmetic is from the trainer's."""
        metrics, version, samples = self._metrics["train"], rollout.engine.version, self._samples
        ages = [version - v for s in samples for v in s.versions if v >= 0]
        metrics["rollout/staleness_mean"].append(sum(ages) / max(len(ages), 1))
        metrics["rollout/staleness_max"].append(float(max(ages, default=0)))
        resumed = sum(len({v for v in s.versions if v >= 0}) > 1 for s in samples)
        metrics["rollout/resumed_samples"].append(resumed / len(samples))
        metrics["rollout/in_flight_groups"].append(float(len(rollout.store)))
        difference = (outputs["old_per_token_logps"] - outputs["sampling_per_token_logps"]).abs()
        fresh = torch.zeros_like(difference, dtype=torch.bool)
        for row, sample in zip(fresh, samples, strict=True):
            row[: len(sample.versions)] = torch.tensor([v == version for v in sample.versions])
        if fresh.any():
            metrics["rollout/fresh_logp_difference_max"].append(difference[fresh].max().item())

    # -- begin, checkpoint, end ----------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._end()

    def _begin(self) -> Rollout:
        """The rollout; opened when the first batch is wanted, for by then a checkpoint's weights are loaded."""
        if self.rollout is None:
            version = self.state.global_step
            with _as_made(self.accelerator.unwrap_model(self.model)) as model:
                self.rollout = self._open_rollout(model, version)
            if self.rollout.engine.version != version:
                raise ValueError(
                    f"rollout: its engine is at version {self.rollout.engine.version}, the weights that it was opened "
                    f"with are version {version}; make the engine with that version"
                )
            state, self._resumed = self._resumed or {"asked": 0, "untrained": [], "after": 0}, None
            self._go_on(self.rollout, state)
        return self.rollout

    def _go_on(self, rollout: Rollout, state: dict[str, Any]) -> None:
        """From where a checkpoint was, with whatever the store has seen since."""
        self.prompts.asked = state["asked"]
        untrained = set(state["untrained"])
        with rollout.turn:
            store = rollout.store
            lost = sorted(self.prompts.position(name) for name in untrained if name not in store)
            rollout.submit(self.prompts.group(position) for position in lost)
            for delivery in store.deliveries(after=state["after"]) if store.directory is not None else ():
                for group in delivery.groups:
                    is_new = self.prompts.position(group.id) >= state["asked"]
                    if (is_new or group.id in untrained) and self._lacks(group) is None:
                        self._ready.append((group, delivery.number))
            _settle(rollout, _samples(self._ready), "trained")  # an earlier end may have said surplus

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            file = self._state_file(Path(checkpoint))
            if not file.is_file():
                raise ValueError(
                    f"resume_from_checkpoint: {file} is missing, so this trainer did not write the checkpoint; train "
                    "from its model instead, with a new store"
                )
            self._resumed = json.loads(file.read_text())

    def _state_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"longtail-{self.accelerator.process_index}.json"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.rollout is None:
            return
        with self.rollout.turn:
            store = self.rollout.store
            store.flush()
            waiting = list(self._ready)
            if self._step % (self.args.steps_per_generation * self.num_iterations):
                waiting += self._batch  # only a part of it is in these weights
            state = {
                "asked": self.prompts.asked,
                "untrained": [group.id for group, _ in waiting] + [group.id for group in store],
                "after": min((number for _, number in waiting), default=store.last_delivery + 1) - 1,
            }
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        file = self._state_file(folder)
        file.with_suffix(".tmp").write_text(json.dumps(state))
        os.replace(file.with_suffix(".tmp"), file)

    def _end(self) -> None:
        rollout, self.rollout = self.rollout, None
        if rollout is None:
            return
        try:
            with rollout.turn:
                _settle(rollout, _samples(self._ready), "surplus")
                rollout.store.flush()
                self.ledger = rollout.store.ledger
            self._ready = []
        finally:
            rollout.close()


def check_config(args: GRPOConfig) -> None:
    """ValueError for settings with which partial rollouts would train on something else than they say."""
    if args.use_vllm:
        raise ValueError("use_vllm: the rollout's engine generates; leave it False")
    if not args.vllm_importance_sampling_correction:
        raise ValueError(
            "vllm_importance_sampling_correction is False: samples of older weights would be trained on as if the "
            "current ones had made them; leave it True (it corrects whatever engine sampled)"
        )
    if args.vllm_importance_sampling_mode == "sequence_mask":
        raise ValueError(
            'vllm_importance_sampling_mode is "sequence_mask" (TRL\'s default), which drops nearly every sample that '
            'was resumed under newer weights; set "token_truncate"'
        )
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise ValueError(
            f"per_device_train_batch_size {args.per_device_train_batch_size} x steps_per_generation "
            f"{args.steps_per_generation} = {rows} must be a multiple of num_generations {args.num_generations}: the "
            "samples of a group finish together, in one process"
        )


_NOT_WITH = {
    "rollout_func": "the rollout takes its place; leave it out",
    "tools": "samples of several turns are the rollout's: give it an environment (Rollout(environment=))",
    "environment_factory": "samples of several turns are the rollout's: give it an environment (Rollout(environment=))",
    "peft_config": "adapters are not merged into what the rollout gets; train the full weights",
    "quantization_config": "the rollout gets the weights as they are; load the model in float32 or bfloat16",
}


def rollout_reward(sample: list[Sample], **_: Any) -> list[float | None]:
    """A reward function for TRL: what the rollout's own grader gave (None where it could not)."""
    return [one.reward for one in sample]


def _hand_over(prompts: list[Any], trainer: PartialRolloutGRPOTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: the samples that the step has taken, in the order of `prompts`."""
    samples = trainer._samples
    assert len(samples) == len(prompts), (len(samples), len(prompts))
    return {
        "prompt_ids": [list(sample.prompt_ids) for sample in samples],
        "completion_ids": [list(sample.output_ids) for sample in samples],
        "logprobs": [list(sample.logprobs) for sample in samples],
        "env_mask": [[int(trained) for trained in sample.loss_mask] for sample in samples],
    }


def _samples(groups: list[tuple[Group, int]]) -> list[Sample]:
    return [sample for group, _ in groups for sample in group.samples]


def _settle(rollout: Rollout, samples: list[Sample], line: Line) -> None:
    with rollout.turn:
        ids = [sample.id for sample in samples if sample.status == "finished"]
        if ids:
            rollout.store.settle(ids, line)


@contextlib.contextmanager
def _as_made(model: Any) -> Iterator[Any]:
    """The model without the forward that TRL puts on the object: a copy's would run the original's layers."""
    forward = model.__dict__.pop("forward", None)
    try:
        yield model
    finally:
        if forward is not None:
            model.forward = forward
