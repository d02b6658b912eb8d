"""Host memory for saved KV: large buffers in huge pages, used again when what they held is gone.

Fresh memory costs more than the copy into it (the kernel zeroes and maps every page), so it is worth keeping. A buffer
comes back when the last tensor on it is gone: nobody can be reading what is written next.

Where there is CUDA the buffers are pinned (page-locked), so that a copy to or from the GPU does not wait for a staging
buffer.
"""

from __future__ import annotations

import mmap
import queue
import threading
import weakref
from collections import OrderedDict

import torch

HUGE_PAGE = 2 << 20
_SMALL = 2 * HUGE_PAGE
"""Below this, ordinary memory."""


def footprint(nbytes: int) -> int:
    """Bytes that a buffer for `nbytes` takes: whole huge pages, in steps of at most an eighth of its size, so that
    buffers of similar sizes can stand in for each other."""
    if nbytes < _SMALL:
        return nbytes
    step = max(1 << (nbytes.bit_length() - 4), HUGE_PAGE)
    return -(-nbytes // step) * step


class HostMemory:
    """Owns the idle buffers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, mmap.mmap] = OrderedDict()
        """Oldest first; the keys only tell them apart."""
        self._returned: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()  # its put may be called from anywhere
        self._count = 0

    def take(self, nbytes: int, most_idle: int) -> torch.Tensor:
        """uint8 [nbytes], of any content. Leaves at most `most_idle` bytes idle."""
        if nbytes < _SMALL:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        size = footprint(nbytes)
        with self._lock:
            self._collect()
            found = next((key for key, memory in self._idle.items() if len(memory) == size), None)
            memory = None if found is None else self._idle.pop(found)
            self._trim(most_idle)
        if memory is None:
            memory = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            _pin(memory)
        lease = memoryview(memory)  # the tensor's storage keeps it alive, and it the memory
        weakref.finalize(lease, self._returned.put, memory).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)[:nbytes]

    def trim(self, most_idle: int) -> None:
        with self._lock:
            self._collect()
            self._trim(most_idle)

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            self._collect()
            return sum(len(memory) for memory in self._idle.values())

    def _collect(self) -> None:
        while not self._returned.empty():
            self._count += 1
            self._idle[self._count] = self._returned.get()

    def _trim(self, most_idle: int) -> None:
        excess = sum(len(memory) for memory in self._idle.values()) - most_idle
        while excess > 0:
            _, memory = self._idle.popitem(last=False)
            excess -= len(memory)
            _unpin(memory)


def _pin(memory: mmap.mmap) -> None:
    """Where there is CUDA. What the driver refuses (a limit on locked memory) stays as it is: slower, not wrong."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)


def _unpin(memory: mmap.mmap) -> None:
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(_address(memory))


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
