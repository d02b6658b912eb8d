"""linear_token_logprobs: the results of the unfused form, whatever the chunks, and never many logits at a time."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from longtail.kernels.linear import PackedLinear, find_row_rule
from longtail.kernels.linear_logprobs import linear_token_logprobs
from longtail.kernels.logprobs import token_logprobs, token_logprobs_reference

T, H, V = 13, 24, 301


def problem(dtype: torch.dtype = torch.float32, rows: int = T, vocab: int = V) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(rows, H, generator=generator).to(dtype).requires_grad_(),
        "weight": (torch.randn(vocab, H, generator=generator) / 3).to(dtype).requires_grad_(),
        "bias": torch.randn(vocab, generator=generator).to(dtype).requires_grad_(),
        "tokens": torch.randint(vocab, (rows,), generator=generator),
        "temperatures": torch.tensor([1.0, 0.0, 0.7, 1.6]).repeat(rows)[:rows],
    }


def fused(p: dict[str, Any], **options: Any) -> Any:
    return linear_token_logprobs(
        p["hidden"], p["weight"], p["tokens"], p["temperatures"], bias=p["bias"], return_entropy=True, **options
    )


def unfused(p: dict[str, Any], op: Any = token_logprobs) -> Any:
    return op(F.linear(p["hidden"], p["weight"], p["bias"]), p["tokens"], p["temperatures"], return_entropy=True)


def gradients(p: dict[str, Any], run: Callable[[dict[str, Any]], Any]) -> list[torch.Tensor]:
    for name in ("hidden", "weight", "bias"):
        p[name].grad = None
    logprobs, entropy = run(p)
    generator = torch.Generator().manual_seed(5)
    g, ge = torch.randn(2, len(logprobs), generator=generator)
    ((logprobs * g).sum() + (entropy * ge).sum()).backward()
    return [logprobs.detach(), entropy.detach(), *(p[name].grad for name in ("hidden", "weight", "bias"))]


@pytest.mark.parametrize("rows_per_chunk", [1, 5, 13, 64, None])
def test_float32_against_float64(rows_per_chunk: int | None) -> None:
    got = gradients(problem(), lambda p: fused(p, rows_per_chunk=rows_per_chunk))
    p = problem()
    wide = {k: v.detach().double().requires_grad_() if k in ("hidden", "weight", "bias") else v for k, v in p.items()}
    want = gradients(wide, lambda p: unfused(p, token_logprobs_reference))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=1e-5)


def test_bfloat16_sums_its_gradients_in_float32() -> None:
    """400 rows in chunks of one: a sum of 400 terms in bfloat16 would stop growing (about 8 bits)."""
    p = problem(torch.bfloat16, rows=400, vocab=3)
    with torch.no_grad():
        p["hidden"].fill_(1.0)
        p["weight"].zero_()
        p["bias"].zero_()
    p["tokens"].zero_()
    linear_token_logprobs(p["hidden"], p["weight"], p["tokens"], bias=p["bias"], rows_per_chunk=1).sum().backward()
    # each row adds onehot - 1/3, rounded to bfloat16
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3]).bfloat16().float() * 400
    assert p["weight"].grad.dtype == torch.bfloat16
    assert torch.equal(p["weight"].grad, expected.bfloat16()[:, None].expand(3, H))
    assert torch.equal(p["bias"].grad, expected.bfloat16())


def test_bfloat16_against_the_unfused_form() -> None:
    got = gradients(problem(torch.bfloat16), lambda p: fused(p, rows_per_chunk=4))
    want = gradients(problem(torch.bfloat16), unfused)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=3e-2)


def test_float64_passes_gradcheck() -> None:
    p = problem(rows=3, vocab=7)
    inputs = [p[name].detach().double().requires_grad_() for name in ("hidden", "weight", "bias")]

    def op(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return fused({**p, "hidden": hidden, "weight": weight, "bias": bias}, rows_per_chunk=2)

    assert torch.autograd.gradcheck(op, inputs)


def test_chunks_do_not_change_a_bit_of_an_invariant_matmul() -> None:
    p = problem()
    rule = find_row_rule([(H, V)])
    if rule is None:
        pytest.skip("no row-invariant matmul on this machine")
    packed = PackedLinear([p["weight"]], p["bias"].detach(), rule.backend)

    def linear(h: torch.Tensor) -> torch.Tensor:
        return packed(F.pad(h.detach(), (0, 0, 0, rule.padded(len(h)) - len(h))))[: len(h)]

    whole = token_logprobs(linear(p["hidden"]), p["tokens"], p["temperatures"])
    for rows in (1, 2, 3, 5, 8, 13, 100):
        logprobs, _ = fused(p, rows_per_chunk=rows, linear=linear)
        assert torch.equal(logprobs, whole), rows
    # and its gradients are those of the product that it computes
    got = gradients(p, lambda p: fused(p, rows_per_chunk=5, linear=linear))
    for one, other in zip(got, gradients(problem(), unfused), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-5)


def test_the_forward_of_a_chunk_is_the_unfused_one_bit_for_bit() -> None:
    p = problem()
    assert torch.equal(fused(p, rows_per_chunk=100)[0], unfused(p)[0])


class LiveLogits(TorchDispatchMode):
    """The most elements of distinct tensors [*, V] that were alive after any operation; [H, V] is the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, weakref.ref[torch.Tensor]] = {}
        self.count = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == V and tensor.shape[0] != H:
                self.alive[next(self.count)] = weakref.ref(tensor)
        sizes = {}
        for tensor in (ref() for ref in self.alive.values()):
            if tensor is not None:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        self.peak = max(self.peak, sum(sizes.values()))
        return out


