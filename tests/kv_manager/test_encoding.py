"""Saved KV of 8 bits: how far off it is, what it takes, and that nothing broken is hidden."""

from __future__ import annotations

import math

import pytest
import torch

from longtail.kv_manager.encoding import Encoding, decode, encode, encoded_shapes
from longtail.kv_manager.layout import Layout

LOSSY: list[Encoding] = ["int8", "fp8"]
LAYOUT = Layout("kv", 3, 2, 16, 64)


def there_and_back(kv: torch.Tensor, blocks: list[int], encoding: Encoding) -> tuple[torch.Tensor, int]:
    """-> the blocks as they come back, and the bytes between."""
    shapes = encoded_shapes(len(blocks), LAYOUT, torch.float32, encoding)
    out = {name: torch.full(shape, 1).to(dtype) for name, (dtype, shape) in shapes.items()}
    encode(kv, blocks, LAYOUT, out)
    back = decode(out, LAYOUT, 0, len(blocks))
    torch.testing.assert_close(decode(out, LAYOUT, 1, 3), back[1:3], rtol=0, atol=0, equal_nan=True)
    return back, sum(t.nbytes for t in out.values())


def by_token(kv: torch.Tensor) -> torch.Tensor:
    """[blocks, layers, 2, kv heads, block size, head dim]"""
    keys, values = kv[:, :, 0].unflatten(-1, (64, 16)).transpose(-1, -2), kv[:, :, 1].unflatten(-1, (16, 64))
    return torch.stack([keys, values], 2)


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_error_is_bounded_and_the_bytes_are_a_quarter(encoding: Encoding) -> None:
    kv = torch.randn(6, 3, 2, 2, 16 * 64, generator=torch.Generator().manual_seed(0))
    kv *= torch.logspace(-6, 3, 16 * 64)
    kv[1] = 0
    kv[0, 0, 0, 0, :7] = torch.tensor([1e-38, 1e-40, 1e-42, 3e-43, 1e-44, -1e-45, 3e38])
    kv[5, 0] *= 1e-42  # scales are subnormal, or 0
    before = kv.clone()
    back, nbytes = there_and_back(kv, [4, 1, 0, 5], encoding)
    assert torch.equal(kv, before)
    exact, got = by_token(kv[[4, 1, 0, 5]]), by_token(back)
    largest = exact.abs().amax(-1, keepdim=True)
    bound = largest / 254 if encoding == "int8" else torch.maximum(exact.abs() / 16, largest / 458752)
    # A scale is a multiple of 1.4e-45, so that far down a code is off by as much for each of its steps.
    slack = bound * 1e-5 + 448 * 1.5e-45
    assert bool(((got - exact).abs() <= bound + slack).all())
    assert bool(((got - exact).abs() > bound * 0.9).any())  # and the bound is met
    assert torch.equal(back[1], torch.zeros_like(back[1]))
    assert nbytes == back.nbytes // 4 + back.nbytes // 64


@pytest.mark.parametrize("encoding", LOSSY)
def test_the_largest_magnitude_comes_back(encoding: Encoding) -> None:
    """It has the largest code; of a power of two times that code, the scale is exact."""
    kv = torch.rand(3, 3, 2, 2, 16 * 64, generator=torch.Generator().manual_seed(0))
    by_hand = 127.0 if encoding == "int8" else 448.0
    kv[:, :, :, :, ::7] = -by_hand / 64  # in every token, for 7 divides neither 16 nor 64
    back, _ = there_and_back(kv, [0, 1, 2], encoding)
    assert torch.equal(back[..., ::7], kv[..., ::7])


@pytest.mark.parametrize("encoding", LOSSY)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_broken_stays_visible(encoding: Encoding, value: float) -> None:
    """In its token and head; the others are as they were."""
    kv = torch.randn(3, 3, 2, 2, 16 * 64, generator=torch.Generator().manual_seed(0))
    clean, _ = there_and_back(kv, [0, 1, 2], encoding)
    kv[1, 2, 0, 1, 5 * 16 + 3] = value  # dimension 5 of token 3
    kv[2, 0, 1, 0, 7 * 64 + 9] = value  # dimension 9 of token 7
    back, _ = there_and_back(kv, [0, 1, 2], encoding)
    broken = torch.zeros(3, 3, 2, 2, 16, dtype=torch.bool)
    broken[1, 2, 0, 1, 3] = broken[2, 0, 1, 0, 7] = True
    assert not by_token(back)[broken].isfinite().any()
    assert torch.equal(by_token(back)[~broken], by_token(clean)[~broken])


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_block_does_not_depend_on_those_saved_with_it(encoding: Encoding) -> None:
    kv = torch.randn(5, 3, 2, 2, 16 * 64, generator=torch.Generator().manual_seed(0))
    together, _ = there_and_back(kv, [3, 1, 4], encoding)
    again, _ = there_and_back(kv, [0, 4, 2, 1], encoding)
    assert torch.equal(together[1], again[3]) and torch.equal(together[2], again[1])


def test_fp8_keeps_the_digits_of_small_numbers() -> None:
    """One number of a token is a thousand times as large as the others: int8 loses them, fp8 does not."""
    kv = torch.rand(3, 3, 2, 2, 16 * 64, generator=torch.Generator().manual_seed(0)) + 0.5
    kv[:, :, :, :, ::7] = 1000.0
    small = kv < 2
    for encoding in LOSSY:
        back, _ = there_and_back(kv, [0, 1, 2], encoding)
        error = ((back - kv).abs() / kv)[small].max()
        assert error == 1 if encoding == "int8" else error <= 1 / 16
