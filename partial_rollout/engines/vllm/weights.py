"""New weights for a running vLLM: checked against the model's own parameters, then loaded in place."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longtail.partial_rollout.engines.native.loader import check_weights
from longtail.partial_rollout.engines.vllm.core import Core


def parameter_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Of the model as `transformers` builds it, whose names a trainer's state dict has, without memory for them. A tied
    LM head is left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if getattr(config.get_text_config(), "tie_word_embeddings", False) else set()
    return {name: tuple(parameter.shape) for name, parameter in made.named_parameters() if name not in tied}


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

    def load(self, checked: Mapping[str, torch.Tensor], version: int) -> None:
        """Every worker reads all of them, and keeps its part in the model's dtype and layout."""
        self.is_broken = True
        if self.core.runner is not None:
            with torch.inference_mode():
                self.core.rpc("reload_weights", weights_iterator=iter(checked.items()))
        else:
            self._load_from_file(checked)
        self.core.llm.set_weight_version(str(version))
        self.is_broken = False

    def _load_from_file(self, checked: Mapping[str, torch.Tensor]) -> None:
        """For workers in processes of their own (tensor parallelism), which share a file system with this one."""
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="longtail-weights-") as directory:
            tensors = {name: tensor.contiguous() for name, tensor in checked.items()}
            save_file(tensors, Path(directory, "model.safetensors"))
            self.core.rpc("reload_weights", weights_path=directory)
