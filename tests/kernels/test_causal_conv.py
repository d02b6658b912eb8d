"""causal_conv: against the reference, `transformers`, by hand; a row's bits and states are its own."""

from __future__ import annotations

import numba
import pytest
import torch
from tests.kernels.state_cases import LENS, Sequences, assert_equal, int64, randn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from longtail.kernels import causal_conv as module
from longtail.kernels.causal_conv import causal_conv, causal_conv_reference

SIZES = [(1, 2), (17, 4), (64, 3), (250, 4)]  # channels, kernel


def sequences(channels: int, kernel: int, silu: bool = True) -> Sequences:
    weight, bias = randn(channels, kernel, seed=90), randn(channels, seed=91)

    def op(parts: list[torch.Tensor], state: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        cu, read, write = where
        return causal_conv(parts[0], weight, bias, state, cu, read, write, silu)

    return Sequences(op, [[randn(n, channels, seed=i)] for i, n in enumerate(LENS)], (channels, kernel - 1))


def test_by_hand() -> None:
    """Weights 1, 10, 100 from old to new; the state holds 7 and 8; the second sequence has no row."""
    state = torch.zeros(4, 1, 2)
    state[0] = torch.tensor([7.0, 8.0])
    weight, x = torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([[1.0], [2.0], [3.0], [torch.nan]])
    cu = int64(0, 3, 3)
    out = causal_conv(x, weight, torch.tensor([0.5]), state, cu, int64(0, 0), int64(1, 2))
    assert out.flatten().tolist() == [187.5, 218.5, 321.5, 0.0]
    assert state.flatten(1).tolist() == [[7, 8], [2, 3], [7, 8], [0, 0]]
    short = causal_conv(x[:1], weight, None, state, int64(0, 1), int64(1), int64(3))
    assert short.item() == 2 + 30 + 100 and state[3].flatten().tolist() == [3, 1]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("channels", "kernel"), SIZES)
def test_is_the_reference_and_that_of_transformers(channels: int, kernel: int, bias: bool, silu: bool) -> None:
    """Outputs within 1e-5 (at most 4 products and an exponential); states are copies, hence equal."""
    weight, shift = randn(channels, kernel, seed=1), randn(channels, seed=2) if bias else None
    x, state = randn(31, channels, seed=3), randn(6, channels, kernel - 1, seed=4)
    twin = state.clone()
    cu, read, write = int64(0, 9, 9, 10, 28), int64(0, 1, 0, 1), int64(2, 3, 4, 5)
    out = causal_conv(x, weight, shift, state, cu, read, write, silu)
    expected = causal_conv_reference(x, weight, shift, twin, cu, read, write, silu)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, twin) and not out[28:].any()
    past = torch.cat([twin[0].T, x[:9]]).T[None]
    theirs = qwen3_next.causal_conv1d_fn(past, weight, shift, "silu" if silu else None)[0].T[kernel - 1 :]
    torch.testing.assert_close(out[:9], theirs, rtol=1e-5, atol=1e-5)
    window = twin[:1].clone()
    theirs = qwen3_next.causal_conv1d_update(x[9:10].T[None], window, weight, shift, "silu" if silu else None)
    torch.testing.assert_close(out[9:10], theirs[0].T, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[4], window[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("channels", "kernel"), SIZES)
def test_a_row_depends_neither_on_the_batch_nor_on_chunks_nor_on_threads(
    channels: int, kernel: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sequences(channels, kernel)
    expected = world.whole()
    monkeypatch.setattr(module, "PARALLEL_FROM", 0)
    numba.set_num_threads(min(threads, numba.get_num_threads()))
    world.check_cuts(expected)


def test_the_comparison_sees_a_state_that_is_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    world = sequences(17, 4)
    expected = world.whole()
    carried = world.op
    world.op = lambda parts, state, cu, read, write: carried(parts, state, cu, torch.zeros_like(read), write)
    with pytest.raises(AssertionError):
        world.check_cuts(expected)


def test_a_view_of_a_larger_memory_is_a_state() -> None:
    world = sequences(17, 4)
    world.check_view(world.whole())


def test_nan_is_not_hidden_and_stays_in_its_sequence() -> None:
    world = sequences(17, 4)
    outs, _ = world.whole()
    world.parts[0][0][4, 3] = torch.nan
    got, _ = world.steps([LENS])
    assert_equal(got[1:], outs[1:])
    broken = got[0].isnan()
    assert broken[4:8, 3].all() and broken.sum() == 4


def test_other_dtypes_take_the_reference_and_an_empty_batch() -> None:
    x, weight, state = randn(5, 8), randn(8, 4, seed=1), torch.zeros(2, 8, 3)
    args = (int64(0, 5), int64(0), int64(1))
    exact = causal_conv(x, weight, None, state, *args)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 5e-2)):
        other = causal_conv(x.to(dtype), weight.to(dtype), None, state.to(dtype), *args)
        assert other.dtype == dtype
        torch.testing.assert_close(other.float(), exact, rtol=tolerance, atol=tolerance)
    nothing = causal_conv(x[:0], weight, None, state, int64(0), int64(), int64())
    assert nothing.shape == (0, 8)


def test_misuse_is_named() -> None:
    x, weight, state = randn(5, 8), randn(8, 4), torch.zeros(3, 8, 3)
    cu, read, write = int64(0, 2, 5), int64(0, 0), int64(1, 2)
    with pytest.raises(ValueError, match=r"want \[T, channels\] and \[channels, kernel\], kernel 2 or larger"):
        causal_conv(x, weight[:, :1], None, state, cu, read, write)
    with pytest.raises(ValueError, match=r"bias \(7,\) must be \[8\]"):
        causal_conv(x, weight, torch.zeros(7), state, cu, read, write)
    with pytest.raises(ValueError, match=r"state is torch.float64, x torch.float32: give the state that dtype, or"):
        causal_conv(x, weight, None, state.double(), cu, read, write)
    with pytest.raises(ValueError, match=r"state \(3, 8, 2\) must be \[slots, 8, 3\]"):
        causal_conv(x, weight, None, state[:, :, :2], cu, read, write)
    with pytest.raises(ValueError, match="must lie together in memory"):
        causal_conv(x, weight, None, torch.zeros(3, 3, 8).transpose(1, 2), cu, read, write)
    with pytest.raises(ValueError, match=r"want \[S \+ 1\], \[S\] and \[S\]"):
        causal_conv(x, weight, None, state, cu, read[:1], write)
    with pytest.raises(ValueError, match="must be int64"):
        causal_conv(x, weight, None, state, cu, read.int(), write)
    for wrong in (int64(1, 2, 5), int64(0, 3, 2), int64(0, 2, 6)):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 5"):
            causal_conv(x, weight, None, state, wrong, read, write)
    with pytest.raises(ValueError, match=r"read\[1\] is -1, write\[1\] 2, the state has 3 slots"):
        causal_conv(x, weight, None, state, cu, int64(0, -1), write)
    with pytest.raises(ValueError, match=r"write\[1\] 3, the state has 3 slots"):
        causal_conv(x, weight, None, state, cu, read, int64(1, 3))
    for wrong in (int64(1, 1), int64(0, 1)):
        with pytest.raises(ValueError, match="is also read, or written by another sequence"):
            causal_conv(x, weight, None, state, cu, read, wrong)
