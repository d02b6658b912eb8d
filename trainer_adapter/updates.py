"""From gradients to weights: clipping, AdamW, warm-up, and no update from what is not finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from longtail.errors import LongtailError


class TrainingDiverged(LongtailError):
    """A loss or a gradient is not finite. The weights are as they were before the update."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """Checked at construction."""

    learning_rate: float = 1e-6
    warmup: int = 0
    """Updates over which the learning rate rises in equal steps to its full value; 0: full from the first."""
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Gradients of a greater norm, of all parameters together, are scaled down to it; None: never."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {value}")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup must be an integer of at least 0, not {self.warmup!r}")
        if not (0 <= self.weight_decay < math.inf and all(0 <= beta < 1 for beta in self.betas)):
            raise ValueError(f"weight_decay {self.weight_decay} must be at least 0, betas {self.betas} in [0, 1)")

    def rate(self, update: int) -> float:
        """Share of the learning rate of update number 0, 1, ..."""
        return min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0


class Updater:
    """Owns the optimiser.

    optimiser: over the parameters; None: AdamW of `config`. Learning rates are those it comes with, times the
    warm-up. ValueError: no parameters."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: UpdateConfig,
        optimiser: torch.optim.Optimizer | None = None,
    ) -> None:
        self.parameters, self.config = list(parameters), config
        if not self.parameters:
            raise ValueError("policy: it has no parameters to train")
        self.optimiser = optimiser or torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        self._rates = [float(group["lr"]) for group in self.optimiser.param_groups]
        self.num_updates = 0
        """That have changed the weights."""

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def learning_rate(self) -> float:
        """Of the last update."""
        return float(self.optimiser.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)

    def update(self, loss: float, where: str) -> float:
        """From the gradients that are there, which are forgotten then. -> their norm before clipping. A gradient of
        exactly 0 makes no update, so that neither momentum nor weight decay moves the weights for a batch that says
        nothing. TrainingDiverged, which names `where`: the loss or the norm is not finite."""
        norm = self._clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.zero_grad()
            raise TrainingDiverged(
                f"{where}: loss {loss}, gradient norm {norm}; the weights are those before it. A lower learning rate, "
                "a smaller clip range or a tighter correction may help"
            )
        if norm > 0:
            share = self.config.rate(self.num_updates)
            for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
                group["lr"] = rate * share
            self.optimiser.step()
            self.num_updates += 1
        self.zero_grad()
        return norm

    def _clip(self) -> float:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if not gradients:
            return 0.0
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.config.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        """The tensors are not copies."""
        return {"optimiser": self.optimiser.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError where it does not fit."""
        self.optimiser.load_state_dict(state["optimiser"])
        self.num_updates = int(state["num_updates"])
