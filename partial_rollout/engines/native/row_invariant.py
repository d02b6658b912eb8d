"""torch's functions, computed so that a row's bits do not depend on the rest of the batch.

A model of `transformers` calls some of torch's functions directly, not through a module that could be replaced: a
router multiplies by a parameter and takes a softmax, a gate takes a sigmoid. Vectorised code computes the last elements
of a tensor otherwise than the first ones, and a matmul of few rows otherwise than one of many. While
`RowInvariantFunctions` is active, such calls are answered by kernels that do not; everything else runs as it is. It
slows down every access to a tensor, and is active in the modules only that are found to call one of the functions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from longtail.kernels.linear import PackedLinear, RowRule
from longtail.partial_rollout.engines.native.differentiable import TrainedLinear, sigmoid, silu, softmax, softplus

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_SUM = 64
"""Elements up to which a sum over the last dimension is taken one by one. Routers sum over a token's experts."""


class RowInvariantFunctions(TorchFunctionMode):
    """Active inside `with`. Covers float32 on the CPU: linear by one of `model`'s bare matrices, sigmoid, SiLU,
    softplus, softmax and sum over the last dimension."""

    def __init__(self, model: nn.Module, rule: RowRule) -> None:
        super().__init__()
        self._running: list[nn.Module] = []
        self._callers: set[type[nn.Module]] = set()
        self._rule = rule
        self._matrices = bare_matrices(model)
        self._packed: dict[int, PackedLinear | TrainedLinear] = {}
        self.load()
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {
            F.linear: self._linear,
            torch.sigmoid: _sigmoid,
            torch.Tensor.sigmoid: _sigmoid,
            F.silu: _silu,
            F.softplus: _softplus,
            F.softmax: _f_softmax,
            torch.softmax: _softmax,
            torch.Tensor.softmax: _softmax,
            torch.sum: _sum,
            torch.Tensor.sum: _sum,
        }

    def load(self) -> None:
        """Call after the parameters have changed."""
        self._packed = {
            matrix.data_ptr(): PackedLinear([matrix.detach()], None, self._rule.backend)
            for matrix in self._matrices.values()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (own := self._functions.get(func)) is not None:
            result = own(*args, **kwargs)
            if result is not NotImplemented:
                if self._running:
                    self._callers.add(type(self._running[-1]))
                return result
        return func(*args, **kwargs)

    @torch.no_grad()
    def callers(self, model: PreTrainedModel) -> set[type[nn.Module]]:
        """The kinds of modules in whose own code a call is answered, found by running two tokens. Attention is left
        out: it is the engine's."""
        from transformers import AttentionInterface

        AttentionInterface.register(_SKIPPED, _skip_attention)
        attention, model.config._attn_implementation = model.config._attn_implementation, _SKIPPED

        def leave(*_: Any) -> None:
            self._running.pop()

        hooks = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            with self:
                model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        finally:
            model.config._attn_implementation = attention
            for hook in hooks:
                hook.remove()
        return self._callers

    def attach(self, module: nn.Module) -> None:
        """Active whenever `module` runs, its submodules included."""
        module.forward = functools.partial(self._run, module.forward)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self:
            return forward(*args, **kwargs)

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        packed = self._packed.get(weight.data_ptr())
        if packed is None or weight.shape != (packed.out_features, packed.in_features) or not _is_covered(x):
            return NotImplemented
        flat = x.reshape(-1, x.shape[-1])
        rows = len(flat)
        y = packed(F.pad(flat, (0, 0, 0, self._rule.padded(rows) - rows)).contiguous())[:rows]
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], packed.out_features)


_SKIPPED = "longtail_skipped"


def _skip_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, T, dim] -> zeros [1, T, heads, v_dim]."""
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def bare_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters [out, in] that belong to no linear layer or embedding: a router's."""
    return {
        name: parameter
        for prefix, module in model.named_modules()
        if not isinstance(module, nn.Linear | nn.Embedding)
        for name, parameter in module.named_parameters(prefix, recurse=False)
        if parameter.dim() == 2
    }


def _is_covered(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


def _sigmoid(x: torch.Tensor, **kwargs: Any) -> Any:
    return sigmoid(x) if _is_covered(x) and not kwargs else NotImplemented


def _silu(x: torch.Tensor, inplace: bool = False) -> Any:
    return silu(x) if _is_covered(x) else NotImplemented


def _softplus(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return softplus(x) if _is_covered(x) and not (args or kwargs) else NotImplemented


def _f_softmax(x: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _softmax(x, dim, dtype)


def _softmax(x: torch.Tensor, dim: Any = None, dtype: Any = None) -> Any:
    last = dim in (-1, x.dim() - 1)
    return softmax(x) if last and _is_covered(x) and dtype in (None, torch.float32) else NotImplemented


def _sum(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    last = isinstance(dim, int) and x.dim() > 0 and dim in (-1, x.dim() - 1)
    if not last or kwargs or not _is_covered(x) or not 0 < x.shape[-1] <= LONGEST_SUM:
        return NotImplemented
    total = functools.reduce(operator.add, x.unbind(-1))
    return total.unsqueeze(-1) if keepdim else total
