"""verify_rejection: emitted tokens are distributed as the target's, whatever the drafter; rules by enumeration, draws
by total variation, bits by the reference.

The statistical tests compare n = 200,000 draws over k outcomes with the target's p in total variation. Its mean is at
most sqrt(k / n) / 2, and by McDiarmid it exceeds its mean by t with a probability of at most exp(-2 n t^2). At the
bound of 0.01 a false alarm has a probability below 6e-12 for k = 3 and 3e-8 for k = 9.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
import torch

from longtail.kernels import verify_rejection as module
from longtail.kernels.sample import SampleBatch, sample
from longtail.kernels.verify_rejection import (
    DraftBatch,
    _accepts,
    _residual,
    verify_rejection,
    verify_rejection_reference,
)

INF = math.inf
DRAWS = 200_000
BOUND = 0.01

# (target, draft) over three tokens
PAIRS = {
    "mild": ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
    "equal": ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
    "close": ([0.49, 0.49, 0.02], [0.5, 0.5, 0.0]),  # nearly all accepted: 2 % too many show
    "disjoint": ([0.0, 0.4, 0.6], [1.0, 0.0, 0.0]),
    "overlapping": ([0.0, 0.4, 0.6], [0.5, 0.5, 0.0]),
    "one-hot draft": ([0.7, 0.2, 0.1], [0.0, 1.0, 0.0]),
    "one-hot target": ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
    "top-k target": ([0.6, 0.4, 0.0], [0.1, 0.3, 0.6]),
    "rare": ([0.98, 0.01, 0.01], [0.01, 0.98, 0.01]),
}


def total_variation(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one) - np.asarray(other)).sum() / 2)


# ---- the rules, by enumeration


@pytest.mark.parametrize("pair", PAIRS)
def test_the_rules_make_the_targets_distribution(pair: str) -> None:
    """The kernel's own rules over a grid of 2^14 uniforms: off by at most the grid's step for each draft."""
    p, q = (np.array(x, np.float32) for x in PAIRS[pair])
    emitted = np.zeros(3)
    grid = (np.arange(2**14) + 0.5) / 2**14
    for d in range(3):
        share = np.mean([bool(_accepts(u, float(p[d]), float(q[d]))) for u in grid])
        emitted[d] += q[d] * share
        if share < 1:
            weights = p.copy()
            assert _residual(weights, np.float32(1.0), q) > 0
            emitted += q[d] * (1 - share) * weights / weights.sum()
    assert total_variation(emitted, p) < 2**-13


# ---- draws


def batch_of(counts: Any, rows: int, temperature: float = 1.0, seed: int = 0) -> DraftBatch:
    """Every sequence has a seed of its own, and positions that repeat."""
    counts = torch.as_tensor(counts)
    cu = torch.zeros(len(counts) + 1, dtype=torch.int32)
    cu[1:] = counts.cumsum(0)
    i = torch.arange(len(counts))
    return DraftBatch(cu, torch.full((rows,), temperature), i // 500 + 1000 * seed, i % 500)


def draft_with_stream_0(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As a draft model that shares the target's noise."""
    ones = np.ones(len(logits), np.float32)
    return torch.from_numpy(sample(logits, SampleBatch(ones, seeds.numpy().astype(np.uint64), positions.numpy()))[0])


def log(p: Any) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64).log().float()


def one_draft(
    pair: str, verify: Any = verify_rejection, temperature: float = 1.0, shared_noise: bool = True
) -> np.ndarray:
    """Frequencies of the first emitted token. The target's logits are those that give p at the temperature."""
    p, q = PAIRS[pair]
    logits = (log(p) * temperature).expand(2 * DRAWS, 3).contiguous()
    batch = batch_of(torch.ones(DRAWS, dtype=torch.int64), 2 * DRAWS, temperature)
    if shared_noise:
        drafts = draft_with_stream_0(log(q).expand(DRAWS, 3).contiguous(), batch.seeds, batch.positions)
    else:
        drafts = torch.multinomial(torch.tensor(q), DRAWS, True, generator=torch.Generator().manual_seed(1))
    out = verify(logits, drafts, torch.tensor(q).expand(DRAWS, 3).contiguous(), batch)
    return np.bincount(out.tokens[:, 0].numpy(), minlength=3) / DRAWS


