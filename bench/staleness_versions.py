"""Policy versions: from a short real training, or from checkpoints that are there.

The training is GRPO's (Shao et al. 2024): groups of the first version's own samples, advantages within the group, PPO's
clipped ratio, AdamW; one optimiser step, on one group, a version. A sample's reward is its verifier's grade plus its
mean log-probability (self-certainty as in Zhao et al. 2025), so that there is something to learn where no answer
is right. AdamW moves each weight by about the learning rate whatever the size of the gradient; its moments are warmed
up (at learning rate 0), since its very first step moves every weight by the whole learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtail.bench.staleness_drift import CLIP
from longtail.kernels.logprobs import token_logprobs
from longtail.partial_rollout.engines.native.decoder import weights_of
from longtail.partial_rollout.engines.native.loader import load_model
from longtail.sample import Group, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = dict[str, torch.Tensor]
WARM_UP = 4
"""Gradients that fill the optimiser's moments."""
MEASURED_WEIGHTS = 4_000_000
"""Weights by which the change is measured, drawn at random from a model that has more."""


class Training:
    """Trains `model` in place, from the same start at any learning rate.

    groups: complete ones; rewards: of each group's samples."""

    def __init__(
        self,
        model: PreTrainedModel,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[float]],
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.model = model.train(False)  # no dropout: the ratio of the first step is 1
        self.groups, self.rewards, self.progress = groups, rewards, progress
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
        self.start = {name: w.clone() for name, w in weights_of(model).items()}
        for i in range(WARM_UP):
            progress(f"training: warming up, {i + 1} of {WARM_UP}")
            self.step(-1 - i)
        self.moments = [{n: t.clone() for n, t in self.optimizer.state[p].items()} for p in self.parameters]

    def versions(self, rate: float, count: int) -> Iterator[Weights]:
        """Version 0 and `count` further ones at this learning rate. Each is valid until the next one is asked for."""
        with torch.no_grad():
            for name, weight in weights_of(self.model).items():
                weight.copy_(self.start[name])
            for parameter, moments in zip(self.parameters, self.moments, strict=True):
                for name, moment in moments.items():
                    self.optimizer.state[parameter][name].copy_(moment)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        yield weights_of(self.model)
        for i in range(count):
            self.progress(f"training at {rate:g}: version {i + 1} of {count}")
            self.step(i)
            yield weights_of(self.model)

    def step(self, index: int) -> float:
        """One optimiser step on one group. -> its loss. ValueError if the gradient is not finite."""
        index %= len(self.groups)
        samples, rewards = self.groups[index].samples, torch.tensor(self.rewards[index])
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
        tokens = sum(len(s.output_ids) for s in samples)
        total = 0.0
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):  # one at a time: less memory
            loss = self._loss(sample, advantage) / tokens
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if not torch.isfinite(norm):
            raise ValueError(f"lr: the gradient is {float(norm)}; lower the learning rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _loss(self, sample: Sample, advantage: float) -> torch.Tensor:
        """Sum over its output tokens."""
        output = torch.tensor(sample.output_ids)
        ids = torch.tensor([[*sample.prompt_ids, *sample.output_ids]])
        model: Any = self.model
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0, :-1].float()
        ratio = (token_logprobs(logits, output) - torch.tensor(sample.logprobs)).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()


def checkpoints(directories: Sequence[Path]) -> Iterator[Weights]:
    """Of each directory, in order; one in memory at a time."""
    for directory in directories:
        yield weights_of(load_model(directory)[0])


def probe(weights: Weights, most: int = MEASURED_WEIGHTS) -> torch.Tensor:
    """float64 [n]: the same `most` weights of any version, or all, to measure a change by."""
    total = sum(w.numel() for w in weights.values())
    generator = torch.Generator().manual_seed(0)
    parts = []
    for name in sorted(weights):
        flat = weights[name].detach().reshape(-1)
        if total > most:
            wanted = -(-flat.numel() * most // total)
            flat = flat[torch.randint(flat.numel(), (wanted,), generator=generator)]
        parts.append(flat.double())
    return torch.cat(parts)


def relative_change(before: torch.Tensor, after: torch.Tensor) -> float:
    """L2 norm of the difference over that of `before`."""
    return float((after - before).norm() / before.norm())
