"""Layers of `transformers` models that keep a state of fixed size per sequence: short convolutions, gated delta
networks, Mamba-2, lightning attention.

The modules stay what they are, with their parameters, linear layers and names; only their forward is ours: it takes
packed rows of many sequences, reads each one's state from its slot and writes it to another. A layer is known by the
name of its class, and what it computes is compared with the model at load like everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from longtail.errors import UnsupportedModel
from longtail.partial_rollout.engines.native.differentiable import gated_rms_norm, rms_norm, sigmoid, silu, softplus
from longtail.partial_rollout.engines.native.differentiable_state import (
    causal_conv,
    gated_delta_rule,
    linear_attention,
)
from longtail.partial_rollout.engines.native.forward import current

Shapes = tuple[tuple[int, ...], ...]


class _StateLayer(NamedTuple):
    shapes: Callable[[Any], Shapes]
    forward: Callable[..., Any]
    """(module, hidden_states [1, T, hidden]) -> [1, T, hidden], or what else the module returns with it."""


def state_shapes(module: nn.Module) -> Shapes | None:
    """Shapes of the float32 tensors that a layer keeps of a sequence, or None if it is no layer known here.

    UnsupportedModel: a layer that is known, in a form that is not.
    """
    kind = LAYERS.get(type(module).__name__)
    if kind is None:
        return None
    if getattr(module, "activation", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"model: {type(module).__name__} with activation {module.activation}; not supported")
    return kind.shapes(module)


def run_packed(module: nn.Module) -> None:
    """Gives a module that `state_shapes` knows its forward on packed rows."""
    module.forward = functools.partial(LAYERS[type(module).__name__].forward, module)


# ---- short convolution (LFM2)


def _short_conv_shapes(module: Any) -> Shapes:
    channels, _, kernel = module.conv.weight.shape
    return ((channels, kernel - 1),)


def _short_conv(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    forward = current()
    state = forward.state(module.layer_idx)
    before, after, x = module.in_proj(hidden_states)[0].chunk(3, dim=-1)
    cu = forward.batch.cu_seqlens
    y = causal_conv(
        before * x, module.conv.weight[:, 0], module.conv.bias, state.tensors[0], cu, state.read, state.write
    )
    out: torch.Tensor = module.out_proj((after * y)[None])
    return out


# ---- gated delta networks (Qwen3-Next, Qwen3.5, OLMo Hybrid)


class _Projected(NamedTuple):
    """What differs between the gated delta networks: how they project, and what their parts are called."""

    qkv: torch.Tensor
    """[T, 2 * k_heads * k_dim + v_heads * v_dim], before the convolution."""
    gate: torch.Tensor
    """[T, v_heads * v_dim], of the output."""
    a: torch.Tensor
    """[T, v_heads], to the decay."""
    b: torch.Tensor
    """[T, v_heads], to beta."""
    norm: Any
    out_proj: Any
    beta_factor: float


def _qwen3_next(module: Any, x: torch.Tensor) -> _Projected:
    q, k, v, gate, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    qkv = torch.cat([part[0].flatten(1) for part in (q, k, v)], dim=1)
    return _Projected(qkv, gate[0].flatten(1), a[0], b[0], module.norm, module.out_proj, 1.0)


def _qwen3_5(module: Any, x: torch.Tensor) -> _Projected:
    qkv, gate, a, b = (p(x)[0] for p in (module.in_proj_qkv, module.in_proj_z, module.in_proj_a, module.in_proj_b))
    return _Projected(qkv, gate, a, b, module.norm, module.out_proj, 1.0)


def _olmo(module: Any, x: torch.Tensor) -> _Projected:
    qkv = torch.cat([p(x)[0] for p in (module.q_proj, module.k_proj, module.v_proj)], dim=1)
    gate, a, b = (p(x)[0] for p in (module.g_proj, module.a_proj, module.b_proj))
    factor = 2.0 if module.allow_neg_eigval else 1.0
    return _Projected(qkv, gate, a, b, module.o_norm, module.o_proj, factor)


def _gated_delta_shapes(module: Any) -> Shapes:
    channels, _, kernel = module.conv1d.weight.shape
    return ((channels, kernel - 1), (module.num_v_heads, module.head_k_dim, module.head_v_dim))


def _gated_delta(
    project: Callable[[Any, torch.Tensor], _Projected], module: Any, hidden_states: torch.Tensor, **_: Any
) -> torch.Tensor:
    forward = current()
    state = forward.state(module.layer_idx)
    where = forward.batch.cu_seqlens, state.read, state.write
    p = project(module, hidden_states)
    qkv = causal_conv(p.qkv, module.conv1d.weight[:, 0], module.conv1d.bias, state.tensors[0], *where, silu=True)
    q, k, v = qkv.split([module.key_dim, module.key_dim, module.value_dim], dim=1)
    q, k = (x.unflatten(1, (module.num_k_heads, module.head_k_dim)) for x in (q, k))
    v, gate = (x.unflatten(1, (module.num_v_heads, module.head_v_dim)) for x in (v, p.gate))
    g = -module.A_log.exp() * softplus(p.a + module.dt_bias)
    y = gated_delta_rule(q, k, v, g, sigmoid(p.b) * p.beta_factor, state.tensors[1], *where)
    y = gated_rms_norm(y, gate, p.norm.weight, p.norm.variance_epsilon)
    out: torch.Tensor = p.out_proj(y.flatten(1)[None])
    return out


# ---- Mamba-2 (Bamba, Granite 4, Nemotron-H)


def _mamba2_shapes(module: Any) -> Shapes:
    channels, _, kernel = module.conv1d.weight.shape
    return ((channels, kernel - 1), (module.num_heads, module.ssm_state_size, module.head_dim))


def _mamba2(module: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    forward = current()
    state = forward.state(module.layer_idx)
    where = forward.batch.cu_seqlens, state.read, state.write
    inner, heads, groups = module.intermediate_size, module.num_heads, module.n_groups
    gate, xbc, dt = module.in_proj(hidden_states)[0].split([inner, module.conv_dim, heads], dim=1)
    xbc = causal_conv(xbc, module.conv1d.weight[:, 0], module.conv1d.bias, state.tensors[0], *where, silu=True)
    x, b, c = xbc.split([inner, *[groups * module.ssm_state_size] * 2], dim=1)
    x = x.unflatten(1, (heads, module.head_dim))
    b, c = (part.unflatten(1, (groups, module.ssm_state_size)) for part in (b, c))
    dt = softplus(dt + module.dt_bias).clamp(*module.time_step_limit)
    y = linear_attention(c, b, x * dt[:, :, None], -module.A_log.exp() * dt, state.tensors[1], *where)
    y = (y + module.D[:, None] * x).flatten(1) * silu(gate)
    norm = module.norm
    y = rms_norm(y.unflatten(1, (-1, norm.group_size)), torch.ones(norm.group_size), norm.variance_epsilon)
    out: torch.Tensor = module.out_proj((norm.weight * y.flatten(1))[None])
    return out


# ---- lightning attention (MiniMax-01)


def _lightning_shapes(module: Any) -> Shapes:
    return ((module.num_attention_heads, module.head_dim, module.head_dim),)


def _lightning(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    forward = current()
    state = forward.state(module.layer_idx)
    heads = module.num_attention_heads
    q, k, v = silu(module.qkv_proj(hidden_states))[0].unflatten(1, (heads, -1)).split(module.head_dim, dim=2)
    g = -module.slope_rate.view(heads).expand(len(q), heads)
    y = linear_attention(q, k, v, g, state.tensors[0], forward.batch.cu_seqlens, state.read, state.write)
    y = sigmoid(module.output_gate(hidden_states)) * module.norm(y.flatten(1)[None])
    return module.out_proj(y), None


_SHORT_CONV = _StateLayer(_short_conv_shapes, _short_conv)
_MAMBA2 = _StateLayer(_mamba2_shapes, _mamba2)


def _delta_layer(project: Callable[[Any, torch.Tensor], _Projected]) -> _StateLayer:
    return _StateLayer(_gated_delta_shapes, functools.partial(_gated_delta, project))


LAYERS: dict[str, _StateLayer] = {
    "Lfm2ShortConv": _SHORT_CONV,
    "Lfm2MoeShortConv": _SHORT_CONV,
    "Lfm3ShortConv": _SHORT_CONV,
    "Qwen3NextGatedDeltaNet": _delta_layer(_qwen3_next),
    "Qwen3_5GatedDeltaNet": _delta_layer(_qwen3_5),
    "Qwen3_5MoeGatedDeltaNet": _delta_layer(_qwen3_5),
    "OlmoHybridGatedDeltaNet": _delta_layer(_olmo),
    "BambaMixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "MiniMaxLightningAttention": _StateLayer(_lightning_shapes, _lightning),
}
"""By the name of the class in `transformers`."""