@pytest.mark.parametrize("shared_noise", [True, False], ids=["stream 0", "own noise"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_first_token_is_the_targets(pair: str, shared_noise: bool) -> None:
    assert total_variation(one_draft(pair, shared_noise=shared_noise), PAIRS[pair][0]) < BOUND


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_first_token_is_the_targets_at_a_temperature(temperature: float) -> None:
    assert total_variation(one_draft("mild", temperature=temperature), PAIRS["mild"][0]) < BOUND


@pytest.mark.parametrize("draft", [0, 1, 2])
def test_drafters_without_probabilities(draft: int) -> None:
    p = PAIRS["mild"][0]
    batch = batch_of(torch.ones(DRAWS, dtype=torch.int64), 2 * DRAWS)
    drafts = torch.full((DRAWS,), draft)
    out = verify_rejection(log(p).expand(2 * DRAWS, 3).contiguous(), drafts, None, batch)
    assert total_variation(np.bincount(out.tokens[:, 0].numpy(), minlength=3) / DRAWS, p) < BOUND
    assert out.accepted.float().mean().item() == pytest.approx(p[draft], abs=BOUND)


def test_as_many_drafts_are_accepted_as_can_be() -> None:
    """sum min(p, q): 0.7 for the mild pair."""
    p, q = PAIRS["mild"]
    batch = batch_of(torch.ones(DRAWS, dtype=torch.int64), 2 * DRAWS)
    drafts = draft_with_stream_0(log(q).expand(DRAWS, 3).contiguous(), batch.seeds, batch.positions)
    probs = torch.tensor(q).expand(DRAWS, 3).contiguous()
    out = verify_rejection(log(p).expand(2 * DRAWS, 3).contiguous(), drafts, probs, batch)
    assert out.accepted.float().mean().item() == pytest.approx(0.7, abs=BOUND)


TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.4, 0.0], [0.3, 0.3, 0.4]])
DRAFT = torch.tensor([[0.3, 0.3, 0.4], [0.2, 0.5, 0.3], [0.2, 0.3, 0.5], [0.8, 0.1, 0.1]])
"""Row 0: after nothing; row 1 + t: after token t."""


def two_tokens(verify: Any = verify_rejection) -> np.ndarray:
    """Frequencies [3, 3] of the first two tokens of a model whose distribution depends on the last token: a step of two
    drafts, and a step of one for the sequences that emitted only one token. The draft model uses stream 0."""
    start = batch_of(torch.full((DRAWS,), 2), 3 * DRAWS)
    seeds, positions = start.seeds, start.positions * 7
    none = torch.zeros(DRAWS, dtype=torch.int64)
    d0 = draft_with_stream_0(DRAFT[none].log(), seeds, positions)
    d1 = draft_with_stream_0(DRAFT[1 + d0].log(), seeds, positions + 1)
    contexts = torch.stack([none, 1 + d0, 1 + d1], 1).reshape(-1)
    drafts = torch.stack([d0, d1], 1).reshape(-1)
    probs = DRAFT[torch.stack([none, 1 + d0], 1).reshape(-1)]
    ones = torch.ones(3 * DRAWS)
    out = verify(TARGET[contexts].log(), drafts, probs, DraftBatch(start.cu_drafts, ones, seeds, positions))
    tokens = out.tokens[:, :2].clone()
    again = (out.accepted == 0).nonzero()[:, 0]
    after = 1 + tokens[again, 0]
    d = draft_with_stream_0(DRAFT[after].log(), seeds[again], positions[again] + 1)
    cu = torch.arange(len(again) + 1, dtype=torch.int32)
    batch = DraftBatch(cu, torch.ones(2 * len(again)), seeds[again], positions[again] + 1)
    rows = TARGET[torch.stack([after, 1 + d], 1).reshape(-1)].log()
    tokens[again, 1] = verify(rows, d, DRAFT[after], batch).tokens[:, 0]
    return (np.bincount((tokens[:, 0] * 3 + tokens[:, 1]).numpy(), minlength=9) / DRAWS).reshape(3, 3)


def test_two_tokens_are_jointly_the_targets() -> None:
    joint = (TARGET[0, :, None] * TARGET[1:]).numpy()
    assert total_variation(two_tokens(), joint) < BOUND


