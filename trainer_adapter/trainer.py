"""Groups of graded samples in, one update of the policy out.

    groups -> pack -> TrainBatch -> weights of the whole batch -> micro-batches -> logprobs -> loss -> backward
                                                                   clip, AdamW  <- gradients, summed over them

    trainer = Trainer(policy, dapo(corrections=tis()), config=TrainConfig(learning_rate=1e-5))
    result = trainer.step(rollout.collect(), version)
    rollout.update_weights(policy.weights(), version + 1)

Each token's share in the loss is fixed for the whole batch before it is split (`losses.token_weights`), so that
micro-batches add up to the unsplit batch, whatever their sizes. What a batch does to the weights is a function of the
batch, the weights and the optimiser's state; the trainer draws no random number.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from longtail.sample import Group, Sample
from longtail.trainer_adapter.batch import Inputs, TrainBatch, counts, expand
from longtail.trainer_adapter.diagnostics import Diagnostics, diagnose
from longtail.trainer_adapter.losses import LossResult, PolicyLoss
from longtail.trainer_adapter.packing import pack
from longtail.trainer_adapter.policy import Policy, Reference
from longtail.trainer_adapter.updates import UpdateConfig, Updater


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(UpdateConfig):
    """Checked at construction."""

    micro_batch_tokens: int = 8192
    """Most input tokens of one forward and backward pass (or one longer sequence)."""
    updates: int = 1
    """Updates on each batch (mu in GRPO, epochs in PPO)."""
    logprobs: Literal["processed", "raw"] = "processed"
    """What the rollout recorded. processed: under the distribution that was sampled from, of which the policy computes
    the temperature; samples with truncation, penalties or banned tokens are refused. raw: under softmax(logits)."""
    max_staleness: int | None = None
    """These five are of `pack`."""
    incomplete: Literal["leave_out", "train"] = "leave_out"
    zero_variance: Literal["train", "leave_out"] = "train"
    last_segment_only: bool = False
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        UpdateConfig.__post_init__(self)
        for name in ("micro_batch_tokens", "updates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if self.logprobs not in ("processed", "raw"):
            raise ValueError(f'logprobs must be "processed" or "raw", not {self.logprobs!r}')
        for name in ("incomplete", "zero_variance"):
            if getattr(self, name) not in ("leave_out", "train"):
                raise ValueError(f'{name} must be "train" or "leave_out", not {getattr(self, name)!r}')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one batch did. Losses are of the weights before each update."""

    version: int
    """Of the weights before it."""
    groups: int
    """Handed in,"""
    sequences: int
    """and of their samples, those with a token in the loss."""
    tokens: int
    """In the loss."""
    learnt: int
    """Sequences of these with an advantage other than 0 (or, with a KL penalty, all)."""
    losses: tuple[float, ...]
    """Of each update; none where nothing is in the mask."""
    grad_norms: tuple[float, ...]
    """Before clipping."""
    updated: int
    """Updates that changed the weights: a gradient of exactly 0 makes none, so that neither momentum nor weight decay
    moves the weights for a batch that says nothing."""
    learning_rate: float
    """Of the last update."""
    policy_loss: float
    """This and what follows: of the first update."""
    kl: float
    """Estimate of KL(pi || reference); 0 without a penalty."""
    clipped_low: int
    clipped_high: int
    dropped: int
    diagnostics: Diagnostics | None
    """Of rollout against trainer; None where nothing is in the mask."""
    left_out: Mapping[str, str]

    @property
    def max_difference(self) -> float | None:
        """max |log-probability of the trainer - that of the rollout| over the tokens that the present weights made: 0.0
        where the policy is exact. None: there are none in the mask."""
        fresh = None if self.diagnostics is None else self.diagnostics.by_staleness.get(0)
        return None if fresh is None else fresh.max_difference

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        found = self.diagnostics
        plain |= {
            "loss": self.losses[0] if self.losses else None,
            "losses": list(self.losses),
            "grad_norms": list(self.grad_norms),
            "max_difference": self.max_difference,
            "diagnostics": None if found is None else found.overall.as_dict(),
            "by_staleness": {} if found is None else {str(k): m.as_dict() for k, m in found.by_staleness.items()},
            "left_out": dict(self.left_out),
        }
        return plain


