"""Any `transformers` decoder with full, sliding-window or latent attention, through the library's attention interface.

The model's own modules run; only its attention function is ours (it writes the paged cache and reads it), and its
linear layers, RMSNorms, SiLU and GELU (tanh) activations and experts (`moe.py`) are replaced by row-invariant ones; in
exact numerics functions of torch that it calls are too (`row_invariant.py`). Slower than `FusedDecoder`, and as general
as the attention interface is.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from longtail.errors import ExactNumericsUnavailable, UnsupportedModel
from longtail.kernels.attention import AttentionVariant, paged_attention
from longtail.kernels.kv import store_kv
from longtail.kernels.linear import Backend, PackedLinear, RowRule
from longtail.kernels.norm import rms_norm_reference
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.decoder import weights_of
from longtail.partial_rollout.engines.native.differentiable import gelu_tanh, rms_norm, silu
from longtail.partial_rollout.engines.native.forward import Forward, current, running
from longtail.partial_rollout.engines.native.latent import AbsorbedProjection, attend, has_latents, keep_latents
from longtail.partial_rollout.engines.native.moe import PackedExperts, form_of, routed, unknown_experts
from longtail.partial_rollout.engines.native.routing import store_routing
from longtail.partial_rollout.engines.native.row_invariant import RowInvariantFunctions
from longtail.partial_rollout.engines.native.state_layers import run_packed, state_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longtail.partial_rollout.engines.native.cache import Cache
    from longtail.partial_rollout.engines.native.spec import DecoderSpec

ATTENTION = "longtail_paged"


class _RowInvariantLinear(nn.Module):
    """nn.Linear on packed weights. Holds no parameters: the engine's weights arrive through `load`."""

    def __init__(self, linear: nn.Linear, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.load(linear.weight, linear.bias)

    def load(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        bias = None if bias is None else bias.detach().float().clone()
        self.linear = PackedLinear([weight.detach().float()], bias, self.backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class _RowInvariantSiLU(nn.Module):
    """SiLU whose value does not depend on where in the tensor an element lies (torch's tail elements take a scalar
    path with another exponential)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x)


class _RowInvariantGELU(nn.Module):
    """GELU's tanh approximation, for the same reason."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(x)


GELU_TANH = frozenset({"GELUTanh", "NewGELUActivation", "FastGELUActivation"})
"""Class names of `transformers` that compute the tanh approximation."""


class _RowInvariantRMSNorm(nn.Module):
    """RMSNorm, times weight or (Gemma) 1 + weight; keeps the module's parameter."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, 1.0 + self.weight if self.offset else self.weight, self.eps)


@torch.no_grad()
def row_invariant_norm(module: nn.Module) -> _RowInvariantRMSNorm | None:
    """The replacement of a module that is found to compute RMSNorm on random input and weight, else None."""
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or not isinstance(eps, float):
        return None
    if hasattr(module, "group_size"):  # of groups, a gated one of a state layer: with one group it looks like RMSNorm
        return None
    generator = torch.Generator().manual_seed(0)
    size = len(parameters["weight"])
    weight = torch.randn(size, generator=generator)
    scales = torch.tensor([[1e-3], [0.1], [1.0], [30.0]])  # the first ones show eps
    x = (torch.randn(4, size, generator=generator) + 0.5) * scales
    try:
        got = torch.func.functional_call(module, {"weight": weight}, (x,))
    except (TypeError, RuntimeError, ValueError):  # wants more than x: some other norm
        return None
    for offset in (False, True):
        want = rms_norm_reference(x, 1.0 + weight if offset else weight, eps)
        if isinstance(got, torch.Tensor) and got.shape == x.shape and torch.allclose(got, want, 1e-5, 1e-6):
            return _RowInvariantRMSNorm(parameters["weight"], eps, offset)
    return None


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, T, dim]; key, value: [1, kv_heads, T, dim], or as `attend` takes them -> [1, T, heads, dim]."""
    run = current()
    layer: int = module.layer_idx  # type: ignore[assignment]
    own, block_size = run.paged(layer), run.batch.block_size
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if run.spec.layers[layer].kind == "latent":
        projection: AbsorbedProjection = module.kv_b_proj  # type: ignore[assignment]
        return attend(projection, query, key, value, own, block_size, scale), None
    window = kwargs.get("sliding_window") or 0
    if window != run.spec.layers[layer].window:
        # A window that is longer than the check at load would otherwise pass it unseen.
        raise UnsupportedModel(
            f"model: layer {layer} attends with a window of {window}, its config says {run.spec.layers[layer].window} "
            "(0: none); not supported"
        )
    sinks = kwargs.get("s_aux")
    variant = AttentionVariant(
        window=window,
        softcap=kwargs.get("softcap") or 0.0,
        sinks=None if sinks is None else sinks.detach().float().contiguous(),
    )
    k, v, q = (x[0].transpose(0, 1) for x in (key, value, query))
    store_kv(k, v, own.cache, own.index, own.slots, block_size)
    out = paged_attention(q.contiguous(), own.cache, own.index, own.attention, block_size, scale, variant)
    return out[None], None


def _with_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the same parameters that has these layers only."""
    config = copy.copy(model.config)
    for name, value in vars(model.config).items():
        if isinstance(value, list) and len(value) == model.config.num_hidden_layers:  # layer_types and their like
            setattr(config, name, [value[i] for i in layers])
    config.num_hidden_layers = len(layers)
    part, base = _twin(model), _twin(model.base_model)
    base.layers = nn.ModuleList(_numbered(model.base_model.layers[i], n) for n, i in enumerate(layers))
    part.config = base.config = config
    setattr(part, model.base_model_prefix, base)
    return part


def _twin(module: Any) -> Any:
    """A copy whose submodules can be exchanged; they and the parameters are the same."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, value in list(vars(twin).items()):
        if isinstance(value, functools.partial | types.MethodType):  # methods that were replaced
            twin.__dict__[name] = _rebound(value, module, twin)
    return twin


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """A bound method, or a partial with such in its arguments, as `new` has it."""
    if isinstance(value, functools.partial):
        return functools.partial(value.func, *(_rebound(a, old, new) for a in value.args), **value.keywords)
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    return new if value is old else value


def _numbered(module: Any, layer: int) -> Any:
    """A layer on the same parameters that keeps what it keeps as the layer of this index."""
    twin = _twin(module)
    if hasattr(twin, "layer_idx"):
        twin.layer_idx = layer
    twin._modules = {name: child and _numbered(child, layer) for name, child in module._modules.items()}
    return twin


class Replaced(NamedTuple):
    """Modules that hold packed copies of weights, by name."""

    linears: dict[str, _RowInvariantLinear]
    experts: dict[str, PackedExperts]
    projections: dict[str, AbsorbedProjection]


class Replacements(NamedTuple):
    """What takes the place of modules that hold weights."""

    linear: Callable[[nn.Module, Backend], nn.Module]
    is_linear: Callable[[nn.Module], bool]
    experts: type[PackedExperts]
    projection: type[AbsorbedProjection]


def is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


PACKED = Replacements(_RowInvariantLinear, is_plain_linear, PackedExperts, AbsorbedProjection)  # type: ignore[arg-type]


def replace_modules(model: nn.Module, rule: RowRule, by: Replacements = PACKED) -> Replaced:
    """Puts row-invariant modules in the place of those that have one."""
    replaced = Replaced({}, {}, {})
    gone = "?"  # how the names begin of what was part of the module replaced last; they come right behind it
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        other: Any
        if name.startswith(gone) or name in replaced.projections:
            continue
        if has_latents(module):
            replaced.projections[f"{name}.kv_b_proj"] = keep_latents(module, rule, by.projection)
            continue
        if by.is_linear(module):
            other = replaced.linears[name] = by.linear(module, rule.backend)  # type: ignore[assignment]
        elif (form := form_of(module)) is not None:
            other = replaced.experts[name] = by.experts(form, dict(module.named_parameters(recurse=False)), rule)
        elif isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation":
            other = _RowInvariantSiLU()
        elif type(module).__name__ in GELU_TANH or getattr(module, "approximate", None) == "tanh":
            other = _RowInvariantGELU()
        else:
            other = row_invariant_norm(module)
        if other is not None:
            setattr(model.get_submodule(parent), leaf, other)
            gone = f"{name}."
    return replaced


class InterfaceDecoder:
    """Takes the model over: its linear layers, norms, activations and experts are replaced in place.

    exact: rows must be independent of the batch; ExactNumericsUnavailable where that is known not to be so."""

    def __init__(self, model: PreTrainedModel, spec: DecoderSpec, rule: RowRule, exact: bool) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attention)
        self.spec = spec
        self.model = model
        self._shapes = {name: tuple(w.shape) for name, w in weights_of(model).items()}
        self._tied_head = "lm_head.weight" not in self._shapes
        self._functions = RowInvariantFunctions(model, rule) if exact else None
        calling = set() if self._functions is None else self._functions.callers(model)
        self._replaced = replace_modules(model, rule)
        for module in model.modules():
            if state_shapes(module) is not None:
                run_packed(module)
            elif self._functions is not None and type(module) in calling:
                self._functions.attach(module)
        model.config._attn_implementation = ATTENTION
        if exact and (unknown := unknown_experts(model)):
            raise ExactNumericsUnavailable(
                f"model: the experts of {type(model).__name__} ({', '.join(unknown)}) compute in a way that the engine "
                'does not know, and their bits depend on the batch; use numerics="fast"'
            )
        self._take_base(model.base_model.forward)

    def _take_base(self, forward: Callable[..., Any]) -> None:
        self._given: torch.Tensor | None = None
        self._output: Any = None
        self._base = self.model.base_model
        self._base_forward = forward
        self._base.forward = self._or_given

    def _or_given(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the forward of the model without its head, so that the head can run on hidden states alone."""
        if self._given is None:
            return self._base_forward(*args, **kwargs)  # the model's own use, not the engine's
        return self._output(last_hidden_state=self._given[None])

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        own = weights_of(self.model)
        weights = {name: weights[name].detach().float() for name in self._shapes}  # an error here changes nothing
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
            embedding = self.model.get_input_embeddings().weight
            for name, module in self._replaced.linears.items():
                tied = name == "lm_head" and self._tied_head
                module.load(embedding if tied else weights[f"{name}.weight"], weights.get(f"{name}.bias"))
            for name, experts in self._replaced.experts.items():
                experts.load({leaf: weights[f"{name}.{leaf}"] for leaf in experts.names})
            for name, projection in self._replaced.projections.items():
                projection.load(weights[f"{name}.weight"])
            if self._functions is not None:
                self._functions.load()

    def subset(self, layers: Sequence[int]) -> InterfaceDecoder:
        part = copy.copy(self)
        part.spec = self.spec.subset(layers)
        part.model = _with_layers(self.model, layers)
        part._take_base(_rebound(self._base_forward, self._base, part.model.base_model))
        return part

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, cache: Cache) -> torch.Tensor:
        return self.logits(self.hidden(batch, cache)[batch.logits_rows])

    @torch.no_grad()
    def hidden(self, batch: ForwardBatch, cache: Cache, embeds: torch.Tensor | None = None) -> torch.Tensor:
        ids = {"input_ids": batch.input_ids[None]} if embeds is None else {"inputs_embeds": embeds[None]}
        rows = int(batch.cu_seqlens[-1])
        with running(Forward(batch, cache, self.spec)), routed(rows) as routing:
            out = self._base_forward(**ids, position_ids=batch.positions[None], use_cache=False)
        if (group := self.spec.routing_group) is not None:
            store_routing(routing.experts, cache.paged[group], batch.paged[group].slots, batch.block_size)
        self._output = type(out)  # which other fields it has differs between models
        hidden: torch.Tensor = out.last_hidden_state[0].float()
        return hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given = hidden
        try:  # the whole model's forward, for what it does with the logits (a scale, a soft cap)
            out = self.model(input_ids=torch.zeros(1, len(hidden), dtype=torch.long), use_cache=False)
        finally:
            self._given = None
        logits: torch.Tensor = out.logits[0].float()
        return logits.contiguous()

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor | None:
        return None