def test_a_draft_with_probability_0_is_as_none() -> None:
    """The token is drawn from p, with the noise of a rejection."""
    p, q = [0.5, 0.3, 0.2], [0.6, 0.4, 0.0]
    batch = batch_of(torch.ones(DRAWS, dtype=torch.int64), 2 * DRAWS)
    drafts, probs = torch.full((DRAWS,), 2), torch.tensor(q).expand(DRAWS, 3).contiguous()
    out = verify_rejection(log(p).expand(2 * DRAWS, 3).contiguous(), drafts, probs, batch)
    assert not out.accepted.any()
    assert total_variation(np.bincount(out.tokens[:, 0].numpy(), minlength=3) / DRAWS, p) < BOUND


# ---- planted faults

FAULTS = {
    "2 % too many accepted": ("u * q < p\n", "u * q < p * 1.02\n"),
    "q not subtracted": ("r = weights[c] * over_total - q\n", "r = weights[c] * over_total\n"),
    "temperature ignored": (
        "scale = np.float32(1.0) if greedy else np.float32(1.0) / t\n",
        "scale = np.float32(1.0)\n",
    ),
    "the draft's noise again": ("stream = np.uint64(2)\n", "stream = np.uint64(0)\n"),
}


def spoiled(fault: str, folder: Path) -> ModuleType:
    source = Path(module.__file__).read_text()
    assert source.count(FAULTS[fault][0]) == 1
    path = folder / "spoiled.py"
    path.write_text(source.replace(*FAULTS[fault]))
    spec = importlib.util.spec_from_file_location(f"spoiled_{list(FAULTS).index(fault)}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    verify = spoiled(fault, tmp_path).verify_rejection
    joint = (TARGET[0, :, None] * TARGET[1:]).numpy()
    distances = {pair: total_variation(one_draft(pair, verify), PAIRS[pair][0]) for pair in ("mild", "close", "rare")}
    distances["at a temperature"] = total_variation(one_draft("mild", verify, 2.0), PAIRS["mild"][0])
    distances["two tokens"] = total_variation(two_tokens(verify), joint)
    assert max(distances.values()) > BOUND, distances


# ---- against the reference, bit for bit with `sample`


def problem(sequences: int, vocab: int, most: int = 4, seed: int = 0) -> Any:
    """Drafts drawn from noisy copies of the target; a third of the rows are greedy or filtered."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (sequences,), generator=generator)
    cu = torch.zeros(sequences + 1, dtype=torch.int32)
    cu[1:] = counts.cumsum(0)
    total = int(counts.sum())
    logits = torch.randn(total + sequences, vocab, generator=generator) * 3
    verifying = torch.cat([torch.arange(int(cu[i]) + i, int(cu[i + 1]) + i) for i in range(sequences)])
    draft_logits = logits[verifying] + torch.randn(total, vocab, generator=generator) / 2
    probs = torch.softmax(draft_logits, -1)
    drafts = torch.multinomial(probs, 1, generator=generator)[:, 0]
    filtered = torch.rand(logits.shape, generator=generator) < 0.3
    filtered[::2] = False
    filtered[:, 0] = False
    logits = logits.masked_fill(filtered, -INF)
    temperatures = torch.tensor([1.0, 0.0, 0.7, 1.3, 1.0]).repeat(len(logits))[: len(logits)]
    seeds = torch.randint(-(2**62), 2**62, (sequences,), generator=generator).view(torch.uint64)
    positions = torch.randint(0, 2**34, (sequences,), generator=generator)
    return logits, drafts, probs, DraftBatch(cu, temperatures, seeds, positions)


def equal(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a.nan_to_num(99), b.nan_to_num(99))
        for a, b in ((one.accepted, other.accepted), (one.tokens, other.tokens), (one.logprobs, other.logprobs))
    )


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("vocab", [1, 3, 40, 1500])
def test_against_the_reference(vocab: int, with_probs: bool) -> None:
    """Scores differ by a rounding, so a tie that decides another way is possible, with a probability of 1e-6 or so."""
    logits, drafts, probs, batch = problem(300, vocab)
    q = probs if with_probs else None
    got, want = (op(logits, drafts, q, batch) for op in (verify_rejection, verify_rejection_reference))
    assert torch.equal(got.accepted, want.accepted)
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=2e-6, atol=2e-6, equal_nan=True)
    if vocab > 3:
        assert len(got.accepted.unique()) > 2
    half = verify_rejection(logits.bfloat16(), drafts, probs, batch)  # takes the reference
    assert half.accepted.shape == got.accepted.shape


def test_without_drafts_it_is_sample_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 1500, generator=generator) * 3
    temperatures = torch.tensor([1.0, 0.0, 0.7, 1.3]).repeat(50)
    seeds, positions = torch.arange(200).view(torch.uint64), torch.arange(200) * 2**26
    cu = torch.zeros(201, dtype=torch.int32)
    out = verify_rejection(
        logits, torch.zeros(0, dtype=torch.int64), None, DraftBatch(cu, temperatures, seeds, positions)
    )
    tokens, logprobs = sample(logits, SampleBatch(temperatures.numpy(), seeds.numpy(), positions.numpy()))
    assert out.logprobs is not None
    assert torch.equal(out.tokens[:, 0], torch.from_numpy(tokens))
    assert torch.equal(out.logprobs[:, 0], torch.from_numpy(logprobs))


def test_sequences_do_not_depend_on_the_batch_or_threads() -> None:
    logits, drafts, probs, batch = problem(20, 1100)
    whole = verify_rejection(logits, drafts, probs, batch)
    numba.set_num_threads(1)
    assert equal(verify_rejection(logits, drafts, probs, batch), whole)
    for i in range(20):
        a, b = batch.cu_drafts[i : i + 2].tolist()
        one = DraftBatch(
            torch.tensor([0, b - a], dtype=torch.int32),
            batch.temperatures[a + i : b + i + 1],
            batch.seeds[i : i + 1],
            batch.positions[i : i + 1],
            max_drafts=4,
        )
        alone = verify_rejection(logits[a + i : b + i + 1], drafts[a:b], probs[a:b], one)
        assert torch.equal(alone.tokens[0], whole.tokens[i])
        assert alone.logprobs is not None
        assert whole.logprobs is not None
        assert torch.equal(alone.logprobs[0].nan_to_num(99), whole.logprobs[i].nan_to_num(99))


@pytest.mark.parametrize("op", [verify_rejection, verify_rejection_reference])
def test_greedy_rows_by_hand(op: Any) -> None:
    """The largest, the lowest id at ties, whatever the drafter's probabilities."""
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0], [0.0, 0.0, 3.0]])
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    batch = DraftBatch(torch.tensor([0, 2], dtype=torch.int32), torch.zeros(3), torch.tensor([7]), torch.tensor([0]))
    for drafts, expected in (([1, 0], [1, 0, 2]), ([1, 2], [1, 0, -1]), ([2, 0], [1, -1, -1])):
        for q in (probs, None):
            out = op(logits, torch.tensor(drafts), q, batch)
            assert out.tokens.tolist() == [expected]


