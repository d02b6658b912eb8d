"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): the cache holds latents, the expansion is absorbed.

Attention modules of `transformers` that have latents (`kv_lora_rank`) compute queries, the latent c and the rotated key
k_rope, expand c to the keys and values of all heads (`expand_kv`, by `kv_b_proj`), and call the attention interface.
Here `expand_kv` hands c and k_rope through, and `kv_b_proj` becomes an `AbsorbedProjection`, whose two halves are
applied to the queries and to what attention over latents returns (kernels/latent.py). All else is the module's own:
how queries are made, how they are rotated, by what scores are scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from longtail.kernels.latent import latent_attention, store_latent
from longtail.kernels.linear import PackedLinear, RowRule

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.native.forward import Paged


class AbsorbedProjection(nn.Module):
    """In the place of `kv_b_proj` [heads * (nope_dim + v_dim), rank]. Holds no parameters: the engine's weights arrive
    through `load`. A head's rows are its own bit for bit."""

    def __init__(self, attention: Any, rule: RowRule) -> None:
        super().__init__()
        self.rule = rule
        self.nope_dim, self.v_dim = int(attention.qk_nope_head_dim), int(attention.v_head_dim)
        self.load(attention.kv_b_proj.weight)

    @torch.no_grad()
    def load(self, weight: torch.Tensor) -> None:
        """weight: of `kv_b_proj`."""
        heads = weight.float().unflatten(0, (-1, self.nope_dim + self.v_dim))
        keys, values = heads.split([self.nope_dim, self.v_dim], dim=1)  # [heads, nope_dim, rank], [heads, v_dim, rank]
        self.keys = [PackedLinear([head.T.contiguous()], None, self.rule.backend) for head in keys]
        self.values = [PackedLinear([head.contiguous()], None, self.rule.backend) for head in values]

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """q_nope: [heads, T, nope_dim], T padded by the rule -> q_latent [T, heads, rank]."""
        return torch.stack([keys(q.contiguous()) for keys, q in zip(self.keys, q_nope, strict=True)], dim=1)

    def expand(self, out: torch.Tensor) -> torch.Tensor:
        """out: [T, heads, rank], of `latent_attention` -> [T, heads, v_dim]."""
        heads = out.transpose(0, 1)
        return torch.stack([values(x.contiguous()) for values, x in zip(self.values, heads, strict=True)], dim=1)


def has_latents(module: nn.Module) -> bool:
    """Whether a module is attention over latents as this file knows it. That it computes the same is seen when the
    model's logits are compared at load."""
    return (
        isinstance(getattr(module, "kv_b_proj", None), nn.Linear)
        and getattr(module.kv_b_proj, "bias", None) is None
        and callable(getattr(module, "expand_kv", None))
        and all(isinstance(getattr(module, n, None), int) for n in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    )


def keep_latents(
    module: nn.Module, rule: RowRule, kind: type[AbsorbedProjection] = AbsorbedProjection
) -> AbsorbedProjection:
    """Changes an attention module in place so that what reaches the attention interface as key and value are the
    rotated key [1, 1, T, rope_dim] and the latent [1, 1, T, rank]."""
    projection = kind(module, rule)
    module.kv_b_proj = projection
    module.expand_kv = _hand_through  # type: ignore[assignment]
    return projection


def _hand_through(c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (key, value), for `attend`."""
    return k_rope, c


def attend(
    projection: AbsorbedProjection,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Paged,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """query: [1, heads, T, nope_dim + rope_dim]; key: [1, 1, T, rope_dim]; value: [1, 1, T, rank]
    -> [1, T, heads, v_dim]."""
    store_latent(value[0, 0], key[0, 0], own.cache, own.index, own.slots, block_size)
    q_nope, q_rope = query[0].split([projection.nope_dim, query.shape[-1] - projection.nope_dim], dim=-1)
    q_latent, q_rope = projection.absorb(q_nope), q_rope.transpose(0, 1).contiguous()
    out = latent_attention(q_latent, q_rope, own.cache, own.index, own.attention, block_size, scale)
    return projection.expand(out)[None]


def matmul_shapes(model: nn.Module) -> frozenset[tuple[int, int]]:
    """(in, out) of what latents are multiplied by."""
    shapes = set()
    for module in model.modules():
        if has_latents(module):
            attention: Any = module
            rank = attention.kv_b_proj.in_features
            shapes |= {(attention.qk_nope_head_dim, rank), (rank, attention.v_head_dim)}
    return frozenset(shapes)
