"""New weights for a running vLLM: checked against the model's own parameters, then loaded in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longtail.errors import UnsupportedModel
from longtail.partial_rollout.engines.native.loader import check_weights
from longtail.partial_rollout.engines.vllm.core import Core


def parameter_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Of the model as `transformers` builds it, whose names a trainer's state dict has, without memory for them. A tied
    LM head is left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}


class Updater:
    """Loads state dicts into a core's workers. model: a directory or hub id."""

    def __init__(self, core: Core, model: str) -> None:
        self.core, self.model = core, model
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self.is_broken = False
        """An update failed half-way: the weights are neither the old nor the new ones."""

    def check(self, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """weights: a complete state dict (a tied LM head may be left out). ValueError names what does not fit."""
        if self._shapes is None:
            self._shapes = parameter_shapes(self.model)
        return check_weights(self._shapes, weights)

    def load(self, checked: Mapping[str, torch.Tensor]) -> None:
        """Every worker reads all of them, and keeps its part in the model's dtype and layout."""
        if self.core.runner is None:
            raise UnsupportedModel(
                "update_weights: vLLM's workers run in processes of their own (tensor_parallel_size above 1), where "
                "state dicts do not reach; set up vLLM's weight transfer in engine_args"
            )
        self.is_broken = True
        with torch.inference_mode():
            self.core.rpc("reload_weights", weights_iterator=iter(checked.items()))
        self.is_broken = False