def test_a_residual_without_mass_falls_back_on_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """q above p everywhere (a q that sums to more than 1 stands for rounding): what is rejected is drawn from p."""
    p, n = [0.5, 0.3, 0.2], 2000
    batch = batch_of(torch.ones(n, dtype=torch.int64), 2 * n)
    probs = torch.tensor([0.9, 0.8, 0.9]).expand(n, 3).contiguous()
    logits, drafts = log(p).expand(2 * n, 3).contiguous(), torch.zeros(n, dtype=torch.int64)
    got, want = (op(logits, drafts, probs, batch) for op in (verify_rejection, verify_rejection_reference))
    assert torch.equal(got.tokens, want.tokens)
    rejected = got.accepted == 0
    assert set(got.tokens[rejected, 0].tolist()) == {0, 1, 2}


# ---- faults and misuse


@pytest.mark.parametrize("op", [verify_rejection, verify_rejection_reference])
def test_faults_name_the_row_that_decides(op: Any) -> None:
    """Six sequences of two drafts; temperature 0, so that drafts of the largest token are accepted."""
    logits = torch.zeros(18, 4)
    logits[:, 1] = 1.0
    logits[1, 2] = math.nan  # reached
    logits[5, 2] = INF  # the bonus row
    logits[6] = -INF
    logits[10, 0] = math.nan  # behind a rejection
    drafts = torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 1, 9, 1, 1])
    probs = torch.full((12, 4), 0.25)
    probs[10, 1] = math.nan
    cu = torch.arange(0, 13, 2, dtype=torch.int32)
    batch = DraftBatch(cu, torch.zeros(18), torch.arange(6), torch.zeros(6, dtype=torch.int64))
    faults: dict[int, str] = {}
    out = op(logits, drafts, probs, batch, faults)
    assert faults == {
        1: "NaN or +inf",
        5: "NaN or +inf",
        6: "no token left to sample (every logit is -inf)",
        13: "a draft outside of the vocabulary",
        15: "a draft probability that is negative or NaN",
    }
    assert out.accepted.tolist() == [1, 2, 0, 0, 1, 0]
    assert out.tokens.tolist() == [[1, -1, -1], [1, 1, -1], [-1] * 3, [1, -1, -1], [1, -1, -1], [-1] * 3]
    assert torch.equal(out.logprobs.isnan(), out.tokens == -1)
    with pytest.raises(ValueError, match="logits row 1 has NaN"):
        op(logits, drafts, probs, batch)


