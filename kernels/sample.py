"""Sampling with counter-based noise: a token is a pure function of (logits row, seed, output position).

    token = argmax_i ( log p_i + Gumbel_i ),   Gumbel_i = -log E_i,   E_i = -log(1 - u_i)

which is computed as argmax_i p_i / E_i (the exponential race; Yellott 1977, Maddison et al. 2014). u_i is a function
of (seed, position, i) by Philox 4x32-10 (`kernels/philox.py`), the generator of Triton's and CUDA's. NumPy's Philox
(4x64) gives the same guarantee but needs 175 us a row of 49,152 tokens here against about 50; known-answer vectors and
Triton's own generator are in the tests.

u_i has 31 random bits, (k + 1/2) / 2^31, fine near zero where winners lie: the distribution is exact up to a total
variation of vocabulary * 2^-32 (1.1e-5 for 49,152 tokens).

The Triton kernels are in `kernels/sample_triton.py`, bans, penalties and filters in `kernels/process_logits.py`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import prange

from longtail.kernels._numba import LANES, exp_nonpositive, inline, jit
from longtail.kernels.philox import CHUNK, gumbel_noise, philox_numba, philox_reference, uniform_numba
from longtail.kernels.philox import QUARTER as _QUARTER
from longtail.kernels.process_logits import LogitEdits, edit_row, filter_row, process_logits, row_edits
from longtail.kernels.sample_batch import BROKEN, EMPTY, SampleBatch, report_faults
from longtail.kernels.sample_triton import sample_triton

__all__ = [
    "CHUNK",
    "LogitEdits",
    "SampleBatch",
    "gumbel_noise",
    "philox_reference",
    "process_logits",
    "processed_logits",
    "row_edits",
    "sample",
    "sample_reference",
    "sample_triton",
]


def sample_reference(
    logits: torch.Tensor, batch: SampleBatch, faults: dict[int, str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """See `sample`; any device and dtype. Edits and filters as in `process_logits`, the rest in float64."""
    rows, vocab = logits.shape
    batch.check(rows, vocab)
    processed = batch.edited() | batch.filtered(vocab)
    tokens, logprobs, status = np.zeros(rows, np.int64), np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    for i, row in enumerate(logits.double().cpu().numpy()):
        if processed[i]:
            single = row.astype(np.float32)
            _process_row(single, batch, i)
            row = single.astype(np.float64)
        t = np.float32(batch.temperatures[i])
        scaled = row / (t if t > 0 else 1.0)
        with np.errstate(over="ignore"):
            most = np.float32(scaled.max())  # what overflows in float32 is broken for every path
        if not -np.inf < most < np.inf:
            status[i] = EMPTY if most == -np.inf else BROKEN
            continue
        scaled -= scaled.max()
        logp = scaled - np.logaddexp.reduce(scaled)
        noise = gumbel_noise(int(batch.seeds[i]), int(batch.positions[i]), vocab) if t > 0 else 0.0
        tokens[i] = np.argmax(logp + noise)
        logprobs[i] = logp[tokens[i]]
    return report_faults(tokens, logprobs, status, faults)


def sample(
    logits: torch.Tensor, batch: SampleBatch, faults: dict[int, str] | None = None, *, in_place: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """logits: [B, V], neither processed nor divided by the temperature; a row is a sequence's next token, or one of its
    positions under verification: every row has its own parameters, seed and position.

    Applies each row's bans, penalties and filters (`kernels/process_logits.py`) and draws a token.
    -> tokens int64 [B], and float32 [B] their log-probability under softmax(processed logits / temperature), greedy
    ones under temperature 1. -inf excludes a token; equal scores go to the lowest id.

    The logits stay as they are unless `in_place` allows to work in them (what they hold then is undefined).

    Raises ValueError naming the row if a row holds NaN or +inf (after its bans, divided by its temperature) or excludes
    every token. With `faults`, such rows are put there with the reason (token -1, log-probability NaN), and the other
    rows are sampled as ever. Raises ValueError naming the field if the batch does not fit the logits.
    """
    if logits.is_cuda:
        return sample_triton(logits, batch, faults, in_place=in_place)
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return sample_reference(logits, batch, faults)
    rows = len(logits)
    work = processed_logits(logits, batch, in_place=in_place)
    tokens, logprobs, status = np.empty(rows, np.int64), np.empty(rows, np.float32), np.zeros(rows, np.int32)
    temperatures = batch.temperatures.astype(np.float32, copy=False)
    _sample(work.numpy(), temperatures, batch.seeds, batch.positions, tokens, logprobs, status)
    return report_faults(tokens, logprobs, status, faults)


def processed_logits(logits: torch.Tensor, batch: SampleBatch, *, in_place: bool = False) -> torch.Tensor:
    """logits: float32 [B, V] on the CPU -> the same after each row's bans, penalties and filters, which exclude a token
    by -inf; not divided by the temperature. It is `logits` itself where no row has any, or if `in_place` allows to work
    in it. Raises ValueError naming the field if the batch does not fit the logits."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        raise ValueError(f"processed_logits: logits are {logits.dtype} on {logits.device}; pass float32 on the CPU")
    rows, vocab = logits.shape
    batch.check(rows, vocab)
    found = np.flatnonzero(batch.edited() | batch.filtered(vocab))
    if not len(found):
        return logits
    apart = logits.stride(1) == 1 and logits.stride(0) >= vocab  # rows of an expanded tensor share memory
    work = logits if in_place and apart else logits.clone(memory_format=torch.contiguous_format)
    for i in found.tolist():
        _process_row(work[i].numpy(), batch, i)
    return work


