"""Triton kernels of `sample` that touch every row (`kernels/sample_triton.py`): edit, scan, finish."""

from __future__ import annotations

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import tl
from longtail.kernels.philox import exponential_triton, philox_triton, uniform_triton


@triton_jit
def copy_kernel(
    logits: tl.tensor,
    edit_rows: tl.tensor,
    work: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    slot = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(edit_rows + slot).to(tl.int64)
    x = tl.load(logits + row * STRIDE + token, mask=token < VOCAB)
    tl.store(work + slot * VOCAB + token, x.to(tl.float32), mask=token < VOCAB)


@triton_jit
def edit_kernel(
    logits: tl.tensor,
    work: tl.tensor,
    entry_rows: tl.tensor,
    entry_slots: tl.tensor,
    entry_tokens: tl.tensor,
    entry_factors: tl.tensor,
    entry_amounts: tl.tensor,
    entries: tl.tensor,
    STRIDE: tl.constexpr,
    WORK_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program edits BLOCK logits, no two of them the same. Only a division, a product and a difference that rounds
    each: the bits are those of the CPU."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < entries
    row = tl.load(entry_rows + i, mask=mask, other=0).to(tl.int64)
    slot = tl.load(entry_slots + i, mask=mask, other=0).to(tl.int64)
    token = tl.load(entry_tokens + i, mask=mask, other=0)
    factor = tl.load(entry_factors + i, mask=mask, other=1.0)
    amount = tl.load(entry_amounts + i, mask=mask, other=0.0)
    x = tl.load(logits + row * STRIDE + token, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(x > 0, tl.div_rn(x, factor), x * factor) - amount
    y = tl.where(amount == float("inf"), -float("inf"), y)
    tl.store(work + slot * WORK_STRIDE + token, y, mask=mask)


@triton_jit
def load_row(
    logits: tl.tensor,
    work: tl.tensor,
    slot: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """Logits of a row in float32, from its edited copy if it has one (a slot of 0 or above); -inf beyond the
    vocabulary."""
    mask = token < VOCAB
    if slot >= 0:
        x = tl.load(work + slot * VOCAB + token, mask=mask, other=-float("inf"))
    else:
        x = tl.load(logits + row * STRIDE + token, mask=mask, other=-float("inf")).to(tl.float32)
    return x


@triton_jit
def _load_quarters(row: tl.tensor, token: tl.tensor, VOCAB: tl.constexpr, QUARTER: tl.constexpr) -> tl.tensor:
    """Four tensors in float32: the logits of `token`, of those a quarter of a chunk further, and so on."""
    t1, t2, t3 = token + QUARTER, token + 2 * QUARTER, token + 3 * QUARTER
    x0 = tl.load(row + token, mask=token < VOCAB, other=-float("inf"))
    x1 = tl.load(row + t1, mask=t1 < VOCAB, other=-float("inf"))
    x2 = tl.load(row + t2, mask=t2 < VOCAB, other=-float("inf"))
    x3 = tl.load(row + t3, mask=t3 < VOCAB, other=-float("inf"))
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton_jit
def _largest(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton_jit
def _score(p: tl.tensor, word: tl.tensor) -> tl.tensor:
    """p / E; 0 for an excluded token, which cannot win against the most likely one (p = 1, E <= 89)."""
    return p / exponential_triton(uniform_triton(word))


@triton_jit
def first(hit: tl.tensor, token: tl.tensor) -> tl.tensor:
    return tl.min(tl.where(hit, token, 0x7FFFFFFF))


@triton_jit
def _winner(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, best: tl.tensor, token: tl.tensor, QUARTER: tl.constexpr
) -> tl.tensor:
    """The lowest token whose value is `best`; those of a are `token`, of b the ones a quarter further, and so on."""
    m = _largest(a, b, c, d)
    further = tl.where(a == m, 0, tl.where(b == m, QUARTER, tl.where(c == m, 2 * QUARTER, 3 * QUARTER)))
    return first(m == best, token + further)


@triton_jit
def scan_kernel(
    logits: tl.tensor,
    work: tl.tensor,
    slots: tl.tensor,
    plans: tl.tensor,
    scales: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    part_sums: tl.tensor,  # [rows, 3, PARTS]
    part_winners: tl.tensor,  # [rows, PARTS]
    groups: tl.tensor,  # [filtered rows, GROUPS]
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """A program scans one part of one row. The largest logit is NaN if the part holds NaN or +inf."""
    QUARTER: tl.constexpr = CHUNK // 4
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    plan = tl.load(plans + row)
    scale = tl.load(scales + row)
    chunk = part * CHUNKS + tl.arange(0, CHUNKS)
    j = tl.arange(0, QUARTER)
    t0 = chunk[:, None] * CHUNK + j[None, :]  # tokens that draw word 0; the next quarters draw words 1, 2, 3
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:  # one branch, so that the four loads are in flight together
        x0, x1, x2, x3 = _load_quarters(work + slot * VOCAB, t0, VOCAB, QUARTER)
    else:
        x0, x1, x2, x3 = _load_quarters(logits + row * STRIDE, t0, VOCAB, QUARTER)
    y0, y1, y2, y3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
    infinity = float("inf")
    fine = (y0 < infinity) & (y1 < infinity) & (y2 < infinity) & (y3 < infinity)
    broken = tl.max(tl.where(fine, 0, 1)) > 0
    top = tl.max(_largest(y0, y1, y2, y3))
    shift = tl.where(top > -infinity, top, 0.0)
    winner = 0x7FFFFFFF
    if plan == -2:  # greedy
        winner = _winner(y0, y1, y2, y3, top, t0, QUARTER)
    elif plan >= 0:
        m = tl.max(tl.reshape(_largest(x0, x1, x2, x3), [CHUNKS * 16, QUARTER // 16]), axis=1)
        g = part * (CHUNKS * 16) + tl.arange(0, CHUNKS * 16)
        tl.store(groups + plan.to(tl.int64) * GROUPS + g, m, mask=g < GROUPS)
    p0, p1, p2, p3 = tl.exp(y0 - shift), tl.exp(y1 - shift), tl.exp(y2 - shift), tl.exp(y3 - shift)
    total = tl.sum((p0 + p1) + (p2 + p3))
    best = total
    if plan == -1:  # the race
        # Made to depend on p0, which changes nothing, so that the noise is computed in the layout of the loads instead
        # of crossing shared memory.
        counter = tl.where(p0 >= 0, chunk[:, None] * QUARTER + j[None, :], 0)
        w0, w1, w2, w3 = philox_triton(tl.load(seeds + row), tl.load(positions + row), counter, 0)
        s0, s1, s2, s3 = _score(p0, w0), _score(p1, w1), _score(p2, w2), _score(p3, w3)
        best = tl.max(_largest(s0, s1, s2, s3))
        winner = _winner(s0, s1, s2, s3, best, t0, QUARTER)
    out = part_sums + row * (3 * PARTS) + part
    tl.store(out, tl.where(broken, float("nan"), top))
    tl.store(out + PARTS, total)
    tl.store(out + 2 * PARTS, best)
    tl.store(part_winners + row * PARTS + part, winner)


@triton_jit
def finish_kernel(
    logits: tl.tensor,
    work: tl.tensor,
    slots: tl.tensor,
    plans: tl.tensor,
    scales: tl.tensor,
    part_sums: tl.tensor,
    part_winners: tl.tensor,
    result: tl.tensor,  # [rows, 3]
    sums: tl.tensor,  # [rows, 2]
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BROKEN: tl.constexpr,
    EMPTY: tl.constexpr,
) -> None:
    """A program combines the parts of one row."""
    row = tl.program_id(0).to(tl.int64)
    plan = tl.load(plans + row)
    scale = tl.load(scales + row)
    part = tl.arange(0, BLOCK)
    mask = part < PARTS
    at = part_sums + row * (3 * PARTS) + part
    tops = tl.load(at, mask=mask, other=-float("inf"))
    totals = tl.load(at + PARTS, mask=mask, other=0.0)
    scores = tl.load(at + 2 * PARTS, mask=mask, other=0.0)
    winners = tl.load(part_winners + row * PARTS + part, mask=mask, other=0x7FFFFFFF)
    broken = tl.max(tl.where(tops == tops, 0, 1)) > 0
    top = tl.max(tl.where(tops == tops, tops, -float("inf")))
    empty = top == -float("inf")
    weight = tl.exp(tops - tl.where(empty, 0.0, top))
    total = tl.sum((totals * weight).to(tl.float64))
    if plan == -2:
        hit = tops == top
    else:
        scores = scores * weight
        hit = scores == tl.max(scores)
    token = first(hit & mask, winners)
    status = tl.where(broken, BROKEN, tl.where(empty, EMPTY, 0))
    tl.store(sums + row * 2, top.to(tl.float64))
    tl.store(sums + row * 2 + 1, total)
    tl.store(result + row * 3 + 2, status)
    if (status == 0) & (plan < 0):
        slot = tl.load(slots + row).to(tl.int64)
        x = load_row(logits, work, slot, row, token, VOCAB, STRIDE)
        logprob = ((x * scale - top).to(tl.float64) - tl.log(total)).to(tl.float32)
        tl.store(result + row * 3, token)
        tl.store(result + row * 3 + 1, logprob.to(tl.int32, bitcast=True))
    else:
        tl.store(result + row * 3, -1)
        tl.store(result + row * 3 + 1, 0x7FC00000)  # NaN
