"""Triton kernels of `sample` for rows with min-p, top-k or top-p (`kernels/sample_triton.py`): compact, truncate."""

from __future__ import annotations

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import tl
from longtail.kernels.philox import exponential_triton, philox_triton, uniform_triton
from longtail.kernels.sample_scan_triton import first, load_row

LOWEST_KEY = -2139095040
"""The key of the lowest finite logit, one above that of -inf."""


@triton_jit
def _key(x: tl.tensor) -> tl.tensor:
    """int32 in the order of the float32; one key for both zeros."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton_jit
def compact_kernel(
    logits: tl.tensor,
    work: tl.tensor,
    slots: tl.tensor,
    filter_rows: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    log_min_ps: tl.tensor,
    scales: tl.tensor,
    part_sums: tl.tensor,
    groups: tl.tensor,
    result: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,  # [programs, VOCAB]: logits of the listed tokens
    ids: tl.tensor,  # [programs, VOCAB]
    lengths: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,  # tokens of a part
    GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    """A program lists, in order, the tokens of one row that may be kept, and replaces the row's `sums` by its largest
    logit (not scaled) and the sum of exp over what min-p leaves."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(filter_rows + place).to(tl.int64)
    fine = tl.load(result + row * 3 + 2) == 0
    k = tl.load(top_ks + row)
    p = tl.load(top_ps + row)
    log_min_p = tl.load(log_min_ps + row)
    scale = tl.load(scales + row)
    top = tl.load(sums + row * 2).to(tl.float32)
    total = tl.load(sums + row * 2 + 1)
    infinity = float("inf")

    # Groups whose largest logit is at least t hold at least so many tokens, or so much mass, from t on: as soon as that
    # is k, or top_p of the whole, no token below t is kept. The largest such t, to 2^-11 of its value. The margin of
    # 1e-4 is for the rounding of this sum and of the exact one.
    g = tl.arange(0, BLOCK_G)
    largest = tl.load(groups + place * GROUPS + g, mask=g < GROUPS, other=-infinity)
    most = tl.max(largest)
    key = _key(largest)
    weight = tl.where(k > 0, 1.0, tl.exp((largest - most) * scale))
    target = tl.where(k > 0, k.to(tl.float64), tl.where(p < 1.0, p.to(tl.float64) * total * 1.0001, infinity))
    low = tl.full([], LOWEST, tl.int64)
    high = _key(most).to(tl.int64) + 1
    for _ in range(22):
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0.0)).to(tl.float64) >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    low = low.to(tl.int32)
    bound = (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    # The other bound of top-p: the whole vocabulary below it weighs less than half of what may be dropped.
    by_mass = (k == 0) & (p < 1.0)
    min_p = top + log_min_p
    cut = tl.maximum(min_p, tl.where(by_mass, top + tl.log((1.0 - p) / (2.0 * VOCAB)), -infinity))
    summing = by_mass & (log_min_p > -infinity)
    needed = tl.where(summing, min_p, tl.maximum(cut, bound * scale))
    slot = tl.load(slots + row).to(tl.int64)
    count = 0
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, BLOCK):
        part_top = tl.load(part_sums + row * (3 * PARTS) + start // PART)
        if fine & (part_top >= needed) & (part_top > -infinity):
            token = start + tl.arange(0, BLOCK)
            x = load_row(logits, work, slot, row, token, VOCAB, STRIDE)
            y = x * scale
            keep = (_key(x) >= low) & (y >= cut)
            number = keep.to(tl.int32)
            at = count + tl.cumsum(number, axis=0) - 1
            tl.store(values + place * VOCAB + at, x, mask=keep)
            tl.store(ids + place * VOCAB + at, token, mask=keep)
            count += tl.sum(number)
            mass += tl.sum(tl.where(y >= min_p, tl.exp((x - most) * scale), 0.0)).to(tl.float64)
    tl.store(lengths + place, count)
    tl.store(sums + row * 2, most.to(tl.float64))
    tl.store(sums + row * 2 + 1, tl.where(summing, mass, total))


@triton_jit
def _amount(
    values: tl.tensor,
    count: tl.tensor,
    pivots: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float64, for each pivot: the mass (relative to the largest logit `most`), or the number, of the listed tokens
    whose key is at least the pivot."""
    amount = tl.zeros(pivots.shape, tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(values + i, mask=i < count, other=-float("inf"))
        above = _key(x)[:, None] >= pivots[None, :]
        if MASS:
            weight = tl.exp((x - most) * scale)[:, None]
            amount += tl.sum(tl.where(above, weight, 0.0), axis=0).to(tl.float64)
        else:
            amount += tl.sum(above.to(tl.int32), axis=0).to(tl.float64)
    return amount


@triton_jit
def _threshold(
    values: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    most: tl.tensor,
    scale: tl.tensor,
    MASS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest key from which on the amount is at least `target`; int64, at least `low`."""
    high = _key(most).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1), high)
        reached = _amount(values, count, pivots.to(tl.int32), most, scale, MASS, BLOCK) >= target
        low = tl.maximum(low, tl.max(tl.where(reached, pivots, low)))
        high = tl.minimum(high, tl.min(tl.where(reached, high, pivots)))
    return low


