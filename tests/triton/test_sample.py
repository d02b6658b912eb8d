"""sample on a GPU's path: against hand-made cases and the reference, bit for bit across batches; its noise.

Tokens equal the reference's wherever the two best scores p / E differ by more than 1e-5; log-probabilities agree to
1e-5, which also shows a token kept too many or too few.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from longtail.kernels import sample_triton as module
from longtail.kernels.philox import (
    exponential_triton,
    gumbel_noise,
    philox_reference,
    philox_triton,
    uniform_triton,
)
from longtail.kernels.process_logits import LogitEdits, edit_row, filter_row, row_edits
from longtail.kernels.sample import SampleBatch, sample, sample_reference
from longtail.kernels.sample_triton import MOST_VOCABULARY, launch_sample, sample_triton

from ..kernels.sample_cases import CASES, batch_of, check_draw, logits_of, random_batch, rows_of

pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def plain_batch(rows: int, temperatures: list[float], seed: int = 0) -> SampleBatch:
    rng = np.random.default_rng(seed)
    return SampleBatch(
        np.resize(np.array(temperatures, np.float32), rows),
        rng.integers(0, 2**64, rows, dtype=np.uint64),
        rng.integers(0, 2**33, rows, dtype=np.int64),
    )


def is_close_call(logits: torch.Tensor, batch: SampleBatch, i: int) -> bool:
    """Whether the two best scores of a row are too close for float32."""
    row = logits[i].float().numpy().copy()
    t = np.float32(batch.temperatures[i])
    if t <= 0:
        return False
    if batch.edits is not None:
        edit_row(row, batch.edits.row(i))
    filters = {"top_k": batch.top_k, "top_p": batch.top_p, "min_p": batch.min_p}
    filter_row(row, temperature=float(t), **{k: v[i].item() for k, v in filters.items() if v is not None})
    scores = np.sort(row.astype(np.float64) / t + gumbel_noise(int(batch.seeds[i]), int(batch.positions[i]), len(row)))
    return len(scores) > 1 and scores[-1] - scores[-2] < 1e-5


def check_against_reference(logits: torch.Tensor, batch: SampleBatch) -> None:
    before = logits.clone()
    tokens, logprobs = sample_triton(logits, batch)
    assert torch.equal(logits, before)
    assert [str(x.dtype) for x in (tokens, logprobs)] == ["int64", "float32"]
    expected_tokens, expected_logprobs = sample_reference(logits, batch)
    for i in range(len(tokens)):
        if tokens[i] != expected_tokens[i]:
            assert is_close_call(logits, batch, i), f"row {i}: {tokens[i]}, expected {expected_tokens[i]}"
        else:
            np.testing.assert_allclose(logprobs[i], expected_logprobs[i], rtol=1e-5, atol=1e-5, err_msg=f"row {i}")


# ---- against the reference


@pytest.mark.parametrize("vocab", [1, 3, 1000, 1025, 5000])
def test_plain_rows(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    check_against_reference(logits, plain_batch(6, [1.0, 0.0, 0.3, 2.5], seed=vocab))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 1200])
def test_every_mixture_of_parameters(vocab: int, dtype: str) -> None:
    logits, batch = random_batch(16, vocab, seed=vocab)
    check_against_reference(logits.to(DTYPES[dtype]), batch)


@pytest.mark.parametrize("vocab", [50_257, 49_152, 262_144])
def test_wide_vocabularies(vocab: int) -> None:
    """A plain row and one with everything; the last token is the winner once."""
    logits, batch = random_batch(2, vocab, seed=vocab)
    assert batch.top_k is not None and batch.top_p is not None and batch.min_p is not None
    batch.temperatures[:] = 1.0, 0.8
    batch.top_k[:], batch.top_p[:], batch.min_p[:] = (0, 300), (1.0, 0.95), (0.0, 0.001)
    logits[0, -1] = 40.0
    check_against_reference(logits.bfloat16(), batch)
    assert sample_triton(logits[:1], rows_of(batch, [0]))[0].tolist() == [vocab - 1]


def test_flat_rows_where_every_token_has_a_chance() -> None:
    """Nothing stands out: lists are as long as the row, and a threshold is searched over many blocks."""
    logits = torch.randn(4, 6000, generator=torch.Generator().manual_seed(5)) * 0.1
    batch = plain_batch(4, [1.0])
    batch.top_k = np.array([0, 0, 4500, 4500], np.int32)
    batch.top_p = np.array([1.0, 0.7, 1.0, 0.7])
    check_against_reference(logits, batch)


def test_top_p_of_one_dominant_token_in_each_group() -> None:
    """The bound from the groups' largest logits is at its tightest, and must not cut off what is kept."""
    logits = torch.full((3, 4096), -20.0)
    group = torch.arange(64)
    token = group // 16 * 1024 + group % 4 * 256 + group % 16 * 16
    logits[:, token] = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    batch = plain_batch(3, [1.0])
    batch.top_p = np.array([0.5, 0.9, 0.999])
    check_against_reference(logits, batch)


