"""Preference pairs in, one update of the policy out (`dpo.dpo_loss`, against a reference that is computed once).

    pairs -> order of the epoch -> batch -> micro-batches of whole pairs -> logprobs -> dpo_loss -> backward
                                                       clip, AdamW  <- gradients, summed over them

    trainer = DPOTrainer(policy, pairs, held_out=held_out, config=DPOConfig(beta=0.1, learning_rate=5e-6))
    while not trainer.is_done:
        print(trainer.step().as_dict())
    print(trainer.evaluate())

A pair's share in the loss is fixed for the whole batch before it is split, so that micro-batches add up to the unsplit
batch. The order of the pairs is a function of (seed, epoch), and the trainer draws no other random number: what a step
does is a function of the pairs, the settings, the weights, the optimiser's state and the number of the step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longtail.trainer_adapter.dpo import DPOKind, DPOResult, PreferenceBatch, dpo_loss
from longtail.trainer_adapter.dpo_reference import ReferenceLogprobs, need_inputs, reference_logprobs
from longtail.trainer_adapter.policy import Policy
from longtail.trainer_adapter.preferences import Pair
from longtail.trainer_adapter.updates import UpdateConfig, Updater


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig(UpdateConfig):
    """Checked at construction."""

    beta: float = 0.1
    """These four are of `dpo_loss`."""
    kind: DPOKind = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool | None = None
    batch_pairs: int = 16
    """Of one update. The last batch of an epoch has what is left."""
    micro_batch_tokens: int = 8192
    """Most input tokens of one forward and backward pass (or one longer pair)."""
    epochs: int = 1
    seed: int = 0
    """Of the order of the pairs."""

    def __post_init__(self) -> None:
        UpdateConfig.__post_init__(self)
        for name in ("batch_pairs", "micro_batch_tokens", "epochs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        empty = PreferenceBatch.from_pairs([])
        nothing = torch.zeros(0)
        dpo_loss(empty.replace(logprobs=nothing, ref_logprobs=nothing), **self.loss)  # refuses what it does not know

    @property
    def loss(self) -> dict[str, Any]:
        """Arguments of `dpo_loss`."""
        return {name: getattr(self, name) for name in ("beta", "kind", "label_smoothing", "length_normalized")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOFigures:
    """Means over pairs. Rewards are the implicit ones, beta (log pi - log ref), as the loss takes them."""

    pairs: int
    loss: float
    accuracy: float
    """Share of the pairs whose chosen response has the higher reward, not an equal one as before the first update."""
    margin: float
    """Reward of the chosen response minus that of the rejected one."""
    chosen_reward: float
    rejected_reward: float
    chosen_logprob: float
    """log pi of the chosen response, summed over its tokens that are trained on. That it falls, though less than that
    of the rejected one, is common in DPO."""
    rejected_logprob: float

    @classmethod
    def of(cls, result: DPOResult) -> DPOFigures:
        n = int(result.pairs)

        def mean(x: torch.Tensor) -> float:
            return float(x) / n

        return cls(
            pairs=n,
            loss=float(result.loss),
            accuracy=mean(result.correct),
            margin=mean(result.chosen_reward) - mean(result.rejected_reward),
            chosen_reward=mean(result.chosen_reward),
            rejected_reward=mean(result.rejected_reward),
            chosen_logprob=mean(result.chosen_logprob),
            rejected_logprob=mean(result.rejected_logprob),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOStep:
    step: int
    """0, 1, ..."""
    epoch: int
    figures: DPOFigures
    """Of the weights before the update."""
    tokens: int
    """In the loss."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "figures"}
        return found | dataclasses.asdict(self.figures)


