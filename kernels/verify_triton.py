"""Triton kernels of `verify_rejection` (kernels/verify_rejection.py), in four launches:

1. `_chunk_kernel`, a program for each chunk of 4,096 tokens of every row: top, mass, first largest token.
2. `_judge_kernel`, a program for each row: combines its chunks and passes a verdict, as if the row were reached.
3. `_race_kernel`, a program for each chunk of one row a sequence, the first that does not accept: the race.
4. `_emit_kernel`, a program for each sequence: combines the race, writes what is emitted.

The residual falls back on p within the race: its weights are max(p - q, 0) + p * 2^-60. The addend is less than half a
unit in the last place of a positive difference, which is at least 2^-25 p; so p decides where the residual's mass is
below 2^-60 of what it competes with, which moves the distribution by less than that.

Rows after the first rejection cost their one read in 1, which knows of no rejection; 3 reads S rows, not D + S.
Chunks depend on V alone, so a row's bits are its own.
"""

from __future__ import annotations

import torch

from longtail.kernels._triton import jit as triton_jit
from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, tl
from longtail.kernels.logprobs_triton import chunk_size, combine_chunks
from longtail.kernels.philox import exponential_triton, philox_triton, uniform_triton
from longtail.kernels.verify import Verified

PHILOX_TOKENS = 1024
"""Tokens of 256 counters of four words; as CHUNK in kernels/sample.py."""

TWO_TO_MINUS_60 = 2.0**-60

# Verdicts: 0 accept, 1 draw from the residual, 2 draw from p after a draft with q(d) = 0, 3 draw the bonus from p,
# 4 emit the largest (temperature 0), 4 + s a fault with status s.


