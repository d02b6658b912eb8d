"""The forward pass of a decoder over whole sequences, differentiable: the decoder's bits, the trainer's parameters.

Two implementations, as of `Decoder`. `FusedForward` repeats `FusedDecoder` operation by operation. `InterfaceForward`
runs a twin of the model, of the same parameters, with modules in the place of those that `InterfaceDecoder` replaces;
all else is the model's own code, which torch differentiates.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from longtail.kernels.linear import Backend, RowRule
from longtail.partial_rollout.engines.native import moe
from longtail.partial_rollout.engines.native.adapters import Weights, is_adapted
from longtail.partial_rollout.engines.native.decoder import FusedDecoder
from longtail.partial_rollout.engines.native.differentiable import (
    FusedShape,
    PackedSequences,
    TrainedLinear,
    attention,
    attention_over_latents,
    fused_attention,
    rms_norm,
    silu_mul,
)
from longtail.partial_rollout.engines.native.forward import State, current, running
from longtail.partial_rollout.engines.native.interface import (
    InterfaceDecoder,
    Replacements,
    is_plain_linear,
    replace_modules,
)
from longtail.partial_rollout.engines.native.latent import AbsorbedProjection
from longtail.partial_rollout.engines.native.row_invariant import RowInvariantFunctions
from longtail.partial_rollout.engines.native.spec import DecoderSpec
from longtail.partial_rollout.engines.native.state_layers import run_packed, state_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "longtail_training"


class TrainingForward(Protocol):
    def hidden(self, rows: PackedSequences) -> torch.Tensor:
        """-> float32 [T, hidden], for `logits`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: rows of what `hidden` returned, [R, hidden], R padded by the row rule -> float32 [R, vocab]."""
        ...


# ---- the Llama family


class FusedForward:
    """decoder: whose arithmetic is repeated; nothing of its weights is read. checkpointing: keep a layer's input alone
    and compute the layer again in the backward pass."""

    def __init__(self, decoder: FusedDecoder, weights: Weights, checkpointing: bool) -> None:
        self.decoder, self.weights, self.checkpointing = decoder, weights, checkpointing
        d = decoder
        self.shapes = [
            FusedShape(d.cos, d.sin, d.eps, d.scale, d.heads, d.kv_heads, window) for window in d.spec.windows
        ]

    def hidden(self, rows: PackedSequences) -> torch.Tensor:
        x = F.embedding(rows.ids, self.weights["model.embed_tokens.weight"])
        for i in range(len(self.shapes)):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(self._layer, i, x, rows, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._layer(i, x, rows)
        return x

    def _layer(self, i: int, x: torch.Tensor, rows: PackedSequences) -> torch.Tensor:
        own, eps = f"model.layers.{i}", self.decoder.eps
        w = self.weights
        h = rms_norm(x, w[f"{own}.input_layernorm.weight"], eps)
        qkv = self._linear(*(f"{own}.self_attn.{name}_proj" for name in "qkv"))(h)
        q_norm, k_norm = (w.get(f"{own}.self_attn.{name}_norm.weight") for name in "qk")
        a = fused_attention(qkv, q_norm, k_norm, rows, self.shapes[i])
        x = self._linear(f"{own}.self_attn.o_proj")(a, residual=x)
        h = rms_norm(x, w[f"{own}.post_attention_layernorm.weight"], eps)
        gate_up = self._linear(f"{own}.mlp.gate_proj", f"{own}.mlp.up_proj")(h)
        return self._linear(f"{own}.mlp.down_proj")(silu_mul(gate_up), residual=x)

    def _linear(self, *names: str) -> TrainedLinear:
        weights = [self.weights[f"{name}.weight"] for name in names]
        biases = [self.weights.get(f"{name}.bias") for name in names]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for b, w in zip(biases, weights, strict=True)])
        return TrainedLinear(weights, bias, self.decoder.backend)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens"
        return self._linear(head)(rms_norm(hidden, self.weights["model.norm.weight"], self.decoder.eps))


# ---- any other decoder


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingPass:
    """What modules ask for while a pass runs (`forward.current`)."""

    rows: PackedSequences
    spec: DecoderSpec

    @property
    def batch(self) -> PackedSequences:
        return self.rows

    def state(self, layer: int) -> State:
        """Zeros to start from, and slots for what nobody reads."""
        count = len(self.rows.lengths)
        tensors = tuple(torch.zeros(count + 1, *shape) for shape in self.spec.layers[layer].shapes)
        return State(tensors, torch.full((count,), count), torch.arange(count))


@contextlib.contextmanager
def _passing(run: TrainingPass) -> Iterator[None]:
    with running(run), moe.routed(sum(run.rows.lengths)):
        yield


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As `interface._attention`, without a cache that outlives it."""
    run: TrainingPass = current()
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if run.spec.layers[layer].kind == "latent":
        projection: AbsorbedProjection = module.kv_b_proj  # type: ignore[assignment]
        q_nope, q_rope = query[0].split([projection.nope_dim, query.shape[-1] - projection.nope_dim], dim=-1)
        q_latent, q_rope = projection.absorb(q_nope), q_rope.transpose(0, 1)
        out = attention_over_latents(q_latent, q_rope, value[0, 0], key[0, 0], run.rows, scale)
        return projection.expand(out)[None], None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window, softcap = kwargs.get("sliding_window") or 0, kwargs.get("softcap") or 0.0
    out = attention(q, k, v, run.rows, scale, window=window, softcap=softcap, sinks=kwargs.get("s_aux"))
    return out[None], None


