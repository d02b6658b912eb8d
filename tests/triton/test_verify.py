"""The kernels of verify_drafts, by match and by rejection, in the interpreter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from longtail.kernels import verify_rejection as module
from longtail.kernels.logprobs_triton import MOST_CHUNK
from longtail.kernels.philox import exponential_triton, philox_reference, philox_triton
from longtail.kernels.verify import Verified, verify_drafts_reference, verify_drafts_triton
from longtail.kernels.verify_rejection import DraftBatch, verify_rejection_reference
from longtail.kernels.verify_triton import verify_rejection_triton

INF = math.inf


pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")


def cu(*counts: int) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def assert_same(got: Verified, want: Verified, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert torch.equal(got.accepted, want.accepted)
    assert torch.equal(got.tokens, want.tokens)
    assert (got.logprobs is None) == (want.logprobs is None)
    if got.logprobs is not None and want.logprobs is not None:
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=rtol, atol=atol, equal_nan=True)


# ---- match


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize("counts", [(0,), (1,), (7,), (2, 0, 3, 1), (0, 0), (4, 4), (0, 16, 5)])
def test_match_against_the_reference(counts: tuple[int, ...], with_logprobs: bool) -> None:
    rng = np.random.default_rng(sum(counts))
    for odds in (0.1, 0.5, 0.9):
        drafts = torch.from_numpy(rng.integers(0, 5, sum(counts)))
        rows = len(drafts) + len(counts)
        sampled = torch.from_numpy(rng.integers(0, 5, rows))
        for i, start in enumerate(cu(*counts)[:-1].tolist()):
            right = torch.from_numpy(rng.random(counts[i]) < odds)
            at = slice(start + i, start + i + counts[i])
            sampled[at] = torch.where(right, drafts[start : start + counts[i]], sampled[at])
        logprobs = torch.from_numpy(rng.standard_normal(rows).astype(np.float32)) if with_logprobs else None
        arguments = drafts, sampled, cu(*counts), logprobs
        assert_same(verify_drafts_triton(*arguments), verify_drafts_reference(*arguments))


def test_match_width_faulty_rows_and_no_sequences() -> None:
    out = verify_drafts_triton(torch.tensor([4, 5]), torch.tensor([4, -1, 6]), cu(2), max_drafts=4)
    assert out.tokens.tolist() == [[4, -1, -1, -1, -1]]
    assert out.accepted.tolist() == [1]
    none = torch.zeros(0, dtype=torch.int64)
    assert verify_drafts_triton(none, none, cu()).tokens.shape == (0, 1)


# ---- noise


@triton.jit
def words_kernel(out, seeds, positions, streams, N: tl.constexpr):
    i = tl.arange(0, N)
    stream = tl.load(streams).to(tl.uint32)
    a, b, c, d = philox_triton(tl.load(seeds), tl.load(positions), i, stream)
    tl.store(out + 4 * i, a.to(tl.int32))
    tl.store(out + 4 * i + 1, b.to(tl.int32))
    tl.store(out + 4 * i + 2, c.to(tl.int32))
    tl.store(out + 4 * i + 3, d.to(tl.int32))


@pytest.mark.parametrize(
    ("seed", "position", "stream"), [(0, 0, 0), (5, 2**33 + 9, 1), (2**64 - 2, 2**40 + 2**32 - 1, 2)]
)
def test_the_words_of_a_stream(seed: int, position: int, stream: int) -> None:
    out = torch.zeros(64, 4, dtype=torch.int32)
    key = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    words_kernel[(1,)](out, key, torch.tensor(position), torch.tensor(stream), N=64)
    counter = np.zeros((64, 4), np.uint32)
    counter[:, 0] = np.arange(64)
    counter[:, 1:] = position & 0xFFFFFFFF, position >> 32, stream
    assert np.array_equal(out.numpy().view(np.uint32), philox_reference(counter, (seed & 0xFFFFFFFF, seed >> 32)))


@triton.jit
def exponential_kernel(u, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, exponential_triton(tl.load(u + i)))


def test_exponential_is_accurate_where_winners_lie() -> None:
    u = torch.logspace(-9.5, 0, 1024).clamp(max=1 - 2.0**-24)
    out = torch.zeros(1024)
    exponential_kernel[(1,)](u, out, N=1024)
    torch.testing.assert_close(out.double(), -torch.log1p(-u.double()), rtol=2e-6, atol=0)


# ---- rejection


def problem(counts: tuple[int, ...], vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Drafts drawn from noisy copies of the target; rows of several temperatures, greedy and filtered ones."""
    generator = torch.Generator().manual_seed(seed)
    starts = cu(*counts)
    total, sequences = sum(counts), len(counts)
    logits = (torch.randn(total + sequences, vocab, generator=generator) * 3).to(dtype)
    verifying = torch.cat([torch.arange(int(starts[i]) + i, int(starts[i + 1]) + i) for i in range(sequences)])
    probs = torch.softmax(logits[verifying].float() + torch.randn(total, vocab, generator=generator) / 3, -1)
    drafts = torch.multinomial(probs, 1, generator=generator)[:, 0] if total else torch.zeros(0, dtype=torch.int64)
    filtered = torch.rand(logits.shape, generator=generator) < 0.3
    filtered[::2] = False
    filtered[:, 0] = False
    temperatures = torch.tensor([1.0, 0.7, 0.0, 1.0, 1.3]).repeat(len(logits))[: len(logits)]
    seeds = torch.randint(-(2**62), 2**62, (sequences,), generator=generator).view(torch.uint64)
    positions = torch.randint(0, 2**34, (sequences,), generator=generator)
    return logits.masked_fill(filtered, -INF), drafts, probs, DraftBatch(starts, temperatures, seeds, positions)