def _process_row(row: np.ndarray, batch: SampleBatch, i: int) -> None:
    if batch.edits is not None:
        edit_row(row, batch.edits.row(i))
    filter_row(
        row,
        temperature=float(batch.temperatures[i]),
        top_k=0 if batch.top_k is None else int(batch.top_k[i]),
        top_p=1.0 if batch.top_p is None else float(batch.top_p[i]),
        min_p=0.0 if batch.min_p is None else float(batch.min_p[i]),
    )


@inline
def _top(logits: Any, scale: Any, lanes: Any) -> Any:
    """Largest scaled logit of a row; NaN if the row holds NaN or +inf."""
    size = logits.shape[0]
    whole = size - size % LANES
    bad = 0
    for i in range(LANES):
        lanes[i] = np.float32(-np.inf)
    for c in range(0, whole, LANES):
        for i in range(LANES):
            x = logits[c + i] * scale
            lanes[i] = x if x > lanes[i] else lanes[i]
    for c in range(size):
        bad += not logits[c] < np.float32(np.inf)
    top = lanes[0]
    for i in range(1, LANES):
        top = max(top, lanes[i])
    for c in range(whole, size):
        top = max(top, logits[c] * scale)
    return np.float32(np.nan) if bad else top


@inline
def _mass(logits: Any, scale: Any, top: Any, probs: Any, lanes: Any) -> Any:
    """Fills probs with exp(logit * scale - top) and returns their float64 sum: fixed lanes within a chunk of 1,024,
    chunks in order."""
    size = logits.shape[0]
    total = 0.0
    for start in range(0, size, CHUNK):
        count = min(size - start, CHUNK)
        x, p = logits[start : start + count], probs[start : start + count]
        for c in range(count):
            p[c] = exp_nonpositive(x[c] * scale - top)
        whole = count - count % LANES
        for i in range(LANES):
            lanes[i] = np.float32(0.0)
        for c in range(0, whole, LANES):
            for i in range(LANES):
                lanes[i] += p[c + i]
        for c in range(whole, count):
            lanes[c - whole] += p[c]
        for i in range(LANES):
            total += lanes[i]
    return total


@jit(parallel=True)
def _sample(
    logits: Any, temperatures: Any, seeds: Any, positions: Any, tokens: Any, logprobs: Any, status: Any
) -> None:
    rows, size = logits.shape
    for row in prange(rows):
        lanes = np.empty(LANES, np.float32)
        greedy = temperatures[row] <= np.float32(0.0)
        scale = np.float32(1.0) if greedy else np.float32(1.0) / temperatures[row]
        x = logits[row]
        top = _top(x, scale, lanes)
        if not (top > np.float32(-np.inf) and top < np.float32(np.inf)):  # +inf: an overflow of the division
            status[row] = EMPTY if top == np.float32(-np.inf) else BROKEN
            continue
        probs = np.empty(size, np.float32)
        total = _mass(x, scale, top, probs, lanes)
        first = 0
        while x[first] * scale != top:
            first += 1
        token = first
        if not greedy:
            token = _race(probs, first, seeds[row], np.uint64(positions[row]), np.uint64(0))
        tokens[row] = token
        logprobs[row] = np.float32(np.float64(x[token] * scale - top) - math.log(total))


@inline
def _race(probs: Any, first: Any, seed: Any, position: Any, stream: Any) -> Any:
    """argmax of probs / E, lowest id at equal scores, with E of the stream; first: the most likely token. E >= u, so
    p / u bounds a token's score from above: only the few whose bound beats the best score so far need a logarithm."""
    size = probs.shape[0]
    m32 = np.uint64(0xFFFFFFFF)
    k0, k1 = seed & m32, seed >> np.uint64(32)
    p_lo, p_hi = position & m32, position >> np.uint64(32)
    # The most likely token first: a good bound from the start.
    counter = np.uint64((first // CHUNK) * _QUARTER + first % _QUARTER)
    w0, w1, w2, w3 = philox_numba(counter, p_lo, p_hi, stream, k0, k1)
    which = (first % CHUNK) // _QUARTER
    word = w0 if which == 0 else (w1 if which == 1 else (w2 if which == 2 else w3))
    best = np.float64(probs[first]) / -math.log1p(-np.float64(uniform_numba(np.uint32(word))))
    winner = first
    uniforms = np.empty(CHUNK, np.float32)
    a, b = np.empty(_QUARTER, np.uint32), np.empty(_QUARTER, np.uint32)
    c, d = np.empty(_QUARTER, np.uint32), np.empty(_QUARTER, np.uint32)
    index = np.arange(_QUARTER).astype(np.uint32)
    for start in range(0, size, CHUNK):
        stop = min(size, start + CHUNK)
        base = np.uint64((start // CHUNK) * _QUARTER)
        for i in range(_QUARTER):
            w0, w1, w2, w3 = philox_numba(np.uint64(index[i]) + base, p_lo, p_hi, stream, k0, k1)
            a[i] = w0
            b[i] = w1
            c[i] = w2
            d[i] = w3
        for i in range(_QUARTER):
            uniforms[i] = uniform_numba(a[i])
            uniforms[_QUARTER + i] = uniform_numba(b[i])
            uniforms[2 * _QUARTER + i] = uniform_numba(c[i])
            uniforms[3 * _QUARTER + i] = uniform_numba(d[i])
        for part in range(start, stop, 64):
            end = min(stop, part + 64)
            bound = np.float32(best * 0.99999)  # a margin for the rounding of the bound itself
            hits = 0
            for t in range(part, end):
                hits += probs[t] > bound * uniforms[t - start]
            if hits:
                for t in range(part, end):
                    if probs[t] > bound * uniforms[t - start]:
                        score = np.float64(probs[t]) / -math.log1p(-np.float64(uniforms[t - start]))
                        if score > best or (score == best and t < winner):
                            best = score
                            winner = t
    return winner


