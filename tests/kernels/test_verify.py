"""verify_drafts by match: by hand, against the reference, and the stream is the target's with any drafter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from longtail.kernels.sample import SampleBatch, sample
from longtail.kernels.verify import verify_drafts, verify_drafts_reference

OPS = [verify_drafts, verify_drafts_reference]


def cu(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


@pytest.mark.parametrize("op", OPS)
def test_by_hand(op: Any) -> None:
    """All of two, none of none, one of three (the third agrees again, in vain), none of one."""
    drafts = torch.tensor([4, 5, 1, 2, 3, 7])
    sampled = torch.tensor([4, 5, 6, 9, 1, 0, 3, 8, 0, 7])
    logprobs = -torch.arange(10.0)
    out = op(drafts, sampled, cu(2, 0, 3, 1), logprobs)
    assert out.accepted.tolist() == [2, 0, 1, 0]
    assert out.accepted.dtype == torch.int32
    assert out.tokens.tolist() == [[4, 5, 6, -1], [9, -1, -1, -1], [1, 0, -1, -1], [0, -1, -1, -1]]
    assert out.logprobs is not None
    assert out.logprobs.nan_to_num(99).tolist() == [
        [0, -1, -2, 99],
        [-3, 99, 99, 99],
        [-4, -5, 99, 99],
        [-8, 99, 99, 99],
    ]
    assert op(drafts, sampled, cu(2, 0, 3, 1)).logprobs is None


@pytest.mark.parametrize("op", OPS)
def test_no_drafts_and_no_sequences(op: Any) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    out = op(none, torch.tensor([3, 4]), cu(0, 0))
    assert out.tokens.tolist() == [[3], [4]]
    assert out.accepted.tolist() == [0, 0]
    assert op(none, none, cu()).tokens.shape == (0, 1)


def test_a_row_without_a_sample_matches_nothing() -> None:
    out = verify_drafts(torch.tensor([4, 5]), torch.tensor([4, -1, 6]), cu(2))
    assert out.accepted.tolist() == [1]
    assert out.tokens.tolist() == [[4, -1, -1]]


def test_random_batches_against_the_reference() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(0, 6, rng.integers(1, 12))
        total, sequences = int(counts.sum()), len(counts)
        drafts, sampled = (torch.from_numpy(rng.integers(0, 2, n)) for n in (total, total + sequences))
        logprobs = torch.from_numpy(rng.standard_normal(total + sequences).astype(np.float32))
        got, want = (op(drafts, sampled, cu(*counts), logprobs) for op in (verify_drafts, verify_drafts_reference))
        assert torch.equal(got.accepted, want.accepted)
        assert torch.equal(got.tokens, want.tokens)
        assert got.logprobs is not None
        assert want.logprobs is not None
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=0, equal_nan=True)
        wider = verify_drafts(drafts, sampled, cu(*counts), logprobs, max_drafts=8)
        assert torch.equal(wider.tokens[:, : want.tokens.shape[1]], want.tokens)
        assert (wider.tokens[:, want.tokens.shape[1] :] == -1).all()


# ---- the stream does not depend on the drafter

VOCAB, LENGTH, SEQUENCES = 50, 40, 3


def target(context: list[int]) -> torch.Tensor:
    """A model: its logits depend on the last two tokens."""
    generator = torch.Generator().manual_seed(hash(tuple(context[-2:])) % 2**31)
    return torch.randn(VOCAB, generator=generator) * 2


def draws(contexts: list[list[int]], seeds: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = SampleBatch(np.full(len(seeds), 0.8, np.float32), np.array(seeds, np.uint64), np.array(positions, np.int64))
    tokens, logprobs = sample(torch.stack([target(context) for context in contexts]), batch)
    return torch.from_numpy(tokens), torch.from_numpy(logprobs)


def generate(drafter: Callable[[int, list[int]], list[int]]) -> tuple[list[list[int]], list[list[float]], int]:
    """(streams, their log-probabilities, drafts accepted)."""
    streams: list[list[int]] = [[] for _ in range(SEQUENCES)]
    logprobs: list[list[float]] = [[] for _ in range(SEQUENCES)]
    accepted = 0
    while min(map(len, streams)) < LENGTH:
        proposals = [drafter(i, stream) for i, stream in enumerate(streams)]
        contexts, seeds, positions = [], [], []
        for i, (stream, proposal) in enumerate(zip(streams, proposals, strict=True)):
            for j in range(len(proposal) + 1):
                contexts.append(stream + proposal[:j])
                seeds.append(i)
                positions.append(len(stream) + j)
        sampled, picked = draws(contexts, seeds, positions)
        drafts = torch.tensor([token for proposal in proposals for token in proposal], dtype=torch.int64)
        out = verify_drafts(drafts, sampled, cu(*map(len, proposals)), picked)
        assert out.logprobs is not None
        for i, a in enumerate(out.accepted.tolist()):
            streams[i] += out.tokens[i, : a + 1].tolist()
            logprobs[i] += out.logprobs[i, : a + 1].tolist()
        accepted += int(out.accepted.sum())
    return [s[:LENGTH] for s in streams], [p[:LENGTH] for p in logprobs], accepted


def test_the_stream_is_the_same_with_any_drafter() -> None:
    """None; garbage of varying length; half right; an oracle, which is accepted whole."""
    plain, plain_logprobs, _ = generate(lambda i, stream: [])
    rng = np.random.default_rng(0)

    def garbage(i: int, stream: list[int]) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(0, 5)).tolist()

    def oracle(i: int, stream: list[int]) -> list[int]:
        return plain[i][len(stream) : len(stream) + 4]

    def half_right(i: int, stream: list[int]) -> list[int]:
        return [token if rng.random() < 0.7 else (token + 1) % VOCAB for token in oracle(i, stream)]

    *with_garbage, few = generate(garbage)
    *with_half, some = generate(half_right)
    *with_oracle, most = generate(oracle)
    assert with_garbage == with_half == with_oracle == [plain, plain_logprobs]
    assert few < some < most
    assert most >= SEQUENCES * LENGTH * 4 // 5


@pytest.mark.parametrize("op", OPS)
def test_misuse_is_named(op: Any) -> None:
    drafts, sampled = torch.tensor([1, 2]), torch.tensor([1, 2, 3])
    for arguments, message in (
        ((drafts, sampled, cu(1, 1)), "3 target rows for 2 drafts of 2 sequences"),
        ((drafts, sampled, cu(1)), r"cu_drafts has to rise from 0 to the 2 drafts"),
        ((drafts, torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 2], dtype=torch.int32)), "cu_drafts has to rise"),
        ((drafts.int(), sampled, cu(2)), "pass int64"),
        ((drafts, sampled.int(), cu(2)), "pass int64"),
        ((drafts, sampled, cu(2).long()), "int32"),
        ((drafts, sampled, cu(2), torch.zeros(2)), r"logprobs \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*arguments)


CODE = """
import sys
sys.modules["triton"] = None  # the import fails as if it were not installed
import torch
from longtail.kernels import logprobs, verify, verify_rejection
zero = torch.zeros(1, dtype=torch.int64)
drafts = verify.verify_drafts(zero, torch.tensor([0, 5]), torch.tensor([0, 1], dtype=torch.int32))
assert drafts.tokens.tolist() == [[0, 5]]
assert logprobs.token_logprobs(torch.zeros(1, 1), zero).tolist() == [0.0]
"""


def test_without_triton() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_more_drafts_than_max_drafts_is_named() -> None:
    with pytest.raises(ValueError, match="max_drafts = 1"):
        verify_drafts(torch.tensor([1, 2]), torch.tensor([1, 2, 3]), cu(2), max_drafts=1)