@pytest.mark.parametrize("op", [verify_rejection, verify_rejection_reference])
def test_bad_draft_probabilities_of_a_rejected_row(op: Any) -> None:
    """Not at the draft, but in the residual."""
    n = 50
    batch = batch_of(torch.ones(n, dtype=torch.int64), 2 * n)
    probs = torch.tensor([1.0, math.nan, -0.5]).expand(n, 3).contiguous()
    faults: dict[int, str] = {}
    op(log([0.1, 0.8, 0.1]).expand(2 * n, 3).contiguous(), torch.zeros(n, dtype=torch.int64), probs, batch, faults)
    assert 30 < len(faults) < 50  # 90 % are rejected
    assert set(faults.values()) == {"a draft probability that is negative or NaN"}


@pytest.mark.parametrize("op", [verify_rejection, verify_rejection_reference])
def test_misuse_is_named(op: Any) -> None:
    logits, drafts = torch.zeros(2, 3), torch.tensor([1])
    one = torch.tensor([0])
    good = DraftBatch(torch.tensor([0, 1], dtype=torch.int32), torch.ones(2), one, one)
    hot, floats = DraftBatch(good.cu_drafts, torch.ones(1), one, one), torch.ones(2)

    def warm(*temperatures: float) -> DraftBatch:
        return DraftBatch(good.cu_drafts, torch.tensor(temperatures), one, one)

    for arguments, message in (
        ((logits[:1], drafts, None, good), "1 target rows for 1 drafts of 1 sequences"),
        ((logits[:, :0], drafts, None, good), "pass floats"),
        ((logits, drafts, torch.zeros(1, 2), good), r"draft_probs \(1, 2\)"),
        ((logits, drafts, torch.zeros(1, 3).double(), good), "pass float32"),
        ((logits, drafts, None, hot), r"temperatures \(1,\)"),
        ((logits, drafts, None, warm(1.0, math.nan)), r"verify_rejection: temperatures\[1\] is nan; use 0 \(greedy\)"),
        ((logits, drafts, None, warm(-1.0, 1.0)), r"temperatures\[0\] is -1.0"),
        ((logits, drafts, None, warm(1.0, 9e-7)), r"temperatures\[1\] is 8.99"),
        ((logits, drafts.to("meta"), None, good), "verify_rejection: drafts is on meta, logits on cpu"),
        ((logits, drafts, None, DraftBatch(good.cu_drafts, floats, one.int(), one)), r"seeds \(1,\) torch.int32"),
        ((logits, drafts, None, DraftBatch(good.cu_drafts, floats, one, one[:0])), r"positions \(0,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*arguments)


@pytest.mark.parametrize("op", [verify_rejection, verify_rejection_reference])
def test_an_overflow_by_the_temperature_is_a_fault_as_in_sample(op: Any) -> None:
    """Rows of one sequence each, no drafts: float32 overflows to +inf, to -inf everywhere, and in one token alone."""
    logits = torch.tensor([[1e36, 0.0], [-1e36, -1e36], [0.0, -1e36]])
    nothing, zeros = torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    batch = DraftBatch(torch.zeros(4, dtype=torch.int32), torch.full((3,), 1e-3), zeros, zeros)
    faults: dict[int, str] = {}
    out = op(logits, nothing, None, batch, faults)
    assert faults == {0: "NaN or +inf", 1: "no token left to sample (every logit is -inf)"}
    assert out.tokens.flatten().tolist() == [-1, -1, 0]
    of_sample: dict[int, str] = {}
    temperatures = np.full(3, 1e-3, np.float32)
    sample(logits, SampleBatch(temperatures, np.zeros(3, np.uint64), np.zeros(3, np.int64)), of_sample)
    assert of_sample == faults
