"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685) through `peft`, an optional extra: pip install longtail[lora].

    LoraPolicy computes    x W + s (x A) B     the base model's weights stay as they are, A and B are trained
    the engine computes    x (W + s A B)       the merged weights, which `weights()` sends

The two differ by rounding, and so do the log-probabilities of trainer and rollout. A policy that computes with merged
weights itself (`ExactPolicy` takes an adapted model) agrees bit for bit, for the price of gradients of their size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from longtail.trainer_adapter.batch import Inputs
from longtail.trainer_adapter.policy import Policy, TransformersPolicy, copy_into

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def adapted(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float | None = None,
    targets: str | Sequence[str] = "all-linear",
    seed: int = 0,
) -> Any:
    """A `peft` model around this one, whose linear layers get adapters in place; only these are trained. rank: of A and
    B; alpha: s = alpha / rank (None: s = 1); targets: suffixes of the layers' names, or "all-linear" (all but the
    head). seed: of A's start (B starts at 0, so that the model starts as it was). No dropout.

    ValueError: no layer fits, or `peft` is not installed."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be an integer of at least 1, not {rank!r}")
    try:
        import peft
    except ImportError as error:
        raise ValueError("lora needs peft: pip install 'longtail[lora]'") from error
    wanted = targets if isinstance(targets, str) else list(targets)
    settings: Any = {"r": rank, "lora_alpha": rank if alpha is None else alpha, "target_modules": wanted}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))


class LoraPolicy(TransformersPolicy):
    """model: of `adapted`. The rest as in `TransformersPolicy`."""

    def __init__(self, model: Any, *, gradient_checkpointing: bool = False, rows_per_chunk: int | None = None) -> None:
        super().__init__(
            model.get_base_model(), gradient_checkpointing=gradient_checkpointing, rows_per_chunk=rows_per_chunk
        )

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """Merged, under the base model's names."""
        found = {}
        for name, tensor in self.model.state_dict().items():
            if "lora_" not in name:
                found[name.replace(".base_layer.", ".")] = tensor.detach()
        for name, module in self.model.named_modules():
            if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
                weight = module.base_layer.weight
                for adapter in module.active_adapters:
                    weight = weight + module.get_delta_weight(adapter)
                found[f"{name}.weight"] = weight.detach()
        return found

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The adapters. The base model is not in it."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        copy_into(self.state_dict(), state)


class BaseReference:
    """The base model under adapters, as a reference for a KL penalty that takes no memory of its own. model: of
    `adapted`; policy: that computes with it."""

    def __init__(self, model: Any, policy: Policy) -> None:
        self._model, self._policy = model, policy

    def logprobs(self, inputs: Inputs, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
        with torch.no_grad(), self._model.disable_adapter():
            return self._policy.logprobs(inputs, temperature=temperature)
