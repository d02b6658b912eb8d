"""gated_delta_rule: against the reference, `transformers`, by hand; a row's bits and states are its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numba
import pytest
import torch
from tests.kernels.state_cases import LENS, Sequences, assert_equal, int64, randn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from longtail.kernels import gated_delta as module
from longtail.kernels.gated_delta import gated_delta_rule, gated_delta_rule_reference

SIZES = [(1, 1, 4, 4), (2, 4, 7, 33), (2, 2, 16, 32), (1, 3, 18, 70)]  # k_heads, v_heads, k_dim, v_dim


def inputs(rows: int, size: tuple[int, ...], seed: int = 0, by_channel: bool = False) -> list[torch.Tensor]:
    """q, k, v, g, beta of `rows` rows; decays from 1 down to exp(-3)."""
    k_heads, v_heads, k_dim, v_dim = size
    q, k = (randn(rows, k_heads, k_dim, seed=seed * 10 + i) for i in (1, 2))
    g = -3 * randn(rows, v_heads, *([k_dim] if by_channel else []), seed=seed * 10 + 3).sigmoid()
    v, beta = randn(rows, v_heads, v_dim, seed=seed * 10 + 4), randn(rows, v_heads, seed=seed * 10 + 5).sigmoid()
    return [q, k, v, g, beta]


def scan(
    rows: Iterable[torch.Tensor],
    state: torch.Tensor,
    *where: torch.Tensor,
    op: Callable = gated_delta_rule,
    **more: object,
) -> torch.Tensor:
    """rows: q, k, v, g, beta; where: cu_seqlens, read, write."""
    out = op(*rows, state, *where, **more)
    assert isinstance(out, torch.Tensor)
    return out


def sequences(size: tuple[int, ...], by_channel: bool = False) -> Sequences:
    return Sequences(scan, [inputs(n, size, i, by_channel) for i, n in enumerate(LENS)], size[1:])


def test_by_hand() -> None:
    """S = (6, 1) for keys e0, e1. It halves to (3, 0.5); k = e0 with beta 1/2 moves 3 half of the way to 8; then
    q = (2, 4) reads 2 * 5.5 + 4 * 0.5, halved by the scale. The second row writes 1 under e1 and forgets all else."""
    state = torch.tensor([6.0, 1.0, 0.0, 0.0]).view(2, 1, 2, 1).clone()
    q, k = torch.tensor([[[2.0, 4.0]], [[1.0, 1.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    v, g, beta = torch.tensor([[[8.0]], [[1.0]]]), torch.tensor([[-math.log(2)], [-1e3]]), torch.tensor([[0.5], [1.0]])
    out = gated_delta_rule(q, k, v, g, beta, state, int64(0, 2), int64(0), int64(1), scale=0.5, l2norm=False)
    assert out.flatten().tolist() == pytest.approx([6.5, 0.5], rel=1e-6)
    assert state.flatten().tolist() == pytest.approx([6, 1, 0, 1], rel=1e-6)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("by_channel", [False, True], ids=["by-head", "by-channel"])
@pytest.mark.parametrize("size", SIZES)
def test_is_the_reference(size: tuple[int, ...], by_channel: bool, l2norm: bool) -> None:
    """Against the reference in float64: within 1e-5 of numbers about 1. Keys of other lengths than 1 are scaled, or S
    would grow without bound."""
    rows = inputs(31, size, by_channel=by_channel)
    rows[1] = rows[1] if l2norm else rows[1] / size[2]
    state = randn(6, *size[1:], seed=99)
    twin = state.double()
    where = (int64(0, 9, 9, 10, 28), int64(0, 1, 0, 1), int64(2, 3, 4, 5))
    out = scan(rows, state, *where, l2norm=l2norm)
    expected = scan([x.double() for x in rows], twin, *where, op=gated_delta_rule_reference, l2norm=l2norm)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), twin, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[3], state[1])


@pytest.mark.parametrize("size", SIZES)
def test_is_that_of_transformers(size: tuple[int, ...]) -> None:
    """Token by token and in chunks of 64; 150 tokens. Within 2e-5 of numbers about 1 (all three are float32)."""
    rows, state = inputs(150, size), torch.cat([randn(1, *size[1:], seed=9), torch.zeros(1, *size[1:])])
    out = scan(rows, state, int64(0, 150), int64(0), int64(1))
    expanded = [x.repeat_interleave(size[1] // size[0], 1)[None] for x in rows[:2]]
    for rule in (qwen3_next.torch_recurrent_gated_delta_rule, qwen3_next.torch_chunk_gated_delta_rule):
        theirs, last = rule(
            *expanded,
            *(x[None] for x in rows[2:]),
            initial_state=state[:1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out, theirs[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(state[1], last[0], rtol=2e-5, atol=2e-5)


def test_a_decay_of_each_channel_that_is_the_same_is_a_decay_of_the_head() -> None:
    q, k, v, g, beta = inputs(20, (2, 4, 7, 33))
    one, other = torch.zeros(2, 4, 7, 33), torch.zeros(2, 4, 7, 33)
    where = (int64(0, 20), int64(0), int64(1))
    by_head = gated_delta_rule(q, k, v, g, beta, one, *where)
    assert torch.equal(by_head, gated_delta_rule(q, k, v, g[:, :, None].expand(-1, -1, 7), beta, other, *where))
    assert torch.equal(one, other)


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


def test_the_comparison_of_bits_sees_a_chunked_form() -> None:
    """What a rule that computes in chunks would do: the same numbers, other bits."""
    (q, k, v, g, beta), state = inputs(40, (2, 2, 16, 32)), torch.zeros(2, 2, 16, 32)
    out = gated_delta_rule(q, k, v, g, beta, state, int64(0, 40), int64(0), int64(1))
    args = [x[None] for x in (q, k, v, g, beta)]
    chunked, _ = qwen3_next.torch_chunk_gated_delta_rule(*args, use_qk_l2norm_in_kernel=True)
    assert not torch.equal(out, chunked[0])
    torch.testing.assert_close(out, chunked[0], rtol=2e-5, atol=2e-5)


def test_a_view_of_a_larger_memory_is_a_state() -> None:
    world = sequences((2, 4, 7, 33))
    world.check_view(world.whole())


@pytest.mark.parametrize("part", range(5), ids=["q", "k", "v", "g", "beta"])
def test_nan_is_not_hidden_and_stays_in_its_sequence(part: int) -> None:
    world = sequences((2, 4, 7, 33))
    outs, _ = world.whole()
    world.parts[0][part][4] = torch.nan
    got, states = world.steps([LENS])
    assert_equal(got[1:], outs[1:])
    assert torch.equal(got[0][:4], outs[0][:4]) and got[0][4].isnan().all()
    assert states[0].isnan().any() == (part > 0)


def test_other_dtypes_take_the_reference_and_an_empty_batch() -> None:
    rows, state = inputs(5, (2, 4, 8, 16)), torch.zeros(2, 4, 8, 16)
    where = (int64(0, 5), int64(0), int64(1))
    exact = scan(rows, state, *where)
    half = scan([x.bfloat16() for x in rows], torch.zeros(2, 4, 8, 16), *where)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=5e-2, atol=3e-2)  # of rounded inputs
    nothing = scan([x[:0] for x in rows], state, int64(0), int64(), int64())
    assert nothing.shape == (0, 4, 16)


def test_misuse_is_named() -> None:
    (q, k, v, g, beta), state = inputs(5, (2, 4, 8, 16)), torch.zeros(3, 4, 8, 16)
    where = (int64(0, 2, 5), int64(0, 0), int64(1, 2))
    with pytest.raises(ValueError, match="v_heads a multiple of k_heads"):
        gated_delta_rule(q, k, v[:, :3], g[:, :3], beta[:, :3], state, *where)
    with pytest.raises(ValueError, match=r"want \(5, 4\) or \(5, 4, 8\), and \(5, 4\)"):
        gated_delta_rule(q, k, v, g[:, :2], beta, state, *where)
    with pytest.raises(ValueError, match=r"state \(3, 4, 16, 8\) must be \[slots, 4, 8, 16\]"):
        gated_delta_rule(q, k, v, g, beta, state.transpose(2, 3), *where)
    with pytest.raises(ValueError, match="is also read, or written by another sequence"):
        gated_delta_rule(q, k, v, g, beta, state, where[0], where[1], int64(0, 1))