def peak_logits(run: Callable[[dict[str, Any]], Any]) -> int:
    p = problem()
    with LiveLogits() as live:
        gradients(p, run)
    return live.peak


@pytest.mark.parametrize("rows", [1, 4, 13])
def test_no_more_logits_are_alive_than_a_chunk_has(rows: int) -> None:
    assert peak_logits(lambda p: fused(p, rows_per_chunk=rows)) == rows * V


def test_live_logits_are_seen() -> None:
    """The unfused form holds them all, and a gradient as large; in place only one of the two."""
    assert peak_logits(unfused) >= 2 * T * V
    inplace = functools.partial(token_logprobs, inplace_backward=True)
    assert T * V <= peak_logits(lambda p: unfused(p, inplace)) < 2 * T * V


def test_no_rows_and_no_gradient_wanted() -> None:
    p = problem(rows=0)
    logprobs, entropy = fused(p)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert p["hidden"].grad.shape == (0, H)
    assert not p["weight"].grad.any()
    p = problem()
    frozen = {name: value.detach() for name, value in p.items()}
    out = linear_token_logprobs(p["hidden"], frozen["weight"], p["tokens"], rows_per_chunk=4)
    out.sum().backward()
    assert p["hidden"].grad is not None


def test_misuse_is_named() -> None:
    hidden, weight, tokens = torch.zeros(2, 4), torch.zeros(5, 4), torch.tensor([0, 1])
    for arguments, options, message in (
        ((hidden, weight[:, :3], tokens), {}, r"does not fit weight \(5, 3\); pass \[T, H\]"),
        ((hidden, weight, tokens), {"bias": torch.zeros(4)}, r"bias \(4,\), weight has 5 rows"),
        ((hidden, weight, tokens), {"rows_per_chunk": 0}, "rows_per_chunk is 0"),
        ((hidden.bfloat16(), weight, tokens), {}, r"hidden is torch.bfloat16, weight torch.float32; give them one"),
        ((hidden, weight, tokens), {"bias": torch.zeros(5).half()}, r"weight torch.float32, bias torch.float16; give"),
        ((hidden, weight, tokens, torch.tensor([1.0, 1e-9])), {}, r"temperatures\[1\] is"),
        ((hidden, weight.to("meta"), tokens), {}, "weight is on meta, hidden on cpu"),
        ((hidden, weight, torch.tensor([0, 5])), {}, r"tokens must lie in 0..4"),
        ((hidden, weight, tokens), {"linear": lambda h: h}, r"linear gave \(2, 4\)"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_token_logprobs(*arguments, **options)


@pytest.mark.parametrize("backward_under", [False, True])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_has_the_gradients_of_plain_autograd(hidden_dtype: torch.dtype, backward_under: bool) -> None:
    """Both multiply in bfloat16 and round the gradient of the logits to it: they differ by about one such rounding,
    2^-8. Logits of another dtype in the backward pass than in the forward one would be off by far more in the sum of a
    row's gradients, which is 0."""

    def run(op: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        p = problem(rows=64)
        hidden, weight, bias = (p[name].detach() * 3 for name in ("hidden", "weight", "bias"))
        inputs = [hidden.to(hidden_dtype).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            out = op(*inputs, p["tokens"])
        with torch.autocast("cpu", torch.bfloat16, backward_under):
            out.sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    got = run(lambda h, w, b, tokens: linear_token_logprobs(h, w, tokens, bias=b, rows_per_chunk=7))
    want = run(lambda h, w, b, tokens: token_logprobs_reference(F.linear(h, w, b), tokens))
    assert len(got) == len(want) == 4
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).norm() / other.norm()) < 2**-7
    assert abs(float(got[3].sum())) < 0.1  # 64 rows; 0 but for rounding each logit's gradient to bfloat16


def test_no_rows_keep_float64() -> None:
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        nothing = torch.empty(0, 4, dtype=dtype, requires_grad=True)
        out, entropy = linear_token_logprobs(
            nothing, torch.ones(3, 4, dtype=dtype), torch.empty(0, dtype=torch.int64), return_entropy=True
        )
        assert out.dtype == entropy.dtype == expected
        out.sum().backward()
        assert nothing.grad is not None and nothing.grad.shape == (0, 4)
