"""New weights for a running vLLM: checked against the model's own parameters, then loaded in place."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longtail.partial_rollout.engines.native.loader import check_weights
from longtail.partial_rollout.engines.vllm.core import Core

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(model: str) -> tuple[Shapes, dict[str, str]]:
    """Of the model as `transformers` builds it, whose names a trainer's state dict has, without memory for them. And
    the names of tied parameters, which are left out of the first, with the name that each is tied to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
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
    """Loads state dicts into a core's workers. model: a directory or hub id."""

    def __init__(self, core: Core, model: str) -> None:
        self.core, self.model = core, model
        self._parameters: tuple[Shapes, dict[str, str]] | None = None
        self.is_broken = False
        """An update failed half-way: the weights are neither the old nor the new ones."""

    def check(self, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """weights: a complete state dict (a tied LM head may be left out). ValueError names what does not fit.
        -> those that count, without what is tied to another."""
        return check_weights(self._known()[0], weights)

    def _known(self) -> tuple[Shapes, dict[str, str]]:
        if self._parameters is None:
            self._parameters = parameter_shapes(self.model)
        return self._parameters

    def load(self, checked: Mapping[str, torch.Tensor], version: int) -> None:
        """Every worker reads all of them, and keeps its part in the model's dtype and layout."""
        self.is_broken = True
        # A tied LM head as well: a CPU's workers hold a packed copy of it, which the embedding alone would not renew.
        complete = {**checked, **{name: checked[other] for name, other in self._known()[1].items()}}
        if self.core.runner is not None:
            with torch.inference_mode():
                self.core.rpc("reload_weights", weights_iterator=iter(complete.items()))
        else:
            self._load_from_file(complete)
        self.core.llm.set_weight_version(str(version))
        self.is_broken = False

    def _load_from_file(self, weights: Mapping[str, torch.Tensor]) -> None:
        """For workers in processes of their own (tensor parallelism), which share a file system with this one."""
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="longtail-weights-") as directory:
            tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
            save_file(tensors, Path(directory, "model.safetensors"))
            self.core.rpc("reload_weights", weights_path=directory)
