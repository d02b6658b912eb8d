"""Compiles the kernels for GPUs that are not here, through the ops' own launching functions, and reads the result.

A launching function runs on CPU tensors under a driver that only names the target; every launch becomes a compilation.
So a kernel is specialised exactly as in a real launch (alignment of pointers, divisibility of strides), without which
registers and load widths mean nothing. Nothing is executed. Triton must not be interpreting (TRITON_INTERPRET unset).

What is read from the machine code: registers a thread, local-memory instructions (spills), static shared memory, global
loads and stores by width, tensor-core instructions. Occupancy is computed from those and the limits of the target.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU architecture and what one of its multiprocessors offers (CUDA Programming Guide, "Compute Capabilities";
    AMD CDNA3 ISA guide). For AMD, occupancy leaves out the granularity of register allocation."""

    name: str
    gpu: GPUTarget
    shared_per_block: int
    """Bytes of shared memory (LDS) that a block may use."""
    shared_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int

    def __str__(self) -> str:
        return self.name


def _nvidia(arch: int, shared_per_block: int, shared_per_sm: int) -> Target:
    gpu = GPUTarget("cuda", arch, 32)
    return Target(f"sm_{arch}", gpu, shared_per_block << 10, shared_per_sm << 10, 65536, 64, 32)


TARGETS = {
    target.name: target
    for target in (
        _nvidia(80, 163, 164),
        _nvidia(90, 227, 228),
        _nvidia(100, 227, 228),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 << 10, 64 << 10, 4 * 512 * 64, 32, 32),
    )
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One launch, compiled. Counts of instructions are static: how often they stand in the code."""

    kernel: str
    target: Target
    grid: tuple[int, ...]
    num_warps: int
    registers: int
    """Of a thread (AMD: vector registers)."""
    spills: int
    """Instructions that move registers to or from local memory (AMD: vector registers kept in memory)."""
    shared: int
    """Bytes of a block."""
    loads: dict[int, int]
    """Global loads by bits a thread."""
    stores: dict[int, int]
    tensor_core: int

    @property
    def occupancy(self) -> float:
        """Resident warps of a multiprocessor, as a share of the most it can hold."""
        if self.shared > self.target.shared_per_block:
            return 0.0
        lanes = self.target.gpu.warp_size
        per_warp = -(-max(self.registers, 1) * lanes // 256) * 256
        by_registers = self.target.registers_per_sm // 4 // per_warp * 4 // self.num_warps
        reserved = 1024 if self.target.gpu.backend == "cuda" else 0  # what the system takes of each block's
        by_shared = self.target.shared_per_sm // max(self.shared + reserved, 1)
        blocks = min(by_registers, by_shared, self.target.warps_per_sm // self.num_warps, self.target.blocks_per_sm)
        return blocks * self.num_warps / self.target.warps_per_sm

    def problems(self) -> list[str]:
        """Why the kernel is unfit for the target, whatever it computes. Register counts move with compiler releases
        and are no reason."""
        found = []
        if self.spills:
            found.append(f"{self.spills} register spills")
        if self.shared > self.target.shared_per_block:
            found.append(f"{self.shared} bytes of shared memory, a block has {self.target.shared_per_block}")
        return [f"{self.kernel} on {self.target}: {problem}" for problem in found]


Launch = Callable[[], Any]
_Kernels = list[tuple[str, Any, tuple[int, ...]]]
"""What a job launched: names, compiled kernels, grids."""


def compile_launches(launch: Launch, target: Target) -> list[Compiled]:
    """Runs `launch` (on CPU tensors) and compiles, instead of running it, every kernel that it launches."""
    (outcome,) = compile_all([(launch, target)])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def compile_all(jobs: Iterable[tuple[Launch, Target]]) -> list[list[Compiled] | Exception]:
    """`compile_launches` for many: its result for each job, or the exception that the job raised. NVIDIA's disassembler
    takes longer to start than to read a kernel; here it starts once for each architecture."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton interprets in this process (TRITON_INTERPRET), it cannot compile")
    outcomes: list[tuple[Target, _Kernels | Exception]] = []
    for launch, target in jobs:
        try:
            outcomes.append((target, _launched(launch, target)))
        except Exception as error:
            outcomes.append((target, error))
    unread = {
        kernel.hash: kernel
        for _, outcome in outcomes
        if not isinstance(outcome, Exception)
        for _, kernel, _ in outcome
        if kernel.hash not in _FACTS
    }
    _FACTS.update(_read_amd({name: k for name, k in unread.items() if "amdgcn" in k.asm}))
    _FACTS.update(_read_nvidia({name: k for name, k in unread.items() if "cubin" in k.asm}))
    return [
        outcome if isinstance(outcome, Exception) else [_compiled(*launched, target) for launched in outcome]
        for target, outcome in outcomes
    ]


_FACTS: dict[str, dict[str, Any]] = {}
"""What was read from the code of each kernel of this process. Triton's hash of a kernel is of its source, signature,
constants, specialisation, options and target."""


