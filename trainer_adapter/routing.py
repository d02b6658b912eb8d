"""Rollout routing replay (R3; Ma et al., arXiv 2510.11370): a trainer's forward pass sends every token to the experts
that computed it in the rollout, so that the two policies differ by their weights alone, not by experts that flipped.

    with replay_routing(model, padded_routing(samples, length)):
        logits = model(input_ids).logits
        loss(logits).backward()

The router still computes the weights of the experts, over the recorded ones, so that gradients flow into it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from longtail.sample import Sample

FREE = -1
"""In place of an expert: nothing was recorded, and the router chooses for itself."""


# ---- batches


def packed_routing(samples: Sequence[Sample]) -> torch.Tensor:
    """For samples one after the other, prompt and output -> int16 [1, tokens, layers, top_k]. The last token of each,
    which has no record, is free."""
    return torch.cat([_routing(sample, sample.num_tokens) for sample in samples])[None]


def padded_routing(samples: Sequence[Sample], length: int, *, left: bool = False) -> torch.Tensor:
    """For samples side by side, prompt and output, padded to `length` on the right (left: on the left)
    -> int16 [samples, length, layers, top_k]. Padding and the last token of each are free. ValueError: one is
    longer."""
    rows = []
    for sample in samples:
        n = sample.num_tokens
        if n > length:
            raise ValueError(f"length {length}: sample {sample.id} has {n} tokens; give at least that")
        own = _routing(sample, length)
        rows.append(own.roll(length - n, 0) if left else own)
    return torch.stack(rows)


def _routing(sample: Sample, length: int) -> torch.Tensor:
    """int16 [length, layers, top_k], free beyond the record."""
    if sample.routed_experts is None:
        raise ValueError(
            f"sample {sample.id} has no routed_experts; make it with an engine that has record_routing=True"
        )
    recorded = np.asarray(sample.routed_experts)[:length]
    rows = torch.full((length, *recorded.shape[1:]), FREE, dtype=torch.int16)
    rows[: len(recorded)] = torch.from_numpy(recorded.copy())
    return rows


# ---- replay


@contextlib.contextmanager
def replay_routing(model: nn.Module, routed_experts: torch.Tensor) -> Iterator[None]:
    """Within it, `model`, of transformers, uses the recorded experts.

    routed_experts: integers [batch, length, layers, top_k] for an input of [batch, length] tokens; layers: the mixture
    layers in the model's order; `FREE` for a token that the router is to route itself (of a token all or none). The
    backward pass belongs inside too if it computes anything again (gradient checkpointing).

    ValueError: a model without experts, or a record that does not fit it or the input. RuntimeError, from the forward
    pass: a router that does not choose experts by one `topk`."""
    layers = mixture_layers(model)
    if not layers:
        raise ValueError(f"model: {type(model).__name__} has no layers of experts whose routing could be replayed")
    if routed_experts.dim() != 4 or routed_experts.shape[2] != len(layers):
        raise ValueError(
            f"routed_experts {tuple(routed_experts.shape)} must be [batch, length, {len(layers)}, top_k]: "
            f"{type(model).__name__} has {len(layers)} mixture layers"
        )
    if routed_experts.is_floating_point():
        raise ValueError(f"routed_experts are {routed_experts.dtype}, must be integers")
    with contextlib.ExitStack() as stack:
        for i, (name, block) in enumerate(layers.items()):
            experts = routed_experts[:, :, i].flatten(0, 1)
            _check_ids(name, experts, num_experts(block))
            before = dict(block.__dict__)
            block.__dict__["forward"] = _replaying(name, block, experts)
            stack.callback(_restore_forward, block, before)
        yield


def _restore_forward(block: nn.Module, before: Mapping[str, Any]) -> None:
    block.__dict__.pop("forward", None)
    if "forward" in before:  # somebody else had replaced it
        block.__dict__["forward"] = before["forward"]


def mixture_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the blocks of a router and experts: the parents of modules with stacked expert weights."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_experts(module):
            parent = name.rpartition(".")[0]
            found[parent] = model.get_submodule(parent)
    return found


def num_experts(block: nn.Module) -> int:
    experts = next(module for module in block.children() if _is_experts(module))
    return len(experts.get_parameter("down_proj"))


def _is_experts(module: nn.Module) -> bool:
    down = dict(module.named_parameters(recurse=False)).get("down_proj")
    return down is not None and down.dim() == 3


def _check_ids(name: str, experts: torch.Tensor, count: int) -> None:
    low, high = (int(x) for x in experts.aminmax()) if experts.numel() else (0, 0)
    if low < FREE or high >= count:
        raise ValueError(f"routed_experts: {low} to {high} for {name}, whose experts are 0 to {count - 1} (-1: free)")
    free = (experts == FREE).sum(-1)
    if ((free > 0) & (free < experts.shape[-1])).any():
        raise ValueError(f"routed_experts: a token of {name} has some experts recorded and some not (-1)")


def _replaying(name: str, block: nn.Module, experts: torch.Tensor) -> Callable[..., Any]:
    """The block's forward, its router's choice replaced. experts: [tokens, top_k]."""
    original, count = block.forward, num_experts(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        mode = _Choice(experts, count)
        with mode:
            result = original(*args, **kwargs)
        if mode.chosen != 1:
            raise RuntimeError(
                f"{name} ({type(block).__name__}) chose {experts.shape[-1]} of {count} experts {mode.chosen} times in "
                "a forward pass, not once by torch.topk; its routing cannot be replayed"
            )
        return result

    return forward


class _Choice(TorchFunctionMode):
    """While a block runs: the top-k over its experts gives the recorded ones, with the scores that they have."""

    def __init__(self, experts: torch.Tensor, count: int) -> None:
        super().__init__()
        self.experts, self.count = experts, count
        self.chosen = 0
        self._limited: tuple[torch.Tensor, torch.Tensor] | None = None
        """Scores of all experts, as the block has them, and limited to the groups that the router would choose from."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.topk, torch.Tensor.topk):
            return self._topk(func, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in (torch.masked_fill, torch.Tensor.masked_fill) and result.shape[-1] == self.count:
            # What was recorded may lie in groups that would not be chosen now; its scores must not be lost.
            self._limited = args[0].view_as(args[0]), result
            return self._limited[0]
        return result

    def _topk(self, func: Callable[..., Any], scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        limited = self._limited is not None and scores is self._limited[0]
        own = func(self._limited[1] if self._limited and limited else scores, k, *args, **kwargs)
        if scores.shape[-1] != self.count or k != self.experts.shape[-1]:
            return own
        if scores.numel() != len(self.experts) * self.count:
            raise ValueError(
                f"routed_experts are of {len(self.experts)} tokens, the input has {scores.numel() // self.count}"
            )
        self.chosen += 1
        experts = self.experts.to(device=scores.device, dtype=torch.long).view(own.indices.shape)
        experts = torch.where(experts == FREE, own.indices, experts)
        return torch.return_types.topk((scores.gather(-1, experts), experts))
