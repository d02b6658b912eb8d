"""New weights for a running vLLM: checked against the model's own parameters, then handed to its workers
(`weight_transfer`)."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longtail.partial_rollout.engines.native.loader import check_weights

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm.core import Core

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: Any) -> tuple[Shapes, dict[str, str]]:
    """Of the model as `transformers` builds it of this config, whose names a trainer's state dict has, without memory
    for them. And the names of tied parameters, which are left out of the first, with the name that each is tied to."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    made.tie_weights()
    shapes: Shapes = {}
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in made.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first == name:
            shapes[name] = tuple(parameter.shape)
        else:
            ties[name] = first
    return shapes, ties


class Updater:
    """Loads state dicts into a core's workers."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._shapes: Shapes | None = None
        self.is_broken = False
        """An update failed half-way: the weights are neither the old nor the new ones."""

    def check(self, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """weights: a complete state dict (a tied LM head may be left out). ValueError names what does not fit.
        -> those that count, without what is tied to another."""
        if self._shapes is None:
            self._shapes, _ = parameter_shapes(self.core.config.model_config.hf_config)
        return check_weights(self._shapes, weights)

    def load(self, checked: Mapping[str, torch.Tensor], version: int) -> None:
        """Every worker gets all of them, and keeps its part in the model's dtype and layout."""
        self.is_broken = True
        with self._sent(checked) as update_info:
            self.core.rpc("start_weight_update")
            self.core.rpc("update_weights", update_info=update_info)
            self.core.rpc("finish_weight_update")
        self.core.set_weight_version(str(version))
        self.is_broken = False

    @contextlib.contextmanager
    def _sent(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """-> where workers find them: in this process, or in files, for workers in others (tensor parallelism)."""
        if self.core.runner is not None:
            yield {"tensors": weights}
            return
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="longtail-weights-") as directory:
            tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
            save_file(tensors, Path(directory, "model.safetensors"))
            yield {"directory": directory}
