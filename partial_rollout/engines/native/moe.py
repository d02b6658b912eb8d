"""Mixtures of experts: the experts of a layer on packed weights, a token's bits depending on its own experts alone.

`transformers` keeps the experts of a layer in one module with parameters of three dimensions, and multiplies each
expert's by the rows that chose it, however many they are. Here each expert's rows are padded by the engine's `RowRule`,
and a token's results are added in the order of its experts' numbers.

The routers run as they are, under `RowInvariantFunctions`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from longtail.kernels.linear import PackedLinear, RowRule
from longtail.partial_rollout.engines.native.differentiable import gelu_tanh, sigmoid, silu_mul
from longtail.partial_rollout.engines.native.row_invariant import bare_matrices

WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")

Gate = Callable[[torch.Tensor], torch.Tensor]
"""gate_up [T, 2 I] -> [T, I], rows independent bit for bit."""

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, in] -> [T, out], T padded by the rule."""


# ---- what a pass routes

_thread = threading.local()


@dataclasses.dataclass(slots=True)
class Routed:
    """The routing of one forward pass."""

    rows: int
    """Rows that are no padding; the rest is not computed."""
    experts: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """Of each mixture layer, in order: int64 [rows, top_k], the experts that the rows were sent to."""


@contextlib.contextmanager
def routed(rows: int) -> Iterator[Routed]:
    """Around a forward pass of which the first `rows` rows are no padding."""
    before = getattr(_thread, "routed", None)
    _thread.routed = record = Routed(rows)
    try:
        yield record
    finally:
        _thread.routed = before


# ---- how experts compute


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What a module of experts computes: down(gate(gate_up(x))), times the token's weight for the expert."""

    transposed: bool
    """The weights are [experts, in, out], not [experts, out, in]."""
    gate: Gate


def _gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def _clamped_swiglu(alpha: float, limit: float) -> Gate:
    """gpt-oss: gate and up alternate, both are clamped, and up is added to one."""

    def compute(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * sigmoid(gate * alpha))

    return compute


def _gates(module: nn.Module) -> list[Gate]:
    """Those that a module may be computing."""
    gates: list[Gate] = [silu_mul, _gelu_mul]
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        gates.append(_clamped_swiglu(alpha, limit))
    return gates


EXPERTS, HIDDEN, INNER = 3, 20, 12
"""Sizes with which a module is tried out."""


@torch.no_grad()
def form_of(module: nn.Module) -> Form | None:
    """What a module is found to compute on random input and weights, or None if it is no module of experts, or not one
    that is understood. What is run is a copy of the module with few and small experts."""
    own = dict(module.named_parameters(recurse=False))
    if set(own) not in (set(WEIGHTS), {*WEIGHTS, *BIASES}) or any(own[name].dim() != 3 for name in WEIGHTS):
        return None
    small: Any = copy.copy(module)
    small.num_experts = EXPERTS
    # The class's own code, not one of the library's implementations of it, which take some sizes only.
    small.forward = types.MethodType(inspect.unwrap(type(module).forward), small)
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    scales = torch.tensor([[0.1], [1.0], [1.0], [30.0]])  # the last one is felt by what clamps
    x = randn(4, HIDDEN) * scales
    chosen = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]])
    shares = torch.tensor([[0.7, 0.3], [0.9, 0.4], [0.2, 0.5], [0.6, 0.1]])
    up = randn(EXPERTS, 2 * INNER, HIDDEN) / HIDDEN**0.5
    down = randn(EXPERTS, HIDDEN, INNER) / INNER**0.5
    biases = dict(zip(BIASES, (randn(EXPERTS, 2 * INNER), randn(EXPERTS, HIDDEN)), strict=True))
    for transposed in (False, True):
        weights = dict(zip(WEIGHTS, (up.mT, down.mT) if transposed else (up, down), strict=True))
        weights |= biases if len(own) == 4 else {}
        try:
            want = torch.func.functional_call(small, weights, (x, chosen, shares))
        except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
        for gate in _gates(module):
            form = Form(transposed, gate)
            got = PackedExperts(form, weights, RowRule("aten"))(x, chosen, shares)
            if isinstance(want, torch.Tensor) and want.shape == got.shape and torch.allclose(got, want, 1e-3, 1e-4):
                return form
    return None


