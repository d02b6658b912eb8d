"""What ops share that carry a state per sequence (recurrent and convolutional layers), beside the rows of a step.

The rows of all sequences lie one after the other; cu_seqlens [S + 1] says where each starts, rows beyond the last one
are padding and are not read. State tensors are [slots, ...]: `read[i]` is the slot of sequence i's state before its
first row, `write[i]` the one that takes the state after its last row. No slot is both read and written, so that a step
can be done again, or taken back, from the states that it read; several sequences may read one slot (siblings, or the
zero state).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._checks import check_devices
from longtail.kernels._numba import jit


def check_state(
    op: str,
    rows: int,
    state: torch.Tensor,
    shape: tuple[int, ...],
    cu_seqlens: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
) -> None:
    """ValueError that names the field and the fix. shape: what a slot must hold. Slots and lengths on a GPU are not
    read: that would wait for it."""
    if tuple(state.shape[1:]) != shape:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{op}: state {tuple(state.shape)} must be [slots, {wanted}]")
    if not state[:1].is_contiguous():
        raise ValueError(f"{op}: the numbers of a state's slot must lie together in memory: pass state.contiguous()")
    if len(read) != len(cu_seqlens) - 1 or len(write) != len(read):
        given = f"cu_seqlens {tuple(cu_seqlens.shape)}, read {tuple(read.shape)}, write {tuple(write.shape)}"
        raise ValueError(f"{op}: {given}: want [S + 1], [S] and [S]")
    if not cu_seqlens.dtype == read.dtype == write.dtype == torch.int64:
        raise ValueError(f"{op}: cu_seqlens, read and write must be int64")
    check_devices(op, state=state, cu_seqlens=cu_seqlens, read=read, write=write)
    if state.device.type != "cpu":
        return
    code, i = _fault(cu_seqlens.numpy(), read.numpy(), write.numpy(), rows, len(state))
    if code == 1:
        raise ValueError(f"{op}: cu_seqlens must rise from 0 to at most {rows}, the rows; see its entry {i}")
    if code == 2:
        given = f"read[{i}] is {int(read[i])}, write[{i}] {int(write[i])}"
        raise ValueError(f"{op}: {given}, the state has {len(state)} slots: pass 0 or larger, below that")
    if code == 3:
        raise ValueError(
            f"{op}: slot {int(write[i])} of write[{i}] is also read, or written by another sequence: give each "
            "sequence a slot of its own to write"
        )


@jit()
def _fault(cu: Any, read: Any, write: Any, rows: Any, slots: Any) -> Any:
    """(what is wrong or 0, where)."""
    if cu[0] != 0:
        return 1, 0
    for i in range(len(read)):
        if cu[i + 1] < cu[i] or cu[i + 1] > rows:
            return 1, i + 1
        if min(read[i], write[i]) < 0 or max(read[i], write[i]) >= slots:
            return 2, i
        for j in range(len(read)):
            if write[i] == read[j] or (write[i] == write[j] and i != j):
                return 3, i
    return 0, 0


def flat(state: torch.Tensor) -> tuple[np.ndarray, int]:
    """The memory from the first number of slot 0 to the last of the last slot, and the numbers from slot to slot: so
    that a kernel sees contiguous memory whatever lies between the slots."""
    stride, size = state.stride(0), state[0].numel()
    span = (len(state) - 1) * stride + size
    return state.as_strided((span,), (1,)).numpy(), stride
