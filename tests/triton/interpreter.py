"""Makes Triton's interpreter right about bfloat16 and strict about memory.

As shipped (3.7.1) the interpreter keeps bfloat16 as its bits in uint16 and computes on those, reads and writes outside
of tensors without a word, gives 0 for masked-off lanes (undefined on a GPU) and runs programs one after the other, so
that races between them cannot show. `install` changes that for the life of the process:

- bfloat16: `tl.dot` multiplies in float32 (and, in any dtype, sums in order), casts to bfloat16 round to nearest even,
  any other arithmetic raises.
- bounds: an access must lie within the tensor argument from which its pointer was computed.
- races: no two programs of a launch may write one byte, and none may read a byte that another one writes.
- masked-off lanes of a load without `other` are NaN, or large integers.
- traffic: the bytes that launches move are counted (`TRAFFIC`).
- `tl.device_assert` and the check of int32 overflow are on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as I

Builder = I.InterpreterBuilder


class MemoryAccessError(AssertionError):
    """A kernel touched memory that is not its own."""


def install() -> None:
    I.interpreter_builder.options = I.InterpreterOptions(debug=True)
    _patch_bfloat16()
    _patch_memory()


# ---- bfloat16


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; every NaN becomes the quiet one."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, I.TensorHandle | tl.tensor) and value.dtype.scalar == tl.bfloat16


def _widened(handle: Any) -> Any:
    return I.TensorHandle(bfloat16_to_float32(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _patch_bfloat16() -> None:
    cast, fp_to_fp, dot = Builder.cast_impl, Builder.create_fp_to_fp, Builder.create_dot

    def convert(original: Callable[..., Any]) -> Callable[..., Any]:
        def converted(self: Any, source: Any, to: Any, *rounding: Any) -> Any:
            if source.dtype.scalar == to.scalar or tl.bfloat16 not in (source.dtype.scalar, to.scalar):
                return original(self, source, to, *rounding)
            source = _widened(source)
            if to.scalar != tl.bfloat16:
                return source if to.scalar == tl.float32 else original(self, source, to, *rounding)
            if source.dtype.scalar != tl.float32:
                source = original(self, source, tl.float32, *rounding)
            return I.TensorHandle(float32_to_bfloat16(source.data), tl.bfloat16)

        return converted

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = _widened(a), _widened(b)
        if a.data.ndim != 2 or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return dot(self, a, b, d, *rest)
        # In order of k for every element: a row's bits depend on its place in numpy's product, not in a tensor core's.
        left, right, total = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return I.TensorHandle(total, d.dtype.scalar)

    def get_bf16(self: Any, value: float) -> Any:
        return I.TensorHandle(float32_to_bfloat16(np.array([value], np.float32)), tl.bfloat16)

    Builder.get_bf16 = get_bf16
    Builder.cast_impl = convert(cast)
    Builder.create_fp_to_fp = convert(fp_to_fp)
    Builder.create_dot = create_dot
    for name in ("binary_op", "unary_op", "create_fma", "create_clampf"):
        setattr(Builder, name, _refuse_bfloat16(getattr(Builder, name)))
    for owner in (I.ReduceOps, I.ScanOps):
        owner.apply = _refuse_bfloat16(owner.apply)


def _refuse_bfloat16(original: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(self: Any, *args: Any) -> Any:
        flat = [x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,))]
        if any(_is_bfloat16(x) for x in flat):
            raise TypeError(f"bfloat16 arithmetic ({original.__name__}): cast to float32 first")
        return original(self, *args)

    return refusing


# ---- memory


@dataclasses.dataclass
class Argument:
    """A tensor argument of the launch in progress."""

    name: str
    start: int
    end: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Argument:
        start = tensor.data_ptr()
        if tensor.numel() == 0:
            return cls(name, start, start)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(name, start, start + (last + 1) * tensor.element_size())


@dataclasses.dataclass
class Traffic:
    """Bytes that launches have moved since the process began."""

    issued: int = 0
    """By programs: the distinct bytes of each load and store, whether a cache or the memory serves them."""
    memory: int = 0
    """By launches: the distinct bytes that its programs read, and those that they write; what a cache that holds a
    launch's data would fetch and write back."""


TRAFFIC = Traffic()

NOBODY, SEVERAL = -1, -2


