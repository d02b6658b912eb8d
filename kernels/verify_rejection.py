"""Verification of drafts by rejection sampling (Leviathan et al. 2023, Chen et al. 2023): each emitted token is
distributed as the target's, and as many drafts as possible are accepted.

With p the target's distribution at a row and q the one from which its draft d was drawn:

    accept d if u * q(d) < p(d); at the first rejection draw from max(p - q, 0) / sum; if all are accepted, from p.

For drafters without a distribution (n-gram, suffix) q is one-hot: accept with p(d), else draw from p without d.
Temperature 0 makes p one-hot at the largest logit (the lowest id at ties). Two cases that exact arithmetic with an
honest q does not have keep the output's distribution p:

- q(d) = 0 (a draft that cannot have been drawn, or one whose probability was rounded to 0): no draft is taken to have
  been made, the token is drawn from p. Exact for any q that lacks some of the drafter's mass and is proportional to it
  elsewhere.
- the residual is 0 everywhere by rounding: the token is drawn from p.

Draws are exponential races, argmax_i weight_i / E_i, which need no normalisation. Noise is that of kernels/sample.py
with the fourth counter word as the *stream*: 0 is the sampling noise, which a draft model may have used at the same
position; 1 gives the acceptance uniforms (word 0 of counter 0); 2 the token after a rejection. The bonus takes stream
0, as no draft was drawn at its position, and so a sequence without drafts emits the token that `sample` draws.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from numba import prange

from longtail.kernels._checks import check_devices, check_temperatures
from longtail.kernels._numba import LANES, inline, jit
from longtail.kernels.philox import philox_numba, uniform_noise
from longtail.kernels.sample import _mass, _race, _top
from longtail.kernels.verify import Verified, check_drafts
from longtail.kernels.verify_triton import verify_rejection_triton

FAULTS = {
    1: "NaN or +inf",
    2: "no token left to sample (every logit is -inf)",
    3: "a draft probability that is negative or NaN",
    4: "a draft outside of the vocabulary",
}


@dataclasses.dataclass(frozen=True, slots=True)
class DraftBatch:
    """S sequences with D drafts, rows packed as in kernels/verify.py."""

    cu_drafts: torch.Tensor
    """int32 [S + 1]; where the drafts of each sequence start."""
    temperatures: torch.Tensor
    """float32 [D + S], one for each target row, at least 1e-6; 0 is greedy."""
    seeds: torch.Tensor
    """uint64 [S] (or the same bits as int64)."""
    positions: torch.Tensor
    """int64 [S]: output position of the first row's token; row j has position + j."""
    max_drafts: int | None = None
    """The most drafts of a sequence, the width of the result; without it the host waits for a GPU to read it."""


def verify_rejection(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    batch: DraftBatch,
    faults: dict[int, str] | None = None,
) -> Verified:
    """logits: [D + S, V], already processed (filters as -inf), not divided by the temperatures; drafts: int64 [D];
    draft_probs: float32 [D, V], the distribution that each draft was drawn from, or None for drafters without one.
    -> `Verified`, with log-probabilities under softmax(logits / temperature) (temperature 0 counts as 1).

    Lossless if draft_probs are what the drafts were drawn from, with noise of stream 0 or noise from elsewhere.
    Rows after a sequence's first rejection are not looked at (CPU), or read once (GPU).

    Raises ValueError naming the field if shapes, dtypes or devices do not fit and, on the CPU, for a temperature that
    is neither 0 nor at least 1e-6; naming the row if a row that decides holds NaN or +inf (divided by its temperature:
    float32 may overflow), excludes every token, or has a draft that
    is no token or whose probabilities are negative or NaN (where they were needed). With `faults`, such rows (of
    logits) are put there with the reason; their sequences emit the drafts accepted before, and no token after them.
    """
    most = _check(logits, drafts, draft_probs, batch)
    if logits.is_cuda:
        verified, status = verify_rejection_triton(
            logits, drafts, draft_probs, batch.cu_drafts, batch.temperatures, batch.seeds, batch.positions, most
        )
    elif logits.device.type == "cpu" and logits.dtype == torch.float32:
        verified, status = _verify_numba(logits, drafts, draft_probs, batch, most)
    else:
        verified, status = _verify_reference(logits, drafts, draft_probs, batch, most)
    _report(status, verified.accepted, batch.cu_drafts, faults)
    return verified


def verify_rejection_reference(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    batch: DraftBatch,
    faults: dict[int, str] | None = None,
) -> Verified:
    """See `verify_rejection`; float64 inside."""
    verified, status = _verify_reference(logits, drafts, draft_probs, batch, _check(logits, drafts, draft_probs, batch))
    _report(status, verified.accepted, batch.cu_drafts, faults)
    return verified