def _compiled(name: str, kernel: Any, grid: tuple[int, ...], target: Target) -> Compiled:
    metadata = kernel.metadata
    facts = _FACTS[kernel.hash]
    return Compiled(name, target, grid, num_warps=metadata.num_warps, shared=metadata.shared, **facts)


def _launched(launch: Launch, target: Target) -> _Kernels:
    launches: _Kernels = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        launches.append((self.fn.__name__, kernel, tuple(grid)))
        return kernel

    before = driver._active
    driver.set_active(_NamedOnly(target.gpu))
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
        driver._active = before  # reset_active() would look for a GPU
    return launches


class _NamedOnly(DriverBase):
    """A driver that knows its target and can run nothing."""

    def __init__(self, gpu: GPUTarget) -> None:
        self.gpu = gpu

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.gpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("kernels that are only compiled cannot be timed")

    def get_current_device(self) -> str:
        return f"{self.gpu.backend}:{self.gpu.arch}"  # a kernel keeps what it compiled by device

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def set_current_device(self, device: Any) -> None:
        pass


def _read_nvidia(kernels: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    facts = {}
    for name, (usage, code) in _disassembled(kernels).items():
        stack, registers = (int(re.findall(rf"\b{what}:(\d+)", usage)[-1]) for what in ("STACK", "REG"))
        local = len(re.findall(r"\b(?:LDL|STL)\b", code))
        facts[name] = {
            "registers": registers,
            "spills": max(local, int(stack > 0)),
            "loads": _widths(code, r"\b(?:LDG|LDGSTS)\.E((?:\.\w+)*)"),
            "stores": _widths(code, r"\bSTG\.E((?:\.\w+)*)"),
            "tensor_core": len(re.findall(r"\b(?:HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA)\b", code)),
        }
    return facts


def _disassembled(kernels: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """-> the resource usage and the instructions of each kernel."""
    by_architecture: dict[str, list[str]] = {}
    for name, kernel in kernels.items():
        architecture = re.findall(r"^\.target sm_(\w+)", kernel.asm["ptx"], re.MULTILINE)[0]
        by_architecture.setdefault(architecture, []).append(name)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "code")
        for architecture, names in by_architecture.items():
            code = [_machine_code(kernels[name].asm["cubin"]) for name in names]
            file.write_bytes(b"".join(code))
            lines = re.findall(r"^ *(/\*[0-9a-f]+\*/.*)$", _tool("nvdisasm", "-b", f"SM{architecture}", file), re.M)
            assert len(lines) * INSTRUCTION == sum(map(len, code)), "not every instruction has a line of its own"
            for name, of in zip(names, code, strict=True):
                file.write_bytes(kernels[name].asm["cubin"])
                usage = _tool("cuobjdump", "--dump-resource-usage", file)
                count = len(of) // INSTRUCTION
                found[name], lines = (usage, "\n".join(lines[:count])), lines[count:]
    return found


INSTRUCTION = 16
"""Bytes, of every architecture since Volta."""


def _machine_code(cubin: bytes) -> bytes:
    """The sections of an ELF file that hold code (System V ABI, "Sections")."""
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    code = []
    for name, _, _, _, offset, length in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(b"\0", at)].startswith(b".text."):
            code.append(cubin[offset : offset + length])
    return b"".join(code)


def _tool(name: str, *arguments: str | Path) -> str:
    return subprocess.run([NVIDIA_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def _widths(code: str, instruction: str) -> dict[int, int]:
    """How often each width in bits occurs; 32 is not written out in the machine code."""
    counts: dict[int, int] = {}
    for suffixes in re.findall(instruction, code):
        width = re.search(r"\.[US]?(8|16|64|128|256)\b", suffixes)
        bits = int(width[1]) if width else 32
        counts[bits] = counts.get(bits, 0) + 1
    return counts


AMD_WIDTHS = {"byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "dword": 32, "dwordx2": 64, "dwordx4": 128}


def _read_amd(kernels: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: _amd_facts(kernel.asm["amdgcn"]) for name, kernel in kernels.items()}


def _amd_facts(code: str) -> dict[str, Any]:
    def note(key: str) -> int:
        return int(re.findall(rf"\.{key}:\s+(\d+)", code)[-1])

    def widths(verb: str) -> dict[int, int]:
        counts: dict[int, int] = {}
        for name in re.findall(rf"\b(?:global|buffer|flat)_{verb}_(\w+)", code):
            bits = AMD_WIDTHS.get(re.sub(r"_d16(_hi)?|_hi", "", name), 0)
            counts[bits] = counts.get(bits, 0) + 1
        return counts

    return {
        "registers": note("vgpr_count"),
        # A scalar register is spilled to a lane of a vector register, which touches no memory.
        "spills": max(note("vgpr_spill_count"), int(note("private_segment_fixed_size") > 0)),
        "loads": widths("load"),
        "stores": widths("store"),
        "tensor_core": len(re.findall(r"\bv_mfma", code)),
    }
