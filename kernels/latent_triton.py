"""The Triton kernels of kernels/latent.py.

As in paged attention the KV is split into partitions of a fixed number of tokens anchored at position 0, one online
softmax in each, which are then added up in order. A program loads the latents of a partition once, for the keys and
for the values of its 16 query rows (heads of one token first).
"""

from __future__ import annotations

import torch

from longtail.kernels._triton import compiles_for_amd, next_power_of_2, num_warps_for, on_device_of, tl
from longtail.kernels._triton import jit as triton_jit
from longtail.kernels.attention_batch import AttentionBatch
from longtail.kernels.attention_plan import TILE, SplitPlan
from longtail.kernels.attention_triton import LOG2_E

STORE_TOKENS = 4
"""Tokens of a store_latent program: with one warp, 16-byte loads of 4 rotary keys of 64 bfloat16."""

PARTITION = 1024
"""Tokens of a program. The partial sums of a tile, written and read, weigh as much as 57 latents of DeepSeek-V3 in
bfloat16, and heads beyond 16 bring more tiles: longer partitions than those of paged attention."""

COMBINE_COLUMNS = 128
"""Columns of a tile that one program adds up."""


def latent_attention_triton(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    layer: int,
    batch: AttentionBatch,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """See `latent_attention`; float32, float16 and bfloat16, sums in float32, rank up to 512, rope_dim up to 64."""
    (_, heads, rank), rope = q_latent.shape, q_rope.shape[2]
    if rank > 512 or rope > 64 or latent.stride(3) != 1 or latent.stride(2) != rank + rope:
        what = f"rank {rank} (at most 512), rope_dim {rope} (at most 64), latent {tuple(latent.shape)} of dense rows"
        raise ValueError(f"latent_attention: {what}")
    block_rank = max(next_power_of_2(rank), 16)
    plan = SplitPlan.of(
        batch, 0, heads, PARTITION, latent.device, whole_from=None, item_bytes=TILE * (block_rank + 2) * 4
    )
    q_latent, q_rope = (x if x.stride(2) == 1 else x.contiguous() for x in (q_latent, q_rope))
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    out[len(batch.context_lens) :].zero_()
    most = max((len(turn.items) for turn in plan.turns), default=0)
    acc = torch.empty(most, TILE, block_rank, dtype=torch.float32, device=out.device)
    stats = torch.empty(most, 2, TILE, dtype=torch.float32, device=out.device)
    float32 = torch.float32 in (q_latent.dtype, latent.dtype)
    columns = min(block_rank, COMBINE_COLUMNS)
    with on_device_of(latent):
        amd = compiles_for_amd()
        warps = min(max(block_rank // 64, 1), 8) if amd else 8 if float32 and block_rank > 256 else 4
        for turn in plan.turns:
            _partition_kernel[(len(turn.items),)](
                q_latent,
                q_rope,
                latent[:, layer],
                plan.context_lens,
                plan.block_tables,
                turn.tiles,
                turn.items,
                acc,
                stats,
                q_latent.stride(0),
                q_latent.stride(1),
                q_rope.stride(0),
                q_rope.stride(1),
                latent.stride(0),
                plan.block_tables.stride(0),
                scale * LOG2_E,
                HEADS=heads,
                RANK=rank,
                ROPE=rope,
                BLOCK_SIZE=block_size,
                PARTITION=PARTITION,
                STEP=16 if float32 else 32,  # positions of a round, by dtype, never by the batch
                TILE=TILE,
                BLOCK_RANK=block_rank,
                BLOCK_ROPE=max(next_power_of_2(rope), 16),
                num_warps=warps,
                num_stages=2 if amd else 5,  # 5: block numbers of the round after next, latents of the next one
            )
            _combine_kernel[(len(turn.tiles), block_rank // columns)](
                acc,
                stats,
                turn.tiles,
                turn.item_starts,
                out,
                HEADS=heads,
                RANK=rank,
                TILE=TILE,
                BLOCK_RANK=block_rank,
                COLUMNS=columns,
                num_warps=num_warps_for(TILE * columns),
            )
    return out


@triton_jit
def _partition_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    latent: tl.tensor,  # one layer: [num_blocks, block_size, RANK + ROPE]
    contexts: tl.tensor,
    tables: tl.tensor,
    tiles: tl.tensor,
    items: tl.tensor,
    out_acc: tl.tensor,  # [items, TILE, BLOCK_RANK]: sums of p * c, not yet divided
    out_stats: tl.tensor,  # [items, 2, TILE]: the largest score (in powers of 2), the sum of p
    latent_token: tl.tensor,  # strides of the queries, in elements
    latent_head: tl.tensor,
    rope_token: tl.tensor,
    rope_head: tl.tensor,
    latent_block: tl.tensor,
    table_row: tl.tensor,
    scale_log2: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTITION: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
) -> None:
    """A program attends from the rows of one tile to one partition of the KV."""
    item = tl.program_id(0).to(tl.int64)
    tile = tl.load(items + item * 2).to(tl.int64)
    part = tl.load(items + item * 2 + 1)
    sequence = tl.load(tiles + tile * 3).to(tl.int64)
    m = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_RANK)
    e = tl.arange(0, BLOCK_ROPE)
    row = tl.load(tiles + tile * 3 + 1).to(tl.int64) + m
    live = row < tl.load(tiles + tile * 3 + 2)
    token = row // HEADS
    head = row % HEADS
    context = tl.load(contexts + token, mask=live, other=0)
    query_at = q_latent + token[:, None] * latent_token + head[:, None] * latent_head + d[None, :]
    query = tl.load(query_at, mask=live[:, None] & (d < RANK)[None, :], other=0.0)
    turned_at = q_rope + token[:, None] * rope_token + head[:, None] * rope_head + e[None, :]
    turned = tl.load(turned_at, mask=live[:, None] & (e < ROPE)[None, :], other=0.0)
    last = tl.minimum(tl.max(context, axis=0), (part + 1) * PARTITION)

    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_RANK], tl.float32)
    for start in range(part * PARTITION, last, STEP):
        position = start + tl.arange(0, STEP)
        exists = position < last
        table = tables + sequence * table_row + position // BLOCK_SIZE
        block = tl.load(table, mask=exists, other=0).to(tl.int64)
        at = latent + block * latent_block + position % BLOCK_SIZE * (RANK + ROPE)
        c = tl.load(at[:, None] + d[None, :], mask=exists[:, None] & (d < RANK)[None, :], other=0.0).to(query.dtype)
        key = tl.load(at[:, None] + RANK + e[None, :], mask=exists[:, None] & (e < ROPE)[None, :], other=0.0)
        scores = tl.dot(turned, tl.trans(key.to(query.dtype)), input_precision="ieee")
        scores = tl.dot(query, tl.trans(c), scores, input_precision="ieee") * scale_log2
        scores = tl.where(position[None, :] < context[:, None], scores, -float("inf"))
        above = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(above == -float("inf"), 0.0, above)  # a row that has seen nothing yet
        shrink = tl.exp2(top - shift)
        p = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p.to(query.dtype), c, input_precision="ieee")
        top = above
    tl.store(out_stats + item * (2 * TILE) + m, top)
    tl.store(out_stats + item * (2 * TILE) + TILE + m, total)
    tl.store(out_acc + item * (TILE * BLOCK_RANK) + m[:, None] * BLOCK_RANK + d[None, :], acc)