def test_top_p_after_min_p_counts_parts_of_which_nothing_is_kept() -> None:
    """Masses 1 and 0.5 in the first part, 25 of 0.02 in the second. Of 2 in all, 0.6 needs the first two tokens; of the
    1.5 of the first part it would need one."""
    logits = torch.full((2, 8192), -30.0)
    logits[:, [5, 700]] = torch.tensor([1.0, 0.5]).log()
    logits[:, 4096:8096:160] = math.log(0.02)
    batch = plain_batch(2, [1.0])
    batch.min_p, batch.top_p = np.array([0.01, 0.01]), np.array([0.6, 0.6])
    tokens, logprobs = sample_triton(logits, batch)
    expected = [math.log({5: 2 / 3, 700: 1 / 3}[token]) for token in tokens.tolist()]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-5)


def test_strided_rows() -> None:
    padded, batch = random_batch(4, 700, seed=3)
    batch.edits = None
    for view in (padded[:, :650], padded[:, 13:650], padded.T.contiguous().T, padded[:, ::2]):
        check_against_reference(view, batch)
    check_against_reference(padded[:1].expand(4, -1), batch)


# ---- by hand


def test_what_may_be_drawn_and_what_is_refused() -> None:
    """All of the hand-made cases in one launch."""
    faults: dict[int, str] = {}
    tokens, logprobs = sample_triton(logits_of(CASES), batch_of(CASES, seed=1), faults)
    for i, case in enumerate(CASES):
        if case.fault is None:
            check_draw(case, int(tokens[i]), float(logprobs[i]))
        else:
            assert case.fault.replace("\\", "") in faults.pop(i)
            assert (tokens[i], math.isnan(logprobs[i])) == (-1, True)
    assert not faults


def test_a_row_that_cannot_be_sampled_is_named() -> None:
    bad = next(case for case in CASES if case.name == "nan_filtered")
    with pytest.raises(ValueError, match="logits row 1 has NaN"):
        sample_triton(logits_of([CASES[0], bad]), batch_of([CASES[0], bad]))


@pytest.mark.parametrize("column", [0, 255, 256, 1023, 1024, 1499])
def test_nan_is_found_wherever_it_is(column: int) -> None:
    logits = torch.zeros(1, 1500)
    logits[0, column] = math.nan
    with pytest.raises(ValueError, match="logits row 0 has NaN"):
        sample_triton(logits, plain_batch(1, [1.0]))


def test_the_largest_logit_counts_wherever_it_is() -> None:
    """In each quarter of a chunk, and at the ends of the row."""
    columns = [0, 300, 600, 900, 1023, 1024, 1499]
    logits, batch = torch.zeros(7, 1500), plain_batch(7, [1.0])
    logits[:, 7] = 5.0
    logits[range(7), columns] = 5.5
    batch.top_k = np.array([1, 1, 1, 1, 0, 0, 0])
    batch.min_p = np.array([0.0, 0.0, 0.0, 0.0, 0.9, 0.9, 0.9])
    tokens, logprobs = sample_triton(logits, batch)
    assert tokens.tolist() == columns
    assert logprobs.tolist() == [0.0] * 7