def launch(
    logits: torch.Tensor, drafts: torch.Tensor, probs: Any, batch: DraftBatch, faults: dict[int, str] | None = None
) -> Verified:
    most = module._check(logits, drafts, probs, batch)
    verified, status = verify_rejection_triton(
        logits, drafts, probs, batch.cu_drafts, batch.temperatures, batch.seeds, batch.positions, most
    )
    module._report(status, verified.accepted, batch.cu_drafts, faults)
    return verified


@pytest.mark.parametrize("with_probs", [True, False], ids=["probs", "no probs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 3, 300, 1025, MOST_CHUNK + 1])
def test_rejection_against_the_reference(vocab: int, dtype: torch.dtype, with_probs: bool) -> None:
    """float32 against float64: the tokens of these seeds are equal, log-probabilities to float32's rounding."""
    counts = (2, 0, 5, 1, 3)
    for seed in range(3 if vocab == 300 else 1):
        logits, drafts, probs, batch = problem(counts, vocab, dtype, seed)
        q = probs if with_probs else None
        want = verify_rejection_reference(logits, drafts, q, batch)
        assert_same(launch(logits, drafts, q, batch), want, rtol=2e-6, atol=3e-6)


def test_many_sequences_of_few_tokens() -> None:
    """Every verdict occurs."""
    counts = tuple(int(n) for n in np.random.default_rng(0).integers(0, 4, 60))
    logits, drafts, probs, batch = problem(counts, 7, seed=5)
    probs[torch.arange(0, len(drafts), 5), drafts[::5]] = 0.0  # some drafts that cannot have been drawn
    want = verify_rejection_reference(logits, drafts, probs, batch)
    assert set(want.accepted.tolist()) == {0, 1, 2, 3}
    assert_same(launch(logits, drafts, probs, batch), want, rtol=2e-6, atol=3e-6)


def test_a_residual_without_mass_falls_back_on_the_target() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(80, 3).contiguous()
    probs = torch.tensor([0.9, 0.8, 0.9]).expand(40, 3).contiguous()
    batch = DraftBatch(
        torch.arange(41, dtype=torch.int32), torch.ones(80), torch.arange(40), torch.zeros(40, dtype=torch.int64)
    )
    drafts = torch.zeros(40, dtype=torch.int64)
    want = verify_rejection_reference(logits, drafts, probs, batch)
    assert len(set(want.tokens[want.accepted == 0, 0].tolist())) > 1
    assert_same(launch(logits, drafts, probs, batch), want, rtol=2e-6, atol=3e-6)


def test_a_certain_draft_is_accepted_or_falls_back_on_itself() -> None:
    """p(d) is 1 up to rounding: nothing else can come."""
    logits = torch.full((40, 3), -INF)
    logits[:, 1] = 12.34
    zeros = torch.zeros(20, dtype=torch.int64)
    batch = DraftBatch(torch.arange(21, dtype=torch.int32), torch.full((40,), 0.7), torch.arange(20), zeros)
    out = launch(logits, torch.ones(20, dtype=torch.int64), None, batch)
    assert (out.tokens[:, 0] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    counts = (2, 0, 3, 1)
    logits, drafts, probs, batch = problem(counts, MOST_CHUNK + 100, dtype)
    whole = launch(logits, drafts, probs, batch)
    assert whole.logprobs is not None
    for i in range(4):
        a, b = batch.cu_drafts[i : i + 2].tolist()
        one = DraftBatch(
            cu(b - a), batch.temperatures[a + i : b + i + 1], batch.seeds[i : i + 1], batch.positions[i : i + 1], 3
        )
        alone = launch(logits[a + i : b + i + 1], drafts[a:b], probs[a:b], one)
        assert alone.logprobs is not None
        assert torch.equal(alone.tokens[0], whole.tokens[i])
        assert torch.equal(alone.logprobs[0].nan_to_num(99), whole.logprobs[i].nan_to_num(99))


def test_faults_name_the_row_that_decides() -> None:
    """As on the CPU (tests/kernels/test_verify_rejection.py)."""
    logits = torch.zeros(18, 4)
    logits[:, 1] = 1.0
    logits[1, 2] = math.nan
    logits[5, 2] = INF
    logits[6] = -INF
    logits[10, 0] = math.nan
    drafts = torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 1, 9, 1, 1])
    probs = torch.full((12, 4), 0.25)
    probs[10, 1] = math.nan
    batch = DraftBatch(cu(*[2] * 6), torch.zeros(18), torch.arange(6), torch.zeros(6, dtype=torch.int64))
    found: list[dict[int, str]] = [{}, {}]
    got = launch(logits, drafts, probs, batch, found[0])
    want = verify_rejection_reference(logits, drafts, probs, batch, found[1])
    assert found[0] == found[1]
    assert len(found[0]) == 5
    assert_same(got, want, rtol=2e-6, atol=3e-6)


def test_bad_draft_probabilities_of_a_rejected_row() -> None:
    n = 12
    logits = torch.tensor([0.1, 0.8, 0.1]).log().expand(2 * n, 3).contiguous()
    batch = DraftBatch(
        torch.arange(n + 1, dtype=torch.int32), torch.ones(2 * n), torch.arange(n), torch.zeros(n, dtype=torch.int64)
    )
    for bad in ([1.0, math.nan, 0.0], [1.0, 0.0, -0.5]):
        found: list[dict[int, str]] = [{}, {}]
        probs = torch.tensor(bad).expand(n, 3).contiguous()
        drafts = torch.zeros(n, dtype=torch.int64)
        got = launch(logits, drafts, probs, batch, found[0])
        assert_same(got, verify_rejection_reference(logits, drafts, probs, batch, found[1]), rtol=2e-6, atol=3e-6)
        assert found[0] == found[1]
        assert found[0]


def test_views_and_no_sequences() -> None:
    logits, drafts, probs, batch = problem((2, 1), 40)
    wide, wide_probs = torch.full((len(logits), 80), torch.nan), torch.full((3, 80), torch.nan)
    wide[:, ::2], wide_probs[:, 40:] = logits, probs
    want = launch(logits, drafts, probs, batch)
    assert_same(launch(wide[:, ::2], drafts, wide_probs[:, 40:], batch), want)
    none = torch.zeros(0, dtype=torch.int64)
    empty = DraftBatch(cu(), torch.zeros(0), none, none)
    assert launch(torch.zeros(0, 5), none, None, empty).tokens.shape == (0, 1)
