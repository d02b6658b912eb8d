"""The model as the engine sees it: a packed batch and the paged cache in, logits out.

Two implementations. `FusedDecoder` runs the Llama family (one fused projection per matmul group, own norm, rotary and
attention ops, about nine calls a layer). `InterfaceDecoder` runs any other `transformers` decoder with full or
sliding-window causal attention through the library's attention interface. Both are checked against the model's own
forward pass when they are loaded, so an architecture that they would get wrong is refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from longtail.kernels.activation import silu_mul
from longtail.kernels.attention import AttentionVariant, paged_attention
from longtail.kernels.linear import Backend, PackedLinear
from longtail.kernels.norm import rms_norm
from longtail.kernels.rope import rope_store_kv
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache
from longtail.partial_rollout.engines.native.forward import Forward
from longtail.partial_rollout.engines.native.spec import DecoderSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Decoder(Protocol):
    spec: DecoderSpec

    def forward(self, batch: ForwardBatch, cache: Cache) -> torch.Tensor:
        """Writes what the layers keep of the batch, and returns logits float32 [len(batch.logits_rows), vocab]: the
        bits of `logits(hidden(batch, cache)[batch.logits_rows])`."""
        ...

    def hidden(self, batch: ForwardBatch, cache: Cache, embeds: torch.Tensor | None = None) -> torch.Tensor:
        """Likewise, and returns what the LM head reads, of every row: float32 [T, hidden], after the final norm.
        embeds: float32 [T, hidden] in place of the embeddings of batch.input_ids."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden] as from `hidden` -> float32 [R, vocab]."""
        ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [R] -> float32 [R, hidden]: what the first layer reads."""
        ...

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor | None:
        """ids: int64 [R] -> float32 [R, hidden]: the LM head's rows of these tokens; None if its logits are more than
        a product with them."""
        ...

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces all weights; names and shapes as in `parameter_shapes`, already checked."""
        ...

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names (as in the model's state_dict) and shapes of what `load_weights` takes."""
        ...

    def subset(self, layers: Sequence[int]) -> Decoder:
        """The model with these layers only, in this order, on the same memory. It takes no weights, and does not follow
        when this decoder gets others."""
        ...


@dataclasses.dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: PackedLinear
    post_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


FUSED_LAYERS = frozenset({"LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer"})


class FusedDecoder:
    """Llama, Qwen2, Qwen3 and Mistral (dense, full or sliding-window attention)."""

    def __init__(self, model: PreTrainedModel, spec: DecoderSpec, backend: Backend) -> None:
        config = model.config
        self.spec = spec
        self.backend = backend
        self.eps = float(config.rms_norm_eps)
        first = spec.layers[0]
        self.head_dim, self.kv_heads, self.heads = first.dim, first.heads, first.heads * first.queries
        self.scale = self.head_dim**-0.5
        self.variants = [AttentionVariant(window=window) for window in spec.windows]
        weights = weights_of(model)
        self._shapes = {name: tuple(w.shape) for name, w in weights.items()}
        positions = torch.arange(spec.max_positions)[None]
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(torch.zeros(1, 1), position_ids=positions)
        half = self.head_dim // 2
        self.cos, self.sin = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        self.load_weights(weights)

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        layers = getattr(getattr(model, "model", None), "layers", None)
        if not layers or {type(layer).__name__ for layer in layers} - FUSED_LAYERS:
            return False
        attention = layers[0].self_attn
        return (
            model.config.hidden_act == "silu"
            and attention.head_dim % 2 == 0
            and attention.q_proj.out_features % attention.head_dim == 0
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        def vector(name: str) -> torch.Tensor:
            return weights[name].detach().float().clone()

        def optional(name: str) -> torch.Tensor | None:
            return vector(name) if name in self._shapes else None

        def linear(*names: str) -> PackedLinear:
            bias = None
            if any(f"{n}.bias" in self._shapes for n in names):  # one vector for all: zeros where a part has none
                biases = [optional(f"{n}.bias") for n in names]
                sizes = [self._shapes[f"{n}.weight"][0] for n in names]
                bias = torch.cat([torch.zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)])
            return PackedLinear([weights[f"{n}.weight"].detach().float() for n in names], bias, self.backend)

        layers = []
        for i in range(len(self.spec.layers)):
            p = f"model.layers.{i}"
            layers.append(
                _Layer(
                    input_norm=vector(f"{p}.input_layernorm.weight"),
                    qkv=linear(f"{p}.self_attn.q_proj", f"{p}.self_attn.k_proj", f"{p}.self_attn.v_proj"),
                    q_norm=optional(f"{p}.self_attn.q_norm.weight"),
                    k_norm=optional(f"{p}.self_attn.k_norm.weight"),
                    o=linear(f"{p}.self_attn.o_proj"),
                    post_norm=vector(f"{p}.post_attention_layernorm.weight"),
                    gate_up=linear(f"{p}.mlp.gate_proj", f"{p}.mlp.up_proj"),
                    down=linear(f"{p}.mlp.down_proj"),
                )
            )
        embedding, norm = vector("model.embed_tokens.weight"), vector("model.norm.weight")
        lm_head = linear("lm_head" if "lm_head.weight" in self._shapes else "model.embed_tokens")
        # All or nothing: an error above leaves the old weights in place.
        self.layers, self.embedding, self.norm, self.lm_head = layers, embedding, norm, lm_head

    def subset(self, layers: Sequence[int]) -> FusedDecoder:
        part = copy.copy(self)
        part.spec = self.spec.subset(layers)
        part.layers = [self.layers[i] for i in layers]
        part.variants = [self.variants[i] for i in layers]
        return part

    def forward(self, batch: ForwardBatch, cache: Cache) -> torch.Tensor:
        x = self._layers(batch, cache, self.embed(batch.input_ids))
        return self.logits(rms_norm(x[batch.logits_rows], self.norm, self.eps))

    def hidden(self, batch: ForwardBatch, cache: Cache, embeds: torch.Tensor | None = None) -> torch.Tensor:
        x = self._layers(batch, cache, self.embed(batch.input_ids) if embeds is None else embeds)
        return rms_norm(x, self.norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embedding)

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor | None:
        return self.lm_head.rows(ids)

    def _layers(self, batch: ForwardBatch, cache: Cache, x: torch.Tensor) -> torch.Tensor:
        block_size, run = batch.block_size, Forward(batch, cache, self.spec)
        rows = x.shape[0]
        for i, layer in enumerate(self.layers):
            own = run.paged(i)
            h = rms_norm(x, layer.input_norm, self.eps)
            q = rope_store_kv(
                layer.qkv(h),
                self.cos,
                self.sin,
                batch.positions,
                layer.q_norm,
                layer.k_norm,
                self.eps,
                own.cache,
                own.index,
                own.slots,
                block_size,
                self.heads,
                self.kv_heads,
            )
            a = paged_attention(q, own.cache, own.index, own.attention, block_size, self.scale, self.variants[i])
            x = layer.o(a.view(rows, -1), residual=x)
            h = rms_norm(x, layer.post_norm, self.eps)
            x = layer.down(silu_mul(layer.gate_up(h)), residual=x)
        return x


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a trainer changes: parameters (tied ones once), and the persistent buffers that are floating-point, such as
    the bias by which DeepSeek-V3's router balances its experts."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name not in tied and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            weights[name] = tensor
    return weights


def linear_shapes(model: torch.nn.Module) -> frozenset[tuple[int, int]]:
    """(in, out) of every linear layer, and of the fused ones that FusedDecoder makes of them."""
    shapes = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shapes.add((module.in_features, module.out_features))
        parts = [getattr(module, n, None) for n in ("q_proj", "k_proj", "v_proj")]
        pair = [getattr(module, n, None) for n in ("gate_proj", "up_proj")]
        for group in (parts, pair):
            if all(isinstance(m, torch.nn.Linear) for m in group):
                linears: list[Any] = group
                shapes.add((linears[0].in_features, sum(m.out_features for m in linears)))
    return frozenset(shapes)
