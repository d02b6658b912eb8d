"""token_logprobs: the bits of `sample`, the gradients of autograd, and what is excluded, NaN or misused."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import pytest
import torch

from longtail.kernels.logprobs import _backward_plain, _forward_plain, token_logprobs, token_logprobs_reference
from longtail.kernels.sample import SampleBatch, sample

INF = math.inf
VOCABS = [1, 2, 17, 1024, 1500, 50_257]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Logits (some excluded), tokens that are not, temperatures, and the loss's weights of both outputs."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (randn(rows, vocab, seed=vocab) * 4).to(dtype)
    tokens = torch.randint(vocab, (rows,), generator=generator)
    excluded = torch.rand(rows, vocab, generator=generator) < 0.3
    excluded[0] = False
    excluded[torch.arange(rows), tokens] = False
    logits = logits.masked_fill(excluded, -INF)
    temperatures = torch.tensor([1.0, 0.0, 0.6, 1.7]).repeat(rows)[:rows]
    return logits, tokens, temperatures, randn(rows, seed=1), randn(rows, seed=2)


def run(op: Any, logits: torch.Tensor, tokens: torch.Tensor, t: Any, g: Any, ge: Any = None, **options: Any) -> Any:
    """(log-probabilities, entropies or None, gradient) of sum(g * log-probability + ge * entropy)."""
    leaf = logits.clone().requires_grad_()
    out = op(leaf * 1.0, tokens, t, return_entropy=ge is not None, **options)
    logprobs, entropy = out if ge is not None else (out, None)
    loss = (logprobs * g).sum() + (0.0 if ge is None else (entropy * ge).sum())
    loss.backward()
    return logprobs.detach(), None if entropy is None else entropy.detach(), leaf.grad


# ---- against `sample` and autograd


@pytest.mark.parametrize("vocab", [1, 5, 1024, 1500, 49_152])
def test_token_logprobs_are_samples_bit_for_bit(vocab: int) -> None:
    rows = 100 if vocab < 10_000 else 12
    logits = randn(rows, vocab, seed=vocab) * 5
    logits[::3, vocab // 2 + 1 :] = -INF
    temperatures = torch.tensor([0.0, 0.3, 1.0, 1.7]).repeat(rows)[:rows]
    seeds = np.arange(rows, dtype=np.uint64)
    tokens, logprobs = sample(logits, SampleBatch(temperatures.numpy(), seeds, np.zeros(rows, np.int64)))
    chosen, rollout = torch.from_numpy(tokens), torch.from_numpy(logprobs)
    assert torch.equal(token_logprobs(logits, chosen, temperatures), rollout)
    trained, _, _ = run(token_logprobs, logits, chosen, temperatures, torch.ones(rows), torch.ones(rows))
    assert torch.equal(trained, rollout)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("vocab", VOCABS)
def test_forward_and_gradient_are_autograds(vocab: int, with_entropy: bool) -> None:
    """Against float64; p has a relative error of some 1e-6 (exp of a rounded argument up to 87)."""
    logits, tokens, t, g, weights = problem(5, vocab)
    ge = weights if with_entropy else None
    got = run(token_logprobs, logits, tokens, t, g, ge)
    want = run(token_logprobs_reference, logits.double(), tokens, t, g, ge)
    assert got[2].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6)
    if with_entropy:
        torch.testing.assert_close(got[1].double(), want[1], rtol=2e-6, atol=5e-6)
    torch.testing.assert_close(got[2].double(), want[2], rtol=1e-5, atol=2e-6)
    assert not got[2][logits == -INF].any()


@pytest.mark.parametrize("vocab", [3, 1500])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_sixteen_bit_logits(dtype: torch.dtype, eps: float, vocab: int) -> None:
    """The results are those of the same values in float32; the gradient is rounded once more."""
    logits, tokens, t, g, ge = problem(4, vocab, dtype)
    low, high = (run(token_logprobs, x, tokens, t, g, ge) for x in (logits, logits.float()))
    assert torch.equal(low[0], high[0])
    assert torch.equal(low[1], high[1])
    assert low[2].dtype == dtype
    torch.testing.assert_close(low[2].float(), high[2], rtol=eps, atol=1e-7)


def test_float64_passes_gradcheck() -> None:
    logits, tokens, t, *_ = problem(4, 7)
    logits = logits.masked_fill(logits == -INF, -3.0).double().requires_grad_()
    for op in (token_logprobs, token_logprobs_reference):
        assert torch.autograd.gradcheck(lambda x, op=op: op(x * 1.0, tokens, t, return_entropy=True), logits)


def test_the_plain_formulas_are_the_references() -> None:
    """What other devices take; float64 logits run it through autograd above."""
    logits, tokens, t, g, ge = problem(4, 40)
    logprobs, statistics = _forward_plain(logits, tokens, t, True)
    grad = torch.empty_like(logits)
    _backward_plain(logits, tokens, t, statistics, g, ge, grad)
    want = run(token_logprobs_reference, logits, tokens, t, g, ge)
    for one, other in zip((logprobs, statistics[2], grad), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("op", [token_logprobs, token_logprobs_reference])
def test_by_hand(op: Any) -> None:
    """Probabilities 1/2, 1/3, 1/6 at temperature 2 (logits are twice their logarithms)."""
    logits = 2 * torch.tensor([[3.0, 2.0, 1.0]]).log()
    logprobs, entropy, grad = run(op, logits, torch.tensor([1]), 2.0, torch.ones(1), torch.zeros(1))
    assert logprobs.item() == pytest.approx(math.log(1 / 3), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(2) / 2 + math.log(3) / 3 + math.log(6) / 6, rel=1e-6)
    assert grad[0].tolist() == pytest.approx([-1 / 4, 1 / 3, -1 / 12], rel=1e-5)


def test_only_the_entropy_is_used() -> None:
    logits, tokens, t, _, ge = problem(3, 20)
    grads = []
    for op in (token_logprobs, token_logprobs_reference):
        leaf = logits.clone().requires_grad_()
        (op(leaf, tokens, t, return_entropy=True)[1] * ge).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


# ---- bits


def test_rows_do_not_depend_on_batch_or_threads() -> None:
    logits, tokens, t, g, ge = problem(9, 1500)
    whole = run(token_logprobs, logits, tokens, t, g, ge)
    for i in range(9):
        one = slice(i, i + 1)
        alone = run(token_logprobs, logits[one], tokens[one], t[one], g[one], ge[one])
        assert all(torch.equal(a, w[one]) for a, w in zip(alone, whole, strict=True))
    numba.set_num_threads(1)
    again = run(token_logprobs, logits, tokens, t, g, ge)
    assert all(torch.equal(a, w) for a, w in zip(again, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inplace_backward_has_the_same_bits_in_the_logits_memory(dtype: torch.dtype) -> None:
    logits, tokens, t, g, ge = problem(5, 1500, dtype)
    apart = run(token_logprobs, logits, tokens, t, g, ge)
    within = run(token_logprobs, logits, tokens, t, g, ge, inplace_backward=True)
    assert all(torch.equal(a, w) for a, w in zip(apart, within, strict=True))
    leaf = logits.clone().requires_grad_()
    made = leaf * 1.0
    seen: list[int] = []
    made.register_hook(lambda grad: seen.append(grad.data_ptr()))
    token_logprobs(made, tokens, t, inplace_backward=True).sum().backward()
    assert seen == [made.data_ptr()]


def test_inplace_backward_of_expanded_rows() -> None:
    """Rows that share memory are copied first."""
    tokens = torch.tensor([0, 5, 9])
    grads = []
    for inplace in (False, True):
        leaf = randn(20).requires_grad_()
        logits = (leaf * 1.0).expand(3, 20)
        token_logprobs(logits, tokens, torch.tensor([1.0, 0.5, 2.0]), inplace_backward=inplace).sum().backward()
        grads.append(leaf.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.equal(grads[0], grads[1])


def test_inplace_backward_is_refused_where_it_would_do_harm() -> None:
    leaf = randn(2, 5).requires_grad_()
    tokens = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="inplace_backward would overwrite a leaf"):
        token_logprobs(leaf, tokens, inplace_backward=True)
    logits = leaf.exp()  # needs its output in its backward pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_logprobs(logits, tokens, inplace_backward=True).sum().backward()


def test_the_logits_are_left_alone() -> None:
    logits, tokens, t, g, _ = problem(3, 40)
    before = logits.clone()
    made = logits.requires_grad_() * 1.0
    (token_logprobs(made, tokens, t) * g).sum().backward()
    assert torch.equal(made, before)


def test_views() -> None:
    wide = randn(4, 60)
    tokens = torch.tensor([0, 5, 9, 19])
    for view in (wide[:, ::3], wide[:, 3:23], wide.t()[:20].t()):
        one, other = (run(token_logprobs, x, tokens, 0.7, torch.ones(4)) for x in (view, view.contiguous()))
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[2], other[2])
    every_other = randn(8, 20)[::2]
    assert torch.equal(token_logprobs(every_other, tokens), token_logprobs(every_other.contiguous(), tokens))


# ---- exclusion, NaN, misuse


@pytest.mark.parametrize("op", [token_logprobs, token_logprobs_reference])
@pytest.mark.parametrize("vocab", [5, 40, 1500])
def test_an_excluded_token_has_minus_infinity(op: Any, vocab: int) -> None:
    logits = randn(1, vocab)
    logits[0, 3] = -INF
    logprobs, entropy, grad = run(op, logits, torch.tensor([3]), 1.0, torch.ones(1), torch.zeros(1))
    assert logprobs.item() == -INF
    assert entropy.isfinite().all()
    expected = -torch.softmax(logits, -1)
    expected[0, 3] = 1.0  # as log_softmax has it
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("op", [token_logprobs, token_logprobs_reference])
@pytest.mark.parametrize(("column", "value"), [(0, math.nan), (39, math.nan), (33, INF), (3, INF)])
@pytest.mark.parametrize("vocab", [40, 1500])
def test_nan_and_infinity_show_in_their_row_alone(op: Any, vocab: int, column: int, value: float) -> None:
    logits = randn(3, vocab)
    logits[1, column] = value
    results = run(op, logits, torch.tensor([3, 3, 3]), 1.0, torch.ones(3), torch.ones(3))
    for result in results:
        assert result[1].isnan().all()
        assert result[[0, 2]].isfinite().all()
    _, _, grad = run(op, logits, torch.tensor([3, 3, 3]), 1.0, torch.ones(3))
    assert grad[1].isnan().all()


@pytest.mark.parametrize("op", [token_logprobs, token_logprobs_reference])
def test_a_row_without_a_token_is_nan(op: Any) -> None:
    results = run(op, torch.full((1, 20), -INF), torch.tensor([3]), 1.0, torch.ones(1), torch.ones(1))
    assert all(result.isnan().all() for result in results)


def test_no_rows() -> None:
    logprobs, entropy, grad = run(
        token_logprobs, torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), 1.0, torch.ones(0), torch.ones(0)
    )
    assert logprobs.shape == entropy.shape == (0,)
    assert grad.shape == (0, 7)


@pytest.mark.parametrize("op", [token_logprobs, token_logprobs_reference])
def test_misuse_is_named(op: Any) -> None:
    logits, tokens = torch.zeros(2, 5), torch.tensor([0, 4])
    for bad, message in (
        ((logits, torch.tensor([0, 5])), r"tokens must lie in 0..4"),
        ((logits, torch.tensor([-100, 0])), r"tokens must lie in 0..4"),
        ((logits, tokens[:1]), r"tokens \(1,\) torch.int64; pass int64 \[2\]"),
        ((logits, tokens.int()), "pass int64"),
        ((logits[0], tokens), r"logits \(5,\)"),
        ((logits.long(), tokens), "pass floats"),
        ((logits[:, :0], tokens), "V must be at least 1"),
        ((logits, tokens, torch.ones(3)), r"temperatures \(3,\)"),
        ((logits, tokens, -1.0), r"temperatures\[0\] is -1.0; use 0 \(greedy\) or at least 1e-06"),
        ((logits, tokens, torch.tensor([1.0, math.nan])), r"temperatures\[1\] is nan"),
        ((logits, tokens, torch.tensor([1.0, 1e-7])), r"temperatures\[1\] is 1.0*.*e-07; use 0"),
        ((logits, tokens.to("meta")), "tokens are on meta, logits on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*bad)