class _Linear(nn.Module):
    """In the place of an nn.Linear, of its parameters or, adapted, of the merged weight."""

    def __init__(self, linear: nn.Module, backend: Backend) -> None:
        super().__init__()
        self.linear, self.backend = linear, backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = Weights.of_linear(self.linear)
        packed = TrainedLinear([weight], bias, self.backend)
        return packed(x.reshape(-1, packed.in_features)).view(*x.shape[:-1], packed.out_features)


class _Experts(moe.PackedExperts):
    def __init__(self, form: moe.Form, weights: dict[str, nn.Parameter], rule: RowRule) -> None:
        super().__init__(form, weights, rule)
        for name, weight in weights.items():
            self.register_parameter(name, weight)

    def load(self, weights: Any) -> None:
        """Nothing is packed ahead."""

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        own = dict(self.named_parameters(recurse=False))
        stacks: list[list[moe.Linear]] = []
        for name, bias_name in zip(moe.WEIGHTS, moe.BIASES, strict=True):
            weight = own[name].mT if self.form.transposed else own[name]
            biases = own[bias_name].unbind() if bias_name in own else [None] * len(weight)
            stacks.append(
                [
                    TrainedLinear([one], bias, self.rule.backend)
                    for one, bias in zip(weight.unbind(), biases, strict=True)
                ]
            )
        self.gate_up, self.down = stacks
        try:
            return super().forward(x, top_k_index, top_k_weights)
        finally:
            del self.gate_up, self.down  # views of this pass


class _Projection(AbsorbedProjection):
    def load(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def _halves(self) -> tuple[torch.Tensor, ...]:
        return self.weight.unflatten(0, (-1, self.nope_dim + self.v_dim)).split([self.nope_dim, self.v_dim], dim=1)

    @property
    def keys(self) -> list[TrainedLinear]:  # type: ignore[override]
        return [TrainedLinear([head.T], None, self.rule.backend) for head in self._halves()[0].unbind()]

    @property
    def values(self) -> list[TrainedLinear]:  # type: ignore[override]
        return [TrainedLinear([head], None, self.rule.backend) for head in self._halves()[1].unbind()]


class _Functions(RowInvariantFunctions):
    def load(self) -> None:
        self._packed = {
            matrix.data_ptr(): TrainedLinear([matrix], None, self._rule.backend) for matrix in self._matrices.values()
        }


def _is_linear(module: nn.Module) -> bool:
    return is_plain_linear(module) or is_adapted(module)


TRAINED = Replacements(_Linear, _is_linear, _Experts, _Projection)


class InterfaceForward:
    """decoder: whose arithmetic is repeated; twin: of the model, of the same parameters, ours to change."""

    def __init__(self, decoder: InterfaceDecoder, twin: PreTrainedModel, rule: RowRule, checkpointing: bool) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attention)
        self.spec, self.twin = decoder.spec, twin
        functions = _Functions(twin, rule)
        calling = functions.callers(twin)
        replace_modules(twin, rule, TRAINED)
        for module in twin.modules():
            if state_shapes(module) is not None:
                run_packed(module)
            elif type(module) in calling:
                functions.attach(module)
        twin.config._attn_implementation = ATTENTION
        self._base: Any = twin.base_model
        self._given: torch.Tensor | None = None
        self._output: Any = None
        self._base_forward = self._base.forward
        self._base.forward = self._hand_over
        if checkpointing:
            for layer in self._base.layers:
                layer.forward = functools.partial(_checkpointed, layer.forward)

    def _hand_over(self, *_: Any, **__: Any) -> Any:
        assert self._given is not None
        return self._output(last_hidden_state=self._given[None])

    def hidden(self, rows: PackedSequences) -> torch.Tensor:
        with _passing(TrainingPass(rows, self.spec)):
            out = self._base_forward(input_ids=rows.ids[None], position_ids=rows.positions[None], use_cache=False)
        self._output = type(out)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given = hidden
        try:
            out = self.twin(input_ids=torch.zeros(1, len(hidden), dtype=torch.long), use_cache=False)
        finally:
            self._given = None
        logits: torch.Tensor = out.logits[0]
        return logits


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run: TrainingPass = current()

    def again(*args: Any, **kwargs: Any) -> Any:
        with _passing(run):
            return forward(*args, **kwargs)

    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules, of the same parameters, buffers and adapted layers (whose adapters may be switched)."""
    kept = *model.parameters(), *model.buffers(), *(m for m in model.modules() if is_adapted(m))
    shared: dict[int, Any] = {id(part): part for part in kept}
    twin = copy.deepcopy(model, shared)
    return twin.eval()
