"""Cases of the ops on rows of activations and logits: norm, activation, matmul, sampling, verification, log-probs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from longtail.bench.kernel_cases import Call, Case, Form, Sizes
from longtail.kernels import (
    activation,
    linear,
    logprobs,
    logprobs_triton,
    norm,
    sample,
    sample_triton,
    verify,
    verify_rejection,
    verify_triton,
)
from longtail.kernels.sample import SampleBatch
from longtail.kernels.verify_rejection import DraftBatch

TEMPERATURE = 0.7


def rms_norm(form: Form, n: Sizes) -> Call:
    x, weight = form.randn(n["rows"], n["columns"]), form.randn(n["columns"])
    return Call(
        op=lambda: norm.rms_norm(x, weight, 1e-6),
        launch=lambda: norm.rms_norm_triton(x, weight, 1e-6),
        reference=lambda: norm.rms_norm_reference(x, weight, 1e-6),
        tokens=n["rows"],
        least=2 * x.nbytes + weight.nbytes,
        memory=2 * x.nbytes + weight.nbytes,
        issued=2 * x.nbytes + weight.nbytes * n["rows"],
    )


def silu_mul(form: Form, n: Sizes) -> Call:
    x = form.randn(n["rows"], 2 * n["columns"])
    return Call(
        op=lambda: activation.silu_mul(x),
        launch=lambda: activation.silu_mul_triton(x),
        reference=lambda: activation.silu_mul_reference(x),
        tokens=n["rows"],
        least=x.nbytes + x.nbytes // 2,
        memory=x.nbytes + x.nbytes // 2,
        issued=x.nbytes + x.nbytes // 2,
    )


def batch_invariant_linear(form: Form, n: Sizes) -> Call:
    x, weight = form.randn(n["rows"], n["in"]), form.randn(n["out"], n["in"], scale=n["in"] ** -0.5)
    tile = linear.tile_for(form.dtype, n["out"], amd=False)
    tiles_of_rows, tiles_of_outputs = -(-n["rows"] // tile.rows), -(-n["out"] // tile.outputs)
    return Call(
        op=lambda: linear.batch_invariant_linear(x, weight),
        launch=lambda: linear.batch_invariant_linear_triton(x, weight),
        reference=lambda: linear.linear_reference(x, weight),
        tokens=n["rows"],
        least=x.nbytes + weight.nbytes + n["rows"] * n["out"] * x.itemsize,
        memory=x.nbytes + weight.nbytes + n["rows"] * n["out"] * x.itemsize,
        issued=(tiles_of_rows * weight.numel() + tiles_of_outputs * x.numel() + n["rows"] * n["out"]) * x.itemsize,
        flops=2 * n["rows"] * n["in"] * n["out"],
    )


def _batch(rows: int, **fields: Any) -> SampleBatch:
    return SampleBatch(
        temperatures=np.full(rows, TEMPERATURE, np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
        positions=np.arange(rows, dtype=np.int64),
        **fields,
    )


def sampling(form: Form, n: Sizes) -> Call:
    """Temperature alone, or with top-k 50, top-p 0.95 where `top_k` is given."""
    rows = n["rows"]
    logits = form.randn(rows, n["vocab"], scale=2.0)
    fields: dict[str, Any] = {}
    if "top_k" in n:
        fields = {"top_k": np.full(rows, n["top_k"], np.int32), "top_p": np.full(rows, 0.95, np.float32)}
    batch = _batch(rows, **fields)

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        packed = sample_triton.launch_sample(logits, batch)
        return packed[:, 0], packed[:, 1].contiguous().view(torch.float32)

    moved = rows * sample_bytes(n, logits.itemsize)
    return Call(
        op=lambda: sample.sample(logits, batch),
        launch=launch,
        reference=lambda: sample.sample_reference(logits, batch),
        tokens=rows,
        least=logits.nbytes,
        memory=moved,
        issued=moved,
        at_most="top_k" in n,
    )


def sample_bytes(n: Sizes, itemsize: int) -> int:
    """Of a row. A filtered row (`top_k`) may be read a second time, in the parts that hold candidates: here all of it,
    with the largest logits of its groups and a list of some hundred candidates, read in every round of the search."""
    parts = -(-n["vocab"] // 4096)
    once = n["vocab"] * itemsize + 32 * parts + 100
    return once + ("top_k" in n) * (n["vocab"] * itemsize + n["vocab"] // 8 + 16 * parts + 20_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Drafts:
    """How the drafts of a verify step are spread: three sequences of four have as many as may be or one less, the
    fourth has none. A fifth of the drafts is meant to be refused, at every place and in most sequences."""

    counts: np.ndarray
    """Of each sequence."""
    cu: torch.Tensor
    """int32 [sequences + 1]."""
    rows: torch.Tensor
    """int64 [drafts]: the row of the target that judges each draft."""
    refused: torch.Tensor
    """bool [drafts]."""

    @classmethod
    def of(cls, form: Form, n: Sizes) -> Drafts:
        sequence = np.arange(n["sequences"])
        counts = np.where(sequence % 4 == 1, 0, n["drafts"] - (sequence % 4 == 2))
        cu = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=cu[1:])
        own = np.repeat(sequence, counts)
        draft = np.arange(cu[-1])
        arrays = (cu, draft + own, (own + draft - cu[own]) % 5 == 2)
        return cls(counts, *(torch.from_numpy(array).to(form.device) for array in arrays))


def verify_match(form: Form, n: Sizes) -> Call:
    sequences, drafts = n["sequences"], Drafts.of(form, n)
    total = int(drafts.counts.sum())
    sampled = torch.arange(total + sequences, device=form.device) % n["vocab"]
    proposed = sampled[drafts.rows] + drafts.refused
    cu = drafts.cu
    most = int(drafts.counts.max())
    moved = 8 * (2 * total + sequences) + (8 * (most + 1) + 4 + 4) * sequences
    return Call(
        op=lambda: _emitted(verify.verify_drafts(proposed, sampled, cu, max_drafts=most)),
        launch=lambda: _emitted(verify.verify_drafts_triton(proposed, sampled, cu, max_drafts=most)),
        reference=lambda: _emitted(verify.verify_drafts_reference(proposed, sampled, cu)),
        tokens=sequences,
        least=moved + 4,
        memory=moved + 4,
        issued=moved + 4 * sequences,  # both ends of cu_drafts
    )


def verify_reject(form: Form, n: Sizes) -> Call:
    """Drafts from a distribution that is the target's with noise on its logits. The likeliest token of the target tends
    to be accepted, the likeliest of the drafter, which owes it to the noise, to be refused."""
    sequences, vocab, drafts = n["sequences"], n["vocab"], Drafts.of(form, n)
    most, rows = int(drafts.counts.max()), int(drafts.counts.sum()) + sequences
    logits = form.randn(rows, vocab, scale=2.0)
    target = logits[drafts.rows].float()
    probs = torch.softmax((target + form.randn(len(target), vocab, scale=1.0)) / TEMPERATURE, -1)
    proposed = torch.where(drafts.refused, probs.argmax(-1), target.argmax(-1))
    batch = DraftBatch(
        cu_drafts=drafts.cu,
        temperatures=torch.full((rows,), TEMPERATURE, device=form.device),
        seeds=torch.arange(sequences, dtype=torch.int64, device=form.device),
        positions=torch.arange(sequences, device=form.device),
        max_drafts=most,
    )
    args = (logits, proposed, probs, batch)

    def launch() -> verify.Verified:
        own = (batch.cu_drafts, batch.temperatures, batch.seeds, batch.positions, most)
        return verify_triton.verify_rejection_triton(logits, proposed, probs, *own)[0]

    # Every row for its sum; the row that decides once more for the race, with its draft's probabilities if it rejects.
    least = logits.nbytes
    chunks = -(-vocab // logprobs_triton.chunk_size(vocab))
    memory = least + sequences * vocab * (logits.itemsize + 4) + rows * (24 * chunks + 128) + sequences * (32 * chunks)
    return Call(
        op=lambda: _emitted(verify_rejection.verify_rejection(*args)),
        launch=lambda: _emitted(launch()),
        reference=lambda: _emitted(verify_rejection.verify_rejection_reference(*args)),
        tokens=sequences,
        least=least,
        memory=memory,
        issued=memory,
        at_most=True,
    )


def _emitted(verified: verify.Verified) -> tuple[torch.Tensor, ...]:
    logprobs = () if verified.logprobs is None else (verified.logprobs,)
    return verified.accepted, verified.tokens, *logprobs


def token_logprobs(form: Form, n: Sizes) -> Call:
    logits = form.randn(n["rows"], n["vocab"], scale=2.0)
    tokens = torch.arange(n["rows"], device=form.device) % n["vocab"]
    chunks = -(-n["vocab"] // logprobs_triton.chunk_size(n["vocab"]))
    return Call(
        op=lambda: logprobs.token_logprobs(logits, tokens),
        launch=lambda: logprobs.token_logprobs_triton(logits, tokens),
        reference=lambda: logprobs.token_logprobs_reference(logits, tokens),
        tokens=n["rows"],
        least=logits.nbytes + tokens.nbytes + 4 * n["rows"],
        memory=logits.nbytes + n["rows"] * (16 * chunks + 28 + logits.itemsize),
        issued=logits.nbytes + n["rows"] * (20 * chunks + 28 + logits.itemsize),
    )


def token_logprobs_backward(form: Form, n: Sizes) -> Call:
    logits = form.randn(n["rows"], n["vocab"], scale=2.0)
    tokens = torch.arange(n["rows"], device=form.device) % n["vocab"]
    temperatures = torch.ones(n["rows"], device=form.device)
    grads, out = torch.ones(n["rows"], device=form.device), torch.empty_like(logits)
    chunks = -(-n["vocab"] // logprobs_triton.chunk_size(n["vocab"]))

    def launch() -> torch.Tensor:
        _, statistics = logprobs_triton.token_logprobs_forward_triton(logits, tokens, temperatures, False)
        return _backward(statistics)

    def _backward(statistics: Any) -> torch.Tensor:
        logprobs_triton.token_logprobs_backward_triton(logits, tokens, temperatures, statistics, grads, None, out)
        return out

    def reference() -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        picked = logprobs.token_logprobs_reference(leaf, tokens)
        assert isinstance(picked, torch.Tensor)
        picked.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def op() -> torch.Tensor:
        leaf = logits.detach().requires_grad_()
        picked = logprobs.token_logprobs(leaf, tokens)
        assert isinstance(picked, torch.Tensor)
        picked.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    few = 20 * chunks + 28 + logits.itemsize + 28 * chunks
    return Call(
        op=op,
        launch=launch,
        reference=reference,
        tokens=n["rows"],
        least=3 * logits.nbytes,
        memory=3 * logits.nbytes + n["rows"] * few,
        issued=3 * logits.nbytes + n["rows"] * few,
        at_most=True,
    )


CASES = [
    Case(
        "rms_norm",
        "",
        rms_norm,
        full={"rows": 4096, "columns": 4096},
        cpu={"rows": 512, "columns": 576},
        small={"rows": 3, "columns": 576},
    ),
    Case(
        "silu_mul",
        "",
        silu_mul,
        full={"rows": 4096, "columns": 11008},
        cpu={"rows": 512, "columns": 1536},
        small={"rows": 3, "columns": 1536},
    ),
    Case(
        "batch_invariant_linear",
        "decode",
        batch_invariant_linear,
        full={"rows": 32, "in": 4096, "out": 4096},
        cpu={"rows": 32, "in": 576, "out": 576},
        small={"rows": 5, "in": 96, "out": 80},
        on_cpu=False,
    ),
    Case(
        "batch_invariant_linear",
        "prefill",
        batch_invariant_linear,
        full={"rows": 4096, "in": 4096, "out": 4096},
        cpu={"rows": 512, "in": 576, "out": 576},
        small={"rows": 70, "in": 64, "out": 130},
        on_cpu=False,
    ),
    Case(
        "sample",
        "temperature",
        sampling,
        full={"rows": 128, "vocab": 151936},
        cpu={"rows": 32, "vocab": 49152},
        small={"rows": 3, "vocab": 9000},
    ),
    Case(
        "sample",
        "top-k, top-p",
        sampling,
        full={"rows": 128, "vocab": 151936, "top_k": 50},
        cpu={"rows": 32, "vocab": 49152, "top_k": 50},
        small={"rows": 2, "vocab": 9000, "top_k": 50},
    ),
    Case(
        "verify_drafts",
        "match",
        verify_match,
        full={"sequences": 256, "drafts": 4, "vocab": 151936},
        cpu={"sequences": 32, "drafts": 4, "vocab": 49152},
        small={"sequences": 3, "drafts": 3, "vocab": 50},
        dtypes=("float32",),
    ),
    Case(
        "verify_drafts",
        "rejection",
        verify_reject,
        full={"sequences": 64, "drafts": 4, "vocab": 151936},
        cpu={"sequences": 16, "drafts": 4, "vocab": 49152},
        small={"sequences": 2, "drafts": 2, "vocab": 9000},
    ),
    Case(
        "token_logprobs",
        "forward",
        token_logprobs,
        full={"rows": 4096, "vocab": 151936},
        cpu={"rows": 64, "vocab": 49152},
        small={"rows": 2, "vocab": 9000},
    ),
    Case(
        "token_logprobs",
        "forward and backward",
        token_logprobs_backward,
        full={"rows": 2048, "vocab": 151936},
        cpu={"rows": 64, "vocab": 49152},
        small={"rows": 2, "vocab": 9000},
    ),
]