@triton_jit
def _combine_kernel(
    acc_of: tl.tensor,
    stats_of: tl.tensor,
    tiles: tl.tensor,
    item_starts: tl.tensor,
    out: tl.tensor,  # [T, heads, RANK], contiguous
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A program adds up, in order, the partitions of one tile in some of its columns."""
    tile = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, TILE)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, COLUMNS], tl.float32)
    for item in range(tl.load(item_starts + tile), tl.load(item_starts + tile + 1)):
        at = tl.cast(item, tl.int64)
        part_top = tl.load(stats_of + at * (2 * TILE) + m)
        part_total = tl.load(stats_of + at * (2 * TILE) + TILE + m)
        part_acc = tl.load(acc_of + at * (TILE * BLOCK_RANK) + m[:, None] * BLOCK_RANK + d[None, :])
        above = tl.maximum(top, part_top)
        shift = tl.where(above == -float("inf"), 0.0, above)
        shrink, weight = tl.exp2(top - shift), tl.exp2(part_top - shift)
        total = total * shrink + part_total * weight
        acc = acc * shrink[:, None] + part_acc * weight[:, None]
        top = above
    row = tl.load(tiles + tile * 3 + 1).to(tl.int64) + m
    live = row < tl.load(tiles + tile * 3 + 2)
    result = acc / tl.where(live, total, 1.0)[:, None]
    # Rows count on from the heads of a token to those of the next one, as they lie in `out`.
    at = out + row[:, None] * RANK + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & (d < RANK)[None, :])


def store_latent_triton(
    c: torch.Tensor, k_rope: torch.Tensor, latent: torch.Tensor, layer: int, slots: torch.Tensor, block_size: int
) -> None:
    """See `store_latent`; float32, float16 and bfloat16, c and k_rope may differ from the cache."""
    (tokens, rank), rope = c.shape, k_rope.shape[1]
    if tokens == 0:
        return
    if latent.stride(3) != 1 or latent.stride(2) != rank + rope:
        raise ValueError("store_latent: the rows of latent must lie densely, as empty_latent makes them")
    c, k_rope = (x if x.stride(1) == 1 else x.contiguous() for x in (c, k_rope))
    with on_device_of(latent):
        _store_latent_kernel[(-(-tokens // STORE_TOKENS),)](
            c,
            k_rope,
            latent[:, layer],
            slots.contiguous(),
            tokens,
            latent.shape[0] * block_size,
            c.stride(0),
            k_rope.stride(0),
            latent.stride(0),
            RANK=rank,
            ROPE=rope,
            BLOCK_SIZE=block_size,
            BLOCK_TOKENS=STORE_TOKENS,
            BLOCK_RANK=next_power_of_2(rank),
            BLOCK_ROPE=next_power_of_2(rope),
            num_warps=1,
        )


@triton_jit
def _store_latent_kernel(
    c: tl.tensor,
    k_rope: tl.tensor,
    latent: tl.tensor,  # one layer: [num_blocks, block_size, RANK + ROPE]
    slots: tl.tensor,
    tokens: tl.tensor,
    num_slots: tl.tensor,
    c_row: tl.tensor,  # strides, in elements
    rope_row: tl.tensor,
    latent_block: tl.tensor,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
) -> None:
    """A program stores BLOCK_TOKENS tokens."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    d = tl.arange(0, BLOCK_RANK)
    e = tl.arange(0, BLOCK_ROPE)
    slot = tl.load(slots + t, mask=t < tokens, other=-1).to(tl.int64)
    tl.device_assert(slot < num_slots, "store_latent: a slot lies beyond the cache")
    live = (slot >= 0)[:, None]
    slot = tl.maximum(slot, 0)
    to = latent + slot // BLOCK_SIZE * latent_block + slot % BLOCK_SIZE * (RANK + ROPE)
    c_mask = live & (d < RANK)[None, :]
    rope_mask = live & (e < ROPE)[None, :]
    compressed = tl.load(c + t[:, None] * c_row + d[None, :], mask=c_mask)
    key = tl.load(k_rope + t[:, None] * rope_row + e[None, :], mask=rope_mask)
    tl.store(to[:, None] + d[None, :], compressed.to(latent.dtype.element_ty), mask=c_mask)
    tl.store(to[:, None] + RANK + e[None, :], key.to(latent.dtype.element_ty), mask=rope_mask)