class PackedExperts(nn.Module):
    """Takes the place of a module of experts. Holds no parameters: the engine's weights arrive through `load`."""

    def __init__(self, form: Form, weights: Mapping[str, torch.Tensor], rule: RowRule) -> None:
        super().__init__()
        self.form, self.rule = form, rule
        self.names = tuple(weights)
        """Of the parameters that `load` takes."""
        self.load(weights)

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """weights: gate_up_proj, down_proj and perhaps their biases, [experts, ...] as the model has them."""
        packed: list[list[Linear]] = []
        for name, bias_name in zip(WEIGHTS, BIASES, strict=True):
            weight, bias = weights[name].float(), weights.get(bias_name)
            packed.append(
                [
                    PackedLinear(
                        [one.T.contiguous() if self.form.transposed else one],
                        None if bias is None else bias[expert].float().clone(),
                        self.rule.backend,
                    )
                    for expert, one in enumerate(weight)
                ]
            )
        self.gate_up, self.down = packed

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """x: [T, H]; top_k_index: int64 [T, K], distinct in a row; top_k_weights: [T, K] -> [T, H], padding zero."""
        record: Routed | None = getattr(_thread, "routed", None)
        rows = len(x) if record is None else record.rows
        chosen = top_k_index[:rows]
        if record is not None:
            record.experts.append(chosen)
        experts, order = chosen.sort(dim=-1)
        shares = top_k_weights[:rows].gather(1, order)
        top_k = experts.shape[1]
        by_expert = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self.down)).tolist()
        sizes = [self.rule.padded(n) if n else 0 for n in counts]
        # Every expert's rows, then its padding; `place` is where each row of each token went.
        padding = torch.tensor([size - n for size, n in zip(sizes, counts, strict=True)]).cumsum(0)
        before = torch.cat([torch.zeros(1, dtype=torch.long), padding[:-1]])
        place = torch.empty_like(by_expert)
        place[by_expert] = torch.arange(len(by_expert)) + before[experts.flatten()[by_expert]]
        packed = x.new_zeros(sum(sizes), x.shape[1])
        packed[place] = x[:rows].repeat_interleave(top_k, 0)
        live = [(expert, part) for expert, part in enumerate(packed.split(sizes)) if len(part)]
        hidden = self.form.gate(torch.cat([self.gate_up[expert](part) for expert, part in live])).contiguous()
        parts = hidden.split([len(part) for _, part in live])
        y = torch.cat([self.down[expert](part) for (expert, _), part in zip(live, parts, strict=True)])
        y = y[place].view(rows, top_k, -1) * shares[..., None]
        out = torch.zeros_like(x)
        for i in range(top_k):
            out[:rows] += y[:, i]
        return out


def unknown_experts(model: nn.Module) -> list[str]:
    """Class names of modules with weights of three dimensions, convolutions aside, that `form_of` does not understand:
    experts of another form."""
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if not isinstance(module, nn.modules.conv._ConvNd)
            and any(p.dim() == 3 for p in module.parameters(recurse=False))
            and form_of(module) is None
        }
    )


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[int]]:
    """-> how many experts a token has, of each call of experts that `form_of` understands."""
    seen: list[int] = []

    def see(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[1].shape[-1])

    hooks = [module.register_forward_pre_hook(see) for module in model.modules() if form_of(module) is not None]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def matmul_shapes(model: nn.Module) -> frozenset[tuple[int, int]]:
    """(in, out) of what the experts and routers of a model multiply by."""
    shapes = {(matrix.shape[1], matrix.shape[0]) for matrix in bare_matrices(model).values()}
    for module in model.modules():
        if (form := form_of(module)) is not None:
            for name in WEIGHTS:
                _, a, b = module.get_parameter(name).shape
                shapes.add((a, b) if form.transposed else (b, a))
    return frozenset(shapes)