class Guard:
    """Knows a launch's tensors, and for every byte the program that wrote it and the programs that read it."""

    def __init__(self, arguments: list[Argument]) -> None:
        self.arguments = arguments
        self.regions: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        for a in sorted(arguments, key=lambda a: a.start):
            if self.regions and a.start < self.regions[-1][1]:  # aliases share one account
                start, end = self.regions[-1][0], max(self.regions[-1][1], a.end)
                self.regions[-1] = (start, end, *_account(end - start))
            else:
                self.regions.append((a.start, a.end, *_account(a.end - a.start)))

    def account(self) -> None:
        """The launch is over."""
        for _, _, writer, reader in self.regions:
            TRAFFIC.memory += int((writer != NOBODY).sum()) + int((reader != NOBODY).sum())

    def check(self, pointers: Any, mask: Any, store: bool) -> None:
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        addresses = np.asarray(pointers.data, np.uint64).astype(np.int64)
        addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
        if addresses.size:
            TRAFFIC.issued += np.unique(addresses).size * size
            self._check_bounds(addresses, size, pointers.attr.get("origin"), store)
            self._check_races(addresses, size, store)

    def _check_bounds(self, addresses: np.ndarray, size: int, origin: int | None, store: bool) -> None:
        candidates = [a for a in self.arguments if origin in (None, a.start)]
        inside = np.zeros(addresses.shape, bool)
        for a in candidates:
            inside |= (addresses >= a.start) & (addresses + size <= a.end)
        if inside.all():
            return
        bad = int(addresses[~inside][0])
        near = min(candidates or self.arguments, key=lambda a: min(abs(bad - a.start), abs(bad - a.end)))
        raise MemoryAccessError(
            f"{'store' if store else 'load'} out of bounds in program {_program()}: {int((~inside).sum())} lanes, the "
            f"first at byte {bad - near.start} of '{near.name}', which has {near.end - near.start}"
        )

    def _check_races(self, addresses: np.ndarray, size: int, store: bool) -> None:
        x, y, z = _program()
        _, ny, nz = I.interpreter_builder.grid_dim
        me = (x * ny + y) * nz + z
        touched = (addresses[:, None] + np.arange(size)).ravel()
        for start, end, writer, reader in self.regions:
            here = touched[(touched >= start) & (touched < end)] - start
            accounts = {"written": writer, "read": reader} if store else {"written": writer}
            for verb, account in accounts.items():
                other = account[here]
                if (clash := (other != NOBODY) & (other != me)).any():
                    index = int(other[clash][0])
                    whom = (index // (ny * nz), index // nz % ny, index % nz)
                    byte = start + int(here[clash][0])
                    a = next(a for a in self.arguments if a.start <= byte < a.end)
                    raise MemoryAccessError(
                        f"race: program {(x, y, z)} {'writes' if store else 'reads'} byte {byte - a.start} of "
                        f"'{a.name}', {verb} by {'several' if index == SEVERAL else whom}"
                    )
            if store:
                writer[here] = me
            else:
                reader[here] = np.where((reader[here] == NOBODY) | (reader[here] == me), me, SEVERAL)


def _account(size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(size, NOBODY, np.int32), np.full(size, NOBODY, np.int32)


def _program() -> tuple[int, int, int]:
    x, y, z = I.interpreter_builder.grid_idx
    return int(x), int(y), int(z)


def _poison(pointers: Any) -> Any:
    """What a masked-off lane holds: anything. NaN for floats, for integers an index far outside of every tensor."""
    dtype = I._get_np_dtype(pointers.get_element_ty())
    if pointers.get_element_ty() == tl.bfloat16:
        value: Any = 0x7FC1
    elif dtype.kind == "f":
        value = np.nan
    elif dtype.kind == "b":
        return None
    else:
        value = np.iinfo(dtype).max // 2
    return I.TensorHandle(np.full(np.shape(pointers.data), value, dtype), pointers.get_element_ty())


def _patch_memory() -> None:
    current: list[Guard] = []
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        if current:
            current[-1].check(pointers, mask, store=False)
        return load(self, pointers, mask, _poison(pointers) if other is None else other, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if current:
            current[-1].check(pointers, mask, store=True)
        return store(self, pointers, value, mask, *rest)

    def atomic(*_: Any) -> Any:
        raise NotImplementedError("the guard does not know atomics: teach it their rules before a kernel uses them")

    Builder.create_masked_load, Builder.create_masked_store = masked_load, masked_store
    Builder.create_atomic_cas = Builder.create_atomic_rmw = atomic

    # The pointer of a tensor argument carries where it came from through the operations that build addresses.
    convert = I._implicit_cvt

    def implicit_cvt(argument: Any) -> Any:
        out = convert(argument)
        if isinstance(argument, torch.Tensor):
            out.handle.set_attr("origin", argument.data_ptr())
        return out

    I._implicit_cvt = implicit_cvt
    for name in ("create_addptr", "create_splat", "create_broadcast", "create_expand_dims", "create_trans"):
        setattr(Builder, name, _keep_origin(getattr(Builder, name)))

    launch, init = I.GridExecutor.__call__, I.GridExecutor._init_args_hst

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = init(self, args, kwargs)
        named = [*zip(self.arg_names, args, strict=False), *kwargs.items()]
        current.append(Guard([Argument.of(name, t) for name, t in named if isinstance(t, torch.Tensor)]))
        return args, kwargs

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return launch(self, *args, **kwargs)
        finally:
            for guard in current:
                guard.account()
            current.clear()

    I.GridExecutor._init_args_hst, I.GridExecutor.__call__ = init_args, call


def _keep_origin(original: Callable[..., Any]) -> Callable[..., Any]:
    def keeping(self: Any, *args: Any) -> Any:
        out = original(self, *args)
        for arg in args:
            if isinstance(arg, I.TensorHandle) and "origin" in arg.attr:
                out.set_attr("origin", arg.attr["origin"])
        return out

    return keeping
