"""The Triton kernels of paged attention (launched by kernels/attention_triton.py)."""

from __future__ import annotations

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import tl
from longtail.kernels.kv_quant import decode, unit_of


@triton_jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Of float32, about 2 ulp (Cephes: a polynomial up to 0.625, the exponential beyond)."""
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|)
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, p * z * x + x, tl.where(x < 0, -large, large))


@triton_jit
def _fold(
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, part_top: tl.tensor, part_total: tl.tensor, part_acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds the next partition to those before it. The fused operations are written out, so that every kernel that calls
    this rounds alike."""
    above = tl.maximum(top, part_top)
    shift = tl.where(above == -float("inf"), 0.0, above)  # a row that has seen nothing yet
    shrink, weight = tl.exp2(top - shift), tl.exp2(part_top - shift)
    total = tl.fma(part_total, weight, total * shrink)
    acc = tl.fma(part_acc, tl.broadcast_to(weight[:, None], part_acc.shape), acc * shrink[:, None])
    return above, total, acc


@triton_jit
def _write(
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    sinks: tl.tensor,  # [heads], or None
    out: tl.tensor,  # [T, heads, head_dim], contiguous
    row: tl.tensor,
    live: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    d = tl.arange(0, BLOCK_D)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + row % GROUP, mask=live, other=0.0) * 1.4426950408889634
        above = tl.maximum(top, sink)
        shrink = tl.exp2(top - above)
        total = tl.fma(total, shrink, tl.exp2(sink - above))
        acc = acc * shrink[:, None]
    out_at = (row // GROUP * (KV_HEADS * GROUP) + head * GROUP + row % GROUP)[:, None] * DIM + d[None, :]
    total = tl.where(live, total, 1.0)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at, result, mask=live[:, None] & (d < DIM)[None, :])