def _check(logits: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None, batch: DraftBatch) -> int:
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"verify_rejection: logits {tuple(logits.shape)} {logits.dtype}; pass floats [D + S, V]")
    most = check_drafts(drafts, batch.cu_drafts, logits.shape[0], batch.max_drafts)
    sequences = len(batch.cu_drafts) - 1
    shape = (len(drafts), logits.shape[1])
    if draft_probs is not None and (draft_probs.shape != shape or draft_probs.dtype != torch.float32):
        raise ValueError(
            f"verify_rejection: draft_probs {tuple(draft_probs.shape)} {draft_probs.dtype}; pass float32 {shape}, or "
            "None for drafters without probabilities"
        )
    for name, tensor, length, dtypes in (
        ("temperatures", batch.temperatures, logits.shape[0], (torch.float32,)),
        ("seeds", batch.seeds, sequences, (torch.uint64, torch.int64)),
        ("positions", batch.positions, sequences, (torch.int64,)),
    ):
        if tensor.shape != (length,) or tensor.dtype not in dtypes:
            raise ValueError(
                f"verify_rejection: {name} {tuple(tensor.shape)} {tensor.dtype}; pass {dtypes[0]} [{length}]"
            )
    check_devices(
        "verify_rejection",
        logits=logits,
        drafts=drafts,
        draft_probs=draft_probs,
        cu_drafts=batch.cu_drafts,
        temperatures=batch.temperatures,
        seeds=batch.seeds,
        positions=batch.positions,
    )
    if batch.temperatures.device.type == "cpu":
        check_temperatures("verify_rejection", batch.temperatures.numpy())
    return most


def _report(
    status: torch.Tensor, accepted: torch.Tensor, cu_drafts: torch.Tensor, faults: dict[int, str] | None
) -> None:
    found = status.cpu()
    for i in found.nonzero()[:, 0].tolist():
        row = int(cu_drafts[i]) + i + int(accepted[i])
        what = FAULTS[int(found[i])]
        if faults is None:
            raise ValueError(f"logits row {row} has {what}; check the weights, the sampling parameters and the drafter")
        faults[row] = what


# ---- reference


def _verify_reference(
    logits: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None, batch: DraftBatch, most: int
) -> tuple[Verified, torch.Tensor]:
    rows, starts, proposed = logits.double().cpu().numpy(), batch.cu_drafts.tolist(), drafts.tolist()
    temperatures, positions = batch.temperatures.tolist(), batch.positions.tolist()
    seeds = [seed & (2**64 - 1) for seed in batch.seeds.view(torch.int64).tolist()]
    accepted, status = np.zeros(len(seeds), np.int32), np.zeros(len(seeds), np.int32)
    tokens, logprobs = np.full((len(seeds), most + 1), -1), np.full((len(seeds), most + 1), np.nan, np.float32)
    for i, seed in enumerate(seeds):
        for j in range(starts[i + 1] - starts[i] + 1):
            at, row = starts[i] + j, starts[i] + i + j
            draft = proposed[at] if at < starts[i + 1] else None
            q = None if draft is None or draft_probs is None else draft_probs[at].double().cpu().numpy()
            t = temperatures[row]
            z = rows[row] / (1.0 if t <= 0 else t)
            status[i] = _fault(z, draft, q)
            if status[i]:
                break
            token, accept = _decide(z, draft, q, t <= 0, seed, positions[i] + j)
            if token < 0:
                status[i] = 3
                break
            tokens[i, j], logprobs[i, j] = token, z[token] - np.logaddexp.reduce(z)
            if not accept:
                break
            accepted[i] += 1
    made = (torch.from_numpy(x).to(logits.device) for x in (accepted, tokens, logprobs))
    return Verified(*made), torch.from_numpy(status)


def _fault(z: np.ndarray, draft: int | None, q: np.ndarray | None) -> int:
    with np.errstate(over="ignore"):
        most = np.float32(z.max())  # what overflows in float32 is broken for every path
    if not -np.inf < most < np.inf:
        return 2 if most == -np.inf else 1
    if draft is not None and not 0 <= draft < len(z):
        return 4
    return 3 if q is not None and not q[draft] >= 0 else 0


def _decide(
    z: np.ndarray, draft: int | None, q: np.ndarray | None, greedy: bool, seed: int, position: int
) -> tuple[int, bool]:
    """-> the token to emit at a row (-1: the residual of a bad q), and whether it is the accepted draft.
    draft: None for the bonus row."""
    if greedy:
        return int(np.argmax(z)), int(np.argmax(z)) == draft
    p = np.exp(z - np.logaddexp.reduce(z))
    weights, stream = p, 0
    if draft is not None:
        stream = 2
        q = np.arange(len(p)) == draft if q is None else q
        if q[draft] > 0:
            if uniform_noise(seed, position, 1, 1)[0] * q[draft] < p[draft]:
                return draft, True
            if not (q >= 0).all():
                return -1, False
            residual = np.maximum(p - q, 0.0)
            weights = residual if residual.any() else p
    return int(np.argmax(weights / -np.log1p(-uniform_noise(seed, position, len(p), stream)))), False


# ---- CPU