@triton_jit
def truncate_kernel(
    filter_rows: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    log_min_ps: tl.tensor,
    scales: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    lengths: tl.tensor,
    sums: tl.tensor,
    result: tl.tensor,
    VOCAB: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    """A program finds the thresholds of one row on its list, and draws from what is kept."""
    QUARTER: tl.constexpr = CHUNK // 4
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(filter_rows + place).to(tl.int64)
    count = tl.load(lengths + place)
    k = tl.load(top_ks + row)
    p = tl.load(top_ps + row)
    scale = tl.load(scales + row)
    most = tl.load(sums + row * 2).to(tl.float32)
    mass = tl.load(sums + row * 2 + 1)
    values += place * VOCAB
    ids += place * VOCAB
    low = tl.full([], LOWEST, tl.int64)
    if (k > 0) & (count > k):
        low = _threshold(values, count, low, k.to(tl.float64), most, scale, False, PIVOTS, BLOCK)
    if p < 1.0:
        if k > 0:
            all_kept = tl.full([1], 0, tl.int32) + low.to(tl.int32)
            mass = tl.sum(_amount(values, count, all_kept, most, scale, True, BLOCK))
        low = _threshold(values, count, low, p.to(tl.float64) * mass, most, scale, True, PIVOTS, BLOCK)
    threshold = low.to(tl.int32)

    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    best = tl.full([], -1.0, tl.float32)
    token = tl.full([], -1, tl.int32)
    logit = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(values + i, mask=i < count, other=-float("inf"))
        t = tl.load(ids + i, mask=i < count, other=0)
        kept = (i < count) & (_key(x) >= threshold)
        weight = tl.where(kept, tl.exp((x - most) * scale), 0.0)
        total += tl.sum(weight).to(tl.float64)
        within = t % CHUNK
        w0, w1, w2, w3 = philox_triton(seed, position, t // CHUNK * QUARTER + within % QUARTER, 0)
        low_half = tl.where(within < QUARTER, w0, w1)
        word = tl.where(within < 2 * QUARTER, low_half, tl.where(within < 3 * QUARTER, w2, w3))
        score = tl.where(kept, weight / exponential_triton(uniform_triton(word)), -1.0)
        here = tl.max(score)
        if here > best:  # the list is in order of ids: an earlier one wins at equal scores
            best = here
            token = first(score == here, t)
            logit = tl.max(tl.where(t == token, x, -float("inf")))
    if count > 0:
        logprob = (((logit - most) * scale).to(tl.float64) - tl.log(total)).to(tl.float32)
        tl.store(result + row * 3, token)
        tl.store(result + row * 3 + 1, logprob.to(tl.int32, bitcast=True))
