"""The weights that a model computes with, by the names of the plain model: LoRA layers of `peft` count as merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from longtail.errors import UnsupportedModel


def is_adapted(module: nn.Module) -> bool:
    """Whether it is a linear layer with adapters (`peft`)."""
    return isinstance(getattr(module, "base_layer", None), nn.Linear) and hasattr(module, "get_delta_weight")


def plain_model(model: nn.Module) -> Any:
    """The model of `transformers` in a `peft` wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def check_adapters(model: nn.Module) -> None:
    """UnsupportedModel for adapters that are more than a sum of products of two matrices on linear layers."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            raise UnsupportedModel(f"model: {name} has a copy of its own (modules_to_save); train LoRA matrices alone")
        if hasattr(module, "base_layer") and (not is_adapted(module) or not hasattr(module, "lora_A")):
            raise UnsupportedModel(f"model: the adapter {name} ({kind}) is not LoRA on a linear layer; not supported")
        if any(getattr(module, "use_dora", {}).values()) or any(getattr(module, "lora_bias", {}).values()):
            raise UnsupportedModel(f"model: the adapter {name} has DoRA or a bias; not supported")
        if any(getattr(drop, "p", 0.0) for drop in getattr(module, "lora_dropout", {}).values()):
            raise UnsupportedModel(f"model: the adapter {name} drops out; weights cannot be merged, set lora_dropout=0")


class Weights(Mapping[str, torch.Tensor]):
    """Differentiable: a parameter is the parameter, an adapted weight is merged anew each time.

    Tied parameters have one name, as in `weights_of`."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        seen: set[int] = set()
        inner = "?"  # how the names of the parts of an adapted layer begin, which come right behind it
        for prefix, module in model.named_modules():
            if prefix.startswith(inner):
                continue
            if is_adapted(module):
                inner = f"{prefix}."
            source: Any = module.base_layer if is_adapted(module) else module
            tensors = [*source.named_parameters(recurse=False), *_float_buffers(source)]
            for leaf, tensor in tensors:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._owners[f"{prefix}.{leaf}" if prefix else leaf] = module, leaf

    def __getitem__(self, name: str) -> torch.Tensor:
        module, leaf = self._owners[name]
        if not is_adapted(module):
            tensor: torch.Tensor = getattr(module, leaf)
            return tensor
        weight, bias = self.of_linear(module)
        return weight if leaf == "weight" else bias  # type: ignore[return-value]

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    @staticmethod
    def of_linear(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight [out, in] and bias of a linear layer, adapted or not."""
        if not is_adapted(module):
            return module.weight, module.bias
        base, weight = module.base_layer, module.base_layer.weight
        if not module.disable_adapters:
            for name in module.active_adapters:
                if name in module.lora_A and name not in module.merged_adapters:
                    weight = weight + module.get_delta_weight(name)
        return weight, base.bias


def _float_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent ones."""
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
            yield name, buffer
