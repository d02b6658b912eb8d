"""What each kernel is measured, compiled and counted on: shapes, tensors, calls, bytes.

One list serves `longtail bench kernels` (times), its `--compile` (machine code), the tests on a GPU (results against
the reference) and the test of the byte counts, so that all of them speak of the same launches.

Bytes. `least` is what any implementation must move: every input element once, every output element once. `memory` is
what our Triton kernels move if a cache holds what the programs of one launch share: the distinct bytes that each launch
reads, and those that it writes, intermediate results included. `issued` counts what each program loads and stores,
whoever serves it. tests/triton/test_bytes.py counts both in the interpreter and holds them against these formulas.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, Literal

import torch

Sizes = dict[str, int]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """Where and in which layout the tensors of a case are made."""

    device: torch.device
    path: Literal["cpu", "triton"]
    """Of the cache's layout: cpu for the numba kernels, triton for launches (on a GPU, in the interpreter, or to be
    compiled)."""
    dtype: torch.dtype

    empty: bool = False
    """Leave the values undefined: for kernels that are compiled and not run."""

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal values with this standard deviation, a function of the shape and of it alone."""
        if self.empty or self.device.type == "meta":
            return torch.empty(*shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(repr((shape, scale)).encode()))
        values = torch.randn(*shape, generator=generator, device=self.device)
        return values.mul_(scale).to(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One op on one set of tensors. `op`, `launch` and `reference` return what is to be equal."""

    op: Callable[[], Any]
    """The dispatching function."""
    launch: Callable[[], Any]
    """Triton's launching function, whatever the device."""
    reference: Callable[[], Any]
    tokens: int
    """Query tokens, rows or positions: what "per token" divides by."""
    least: int
    """Bytes."""
    memory: int
    """Bytes."""
    issued: int
    """Bytes."""
    at_most: bool = False
    """`memory` and `issued` are bounds: what moves depends on the values."""
    flops: int = 0
    """Multiply-adds count two; 0 where memory alone is the limit."""
    rivals: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    """The same work by other libraries that are installed, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    op: str
    what: str
    make: Callable[[Form, Sizes], Call]
    full: Sizes
    """On a GPU and for the compiler: shapes of a 7B-class model."""
    cpu: Sizes
    """Shapes of SmolLM2-135M."""
    small: Sizes
    """For the interpreter, which takes about 8 ms a program."""
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    on_cpu: bool = True
    """Whether the CPU has a fast path of its own (the reference is not worth timing)."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.what}".strip()

    def traffic(self, dtype: torch.dtype) -> Call:
        """At the full size, on tensors without memory: only the byte counts are of use."""
        return self.make(Form(torch.device("meta"), "triton", dtype), self.full)
