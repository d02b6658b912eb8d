"""Cases of the ops on the KV cache: store, move, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longtail.bench.kernel_cases import Call, Case, Form, Sizes
from longtail.kernels import attention_plan, attention_triton, kv, latent, latent_triton, rope
from longtail.kernels._triton import next_power_of_2
from longtail.kernels.attention import (
    AttentionBatch,
    paged_attention,
    paged_attention_reference,
    paged_attention_triton,
)

LAYERS = 2
INDEX = 4
"""Bytes of an int32."""


def _cache(form: Form, blocks: int, kv_heads: int, block_size: int, dim: int) -> torch.Tensor:
    block = (block_size * dim,) if form.path == "cpu" else (block_size, dim)
    return form.randn(blocks, LAYERS, 2, kv_heads, *block)


def store_kv(form: Form, n: Sizes) -> Call:
    k, v = form.randn(2, n["tokens"], n["kv_heads"], n["dim"])
    cache = _cache(form, -(-n["tokens"] // n["block"]) + 1, n["kv_heads"], n["block"], n["dim"])
    slots = torch.arange(n["tokens"], device=form.device) + 3

    def run(function: Callable[..., None], target: torch.Tensor) -> torch.Tensor:
        function(k, v, target, 1, slots, n["block"])
        return target

    rows = 2 * k.nbytes * 2  # K and V, read and written
    return Call(
        op=lambda: run(kv.store_kv, cache),
        launch=lambda: run(kv.store_kv_triton, cache),
        reference=lambda: run(kv.store_kv_reference, cache.clone()),
        tokens=n["tokens"],
        least=rows + slots.nbytes,
        memory=rows + slots.nbytes,
        issued=rows + slots.nbytes * n["kv_heads"],
    )


def rope_store_kv(form: Form, n: Sizes) -> Call:
    heads, kv_heads, dim, tokens = n["heads"], n["kv_heads"], n["dim"], n["tokens"]
    qkv = form.randn(tokens, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(n["positions"], dim // 2, device=form.device)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(tokens, device=form.device) % n["positions"]
    cache = _cache(form, -(-tokens // n["block"]) + 1, kv_heads, n["block"], dim)
    slots = torch.arange(tokens, device=form.device) + 3

    def run(function: Callable[..., torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        args = (qkv, cos, sin, positions, None, None, 1e-6, target, 1, slots, n["block"], heads, kv_heads)
        return function(*args), target

    all_heads, half = heads + 2 * kv_heads, next_power_of_2(dim // 2)
    per_program = min(next_power_of_2(all_heads), max(rope.PROGRAM_ELEMENTS // (2 * half), 1))
    programs = -(-all_heads // per_program)
    per_token = cos[:1].nbytes + sin[:1].nbytes + positions.itemsize + slots.itemsize
    return Call(
        op=lambda: run(rope.rope_store_kv, cache),
        launch=lambda: run(rope.rope_store_kv_triton, cache),
        reference=lambda: run(rope.rope_store_kv_reference, cache.clone()),
        tokens=tokens,
        least=2 * qkv.nbytes + per_token * tokens,
        memory=2 * qkv.nbytes + per_token * tokens,
        issued=2 * qkv.nbytes + per_token * tokens * programs,
    )


def move_blocks(form: Form, n: Sizes) -> Call:
    cache = _cache(form, 2 * n["blocks"], n["kv_heads"], n["block"], n["dim"])
    pairs = [(i, n["blocks"] + i) for i in range(n["blocks"])]

    def run(function: Callable[..., None], target: torch.Tensor) -> torch.Tensor:
        function(target, pairs)
        return target

    moved = 2 * n["blocks"] * cache[0].nbytes
    programs = -(-cache[0].numel() // kv.MOVE_ELEMENTS) * n["blocks"]
    return Call(
        op=lambda: run(kv.copy_blocks, cache),
        launch=lambda: run(kv.copy_blocks_triton, cache),
        reference=lambda: run(kv.copy_blocks_reference, cache.clone()),
        tokens=n["blocks"] * n["block"],
        least=moved + 16 * n["blocks"],
        memory=moved + 16 * n["blocks"],
        issued=moved + 16 * programs,
    )


def paged_tables(n: Sizes) -> list[list[int]]:
    """Block tables of `batch` sequences, their blocks scattered over the cache."""
    per_sequence = -(-n["context"] // n["block"])
    order = torch.randperm(n["batch"] * per_sequence, generator=torch.Generator().manual_seed(0)).tolist()
    return [order[i * per_sequence : (i + 1) * per_sequence] for i in range(n["batch"])]


def attention(form: Form, n: Sizes) -> Call:
    """`queries` rows of each sequence, the last of its context: 1 is decode, a few verify drafts, many prefill."""
    batch, queries, context, dim = n["batch"], n["queries"], n["context"], n["dim"]
    heads, kv_heads, group = n["heads"], n["kv_heads"], n["heads"] // n["kv_heads"]
    tables = paged_tables(n)
    cache = _cache(form, batch * len(tables[0]), kv_heads, n["block"], dim)
    q = form.randn(batch * queries, heads, dim)
    rows = AttentionBatch.build([queries] * batch, [context] * batch, tables, group)
    args: tuple[Any, ...] = (q, cache, 1, rows, n["block"], dim**-0.5)
    row = 2 * kv_heads * dim * q.itemsize  # K and V of a position
    least = batch * context * row + 2 * q.nbytes + batch * len(tables[0]) * INDEX
    split = (attention_triton.PARTITION, attention_triton.WHOLE_FROM)
    memory, issued = _attention_bytes(n, q.itemsize, kv_heads, dim, row, *split)
    pairs = batch * (queries * (context - queries) + queries * (queries + 1) // 2)
    return Call(
        op=lambda: paged_attention(*args),
        launch=lambda: paged_attention_triton(*args),
        reference=lambda: paged_attention_reference(*args),
        tokens=batch * queries,
        least=least,
        memory=memory,
        issued=issued,
        flops=4 * pairs * heads * dim,
        rivals=_flash(form, n, q),
    )


def _attention_bytes(
    n: Sizes, itemsize: int, kv_heads: int, dim: int, row: int, partition: int, whole_from: int
) -> tuple[int, int]:
    """Of the attention and combine kernels: memory, issued. row: bytes of a position's keys and values, all heads; dim:
    of the values; whole_from: tiles x heads from which a program takes all partitions."""
    tile, wide = attention_plan.TILE, max(next_power_of_2(dim), 16)
    group = n["heads"] // kv_heads
    rows = n["queries"] * group
    whole = itemsize == 2 and dim == wide <= 128 and n["batch"] * -(-rows // tile) * kv_heads >= whole_from
    memory = n["context"] * row + -(-n["context"] // n["block"]) * INDEX
    issued = 0
    for first in range(0, rows, tile):
        live = min(tile, rows - first)
        sees = n["context"] - n["queries"] + 1 + (first + live - 1) // group
        parts = -(-sees // partition)
        in_and_out = kv_heads * live * dim * itemsize
        partial = parts * kv_heads * (tile * (wide + 2) + live * (dim + 2)) * 4  # a whole tile written, live rows read
        partial = 0 if whole else partial
        memory += 2 * in_and_out + partial
        blocks = sum(-(-min(partition, sees - start) // n["block"]) for start in range(0, sees, partition))
        issued += sees * row + kv_heads * blocks * INDEX + in_and_out * (2 if whole else parts + 1) + partial
    return n["batch"] * memory, n["batch"] * issued


def _flash(form: Form, n: Sizes, q: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """flash-attn on a contiguous cache of its own layout: the most favourable one to it."""
    if form.device.type != "cuda" or form.dtype == torch.float32:
        return {}
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return {}
    k, v = form.randn(2, n["batch"], n["context"], n["kv_heads"], n["dim"])
    lens = torch.full((n["batch"],), n["context"], dtype=torch.int32, device=form.device)
    rows = q.view(n["batch"], n["queries"], n["heads"], n["dim"])
    return {"flash-attn": lambda: flash_attn_with_kvcache(rows, k, v, cache_seqlens=lens, causal=True)}


def latent_attention(form: Form, n: Sizes) -> Call:
    batch, queries, context, heads = n["batch"], n["queries"], n["context"], n["heads"]
    tables = paged_tables(n)
    cache = form.randn(batch * len(tables[0]), LAYERS, n["block"], n["rank"] + n["rope"])
    q_latent, q_rope = form.randn(batch * queries, heads, n["rank"]), form.randn(batch * queries, heads, n["rope"])
    rows = AttentionBatch.build([queries] * batch, [context] * batch, tables, heads)
    args: tuple[Any, ...] = (q_latent, q_rope, cache, 1, rows, n["block"], (n["rank"] + n["rope"]) ** -0.5)
    row = (n["rank"] + n["rope"]) * q_latent.itemsize
    pairs = batch * (queries * (context - queries) + queries * (queries + 1) // 2)
    least = batch * context * row + 2 * q_latent.nbytes + q_rope.nbytes + batch * len(tables[0]) * INDEX
    memory, issued = _attention_bytes(n, q_latent.itemsize, 1, n["rank"], row, latent_triton.PARTITION, 1 << 62)
    return Call(
        op=lambda: latent.latent_attention(*args),
        launch=lambda: latent_triton.latent_attention_triton(*args),
        reference=lambda: latent.latent_attention_reference(*args),
        tokens=batch * queries,
        least=least,
        memory=memory + q_rope.nbytes,
        issued=issued + q_rope.nbytes * -(-context // latent_triton.PARTITION),
        flops=2 * pairs * heads * (2 * n["rank"] + n["rope"]),
    )


def store_latent(form: Form, n: Sizes) -> Call:
    c, k_rope = form.randn(n["tokens"], n["rank"]), form.randn(n["tokens"], n["rope"])
    cache = form.randn(-(-n["tokens"] // n["block"]) + 1, LAYERS, n["block"], n["rank"] + n["rope"])
    slots = torch.arange(n["tokens"], device=form.device) + 3

    def run(function: Callable[..., None], target: torch.Tensor) -> torch.Tensor:
        function(c, k_rope, target, 1, slots, n["block"])
        return target

    moved = 2 * (c.nbytes + k_rope.nbytes) + slots.nbytes
    return Call(
        op=lambda: run(latent.store_latent, cache),
        launch=lambda: run(latent_triton.store_latent_triton, cache),
        reference=lambda: run(latent.store_latent_reference, cache.clone()),
        tokens=n["tokens"],
        least=moved,
        memory=moved,
        issued=moved,
    )


LLAMA = {"heads": 32, "kv_heads": 8, "dim": 128, "block": 16}
SMOL = {"heads": 9, "kv_heads": 3, "dim": 64, "block": 32}
SMALL = {"heads": 3, "kv_heads": 1, "dim": 64, "block": 16}
DEEPSEEK = {"heads": 128, "rank": 512, "rope": 64, "block": 64}
SMALL_LATENT = {"heads": 16, "rank": 64, "rope": 16, "block": 16}

CASES = [
    Case(
        "store_kv",
        "",
        store_kv,
        full=LLAMA | {"tokens": 4096},
        cpu=SMOL | {"tokens": 512},
        small=SMALL | {"tokens": 40},
    ),
    Case(
        "rope_store_kv",
        "",
        rope_store_kv,
        full=LLAMA | {"tokens": 4096, "positions": 8192},
        cpu=SMOL | {"tokens": 512, "positions": 2048},
        small=SMALL | {"tokens": 5, "positions": 64},
    ),
    Case(
        "copy_blocks",
        "",
        move_blocks,
        full=LLAMA | {"blocks": 512},
        cpu=SMOL | {"blocks": 256},
        small=SMALL | {"blocks": 3},
        on_cpu=False,
    ),
    Case(
        "paged_attention",
        "decode",
        attention,
        full=LLAMA | {"batch": 32, "queries": 1, "context": 4096},
        cpu=SMOL | {"batch": 16, "queries": 1, "context": 2048},
        small=SMALL | {"batch": 2, "queries": 1, "context": 600},
    ),
    Case(
        "paged_attention",
        "decode, batch 8",
        attention,
        full=LLAMA | {"batch": 8, "queries": 1, "context": 4096},
        cpu=SMOL | {"batch": 2, "queries": 1, "context": 2048},
        small=SMALL | {"batch": 1, "queries": 1, "context": 300},
    ),
    Case(
        "paged_attention",
        "decode, MQA",
        attention,
        full=LLAMA | {"kv_heads": 1, "batch": 32, "queries": 1, "context": 4096},
        cpu=SMOL | {"kv_heads": 1, "batch": 16, "queries": 1, "context": 2048},
        small=SMALL | {"heads": 20, "batch": 1, "queries": 1, "context": 300},
    ),
    Case(
        "paged_attention",
        "verify",
        attention,
        full=LLAMA | {"batch": 32, "queries": 4, "context": 4096},
        cpu=SMOL | {"batch": 16, "queries": 4, "context": 2048},
        small=SMALL | {"batch": 1, "queries": 4, "context": 300},
    ),
    Case(
        "paged_attention",
        "verify, batch 8",
        attention,
        full=LLAMA | {"batch": 8, "queries": 4, "context": 4096},
        cpu=SMOL | {"batch": 2, "queries": 4, "context": 2048},
        small=SMALL | {"batch": 2, "queries": 2, "context": 270},
    ),
    Case(
        "paged_attention",
        "chunk of 64",
        attention,
        full=LLAMA | {"batch": 1, "queries": 64, "context": 4096},
        cpu=SMOL | {"batch": 1, "queries": 64, "context": 1024},
        small=SMALL | {"batch": 1, "queries": 12, "context": 300},
    ),
    Case(
        "paged_attention",
        "prefill",
        attention,
        full=LLAMA | {"batch": 1, "queries": 2048, "context": 4096},
        cpu=SMOL | {"batch": 1, "queries": 512, "context": 1024},
        small=SMALL | {"batch": 1, "queries": 40, "context": 50},
    ),
    Case(
        "latent_attention",
        "decode",
        latent_attention,
        full=DEEPSEEK | {"batch": 32, "queries": 1, "context": 4096},
        cpu=SMALL_LATENT | {"batch": 4, "queries": 1, "context": 1024},
        small=SMALL_LATENT | {"batch": 1, "queries": 1, "context": 600},
    ),
    Case(
        "store_latent",
        "",
        store_latent,
        full=DEEPSEEK | {"tokens": 4096},
        cpu=SMALL_LATENT | {"tokens": 512},
        small=SMALL_LATENT | {"tokens": 10},
        on_cpu=False,
    ),
]