@triton_jit
def attention_kernel(
    q: tl.tensor,
    kv: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size, head_dim]
    scales: tl.tensor,  # one layer: [num_blocks, 2, kv_heads, block_size], or None
    sinks: tl.tensor,  # [heads], or None
    contexts: tl.tensor,
    first_seen: tl.tensor,  # or None
    tree_masks: tl.tensor,  # or None
    tree_bases: tl.tensor,  # or None
    tables: tl.tensor,
    tiles: tl.tensor,
    items: tl.tensor,
    item_starts: tl.tensor,
    out: tl.tensor,  # WHOLE: [T, heads, head_dim], contiguous
    out_acc: tl.tensor,  # else: [items, kv_heads, TILE, BLOCK_D]
    out_stats: tl.tensor,  # else: [items, kv_heads, 2, TILE]: largest score, sum of p
    q_token: tl.tensor,
    q_head: tl.tensor,
    kv_block: tl.tensor,
    scales_block: tl.tensor,
    table_row: tl.tensor,
    factor: tl.tensor,  # of the products q k, to powers of 2; with a cap, to shares of the cap
    cap_log2: tl.tensor,
    WHOLE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,  # see code_format
    BOOST: tl.constexpr,  # keeps p * value_scale within float16's normal numbers
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PARTITION: tl.constexpr,
    STEP: tl.constexpr,  # KV tokens of a round
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A program attends from the rows of one tile, for one KV head: to one partition, or to all of them in order
    (WHOLE), with the arithmetic of the split."""
    program = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if WHOLE:
        tile = program
        part = tl.load(items + tl.load(item_starts + tile).to(tl.int64) * 2 + 1)
    else:
        tile = tl.load(items + program * 2).to(tl.int64)
        part = tl.load(items + program * 2 + 1)
    sequence = tl.load(tiles + tile * 3).to(tl.int64)
    m = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    row = tl.load(tiles + tile * 3 + 1).to(tl.int64) + m
    live = row < tl.load(tiles + tile * 3 + 2)
    token = row // GROUP
    context = tl.load(contexts + token, mask=live, other=0)
    q_at = token[:, None] * q_token + (head * GROUP + row % GROUP)[:, None] * q_head + d[None, :]
    query = tl.load(q + q_at, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    table = tables + sequence * table_row
    first = part * PARTITION
    last = tl.max(context, axis=0)
    if not WHOLE:
        last = tl.minimum(last, first + PARTITION)
    if WINDOW:
        low = tl.load(first_seen + token, mask=live, other=2147483647)
        lowest = tl.min(low, axis=0)  # blocks before it may be gone
        first = tl.maximum(first, lowest // STEP * STEP)
    if TREE:
        tree = tl.load(tree_masks + token, mask=live, other=0)
        tree_low, tree_high = tree.to(tl.int32), (tree >> 32).to(tl.int32)
        base = tl.load(tree_bases + token, mask=live, other=0)
    kv_head = kv + head * (BLOCK_SIZE * DIM)
    # Of the present partition, and (WHOLE) of those before it.
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    if WHOLE:
        all_top, all_total, all_acc = top, total, acc
    for start in range(first, last, STEP):
        if WHOLE:  # noqa: SIM102 (known when compiling; the other is not)
            if start % PARTITION == 0:
                if FORMAT != "":
                    acc = acc / BOOST
                all_top, all_total, all_acc = _fold(all_top, all_total, all_acc, top, total, acc)
                top = tl.full([TILE], -float("inf"), tl.float32)
                total = tl.zeros([TILE], tl.float32)
                acc = tl.zeros([TILE, BLOCK_D], tl.float32)
        position = start + tl.arange(0, STEP)
        exists = position < last
        if WINDOW:
            exists = exists & (position >= lowest)
        in_block = position % BLOCK_SIZE
        block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        at = block * kv_block + in_block * DIM
        key = tl.load(kv_head + at[None, :] + d[:, None], mask=exists[None, :] & (d < DIM)[:, None], other=0)
        v_at = at[:, None] + (KV_HEADS * BLOCK_SIZE * DIM + d[None, :])
        value = tl.load(kv_head + v_at, mask=exists[:, None] & (d < DIM)[None, :], other=0)
        if FORMAT != "":
            scale_at = scales + block * scales_block + head * BLOCK_SIZE + in_block
            key_scale = tl.load(scale_at, mask=exists, other=0.0) * unit_of(FORMAT)
            value_scale = tl.load(scale_at + KV_HEADS * BLOCK_SIZE, mask=exists, other=0.0) * (unit_of(FORMAT) * BOOST)
            key, value = decode(key, query.dtype, FORMAT), decode(value, query.dtype, FORMAT)
            scores = tl.dot(query, key, input_precision="ieee") * (key_scale * factor)[None, :]
        else:
            scores = tl.dot(query, key.to(query.dtype), input_precision="ieee") * factor
        if SOFTCAP:
            scores = _tanh(scores) * cap_log2
        if TREE:
            bit = tl.minimum(tl.maximum(position[None, :] - base[:, None], 0), 63)  # bit 63 is never set
            word = tl.where(bit < 32, tree_low[:, None], tree_high[:, None])
            seen = (position[None, :] < base[:, None]) | (((word >> (bit & 31)) & 1) != 0)
        else:
            seen = position[None, :] < context[:, None]
        if WINDOW:
            seen = seen & (position[None, :] >= low[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        above = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(above == -float("inf"), 0.0, above)  # a row that has seen nothing yet
        shrink = tl.exp2(top - shift)
        p = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        if FORMAT != "":
            p = p * value_scale[None, :]
        acc = acc * shrink[:, None] + tl.dot(p.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        top = above
    if FORMAT != "":
        acc = acc / BOOST
    if WHOLE:
        top, total, acc = _fold(all_top, all_total, all_acc, top, total, acc)
        _write(top, total, acc, sinks, out, row, live, head, KV_HEADS, GROUP, DIM, SINKS, BLOCK_D)
    else:
        at_out = program * KV_HEADS + head
        # Rows that do not exist are written too, into room of their own: a mask would cost registers through the loop.
        tl.store(out_stats + at_out * (2 * TILE) + m, top)
        tl.store(out_stats + at_out * (2 * TILE) + TILE + m, total)
        tl.store(out_acc + at_out * (TILE * BLOCK_D) + m[:, None] * BLOCK_D + d[None, :], acc)


@triton_jit
def combine_kernel(
    acc_of: tl.tensor,
    stats_of: tl.tensor,
    sinks: tl.tensor,
    tiles: tl.tensor,
    item_starts: tl.tensor,
    out: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """A program adds up, in order, the partitions of one tile for one KV head."""
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    row = tl.load(tiles + tile * 3 + 1).to(tl.int64) + m
    live = row < tl.load(tiles + tile * 3 + 2)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for item in range(tl.load(item_starts + tile), tl.load(item_starts + tile + 1)):
        at = tl.cast(item, tl.int64) * KV_HEADS + head
        part_top = tl.load(stats_of + at * (2 * TILE) + m, mask=live, other=-float("inf"))
        part_total = tl.load(stats_of + at * (2 * TILE) + TILE + m, mask=live, other=0.0)
        acc_at = acc_of + at * (TILE * BLOCK_D) + m[:, None] * BLOCK_D + d[None, :]
        part_acc = tl.load(acc_at, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
        top, total, acc = _fold(top, total, acc, part_top, part_total, part_acc)
    _write(top, total, acc, sinks, out, row, live, head, KV_HEADS, GROUP, DIM, SINKS, BLOCK_D)