class Trainer:
    """Owns the optimiser; the policy's weights change in `step` only.

    optimiser: over policy.parameters(); None: AdamW of `config`. Learning rates are those it comes with, times the
    warm-up. reference: for a KL penalty (loss.kl_coef); it is not trained."""

    def __init__(
        self,
        policy: Policy,
        loss: PolicyLoss,
        optimiser: torch.optim.Optimizer | None = None,
        *,
        config: TrainConfig | None = None,
        reference: Reference | None = None,
    ) -> None:
        self.policy, self.loss, self.config, self.reference = policy, loss, config or TrainConfig(), reference
        if loss.kl_coef and reference is None:
            raise ValueError(f"reference: a KL penalty (kl_coef {loss.kl_coef}) needs a reference policy")
        self.updater = Updater(policy.parameters(), self.config, optimiser)

    @property
    def optimiser(self) -> torch.optim.Optimizer:
        return self.updater.optimiser

    @property
    def num_updates(self) -> int:
        """That have changed the weights."""
        return self.updater.num_updates

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, groups: Iterable[Group], version: int) -> StepResult:
        """version: of the policy's weights, above which no token's is. ValueError as `pack` has it, and for samples
        whose recorded log-probabilities mean something else than the policy's; TrainingDiverged. Updates before the
        one that fails have happened (there are none with config.updates = 1)."""
        groups = list(groups)
        batch = self._pack(groups, version)
        parts = self._parts(batch, {s.id: s for group in groups for s in group.samples})
        totals: list[LossResult] = []
        norms: list[float] = []
        before, diagnostics = self.num_updates, None
        for update in range(self.config.updates if parts else 0):
            self.updater.zero_grad()
            results = [self._gradients(part) for part in parts]
            if update == 0:
                diagnostics = self._diagnose(batch, parts)
            totals.append(functools.reduce(operator.add, results))
            norms.append(self.updater.update(float(totals[-1].loss), f"version {version}, update {update}"))
        first = totals[0] if totals else None
        return StepResult(
            version=version,
            groups=len(groups),
            sequences=int(batch.trained.sum()),
            tokens=int(batch.mask.sum()),
            learnt=sum(len(part.batch) for part in parts if part.learns),
            losses=tuple(float(total.loss) for total in totals),
            grad_norms=tuple(norms),
            updated=self.num_updates - before,
            learning_rate=self.updater.learning_rate,
            policy_loss=0.0 if first is None else float(first.policy_loss),
            kl=0.0 if first is None else float(first.kl),
            clipped_low=0 if first is None else int(first.clipped_low),
            clipped_high=0 if first is None else int(first.clipped_high),
            dropped=0 if first is None else int(first.dropped),
            diagnostics=diagnostics,
            left_out=dict(batch.left_out),
        )

    def _pack(self, groups: list[Group], version: int) -> TrainBatch:
        c = self.config
        batch = pack(
            groups,
            version=version,
            advantage=self.loss.advantage,
            max_staleness=c.max_staleness,
            incomplete=c.incomplete,
            zero_variance=c.zero_variance,
            last_segment_only=c.last_segment_only,
            mask_truncated=c.mask_truncated,
        )
        return self.loss.weigh(batch)  # once nothing more leaves the mask

    def _parts(self, batch: TrainBatch, samples: Mapping[str, Sample]) -> list[_Part]:
        """Micro-batches. Sequences that can have no gradient stand in some of their own, for the diagnostics."""
        learns = counts(batch.mask & (batch.advantages != 0), batch.lengths) > 0
        if self.loss.kl_coef:
            learns = batch.trained
        ends = dict(zip(batch.sample_ids, batch.lengths.cumsum(0).tolist(), strict=True))
        device = self.updater.device
        parts = []
        for chosen, does in ((learns, True), (~learns, False)):
            for micro in batch.select(chosen).split(self.config.micro_batch_tokens):
                spans = zip(micro.sample_ids, micro.lengths.tolist(), strict=True)
                places = torch.cat([torch.arange(ends[name] - n, ends[name]) for name, n in spans])
                temperature = self._temperature([samples[name] for name in micro.sample_ids], micro.lengths)
                part = _Part(micro.to(device), places, does, temperature)
                if self.loss.kl_coef:
                    assert self.reference is not None
                    with torch.no_grad():
                        found = self.reference.logprobs(part.inputs, temperature=temperature)
                    part.batch = part.batch.replace(ref_logprobs=found)
                parts.append(part)
        return parts

    def _temperature(self, samples: Sequence[Sample], lengths: torch.Tensor) -> float | torch.Tensor:
        """One number where all samples have it, else float32 [N]."""
        if self.config.logprobs == "raw":
            return 1.0
        for sample in samples:
            _check_params(sample)
        found = [sample.params.temperature for sample in samples]
        if len(set(found)) == 1:
            return found[0]
        return expand(torch.tensor(found), lengths).to(self.updater.device)

    def _gradients(self, part: _Part) -> LossResult:
        """Adds the part's to the parameters' gradients."""
        with torch.set_grad_enabled(part.learns):
            logprobs = self.policy.logprobs(part.inputs, temperature=part.temperature)
            if part.batch.proximal_logprobs is None:  # before the first update on this batch
                part.batch = part.batch.replace(proximal_logprobs=logprobs.detach())
            batch = part.batch.replace(logprobs=logprobs)
            result = self.loss(batch)
        if part.learns:
            result.loss.backward()
        with torch.no_grad():
            part.logprobs, part.factors = logprobs.detach(), self.loss.factors(batch)
        return dataclasses.replace(result, loss=result.loss.detach())

    def _diagnose(self, batch: TrainBatch, parts: Sequence[_Part]) -> Diagnostics:
        logprobs = batch.rollout_logprobs.clone()  # what is in no part is not in the mask
        factors = torch.ones_like(logprobs)
        for part in parts:
            assert part.logprobs is not None and part.factors is not None
            logprobs[part.places] = part.logprobs.to(logprobs)
            factors[part.places] = part.factors.to(factors)
        return diagnose(batch.replace(logprobs=logprobs), factors)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on but the groups: tensors, numbers, text, and dicts and lists of them.
        The tensors are not copies."""
        return {"policy": self.policy.state_dict(), **self.updater.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, of a trainer with the same model, optimiser and settings. ValueError where it does
        not fit."""
        self.policy.load_state_dict(state["policy"])
        self.updater.load_state_dict(state)


@dataclasses.dataclass(slots=True)
class _Part:
    """A micro-batch."""

    batch: TrainBatch
    places: torch.Tensor
    """int64 [N]: of its tokens in the whole batch."""
    learns: bool
    """Whether it can have a gradient."""
    temperature: float | torch.Tensor
    logprobs: torch.Tensor | None = None
    """float [N], of the last pass, and the corrections' factors."""
    factors: torch.Tensor | None = None

    @property
    def inputs(self) -> Inputs:
        assert self.batch.inputs is not None
        return self.batch.inputs


def _check_params(sample: Sample) -> None:
    params = sample.params
    why = None
    if params.temperature == 0:
        why = "temperature 0: greedy decoding has no distribution to train"
    elif params.truncates:
        why = "top_k, top_p or min_p: tokens were drawn from a truncated distribution"
    elif params.has_penalties or params.min_tokens:
        why = "penalties or min_tokens: logits were edited before tokens were drawn"
    if why is not None:
        raise ValueError(
            f"sample {sample.id}: {why}, which the policy does not compute; sample without, or record "
            'log-probabilities of the model itself (logprobs_mode="raw" and TrainConfig(logprobs="raw"))'
        )
