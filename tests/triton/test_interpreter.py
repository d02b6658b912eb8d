"""The tests' own tests: what tests/triton/interpreter.py adds to Triton's interpreter catches planted faults."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # numpy's, of infinities on purpose


@triton.jit
def copy_kernel(x, y, n, shift_in, shift_out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i + shift_out, tl.load(x + i + shift_in, mask=i < n), mask=i < n)


def copy(x, y, shift_in=0, shift_out=0):
    copy_kernel[(triton.cdiv(x.numel(), 8),)](x, y, x.numel(), shift_in, shift_out, BLOCK=8)


def test_a_right_kernel_passes() -> None:
    x, y = torch.randn(21), torch.full((21,), torch.nan)
    copy(x, y)
    assert torch.equal(x, y)


@pytest.mark.parametrize("shift", [1, -1])
def test_an_off_by_one_read_is_caught(shift: int) -> None:
    with pytest.raises(InterpreterError, match=r"load out of bounds in program .* of 'x', which has 84"):
        copy(torch.zeros(21), torch.zeros(21), shift_in=shift)


@pytest.mark.parametrize("shift", [1, -1])
def test_an_off_by_one_write_is_caught(shift: int) -> None:
    with pytest.raises(InterpreterError, match=r"store out of bounds in program .* of 'y', which has 84"):
        copy(torch.zeros(21), torch.zeros(21), shift_out=shift)


def test_a_view_is_bounded_by_the_view() -> None:
    """Also where the bytes beyond it belong to another argument."""
    both = torch.zeros(16)
    with pytest.raises(InterpreterError, match=r"load out of bounds .* of 'x', which has 32"):
        copy(both[:8], both[8:], shift_in=1)


def test_a_strided_view_is_bounded_by_its_last_element() -> None:
    x = torch.zeros(4, 5)[:, :3]  # the last element is number 17 of 20
    with pytest.raises(InterpreterError, match=r"of 'x', which has 72"):
        copy_kernel[(3,)](x, torch.zeros(24), 19, 0, 0, BLOCK=8)


def test_bounds_hold_for_the_next_launch_too() -> None:
    copy(torch.zeros(21), torch.zeros(21))
    with pytest.raises(InterpreterError, match=r"out of bounds"):
        copy(torch.zeros(21), torch.zeros(21), shift_in=1)
    copy(torch.zeros(21), torch.zeros(21))


@triton.jit
def overlapping_kernel(y, STEP: tl.constexpr):
    tl.store(y + tl.program_id(0) * STEP + tl.arange(0, 8), tl.program_id(0))


def test_a_write_write_race_is_caught() -> None:
    overlapping_kernel[(3,)](torch.zeros(24), STEP=8)
    with pytest.raises(InterpreterError, match=r"race: program .1, 0, 0. writes byte 28 of 'y', written by .0, 0, 0."):
        overlapping_kernel[(3,)](torch.zeros(24), STEP=7)


def test_a_read_after_write_race_is_caught() -> None:
    x = torch.zeros(24)
    with pytest.raises(InterpreterError, match=r"race: program .1, 0, 0. reads .* written by .0, 0, 0."):
        copy_kernel[(2,)](x, x, 16, 0, 8, BLOCK=8)


def test_a_write_after_read_race_is_caught() -> None:
    x = torch.zeros(24)
    with pytest.raises(InterpreterError, match=r"race: program .1, 0, 0. writes .* read by .0, 0, 0."):
        copy_kernel[(2,)](x, x[:16], 16, 8, 0, BLOCK=8)


def test_a_program_may_work_in_place() -> None:
    x = torch.arange(16.0)
    copy(x, x)
    assert torch.equal(x, torch.arange(16.0))


@triton.jit
def careless_sum_kernel(x, out, n, OTHER: tl.constexpr):
    i = tl.arange(0, 8)
    values = tl.load(x + i, mask=i < n) if OTHER is None else tl.load(x + i, mask=i < n, other=OTHER)
    tl.store(out, tl.sum(values.to(tl.float32), axis=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_lanes_are_poisoned(dtype: torch.dtype) -> None:
    x, out = torch.ones(5, dtype=dtype), torch.zeros(1)
    careless_sum_kernel[(1,)](x, out, 5, OTHER=None)
    assert out.isnan()
    careless_sum_kernel[(1,)](x, out, 5, OTHER=0.0)
    assert out.item() == 5


@triton.jit
def index_kernel(index, x, out):
    i = tl.arange(0, 4)
    tl.store(out + i, tl.load(x + tl.load(index + i, mask=i < 3)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_masked_index_is_poisoned(dtype: torch.dtype) -> None:
    with pytest.raises(InterpreterError, match=r"load out of bounds .* of 'x'|overflow"):
        index_kernel[(1,)](torch.zeros(3, dtype=dtype), torch.zeros(4), torch.zeros(4))


@triton.jit
def first(a, b):
    return a


@triton.jit
def bfloat16_kernel(x, y, OP: tl.constexpr):
    i = tl.arange(0, 8)
    a = tl.load(x + i)
    if OP == "add":
        a = a + a
    elif OP == "scale":
        a = a * 2.0
    elif OP == "exp":
        a = tl.exp(a)
    elif OP == "negate":
        a = -a
    elif OP == "compare":
        a = tl.where(a > a, a, a)
    elif OP == "fma":
        a = tl.fma(a, a, a)
    elif OP == "sum":
        a = tl.reduce(a, 0, first)
    elif OP == "cast":
        a = (a.to(tl.float32) * 2.0).to(tl.bfloat16)
    tl.store(y + i, a)


@pytest.mark.parametrize("op", ["add", "scale", "exp", "negate", "compare", "fma", "sum"])
def test_bfloat16_arithmetic_raises(op: str) -> None:
    x = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(Exception, match=r"bfloat16 arithmetic|Expected dtype .* but got bf16"):
        bfloat16_kernel[(1,)](x, torch.empty_like(x), OP=op)


@pytest.mark.parametrize("op", ["copy", "cast"])
def test_bfloat16_moves_and_casts(op: str) -> None:
    x = torch.tensor([1.0, -2.5, 0.0, -0.0, torch.inf, torch.nan, 3e38, 1e-40], dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    bfloat16_kernel[(1,)](x, y, OP=op)
    expected = x if op == "copy" else (x.float() * 2).bfloat16()
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def cast_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n).to(y.dtype.element_ty), mask=i < n)


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_casts_are_those_of_torch(source: torch.dtype, target: torch.dtype) -> None:
    """Ties to even, denormals, infinities, overflow to infinity, NaN."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    ties = torch.arange(0x3F800000, 0x3F900000, 0x8000)  # halfway between two bfloat16 every other time
    x = torch.cat([bits, ties, torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7FC00000])]).to(torch.int32).view(torch.float32)
    x = torch.arange(-500, 500, dtype=torch.int32) if source == torch.int32 else x.to(source)
    y = torch.zeros(x.shape, dtype=target)
    cast_kernel[(1,)](x, y, x.numel(), BLOCK=8192)
    torch.testing.assert_close(y, x.to(target), rtol=0, atol=0, equal_nan=True)


@triton.jit
def dot_kernel(a, b, c):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot_multiplies_in_float32(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    c = torch.full((16, 16), torch.nan)
    dot_kernel[(1,)](a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@triton.jit
def debug_kernel(x, out, LIMIT: tl.constexpr):
    value = tl.load(x)
    tl.device_assert(value < LIMIT, "too large")
    tl.store(out, value * 1_000_000)


def test_debug_checks_are_on() -> None:
    x, out = torch.tensor([5000], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(InterpreterError, match=r"too large"):
        debug_kernel[(1,)](x, out, LIMIT=5000)
    with pytest.raises(InterpreterError, match=r"overflow"):
        debug_kernel[(1,)](x, out, LIMIT=5001)


@triton.jit
def atomic_kernel(x):
    tl.atomic_add(x, 1.0)


def test_atomics_are_refused() -> None:
    with pytest.raises(InterpreterError, match=r"does not know atomics"):
        atomic_kernel[(1,)](torch.zeros(1))