def test_greedy_ties_go_to_the_lowest_id_across_quarters_chunks_and_parts() -> None:
    logits = torch.zeros(4, 9000)
    for row, ids in enumerate([[788, 532, 276, 20], [8191, 8192], [1024, 1023], [5000, 513, 770]]):
        logits[row, ids] = 1.0
    tokens, _ = sample_triton(logits, plain_batch(4, [0.0]))
    assert tokens.tolist() == [20, 8191, 1023, 513]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at most 262144"):
        launch_sample(torch.zeros(1, 1).expand(1, MOST_VOCABULARY + 1), plain_batch(1, [1.0]))
    with pytest.raises(ValueError, match="seeds has shape"):
        sample_triton(torch.zeros(1, 4), SampleBatch(np.ones(1, np.float32), np.zeros(2, np.uint64), np.zeros(1, int)))
    tokens, logprobs = sample_triton(torch.zeros(0, 4), plain_batch(0, [1.0]))
    assert (len(tokens), len(logprobs)) == (0, 0)


# ---- edits


@pytest.mark.parametrize("dtype", DTYPES)
def test_edited_logits_are_the_cpus_bit_for_bit(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", 64)  # several programs
    logits, batch = random_batch(6, 1500, seed=4)
    logits = logits.to(DTYPES[dtype])
    assert batch.edits is not None
    batch.edits = LogitEdits.stack([batch.edits.row(i) if i != 2 else row_edits() for i in range(6)])
    expected = logits.float().numpy().copy()
    for i in range(6):
        edit_row(expected[i], batch.edits.row(i))
    for in_place in (False, True) if dtype == "float32" else (False,):
        args, _, edited = module._upload(batch, 1500, in_place, logits.device)
        work = module._edit(logits, args, edited, in_place)
        rows = np.arange(6) if in_place else np.flatnonzero(batch.edited())
        assert 2 not in np.flatnonzero(batch.edited())
        assert edited >= 3
        assert np.array_equal(work.numpy(), expected[rows])
        assert (work is logits) == in_place


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_place_gives_the_same_bits(dtype: str) -> None:
    logits, batch = random_batch(3, 1500, seed=4)
    logits = logits.to(DTYPES[dtype])
    tokens, logprobs = sample_triton(logits, batch)
    again = sample_triton(logits.clone(), batch, in_place=True)
    assert again[0].tolist() == tokens.tolist()
    assert again[1].tobytes() == logprobs.tobytes()


# ---- bit for bit


def test_rows_do_not_depend_on_the_batch() -> None:
    logits, batch = random_batch(6, 5000, seed=6)
    assert batch.edits is not None and batch.top_k is not None and batch.temperatures is not None
    batch.temperatures[:4] = 0.0, 1.0, 1.0, 0.7
    batch.edits = LogitEdits.stack([batch.edits.row(i) if i % 2 else row_edits() for i in range(6)])
    tokens, logprobs = sample_triton(logits, batch)
    for rows in ([5, 2, 4, 0], *([i] for i in range(6))):
        some = sample_triton(logits[rows], rows_of(batch, rows))
        assert some[0].tolist() == tokens[rows].tolist()
        assert some[1].tobytes() == logprobs[rows].tobytes()


def test_filtered_rows_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = random_batch(4, 300, seed=7)
    batch.temperatures[:] = 0.9
    batch.top_p = np.full(4, 0.8, np.float32)
    tokens, logprobs = sample_triton(logits, batch)
    monkeypatch.setattr(module, "LIST_BYTES", 3 * 300 * 8)
    again = sample_triton(logits, batch)
    assert again[0].tolist() == tokens.tolist()
    assert again[1].tobytes() == logprobs.tobytes()


def test_the_cpu_draws_the_same_tokens() -> None:
    """The distribution of the CPU's tokens is tested over 200,000 draws (tests/kernels); these are a sample of them."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.09, 0.01])
    rows = 32
    batch = SampleBatch(np.ones(rows, np.float32), np.zeros(rows, np.uint64), np.arange(rows))
    logits = probs.log().expand(rows, -1).contiguous()
    assert sample_triton(logits, batch)[0].tolist() == sample(logits, batch)[0].tolist()


# ---- the noise


@triton.jit
def words_kernel(out, seed, position, SIZE: tl.constexpr, STREAM: tl.constexpr):
    i = tl.arange(0, SIZE)
    words = philox_triton(tl.load(seed), tl.load(position), i, STREAM)
    for w in tl.static_range(4):
        tl.store(out + 4 * i + w, words[w].to(tl.int32, bitcast=True))


@pytest.mark.parametrize("stream", [0, 1, 2])
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (0xFEDCBA9876543210, 2**40 + 7), (2**64 - 1, 2**32 - 1)])
def test_the_words_are_the_references(seed: int, position: int, stream: int) -> None:
    out = torch.zeros(256, 4, dtype=torch.int32)
    seeds = torch.from_numpy(np.array([seed], np.uint64).view(np.int64))
    words_kernel[(1,)](out, seeds, torch.tensor([position]), SIZE=256, STREAM=stream)
    counter = np.zeros((256, 4), np.uint32)
    counter[:, 0] = np.arange(256)
    counter[:, 1:] = position & 0xFFFFFFFF, position >> 32, stream
    assert np.array_equal(out.numpy().view(np.uint32), philox_reference(counter, (seed & 0xFFFFFFFF, seed >> 32)))


@triton.jit
def exponential_kernel(words, u, e, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    uniform = uniform_triton(tl.load(words + i).to(tl.uint32, bitcast=True))
    tl.store(u + i, uniform)
    tl.store(e + i, exponential_triton(uniform))


def test_uniform_and_exponential() -> None:
    """u has the CPU's bits. E is accurate to 3e-7 of itself also for the smallest u."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 1 << 16, dtype=np.uint32)
    words[: 1 << 15] >>= rng.integers(0, 32, 1 << 15, dtype=np.uint32)  # small ones, where winners are
    words[:3] = 0, 0x80000000, 0x7FFFFF00
    u, e = torch.zeros(2, 1 << 16)
    exponential_kernel[(4,)](torch.from_numpy(words.view(np.int32)), u, e, SIZE=1 << 14)
    expected = ((words & np.uint32(0x7FFFFFFF)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    assert np.array_equal(u.numpy(), expected)
    assert u[0] == u[1] == 2.0**-32
    inner = expected < 1
    exact = -np.log1p(-expected[inner].astype(np.float64))
    np.testing.assert_allclose(e.numpy()[inner], exact, rtol=3e-7)
    assert np.isfinite(e.numpy()).all()


@triton.jit
def race_kernel(p, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """out[position] = argmax p / E over VOCAB <= 256 tokens, seed 9, BLOCK positions at once."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    seed = tl.full([BLOCK], 9, tl.int64)
    best = tl.full([BLOCK], -1.0, tl.float32)
    winner = tl.full([BLOCK], 0, tl.int32)
    for token in range(VOCAB):
        counter = tl.zeros([BLOCK], tl.int32) + token % 256
        w0, w1, _, _ = philox_triton(seed, position, counter, 0)
        word = w0 if token < 256 else w1
        score = tl.load(p + token) / exponential_triton(uniform_triton(word))
        winner = tl.where(score > best, token, winner)
        best = tl.maximum(best, score)
    tl.store(out + position, winner)


def chi_square_p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    assert expected.min() >= 10
    statistic = float(((observed - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("vocab", [8, 300])
def test_the_race_draws_from_its_probabilities(vocab: int) -> None:
    """262,144 draws of 8 tokens, 65,536 of 300, by the race with the kernels' own noise and arithmetic (a whole launch
    of the sampler takes 50 ms a draw here); false-alarm probability 1e-6. A bias of 4 % of one of 8 is found."""
    draws = 1 << (18 if vocab == 8 else 16)
    weights = np.linspace(1.0, 4.0, vocab)[np.random.default_rng(vocab).permutation(vocab)]
    p = torch.from_numpy((weights / weights.max()).astype(np.float32))
    out = torch.zeros(draws, dtype=torch.int32)
    race_kernel[(1,)](p, out, VOCAB=vocab, BLOCK=draws)
    counts = np.bincount(out.numpy(), minlength=vocab)
    assert chi_square_p_value(counts, weights / weights.sum() * draws) > 1e-6
    assert out[:40].tolist() == [
        int(np.argmax(np.log(weights) + gumbel_noise(9, position, vocab))) for position in range(40)
    ]
    if vocab == 8:
        weights[weights.argmax()] *= 1.04
        assert chi_square_p_value(counts, weights / weights.sum() * draws) < 1e-6
