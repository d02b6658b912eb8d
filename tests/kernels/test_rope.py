"""rope_store_kv: against its reference, by hand, and that a row's bits are its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from longtail.kernels.rope import rope_store_kv, rope_store_kv_reference

LAYERS, BLOCKS = 3, 4


def make_kv(kv_heads: int, block: int, dim: int) -> torch.Tensor:
    """A cache whose every number is different, so that a stray write shows."""
    kv = torch.empty(BLOCKS, LAYERS, 2, kv_heads, block * dim)
    return kv.copy_(torch.arange(kv.numel()).view_as(kv))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rope_tables(positions: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(positions).float(), 10000.0 ** (-torch.arange(0, dim, 2).float() / dim))
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block", "dim"), [(1, 1, 16, 16), (9, 3, 16, 64), (4, 1, 32, 20), (2, 2, 16, 6)]
)
def test_rope_store_kv_is_the_reference(heads: int, kv_heads: int, block: int, dim: int, norm: bool) -> None:
    tokens = 6
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, seed=3) * 3
    cos, sin = rope_tables(50, dim)
    positions = torch.tensor([0, 1, 49, 7, 7, 0])
    slots = torch.tensor([5, 4 * block - 1, -1, block, 0, -1])
    qw, kw = (1 + randn(dim, seed=4) / 4, 1 + randn(dim, seed=5) / 4) if norm else (None, None)
    ours, theirs = make_kv(kv_heads, block, dim), make_kv(kv_heads, block, dim)
    q = rope_store_kv(qkv, cos, sin, positions, qw, kw, 1e-6, ours, 1, slots, block, heads, kv_heads)
    expected = rope_store_kv_reference(qkv, cos, sin, positions, qw, kw, 1e-6, theirs, 1, slots, block, heads, kv_heads)
    torch.testing.assert_close(q, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    written = torch.zeros(BLOCKS, block, dtype=torch.bool)
    written.view(-1)[slots[slots >= 0]] = True
    k_stays = ours.view(BLOCKS, LAYERS, 2, kv_heads, dim, block)[:, 1, 0].permute(0, 3, 1, 2)[~written]
    k_before = make_kv(kv_heads, block, dim).view(BLOCKS, LAYERS, 2, kv_heads, dim, block)[:, 1, 0]
    assert torch.equal(k_stays, k_before.permute(0, 3, 1, 2)[~written])
    assert torch.equal(ours[:, [0, 2]], make_kv(kv_heads, block, dim)[:, [0, 2]])  # other layers


def test_rope_store_kv_by_hand() -> None:
    """A quarter turn: (low, high) becomes (-high, low). One head, head dim 2; V is stored as it is."""
    cos, sin = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    kv = torch.zeros(1, 1, 2, 1, 16 * 2)
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    q = rope_store_kv(qkv, cos, sin, torch.tensor([1]), None, None, 1e-6, kv, 0, torch.tensor([2]), 16, 1, 1)
    assert q.tolist() == [[[-2.0, 1.0]]]
    assert kv[0, 0, 0, 0].view(2, 16)[:, 2].tolist() == [-4.0, 3.0]
    assert kv[0, 0, 1, 0].view(16, 2)[2].tolist() == [5.0, 6.0]
    q = rope_store_kv(qkv, cos, sin, torch.tensor([0]), None, None, 1e-6, kv, 0, torch.tensor([2]), 16, 1, 1)
    assert q.tolist() == [[[1.0, 2.0]]]


def test_rope_store_kv_norm_by_hand() -> None:
    """(3, 4) has mean square 12.5; q's weight doubles, k's leaves alone; position 0 does not turn."""
    cos, sin = torch.ones(1, 1), torch.zeros(1, 1)
    kv = torch.zeros(1, 1, 2, 1, 16 * 2)
    q_weight, k_weight = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0])
    qkv = torch.tensor([[3.0, 4.0, 3.0, 4.0, 3.0, 4.0]])
    zero = torch.tensor([0])
    q = rope_store_kv(qkv, cos, sin, zero, q_weight, k_weight, 0.0, kv, 0, zero, 16, 1, 1)
    root = math.sqrt(12.5)
    assert q.flatten().tolist() == pytest.approx([6 / root, 8 / root])
    assert kv[0, 0, 0, 0].view(2, 16)[:, 0].tolist() == pytest.approx([3 / root, 4 / root])
    assert kv[0, 0, 1, 0].view(16, 2)[0].tolist() == [3.0, 4.0]  # values are not normalised


@pytest.mark.parametrize("norm", [False, True])
def test_rope_store_kv_rows_do_not_depend_on_the_batch(norm: bool) -> None:
    tokens, heads, kv_heads, block, dim = 9, 3, 1, 16, 20
    qkv, (cos, sin) = randn(tokens, 5 * dim, seed=6), rope_tables(30, dim)
    positions, slots = torch.arange(tokens) * 3, torch.arange(tokens) * 5
    qw, kw = (randn(dim, seed=7), randn(dim, seed=8)) if norm else (None, None)
    together, alone = make_kv(kv_heads, block, dim), make_kv(kv_heads, block, dim)
    q = rope_store_kv(qkv, cos, sin, positions, qw, kw, 1e-5, together, 0, slots, block, heads, kv_heads)
    for t in reversed(range(tokens)):
        row = slice(t, t + 1)
        one = rope_store_kv(
            qkv[row], cos, sin, positions[row], qw, kw, 1e-5, alone, 0, slots[row], block, heads, kv_heads
        )
        assert torch.equal(one, q[row])
    assert torch.equal(together, alone)


# ---- the reference


@pytest.mark.parametrize("rank", [5, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotary", [20, 12])
def test_the_reference_is_the_formula(rotary: int, dtype: torch.dtype, rank: int) -> None:
    """Row by row in float64, rounded where the module says; every dtype, both layouts of the cache, partial rotary."""
    tokens, heads, kv_heads, block, dim = 3, 3, 1, 4, 20
    qkv, (cos, sin) = randn(tokens, 5 * dim, seed=3).to(dtype), rope_tables(30, rotary)
    qw, kw = (1 + randn(2, dim, seed=4) / 4).to(dtype)
    positions, slots = torch.tensor([29, 0, 7]), torch.tensor([9, -1, 2])
    shape = (block * dim,) if rank == 5 else (block, dim)
    kv = torch.full((BLOCKS, LAYERS, 2, kv_heads, *shape), -7.0).to(torch.bfloat16)
    q = rope_store_kv(qkv, cos, sin, positions, qw, kw, 1e-6, kv, 1, slots, block, heads, kv_heads)
    assert q.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    half = rotary // 2
    for t in range(tokens):
        for h in range(heads + kv_heads):
            x = qkv[t, h * dim : (h + 1) * dim].double()
            x = (x / (x.square().mean() + 1e-6).sqrt()).to(dtype).double()
            x = (x * (qw if h < heads else kw)).to(dtype).double()
            c, s = cos[positions[t]].double(), sin[positions[t]].double()
            low, high = x[:half], x[half:rotary]
            x = torch.cat([low * c - high * s, high * c + low * s, x[rotary:]])
            if h < heads:
                torch.testing.assert_close(q[t, h].double(), x, rtol=tolerance, atol=tolerance)
            elif t == 0:  # slot 9 is block 2, offset 1
                k = kv[2, 1, 0, 0].view(dim, block)[:, 1] if rank == 5 else kv[2, 1, 0, 0, 1]
                torch.testing.assert_close(k.double(), x, rtol=1.6e-2, atol=1.6e-2)
    v = kv[2, 1, 1, 0].view(block, dim)[1]
    assert torch.equal(v, qkv[0, 4 * dim :].to(torch.bfloat16))
    assert (kv != -7).sum() == 2 * 2 * dim  # two slots, k and v, and nothing else


def test_partial_rotary_on_the_cpu_is_the_reference() -> None:
    qkv, (cos, sin) = randn(3, 5 * 20, seed=3), rope_tables(30, 12)
    positions, slots = torch.tensor([29, 0, 7]), torch.tensor([9, -1, 2])
    args = (qkv, cos, sin, positions, 1 + randn(20, seed=4) / 4, 1 + randn(20, seed=5) / 4, 1e-6)
    ours, theirs = make_kv(1, 4, 20), make_kv(1, 4, 20)
    q = rope_store_kv(*args, ours, 1, slots, 4, 3, 1)
    torch.testing.assert_close(q, rope_store_kv_reference(*args, theirs, 1, slots, 4, 3, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_misuse_is_named() -> None:
    cos, weight, kv, one = torch.ones(4, 4), torch.ones(8), make_kv(1, 4, 8), torch.tensor([0])

    given: dict[str, Any] = {"qkv": torch.ones(1, 24), "cos": cos, "sin": cos, "positions": one, "slots": one}
    given |= {"q_weight": weight, "k_weight": weight, "eps": 1e-6, "kv": kv, "layer": 0}

    def call(**changed: Any) -> None:
        rope_store_kv(**(given | changed), block_size=4, heads=1, kv_heads=1)

    call()
    with pytest.raises(ValueError, match="both q_weight and k_weight, or neither"):
        call(k_weight=None)
    with pytest.raises(ValueError, match=r"q_weight \(9,\) must be \[8\]"):
        call(q_weight=torch.ones(9))
    with pytest.raises(ValueError, match="do not fit 1 heads and 1 KV heads"):
        call(qkv=torch.ones(1, 27))
    with pytest.raises(ValueError, match=r"must be \[max positions, at most 4\]"):
        call(cos=torch.ones(4, 5), sin=torch.ones(4, 5))
    with pytest.raises(ValueError, match="one of each for the 1 rows of qkv"):
        call(slots=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"kv is torch.int8, which needs scales"):
        call(kv=kv.to(torch.int8))
