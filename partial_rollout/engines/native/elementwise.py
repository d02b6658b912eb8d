"""Elementwise functions that a model's modules call by themselves, such as the sigmoid of a gate, made row-invariant.

torch computes them with vectors, and the elements left over at the end of a tensor, or of a thread's part of it, with
other code, so that an element's bits depend on its place. Modules that call one are found by running the model once; a
function mode then stands before the calls of those modules only, since it slows down every access to a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from longtail.kernels.gates import sigmoid, silu, softplus

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return silu(x)


INVARIANT: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    F.silu: _silu,
    F.softplus: softplus,
}
"""What stands in for a function of torch, whichever of its names is called."""


class _Replace(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return INVARIANT.get(function, function)(*args, **(kwargs or {}))


class _Record(TorchFunctionMode):
    """The kinds of modules in whose own code one of the functions is called."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.found: set[type[nn.Module]] = set()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in INVARIANT and self.running:
            self.found.add(type(self.running[-1]))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def calling_modules(model: PreTrainedModel) -> set[type[nn.Module]]:
    """The kinds of modules that call a function of INVARIANT themselves, found by running two tokens."""
    record = _Record()

    def leave(*_: Any) -> None:
        record.running.pop()

    hooks = [
        register_module_forward_pre_hook(lambda module, _: record.running.append(module)),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with record:
            model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return record.found


def make_invariant(module: nn.Module) -> None:
    """Functions of INVARIANT that `module` calls are replaced, those of its submodules too."""
    module.forward = functools.partial(_run, module.forward)


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Replace():
        return forward(*args, **kwargs)