def _verify_numba(
    logits: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None, batch: DraftBatch, most: int
) -> tuple[Verified, torch.Tensor]:
    sequences = len(batch.seeds)
    accepted, status = torch.zeros(2, sequences, dtype=torch.int32).unbind()
    tokens = torch.full((sequences, most + 1), -1)
    logprobs = torch.full((sequences, most + 1), torch.nan)
    probs = torch.empty(0, 0) if draft_probs is None else draft_probs
    _verify(
        logits.contiguous().numpy(),
        drafts.contiguous().numpy(),
        probs.contiguous().numpy(),
        draft_probs is not None,
        batch.cu_drafts.contiguous().numpy(),
        batch.temperatures.contiguous().numpy(),
        batch.seeds.view(torch.int64).contiguous().numpy(),
        batch.positions.contiguous().numpy(),
        accepted.numpy(),
        tokens.numpy(),
        logprobs.numpy(),
        status.numpy(),
    )
    return Verified(accepted, tokens, logprobs), status


@inline
def _accepts(u: Any, p: Any, q: Any) -> Any:
    """Whether a draft with probabilities p (target) and q (drafter) is accepted: u < p / q. Nothing with q = 0 is."""
    return q > 0.0 and u * q < p


@inline
def _residual(weights: Any, over_total: Any, draft_probs: Any) -> Any:
    """weights * over_total becomes max(p - q, 0), in place -> their largest, NaN for a q that is NaN or negative."""
    most = np.float32(0.0)
    bad = 0
    for c in range(weights.shape[0]):
        q = draft_probs[c]
        r = weights[c] * over_total - q
        r = r if r > np.float32(0.0) else np.float32(0.0)
        bad += not q >= np.float32(0.0)
        weights[c] = r
        most = r if r > most else most
    return np.float32(np.nan) if bad else most


@jit(parallel=True)
def _verify(
    logits: Any,
    drafts: Any,
    draft_probs: Any,
    has_probs: bool,
    cu_drafts: Any,
    temperatures: Any,
    seeds: Any,
    positions: Any,
    accepted: Any,
    tokens: Any,
    logprobs: Any,
    status: Any,
) -> None:
    size = logits.shape[1]
    for i in prange(accepted.shape[0]):
        lanes = np.empty(LANES, np.float32)
        weights = np.empty(size, np.float32)
        seed = np.uint64(seeds[i])
        start = cu_drafts[i]
        count = cu_drafts[i + 1] - start
        j = 0
        going = True
        while going:
            going = False
            row = start + i + j
            position = np.uint64(positions[i] + j)
            t = temperatures[row]
            greedy = t <= np.float32(0.0)
            scale = np.float32(1.0) if greedy else np.float32(1.0) / t
            x = logits[row]
            draft = drafts[start + j] if j < count else np.int64(-1)
            q = np.float64(1.0)
            top = _top(x, scale, lanes)
            if not (top > np.float32(-np.inf) and top < np.float32(np.inf)):  # +inf: an overflow of the division
                status[i] = 2 if top == np.float32(-np.inf) else 1
            elif j < count and (draft < 0 or draft >= size):
                status[i] = 4
            elif j < count and has_probs:
                q = np.float64(draft_probs[start + j, draft])
                if not q >= 0.0:
                    status[i] = 3
            if status[i] == 0:
                total = _mass(x, scale, top, weights, lanes)
                token = np.int64(-1)
                stream = np.uint64(0)
                if greedy:
                    token = np.int64(0)
                    while x[token] * scale != top:
                        token += 1
                    going = token == draft
                elif j < count:
                    stream = np.uint64(2)
                    m32 = np.uint64(0xFFFFFFFF)
                    word, _, _, _ = philox_numba(
                        np.uint64(0),
                        position & m32,
                        position >> np.uint64(32),
                        np.uint64(1),
                        seed & m32,
                        seed >> np.uint64(32),
                    )
                    u = (np.float64(word & np.uint64(0x7FFFFFFF)) + 0.5) * 2.0**-31  # below 1, in float32 it may not be
                    if _accepts(u, np.float64(weights[draft]) / total, q):
                        token = draft
                        going = True
                    elif q > 0.0:
                        if has_probs:
                            most = _residual(weights, np.float32(1.0 / total), draft_probs[start + j])
                            if np.isnan(most):
                                status[i] = 3
                            elif most == np.float32(0.0):  # by rounding: p is drawn from
                                _mass(x, scale, top, weights, lanes)
                        else:
                            weights[draft] = np.float32(0.0)
                if status[i] == 0:
                    if token < 0:
                        first = 0
                        for c in range(weights.shape[0]):
                            first = c if weights[c] > weights[first] else first
                        token = np.int64(_race(weights, first, seed, position, stream))
                    tokens[i, j] = token
                    logprobs[i, j] = np.float32(np.float64(x[token] * scale - top) - math.log(total))
                    j += 1
        accepted[i] = max(j - 1, 0) if status[i] == 0 else j
