"""Checks of arguments that several ops share. Each takes about a microsecond or less: they run in every layer.

What would have to wait for a GPU (slots, positions, temperatures there) is not read.
"""

from __future__ import annotations

import numpy as np
import torch

LEAST_TEMPERATURE = float(np.float32(1e-6))
"""Below it logits / temperature leaves the range in which float32 tells tokens apart; 0 is greedy."""


def check_devices(op: str, **tensors: torch.Tensor | None) -> None:
    """ValueError that names the first tensor that is not on the device of the first one."""
    first: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        device = tensor.device
        if first is None:
            first = device
        elif device != first:
            where = next(iter(tensors))
            raise ValueError(f"{op}: {name} is on {device}, {where} on {first}: put them on one device")


def check_layer(op: str, layer: int, cache: torch.Tensor) -> None:
    """cache: [num_blocks, layers, ...]."""
    if not 0 <= layer < cache.shape[1]:
        raise ValueError(f"{op}: layer {layer} does not exist, the cache has {cache.shape[1]}: pass 0 or larger")


def check_slots(op: str, slots: torch.Tensor, num_slots: int) -> None:
    """slots: int [T], negative ones are padding rows."""
    if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= num_slots:
        raise beyond_cache(op, int(slots.argmax()), int(slots.max()), num_slots)


def beyond_cache(op: str, row: int, slot: int, num_slots: int) -> ValueError:
    return ValueError(f"{op}: slots[{row}] is {slot}, beyond the cache of {num_slots} slots: see kernels/kv.py")


def check_temperatures(op: str, temperatures: np.ndarray) -> None:
    """ValueError that names the first row whose temperature is neither 0 (greedy) nor at least LEAST_TEMPERATURE."""
    usable = (temperatures >= LEAST_TEMPERATURE) | (temperatures == 0)
    if not usable.all():
        row = int(np.flatnonzero(~usable)[0])
        raise ValueError(
            f"{op}: temperatures[{row}] is {temperatures[row]}; use 0 (greedy) or at least {LEAST_TEMPERATURE:.0e}"
        )