def verify_rejection_triton(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    cu_drafts: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    most: int,
) -> tuple[Verified, torch.Tensor]:
    """See `verify_rejection`; most: the most drafts of a sequence -> results and status int32 [S]. float32 inside."""
    (rows, vocab), sequences, device = logits.shape, len(seeds), logits.device
    if logits.stride(1) != 1 or logits.data_ptr() % 16:  # else a row's bits could depend on its place in memory
        logits = logits.clone(memory_format=torch.contiguous_format)
    q = logits if draft_probs is None else draft_probs if draft_probs.stride(1) == 1 else draft_probs.contiguous()
    accepted, status = torch.empty(2, sequences, dtype=torch.int32, device=device).unbind()
    tokens = torch.empty(sequences, most + 1, dtype=torch.int64, device=device)
    logprobs = torch.empty(sequences, most + 1, dtype=torch.float32, device=device)
    if not sequences:
        return Verified(accepted, tokens, logprobs), status
    drafts, cu_drafts, temperatures = drafts.contiguous(), cu_drafts.contiguous(), temperatures.contiguous()
    seeds, positions = seeds.view(torch.int64).contiguous(), positions.contiguous()
    chunk = chunk_size(vocab)
    chunks = -(-vocab // chunk)
    race_chunk = max(chunk, PHILOX_TOKENS)
    race_chunks = -(-vocab // race_chunk)
    block_c, block_j = next_power_of_2(chunks), next_power_of_2(most + 1)
    parts = torch.empty(rows, 2, chunks, dtype=torch.float32, device=device)
    firsts = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    verdicts = torch.empty(rows, 2, dtype=torch.int32, device=device)
    statistics = torch.empty(rows, 3, dtype=torch.float32, device=device)
    scores = torch.empty(sequences, race_chunks, dtype=torch.float32, device=device)
    winners = torch.empty(sequences, race_chunks, dtype=torch.int32, device=device)
    with on_device_of(logits):
        _chunk_kernel[(rows * chunks,)](
            logits,
            temperatures,
            parts,
            firsts,
            logits.stride(0),
            VOCAB=vocab,
            CHUNK=chunk,
            CHUNKS=chunks,
            num_warps=num_warps_for(chunk),
        )
        _judge_kernel[(sequences, most + 1)](
            logits,
            drafts,
            q,
            cu_drafts,
            temperatures,
            seeds,
            positions,
            parts,
            firsts,
            verdicts,
            statistics,
            logits.stride(0),
            q.stride(0),
            HAS_PROBS=draft_probs is not None,
            VOCAB=vocab,
            CHUNKS=chunks,
            BLOCK=block_c,
            num_warps=1,
        )
        _race_kernel[(sequences * race_chunks,)](
            logits,
            drafts,
            q,
            cu_drafts,
            temperatures,
            seeds,
            positions,
            verdicts,
            statistics,
            scores,
            winners,
            logits.stride(0),
            q.stride(0),
            HAS_PROBS=draft_probs is not None,
            FALLBACK=TWO_TO_MINUS_60,
            VOCAB=vocab,
            GROUPS=race_chunk // PHILOX_TOKENS,
            CHUNKS=race_chunks,
            BLOCK_J=block_j,
            num_warps=4,
        )
        _emit_kernel[(sequences,)](
            logits,
            drafts,
            cu_drafts,
            temperatures,
            verdicts,
            statistics,
            scores,
            winners,
            accepted,
            status,
            tokens,
            logprobs,
            logits.stride(0),
            most + 1,
            VOCAB=vocab,
            CHUNKS=race_chunks,
            BLOCK=next_power_of_2(race_chunks),
            BLOCK_J=block_j,
            num_warps=1,
        )
    return Verified(accepted, tokens, logprobs), status


@triton_jit
def _scale_of(temperatures: tl.tensor, row: tl.tensor) -> tl.tensor:
    t = tl.load(temperatures + row)
    return 1.0 / tl.where(t <= 0.0, 1.0, t)


@triton_jit
def _chunk_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    parts: tl.tensor,  # [D + S, 2, CHUNKS]: largest z, sum of exp(z - largest)
    firsts: tl.tensor,  # [D + S, CHUNKS]: the first token with the largest z
    logits_row: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """A program reduces one chunk of one row."""
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // CHUNKS, program % CHUNKS
    offset = tl.arange(0, CHUNK)
    live = offset < (VOCAB - chunk * CHUNK).to(tl.int32)
    x = tl.load(logits + (row * logits_row + chunk * CHUNK) + offset, mask=live, other=-float("inf"))
    z = tl.where(live, x.to(tl.float32) * _scale_of(temperatures, row), -float("inf"))
    top = tl.max(z, axis=0)
    first = tl.min(tl.where(z == top, offset, CHUNK), axis=0)
    total = tl.sum(tl.exp(z - tl.where(top == -float("inf"), 0.0, top)), axis=0)
    at = parts + row * (2 * CHUNKS) + chunk
    tl.store(at, top)
    tl.store(at + CHUNKS, total)
    tl.store(firsts + row * CHUNKS + chunk, (chunk * CHUNK).to(tl.int32) + first)


@triton_jit
def _judge_kernel(
    logits: tl.tensor,
    drafts: tl.tensor,
    draft_probs: tl.tensor,
    cu_drafts: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    parts: tl.tensor,
    firsts: tl.tensor,
    verdicts: tl.tensor,  # [D + S, 2]: verdict, first largest token
    statistics: tl.tensor,  # [D + S, 3]: top, log_total, log-probability of the draft
    logits_row: tl.tensor,
    probs_row: tl.tensor,
    HAS_PROBS: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program judges row j of a sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    start = tl.load(cu_drafts + sequence).to(tl.int64)
    count = tl.load(cu_drafts + sequence + 1) - start
    if j <= count:
        row = start + sequence + j
        chunk = tl.arange(0, BLOCK)
        live = chunk < CHUNKS
        at = parts + row * (2 * CHUNKS) + chunk
        tops = tl.load(at, mask=live, other=-float("inf"))
        totals = tl.load(at + CHUNKS, mask=live, other=0.0)
        top, total, _ = combine_chunks(tops, totals, live)
        log_total = tl.log(total)
        first = tl.load(firsts + row * CHUNKS + chunk, mask=live & (tops == top), other=VOCAB)
        best = tl.min(first, axis=0)

        is_bonus = j == count
        draft = tl.load(drafts + start + j, mask=j < count, other=-1)
        known = (draft >= 0) & (draft < VOCAB)
        scale = _scale_of(temperatures, row)
        x = tl.load(logits + row * logits_row + draft, mask=known, other=-float("inf")).to(tl.float32)
        logprob = x * scale - top - log_total
        q = 1.0
        if HAS_PROBS:
            q = tl.load(draft_probs + (start + j) * probs_row + draft, mask=known, other=1.0)
        seed, position = tl.load(seeds + sequence), tl.load(positions + sequence) + j
        counter = tl.zeros([1], tl.uint32)
        word, _, _, _ = philox_triton(seed, position, counter, 1)
        u = tl.sum(uniform_triton(word), axis=0)

        verdict = tl.where(u * q < tl.exp(logprob), 0, 1)
        verdict = tl.where(q == 0.0, 2, verdict)
        verdict = tl.where(is_bonus, 3, verdict)
        greedy = tl.load(temperatures + row) <= 0.0
        verdict = tl.where(greedy, tl.where(draft == best, 0, 4), verdict)
        verdict = tl.where(q >= 0.0, verdict, 7)
        verdict = tl.where(known | is_bonus, verdict, 8)
        verdict = tl.where((top == -float("inf")) & (total == 0.0), 6, verdict)
        verdict = tl.where(total == total, verdict, 5)
        tl.store(verdicts + row * 2, verdict)
        tl.store(verdicts + row * 2 + 1, best.to(tl.int32))
        tl.store(statistics + row * 3, top)
        tl.store(statistics + row * 3 + 1, log_total)
        tl.store(statistics + row * 3 + 2, logprob)


@triton_jit
def _first_not_accepting(verdicts: tl.tensor, row: tl.tensor, count: tl.tensor, BLOCK_J: tl.constexpr) -> tl.tensor:
    """How many drafts are accepted: the last row never accepts."""
    j = tl.arange(0, BLOCK_J)
    verdict = tl.load(verdicts + (row + j) * 2, mask=j <= count, other=1)
    return tl.min(tl.where(verdict != 0, j, BLOCK_J), axis=0)


@triton_jit
def _race_kernel(
    logits: tl.tensor,
    drafts: tl.tensor,
    draft_probs: tl.tensor,
    cu_drafts: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    verdicts: tl.tensor,
    statistics: tl.tensor,
    scores: tl.tensor,  # [S, CHUNKS]: best score (NaN: q is NaN or negative)
    winners: tl.tensor,  # [S, CHUNKS]: the token that has it
    logits_row: tl.tensor,
    probs_row: tl.tensor,
    HAS_PROBS: tl.constexpr,
    FALLBACK: tl.constexpr,
    VOCAB: tl.constexpr,
    GROUPS: tl.constexpr,  # of 1,024 tokens in a chunk
    CHUNKS: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """A program races the tokens of one chunk for one sequence. Scores are weight / E, highest wins, ties to the lowest
    token."""
    program = tl.program_id(0).to(tl.int64)
    sequence, chunk = program // CHUNKS, program % CHUNKS
    start = tl.load(cu_drafts + sequence).to(tl.int64)
    count = tl.load(cu_drafts + sequence + 1) - start
    a = _first_not_accepting(verdicts, start + sequence, count, BLOCK_J)
    row = start + sequence + a
    verdict = tl.load(verdicts + row * 2)
    if verdict < 4:
        residual = verdict == 1
        scale, top = _scale_of(temperatures, row), tl.load(statistics + row * 3)
        log_total = tl.load(statistics + row * 3 + 1)
        begin = chunk * (GROUPS * 1024)
        here = (VOCAB - begin).to(tl.int32)  # tokens from `begin` on
        if not HAS_PROBS:
            draft = (tl.load(drafts + start + a, mask=a < count, other=-1) - begin).to(tl.int32)
        group, lane = tl.arange(0, GROUPS)[:, None], tl.arange(0, 256)[None, :]
        words = philox_triton(
            tl.load(seeds + sequence),
            tl.load(positions + sequence) + a,
            ((chunk * GROUPS).to(tl.int32) + group).to(tl.uint32) * 256 + lane.to(tl.uint32),
            tl.where(verdict == 3, 0, 2).to(tl.uint32),
        )
        best = tl.full([GROUPS, 256], -1.0, tl.float32)
        winner = tl.zeros([GROUPS, 256], tl.int32)
        for k in tl.static_range(4):
            offset = group * 1024 + k * 256 + lane
            live = offset < here
            x = tl.load(logits + (row * logits_row + begin) + offset, mask=live, other=-float("inf")).to(tl.float32)
            p = tl.exp(x * scale - top - log_total)
            if HAS_PROBS:
                q_at = draft_probs + ((start + a) * probs_row + begin) + offset
                q = tl.load(q_at, mask=live & residual, other=0.0)
                r = tl.where(q >= 0.0, tl.where(p > q, p - q, 0.0), float("nan"))
            else:
                r = tl.where(offset == draft, 0.0, p)
            weight = tl.where(residual, r + p * FALLBACK, p)
            score = tl.where(live, weight / exponential_triton(uniform_triton(words[k])), -1.0)
            better = (score > best) | (score != score)  # NaN stays: nothing is larger
            best, winner = tl.where(better, score, best), tl.where(better, offset, winner)
        bad = tl.max(tl.max(tl.where(best == best, 0, 1), axis=1), axis=0)
        most = tl.max(tl.max(best, axis=1), axis=0)
        first = tl.min(tl.min(tl.where(best == most, winner, GROUPS * 1024), axis=1), axis=0)
        tl.store(scores + program, tl.where(bad > 0, float("nan"), most))
        tl.store(winners + program, begin.to(tl.int32) + first)


@triton_jit
def _emit_kernel(
    logits: tl.tensor,
    drafts: tl.tensor,
    cu_drafts: tl.tensor,
    temperatures: tl.tensor,
    verdicts: tl.tensor,
    statistics: tl.tensor,
    scores: tl.tensor,
    winners: tl.tensor,
    accepted: tl.tensor,
    status: tl.tensor,
    tokens: tl.tensor,  # [S, width]
    logprobs: tl.tensor,
    logits_row: tl.tensor,
    width: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """A program writes what one sequence emits."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_drafts + sequence).to(tl.int64)
    count = tl.load(cu_drafts + sequence + 1) - start
    a = _first_not_accepting(verdicts, start + sequence, count, BLOCK_J)
    row = start + sequence + a
    verdict = tl.load(verdicts + row * 2)
    chunk = tl.arange(0, BLOCK)
    raced = (chunk < CHUNKS) & (verdict < 4)
    score = tl.load(scores + sequence * CHUNKS + chunk, mask=raced, other=-1.0)
    winner = tl.load(winners + sequence * CHUNKS + chunk, mask=raced, other=VOCAB)
    bad = tl.max(tl.where(score == score, 0, 1), axis=0)
    token = tl.min(tl.where(score == tl.max(score, axis=0), winner, VOCAB), axis=0)
    token = tl.where(verdict == 4, tl.load(verdicts + row * 2 + 1), token)
    fault = tl.where(verdict > 4, verdict - 4, tl.where(bad > 0, 3, 0))
    token = tl.where(fault > 0, -1, token).to(tl.int64)
    x = tl.load(logits + row * logits_row + token, mask=(token >= 0) & (token < VOCAB), other=float("nan"))
    z = x.to(tl.float32) * _scale_of(temperatures, row)
    logprob = z - tl.load(statistics + row * 3) - tl.load(statistics + row * 3 + 1)
    j = tl.arange(0, BLOCK_J)
    draft = tl.load(drafts + start + j, mask=j < a, other=-1)
    draft_logprob = tl.load(statistics + (start + sequence + j) * 3 + 2, mask=j < a, other=float("nan"))
    out = sequence * width + j
    tl.store(tokens + out, tl.where(j == a, token, draft), mask=j < width)
    tl.store(logprobs + out, tl.where(j == a, logprob, draft_logprob), mask=j < width)
    tl.store(accepted + sequence, a.to(tl.int32))
    tl.store(status + sequence, fault.to(tl.int32))
