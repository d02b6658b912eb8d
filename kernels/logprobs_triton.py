"""Triton kernels of `token_logprobs` (kernels/logprobs.py).

Forward: the rows are cut into chunks of 4,096 tokens, each a program, so that one row already fills a GPU; a second
kernel combines a row's chunks. The logits are read once. Backward: one read, one write, the chunks are independent.
Chunks depend on V alone, so a row's bits are its own.
"""

from __future__ import annotations

import torch

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl

MOST_CHUNK = 4096
"""Tokens of a program: 16 a thread, 8 KiB of bfloat16."""


def chunk_size(vocab: int) -> int:
    return min(next_power_of_2(vocab), MOST_CHUNK)


def token_logprobs_forward_triton(
    logits: torch.Tensor, tokens: torch.Tensor, temperatures: torch.Tensor, want_entropy: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """logits: [T, V] -> log-probabilities, (top, log_total, entropy), all float32 [T]. The
    entropy is unspecified unless wanted."""
    rows, vocab = logits.shape
    if rows and (logits.stride(1) != 1 or logits.data_ptr() % 16):  # else bits could depend on the place in memory
        logits = logits.clone(memory_format=torch.contiguous_format)
    results = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        chunk = chunk_size(vocab)
        chunks = -(-vocab // chunk)
        fields = 3 if want_entropy else 2
        parts = torch.empty(rows, fields, chunks, dtype=torch.float32, device=logits.device)
        with on_device_of(logits):
            _chunk_kernel[(rows * chunks,)](
                logits,
                temperatures,
                parts,
                logits.stride(0),
                VOCAB=vocab,
                CHUNK=chunk,
                CHUNKS=chunks,
                ENTROPY=want_entropy,
                num_warps=num_warps_for(chunk),
            )
            _combine_kernel[(rows,)](
                logits,
                tokens,
                temperatures,
                parts,
                results,
                logits.stride(0),
                rows,
                VOCAB=vocab,
                CHUNKS=chunks,
                BLOCK=next_power_of_2(chunks),
                ENTROPY=want_entropy,
                num_warps=1,
            )
    return results[0], (results[1], results[2], results[3])


def token_logprobs_backward_triton(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperatures: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grads: torch.Tensor,
    entropy_grads: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fills out [T, V] (contiguous rows, may be `logits`) with the gradient for the logits."""
    rows, vocab = logits.shape
    if not rows:
        return
    chunk = chunk_size(vocab)
    top, log_total, entropy = statistics
    with on_device_of(logits):
        _gradient_kernel[(rows * -(-vocab // chunk),)](
            logits,
            tokens,
            temperatures,
            top,
            log_total,
            entropy,
            grads.float().contiguous(),
            (grads if entropy_grads is None else entropy_grads).float().contiguous(),
            out,
            logits.stride(0),
            out.stride(0),
            VOCAB=vocab,
            CHUNK=chunk,
            CHUNKS=-(-vocab // chunk),
            ENTROPY=entropy_grads is not None,
            num_warps=num_warps_for(chunk),
        )


@triton_jit
def scale_of(temperatures: tl.tensor, row: tl.tensor) -> tl.tensor:
    """1 / temperature, and 1 for temperature 0."""
    t = tl.load(temperatures + row)
    return 1.0 / tl.where(t == 0.0, 1.0, t)


@triton_jit
def combine_chunks(tops: tl.tensor, totals: tl.tensor, live: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of a row's chunks (top and sum exp(z - top) of each): top of the row, its sum, and the weight of each chunk's sum
    in it. NaN of any chunk is NaN in the sum."""
    top = tl.max(tl.where(live, tops, -float("inf")), axis=0)
    weights = tl.exp(tops - tl.where(top == -float("inf"), 0.0, top))
    return top, tl.sum(tl.where(live, totals * weights, 0.0), axis=0), weights


@triton_jit
def _chunk_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    parts: tl.tensor,  # [T, 2 or 3, CHUNKS]: largest z, sum of e = exp(z - largest), sum of e * (z - largest)
    logits_row: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """A program reduces one chunk of one row."""
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // CHUNKS, program % CHUNKS
    offset = tl.arange(0, CHUNK)
    live = offset < (VOCAB - chunk * CHUNK).to(tl.int32)
    x = tl.load(logits + (row * logits_row + chunk * CHUNK) + offset, mask=live, other=-float("inf"))
    z = x.to(tl.float32) * scale_of(temperatures, row)
    z = tl.where(live, z, -float("inf"))  # an infinite temperature would make NaN of the padding
    top = tl.max(z, axis=0)
    y = z - tl.where(top == -float("inf"), 0.0, top)
    e = tl.exp(y)
    at = parts + row * ((3 if ENTROPY else 2) * CHUNKS) + chunk
    tl.store(at, top)
    tl.store(at + CHUNKS, tl.sum(e, axis=0))
    if ENTROPY:
        tl.store(at + 2 * CHUNKS, tl.sum(e * tl.where(e == 0.0, 0.0, y), axis=0))


@triton_jit
def _combine_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    parts: tl.tensor,
    results: tl.tensor,  # [4, T]: log-probability, top, log_total, entropy
    logits_row: tl.tensor,
    rows: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """A program combines the chunks of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    live = chunk < CHUNKS
    at = parts + row * ((3 if ENTROPY else 2) * CHUNKS) + chunk
    tops = tl.load(at, mask=live, other=-float("inf"))
    totals = tl.load(at + CHUNKS, mask=live, other=0.0)
    top, total, weights = combine_chunks(tops, totals, live)
    log_total = tl.log(total)
    token = tl.load(tokens + row)
    x = tl.load(logits + row * logits_row + token, mask=(token >= 0) & (token < VOCAB), other=float("nan"))
    stride = tl.cast(rows, tl.int64)
    tl.store(results + row, x.to(tl.float32) * scale_of(temperatures, row) - top - log_total)
    tl.store(results + stride + row, top)
    tl.store(results + 2 * stride + row, log_total)
    if ENTROPY:
        sums = tl.load(at + 2 * CHUNKS, mask=live, other=0.0)
        shifted = weights * (sums + totals * tl.where(weights == 0.0, 0.0, tops - top))
        tl.store(results + 3 * stride + row, log_total - tl.sum(tl.where(live, shifted, 0.0), axis=0) / total)


@triton_jit
def _gradient_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    log_totals: tl.tensor,
    entropies: tl.tensor,
    grads: tl.tensor,
    entropy_grads: tl.tensor,
    out: tl.tensor,
    logits_row: tl.tensor,
    out_row: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """A program writes the gradient of one chunk of one row; out may be logits."""
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // CHUNKS, program % CHUNKS
    offset = tl.arange(0, CHUNK)
    begin = chunk * CHUNK
    live = offset < (VOCAB - begin).to(tl.int32)
    x = tl.load(logits + (row * logits_row + begin) + offset, mask=live, other=-float("inf")).to(tl.float32)
    scale = scale_of(temperatures, row)
    logp = x * scale - tl.load(tops + row) - tl.load(log_totals + row)
    p = tl.exp(logp)
    g = tl.load(grads + row)
    token = tl.load(tokens + row) - begin
    token = tl.where((token >= 0) & (token < CHUNK), token, CHUNK).to(tl.int32)
    grad = tl.where(offset == token, g, 0.0) - p * g
    if ENTROPY:
        above = tl.where(p == 0.0, 0.0, logp) + tl.load(entropies + row)  # NaN is not 0 and stays
        grad -= p * above * tl.load(entropy_grads + row)
    tl.store(out + (row * out_row + begin) + offset, (grad * scale).to(out.dtype.element_ty), mask=live)
