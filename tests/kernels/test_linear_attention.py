"""linear_attention: against the reference, Mamba-2 and lightning attention of `transformers`, by hand; exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numba
import pytest
import torch
from tests.kernels.state_cases import LENS, Sequences, assert_equal, int64, randn
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan, mamba2_selective_state_update

from longtail.kernels import linear_attention as module
from longtail.kernels.linear_attention import linear_attention, linear_attention_reference

SIZES = [(1, 1, 4, 4), (2, 4, 7, 33), (2, 2, 16, 32), (1, 3, 18, 70)]  # k_heads, v_heads, k_dim, v_dim


def inputs(rows: int, size: tuple[int, ...], seed: int = 0, by_channel: bool = False) -> list[torch.Tensor]:
    """q, k, v, g of `rows` rows; decays from 1 down to exp(-3)."""
    k_heads, v_heads, k_dim, v_dim = size
    q, k = (randn(rows, k_heads, k_dim, seed=seed * 10 + i) for i in (1, 2))
    g = -3 * randn(rows, v_heads, *([k_dim] if by_channel else []), seed=seed * 10 + 3).sigmoid()
    return [q, k, randn(rows, v_heads, v_dim, seed=seed * 10 + 4), g]


def scan(
    parts: Iterable[torch.Tensor],
    state: torch.Tensor,
    *where: torch.Tensor,
    op: Callable[..., torch.Tensor] = linear_attention,
    scale: float = 0.5,
) -> torch.Tensor:
    """parts: q, k, v, g; where: cu_seqlens, read, write."""
    return op(*parts, state, *where, scale=scale)


def sequences(size: tuple[int, ...], by_channel: bool = False) -> Sequences:
    return Sequences(scan, [inputs(n, size, i, by_channel) for i, n in enumerate(LENS)], size[1:])


def test_by_hand() -> None:
    """S = (6, 1) halves to (3, 0.5) and takes 8 under key e0: (11, 0.5); q = (2, 4) reads 22 + 2, halved by the scale.
    The second row forgets all that and writes 1 under e1."""
    state = torch.tensor([6.0, 1.0, 0.0, 0.0]).view(2, 1, 2, 1).clone()
    q, k = torch.tensor([[[2.0, 4.0]], [[1.0, 1.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    v, g = torch.tensor([[[8.0]], [[1.0]]]), torch.tensor([[-math.log(2)], [-1e3]])
    out = scan([q, k, v, g], state, int64(0, 2), int64(0), int64(1))
    assert out.flatten().tolist() == pytest.approx([12, 0.5], rel=1e-6)
    assert state.flatten().tolist() == pytest.approx([6, 1, 0, 1], rel=1e-6)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
@pytest.mark.parametrize("size", SIZES)
def test_is_the_reference(size: tuple[int, ...], by_channel: bool) -> None:
    """Against the reference in float64: within 1e-5 of numbers about 1 to 10."""
    parts, state = inputs(31, size, by_channel=by_channel), randn(6, *size[1:], seed=99)
    twin = state.double()
    where = (int64(0, 9, 9, 10, 28), int64(0, 1, 0, 1), int64(2, 3, 4, 5))
    out = scan(parts, state, *where)
    expected = scan([x.double() for x in parts], twin, *where, op=linear_attention_reference)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), twin, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[3], state[1])


@pytest.mark.parametrize("size", SIZES)
def test_is_mamba_2_of_transformers(size: tuple[int, ...]) -> None:
    """In chunks of 16 and one token more, 70 in all: q is C, k is B, v is dt x, g is dt A. Within 1e-4 of numbers up to
    about 10 (all are float32)."""
    heads, state_size, head_dim = size[1:]
    c, b, x, _ = inputs(71, size)
    dt, a = randn(71, heads, seed=7).sigmoid(), -randn(heads, seed=8).exp()
    state = torch.zeros(2, *size[1:])
    out = linear_attention(c, b, x * dt[:, :, None], dt * a, state, int64(0, 71), int64(0), int64(1))
    theirs, last = mamba2_chunk_scan(
        *(part[None, :70] for part in (x, dt)), a, *(part[None, :70] for part in (b, c)), 16, return_final_states=True
    )
    torch.testing.assert_close(out[:70], theirs[0], rtol=1e-4, atol=1e-4)
    wide = (heads, head_dim, state_size)
    step = mamba2_selective_state_update(
        last,
        x[70:],
        dt[70:, :, None].expand(1, heads, head_dim),
        a[:, None, None].expand(wide),
        b[70:],
        c[70:],
    )
    torch.testing.assert_close(out[70:], step, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[1], last[0].transpose(1, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_depends_neither_on_the_batch_nor_on_chunks_nor_on_threads(
    size: tuple[int, ...], by_channel: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sequences(size, by_channel)
    expected = world.whole()
    monkeypatch.setattr(module, "PARALLEL_FROM", 0)
    numba.set_num_threads(min(threads, numba.get_num_threads()))
    world.check_cuts(expected)
    world.check_view(expected)


@pytest.mark.parametrize("part", range(4), ids=["q", "k", "v", "g"])
def test_nan_is_not_hidden_and_stays_in_its_sequence(part: int) -> None:
    world = sequences((2, 4, 7, 33))
    outs, _ = world.whole()
    world.parts[0][part][4] = torch.nan
    got, states = world.steps([LENS])
    assert_equal(got[1:], outs[1:])
    assert torch.equal(got[0][:4], outs[0][:4]) and got[0][4].isnan().all()
    assert states[0].isnan().any() == (part > 0)


def test_other_dtypes_take_the_reference_and_an_empty_batch() -> None:
    parts, state = inputs(5, (2, 4, 8, 16)), torch.zeros(2, 4, 8, 16)
    where = (int64(0, 5), int64(0), int64(1))
    exact = scan(parts, state, *where)
    half = scan([x.bfloat16() for x in parts], torch.zeros(2, 4, 8, 16), *where)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=5e-2, atol=5e-2)  # of rounded inputs
    nothing = scan([x[:0] for x in parts], state, int64(0), int64(), int64())
    assert nothing.shape == (0, 4, 16)


def test_misuse_is_named() -> None:
    (q, k, v, g), state = inputs(5, (2, 4, 8, 16)), torch.zeros(3, 4, 8, 16)
    where = (int64(0, 2, 5), int64(0, 0), int64(1, 2))
    with pytest.raises(ValueError, match="v_heads a multiple of k_heads"):
        linear_attention(q, k, v[:, :3], g[:, :3], state, *where)
    with pytest.raises(ValueError, match=r"g \(5, 2\) must be \(5, 4\) or \(5, 4, 8\)"):
        linear_attention(q, k, v, g[:, :2], state, *where)
    with pytest.raises(ValueError, match=r"state \(3, 4, 16, 8\) must be \[slots, 4, 8, 16\]"):
        linear_attention(q, k, v, g, state.transpose(2, 3), *where)
    with pytest.raises(ValueError, match="is also read, or written by another sequence"):
        linear_attention(q, k, v, g, state, where[0], where[1], int64(0, 1))