class DPOTrainer:
    """Owns the optimiser; the policy's weights change in `step` only.

    policy: its weights, as they are at construction, are the reference, unless another policy is given as one.
    held_out: pairs that `evaluate` measures. cache: file for what the reference says of all pairs; a resumed run has
    it, and starts from the same weights again. optimiser: over policy.parameters(); None: AdamW of `config`.

    ValueError: no pairs, a pair that is in both sets, or a policy with nothing to train."""

    def __init__(
        self,
        policy: Policy,
        pairs: Sequence[Pair],
        *,
        held_out: Sequence[Pair] = (),
        config: DPOConfig | None = None,
        reference: Policy | None = None,
        cache: Path | None = None,
        optimiser: torch.optim.Optimizer | None = None,
    ) -> None:
        self.policy, self.config = policy, config or DPOConfig()
        self.pairs, self.held_out = tuple(pairs), tuple(held_out)
        if not self.pairs:
            raise ValueError("pairs: there are none to train on")
        prompts = {pair.prompt_ids for pair in self.pairs}
        if shared := sum(pair.prompt_ids in prompts for pair in self.held_out):
            raise ValueError(
                f"held_out: {shared} pairs have prompts that are trained on; `preferences.hold_out` keeps prompts apart"
            )
        self.updater = Updater(policy.parameters(), self.config, optimiser)
        self.reference: ReferenceLogprobs = reference_logprobs(
            reference or policy,
            [*self.pairs, *self.held_out],
            micro_batch_tokens=self.config.micro_batch_tokens,
            cache=cache,
        )
        self.num_steps = 0
        """Made."""

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.pairs) // self.config.batch_pairs)

    @property
    def is_done(self) -> bool:
        return self.num_steps >= self.config.epochs * self.steps_per_epoch

    def batch_of(self, step: int) -> list[int]:
        """Places in `pairs`, of the batch of step 0, 1, ...: each pair comes once an epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        seed = hashlib.blake2b(f"{self.config.seed}:{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        order = torch.randperm(len(self.pairs), generator=generator).tolist()
        return order[place * self.config.batch_pairs : (place + 1) * self.config.batch_pairs]

    def step(self) -> DPOStep:
        """One update. TrainingDiverged where a loss or a gradient is not finite: the weights stay. ValueError when all
        epochs are done."""
        if self.is_done:
            raise ValueError(f"step: all {self.num_steps} are made; raise config.epochs to go on")
        chosen = self.batch_of(self.num_steps)
        batch = self._batch(chosen, [self.pairs[i] for i in chosen])
        self.updater.zero_grad()
        total = self._pass(batch, learn=True)
        norm = self.updater.update(float(total.loss), f"step {self.num_steps}")
        made = DPOStep(
            step=self.num_steps,
            epoch=self.num_steps // self.steps_per_epoch,
            figures=DPOFigures.of(total),
            tokens=int(batch.mask.sum()),
            grad_norm=norm,
            learning_rate=self.updater.learning_rate,
        )
        self.num_steps += 1
        return made

    def evaluate(self) -> DPOFigures | None:
        """Of the held-out pairs under the weights that the policy has now; None without such pairs."""
        if not self.held_out:
            return None
        places = range(len(self.pairs), len(self.pairs) + len(self.held_out))
        return DPOFigures.of(self._pass(self._batch(places, self.held_out), learn=False))

    def _batch(self, places: Sequence[int], pairs: Sequence[Pair]) -> PreferenceBatch:
        batch = PreferenceBatch.from_pairs(pairs)
        return batch.replace(ref_logprobs=self.reference.of(places), weights=batch.pair_weights())

    def _pass(self, batch: PreferenceBatch, *, learn: bool) -> DPOResult:
        """Adds to the parameters' gradients, where it is to learn."""
        results = []
        for part in batch.split(self.config.micro_batch_tokens):
            part = part.to(self.updater.device)
            with torch.set_grad_enabled(learn):
                result = dpo_loss(part.replace(logprobs=self.policy.logprobs(need_inputs(part))), **self.config.loss)
            if learn:
                result.loss.backward()
            results.append(dataclasses.replace(result, loss=result.loss.detach()))
        return functools.reduce(operator.add, results)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on but pairs and settings, which it names: tensors, numbers, text, and
        dicts and lists of them. The tensors are not copies."""
        return {
            "policy": self.policy.state_dict(),
            **self.updater.state_dict(),
            "num_steps": self.num_steps,
            "config": dataclasses.asdict(self.config),
            "reference": {"weights": self.reference.weights, "pairs": self.reference.pairs},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave. ValueError, and nothing is changed, where it is of other pairs, another reference or
        other settings than those of this trainer (but epochs, which may be raised)."""
        own = {"weights": self.reference.weights, "pairs": self.reference.pairs}
        for name, what in (("pairs", "other pairs"), ("weights", "another reference")):
            if state["reference"][name] != own[name]:
                raise ValueError(f"state: was trained with {what}; give those of that run, or start another one")
        config = dataclasses.asdict(self.config)
        for name, value in state["config"].items():
            if name != "epochs" and config.get(name) != value:
                raise ValueError(f"state: was trained with {name} {value}, not {config.get(name)}")
        self.policy.load_state_dict(state["policy"])
        self.updater.load_state_dict(state)
        self.num_steps = int(state["num_steps"])
