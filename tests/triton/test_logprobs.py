"""The kernels of token_logprobs in the interpreter: against the float64 reference, and a row's bits are its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from longtail.kernels import linear_logprobs
from longtail.kernels.logprobs import _TRITON, token_logprobs_reference, token_logprobs_triton
from longtail.kernels.logprobs_triton import MOST_CHUNK, chunk_size

pytestmark = pytest.mark.usefixtures("outputs_start_as_nan")

INF = math.inf
VOCABS = [1, 2, 17, 1000, MOST_CHUNK, MOST_CHUNK + 1, 50_257]
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Of the gradient, which has the logits' dtype; everything else is float32: 2e-6 for logits of up to 20."""


def problem(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Logits (some excluded, in one row a whole chunk), tokens that are not, temperatures, weights of both outputs."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * 4).to(dtype)
    tokens = torch.randint(vocab, (rows,), generator=generator)
    tokens[0] = vocab - 1
    excluded = torch.rand(rows, vocab, generator=generator) < 0.3
    excluded[-1, : vocab // 4096 * 4096] = True
    excluded[torch.arange(rows), tokens] = False
    temperatures = torch.tensor([1.0, 0.0, 0.6, 1.7]).repeat(rows)[:rows]
    g, ge = torch.randn(2, rows, generator=generator)
    return logits.masked_fill(excluded, -INF), tokens, temperatures, g, ge


def run(op: Any, logits: torch.Tensor, tokens: torch.Tensor, t: Any, g: Any, ge: Any = None, **options: Any) -> Any:
    leaf = logits.clone().requires_grad_()
    out = op(leaf * 1.0, tokens, t, return_entropy=ge is not None, **options)
    logprobs, entropy = out if ge is not None else (out, None)
    ((logprobs * g).sum() + (0.0 if ge is None else (entropy * ge).sum())).backward()
    assert leaf.grad is not None
    return logprobs.detach(), torch.zeros(1) if entropy is None else entropy.detach(), leaf.grad


@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_against_the_reference(dtype: torch.dtype, vocab: int, with_entropy: bool) -> None:
    logits, tokens, t, g, ge = problem(2 if vocab > 10_000 else 5, vocab, dtype)
    got = run(token_logprobs_triton, logits, tokens, t, g, ge if with_entropy else None)
    want = run(token_logprobs_reference, logits.double(), tokens, t, g, ge if with_entropy else None)
    assert got[0].dtype == torch.float32
    assert got[2].dtype == dtype
    torch.testing.assert_close(got[0].double(), want[0], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got[1].double(), want[1].double(), rtol=2e-6, atol=5e-6)
    torch.testing.assert_close(got[2].double(), want[2], rtol=1e-5 + ROUNDING[dtype], atol=2e-6)
    assert not got[2][logits == -INF].any()


@pytest.mark.parametrize("vocab", [100, 2 * MOST_CHUNK + 3])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, vocab: int) -> None:
    logits, tokens, t, g, ge = problem(4, vocab, dtype)
    whole = run(token_logprobs_triton, logits, tokens, t, g, ge)
    spoiled = logits.clone()
    spoiled[[0, 3]] = torch.nan
    beside = run(token_logprobs_triton, spoiled, tokens, t, g, ge)
    backwards = run(token_logprobs_triton, logits.flip(0), tokens.flip(0), t.flip(0), g.flip(0), ge.flip(0))
    for i, result in enumerate(whole):
        assert torch.equal(beside[i][1:3], result[1:3])
        assert torch.equal(backwards[i].flip(0), result)
    one = slice(2, 3)
    alone = run(token_logprobs_triton, logits[one], tokens[one], t[one], g[one], ge[one])
    assert all(torch.equal(a, result[one]) for a, result in zip(alone, whole, strict=True))


def test_inplace_backward_and_views() -> None:
    logits, tokens, t, g, ge = problem(3, MOST_CHUNK + 7)
    apart = run(token_logprobs_triton, logits, tokens, t, g, ge)
    within = run(token_logprobs_triton, logits, tokens, t, g, ge, inplace_backward=True)
    assert all(torch.equal(a, w) for a, w in zip(apart, within, strict=True))
    wide = torch.randn(3, 60, generator=torch.Generator().manual_seed(0))
    for view in (wide[:, ::3], wide[:, 3:23]):
        some = torch.tensor([0, 5, 19])
        leaves = wide.clone().requires_grad_(), view.contiguous().requires_grad_()
        seen = leaves[0].as_strided(view.size(), view.stride(), view.storage_offset())
        outs = [token_logprobs_triton(x, some) for x in (seen, leaves[1])]
        for out in outs:
            (out * g).sum().backward()
        assert torch.equal(outs[0], outs[1])
        assert leaves[0].grad is not None
        assert leaves[1].grad is not None
        assert torch.equal(leaves[0].grad.as_strided(view.size(), view.stride(), view.storage_offset()), leaves[1].grad)


@pytest.mark.parametrize(("column", "value"), [(0, torch.nan), (4200, torch.nan), (0, INF), (4200, INF)])
def test_nan_and_infinity_show_in_their_row_alone(column: int, value: float) -> None:
    logits, tokens, t, g, ge = problem(3, MOST_CHUNK + 200)
    logits[1, column] = value
    for results in (
        run(token_logprobs_triton, logits, tokens, t, g, ge),
        run(token_logprobs_triton, logits, tokens, t, g)[::2],
    ):
        for result in results:
            assert result[1].isnan().all()
            assert not result[[0, 2]].isnan().any()


def test_a_nan_among_excluded_tokens_shows() -> None:
    """The other tokens of its chunk, or of the whole row, are -inf."""
    logits = torch.full((2, MOST_CHUNK + 200), -INF)
    logits[:, 4200] = torch.nan
    logits[0, 3] = 0.0
    results = run(token_logprobs_triton, logits, torch.tensor([3, 3]), 1.0, torch.ones(2), torch.ones(2))
    assert all(result.isnan().all() for result in results)


def test_excluded_tokens_and_rows_without_a_token() -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -INF
    logits[1] = -INF
    logprobs, entropy, grad = run(
        token_logprobs_triton, logits, torch.tensor([3, 3]), 1.0, torch.ones(2), torch.zeros(2)
    )
    assert logprobs[0] == -INF
    assert entropy[0].isfinite()
    expected = -torch.softmax(logits[0], -1)
    expected[3] = 1.0
    torch.testing.assert_close(grad[0], expected, rtol=1e-5, atol=1e-7)
    assert all(result[1].isnan().all() for result in (logprobs, entropy, grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_the_lm_head(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the chunks' logits are overwritten by their gradient, in their own dtype."""
    monkeypatch.setattr(linear_logprobs, "backend_of", lambda x: _TRITON)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 8, generator=generator), torch.randn(50, 8, generator=generator)
    tokens, t, g = torch.arange(7) * 7, torch.tensor([1.0, 0.0, 0.6, 1.7, 1.0, 1.0, 2.0]), torch.arange(1.0, 8.0)
    results = []
    for wide in (False, True):
        h, w = (x.to(dtype, copy=True).to(torch.float64 if wide else dtype).requires_grad_() for x in (hidden, weight))
        if wide:
            out = token_logprobs_reference(h @ w.t(), tokens, t)
        else:
            out = linear_logprobs.linear_token_logprobs(h, w, tokens, t, rows_per_chunk=3)
        grads = torch.autograd.grad((out * g).sum(), (h, w))
        results.append([x.double() for x in (out.detach(), *grads)])
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2  # bfloat16: of the logits, their gradient and the sums
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() < tolerance * want.abs().max()


def test_no_rows_and_the_chunks_of_a_row() -> None:
    none = torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64)
    assert run(token_logprobs_triton, *none, 1.0, torch.ones(0))[2].shape == (0, 7)
    assert [chunk_size(v) for v in (1, 3, 4096, 49_152)] == [1, 4, 4096, 4096]
