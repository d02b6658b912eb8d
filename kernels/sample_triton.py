"""`sample` on a GPU. A row without filters is read once.

    edit      rows with bans or penalties: a float32 copy of the row, then the few edited logits written into it
    scan      (row, part of 4,096 tokens): largest logit, sum of exp, the race within the part; a row that is to be
              filtered runs no race but keeps the largest logit of every group of 64 tokens
    finish    row: the parts combined: token, log-probability, status
    compact   filtered row: from the groups' largest logits a bound that every token of the result reaches; the
              tokens that reach it are listed, in order. Parts without one are not read again
    truncate  filtered row: on the list, the exact top-k and top-p thresholds, then the race and the sum

Thresholds are searched in an order-preserving integer of the logit, 8 pivots a round, until the interval is one key
(at most 11 rounds): F(t) = the number, or the mass, of the tokens with a key of at least t, and the threshold is the
largest t with F(t) >= k, or >= top_p * mass, which keeps ties. Every sum has a shape and an order that depend on the
row alone. Sums are float32 within a tile and float64 across tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from longtail.kernels._triton import next_power_of_2, num_warps_for, on_device_of, warp_size
from longtail.kernels.philox import CHUNK
from longtail.kernels.sample_batch import BROKEN, EMPTY, SampleBatch, report_faults
from longtail.kernels.sample_filter_triton import LOWEST_KEY, compact_kernel, truncate_kernel
from longtail.kernels.sample_scan_triton import copy_kernel, edit_kernel, finish_kernel, scan_kernel

MOST_VOCABULARY = 262_144
"""Widest row: the largest logits of its groups fill one tile of 4,096."""

PART_CHUNKS = 4
"""Chunks of 1,024 tokens of a scanning program: 32 tokens a thread, four 16-byte loads of bfloat16."""

GROUP = 64
"""Tokens of a group: 16 neighbours in each of 4 quarters of a chunk."""

LIST_BYTES = 256 << 20
"""Memory for the lists of filtered rows (8 bytes a token of the vocabulary); more rows than fit go in several turns."""

COPY = 8192
"""Logits that one program copies for a row with edits."""

ENTRIES = 512
"""Edits of one program."""

GREEDY, RACE = -2, -1
"""What a row's plan says; 0 and above is a filtered row's place among the filtered rows."""


def sample_triton(
    logits: torch.Tensor, batch: SampleBatch, faults: dict[int, str] | None = None, *, in_place: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """See `sample`; float32, float16 and bfloat16, up to 262,144 tokens. Scores and probabilities are float32: where
    two scores, or the two sides of a threshold on mass, are within about 1e-5 of each other, the token may be another
    one than the CPU's."""
    if logits.shape[0] == 0:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    tokens, bits, status = launch_sample(logits, batch, in_place).cpu().numpy().T
    return report_faults(tokens.astype(np.int64), np.ascontiguousarray(bits).view(np.float32), status, faults)


def launch_sample(logits: torch.Tensor, batch: SampleBatch, in_place: bool = False) -> torch.Tensor:
    """See `sample_triton` -> int32 [B, 3] on the device of the logits: tokens, the bits of their log-probabilities
    (float32), status (`sample_batch.FAULTS`; token -1 and NaN where it is not 0). At least one row."""
    rows, vocab = logits.shape
    batch.check(rows, vocab)
    if not 1 <= vocab <= MOST_VOCABULARY:
        raise ValueError(f"sample: a vocabulary of {vocab} (at least 1, at most {MOST_VOCABULARY})")
    if logits.stride(1) != 1 or logits.data_ptr() % 16:  # else a row's bits could depend on its place in memory
        logits = logits.clone(memory_format=torch.contiguous_format)
    device = logits.device
    in_place = in_place and logits.dtype == torch.float32 and logits.stride(0) >= vocab
    args, filtered, edited = _upload(batch, vocab, in_place, device)
    chunks = min(PART_CHUNKS, next_power_of_2(-(-vocab // CHUNK)))
    parts = -(-vocab // (chunks * CHUNK))
    num_groups = parts * chunks * (CHUNK // GROUP)
    lanes = warp_size()
    warps = max(CHUNK // 4 * chunks * logits.element_size() // (16 * lanes), 1)  # 16-byte loads
    part_sums = torch.empty(rows, 3, parts, dtype=torch.float32, device=device)  # largest logit, sum of exp, score
    part_winners = torch.empty(rows, parts, dtype=torch.int32, device=device)
    groups = torch.empty(max(filtered, 1), num_groups, dtype=torch.float32, device=device)
    result = torch.empty(rows, 3, dtype=torch.int32, device=device)  # token, bits of the log-probability, status
    sums = torch.empty(rows, 2, dtype=torch.float64, device=device)  # largest logit, sum of exp
    with on_device_of(logits):
        work = args["scale"]  # not read
        if edited:
            work = _edit(logits, args, edited, in_place)
        shape: dict[str, Any] = {
            "VOCAB": vocab,
            "STRIDE": logits.stride(0),
            "PARTS": parts,
            "enable_fp_fusion": False,  # every product is rounded, as on the CPU; `tl.fma` where none is to be
        }
        source = (logits, work, args["slots"])
        scan_kernel[(rows, parts)](
            *source,
            args["plan"],
            args["scale"],
            args["seeds"],
            args["positions"],
            part_sums,
            part_winners,
            groups,
            **shape,
            CHUNKS=chunks,
            CHUNK=CHUNK,
            GROUPS=num_groups,
            num_warps=warps,
        )
        finish_kernel[(rows,)](
            *source,
            args["plan"],
            args["scale"],
            part_sums,
            part_winners,
            result,
            sums,
            **shape,
            BLOCK=next_power_of_2(parts),
            BROKEN=BROKEN,
            EMPTY=EMPTY,
            num_warps=1,
        )
        turn = max(LIST_BYTES // (8 * vocab), 1)
        for start in range(0, filtered, turn):
            count = min(turn, filtered - start)
            values = torch.empty(count, vocab, dtype=torch.float32, device=device)
            ids = torch.empty(count, vocab, dtype=torch.int32, device=device)
            lengths = torch.empty(count, dtype=torch.int32, device=device)
            filters = (args["filter_rows"][start:], args["top_k"], args["top_p"], args["log_min_p"], args["scale"])
            compact_kernel[(count,)](
                *source,
                *filters,
                part_sums,
                groups[start:],
                result,
                sums,
                values,
                ids,
                lengths,
                **shape,
                GROUPS=num_groups,
                BLOCK_G=next_power_of_2(num_groups),
                PART=chunks * CHUNK,
                BLOCK=min(chunks, 2) * CHUNK,
                LOWEST=LOWEST_KEY,
                num_warps=4 * min(chunks, 2) * 32 // lanes,
            )
            truncate_kernel[(count,)](
                *filters,
                args["seeds"],
                args["positions"],
                values,
                ids,
                lengths,
                sums,
                result,
                VOCAB=vocab,
                PIVOTS=8,
                BLOCK=CHUNK,
                CHUNK=CHUNK,
                LOWEST=LOWEST_KEY,
                enable_fp_fusion=False,
                num_warps=256 // lanes,
            )
    return result


def _upload(
    batch: SampleBatch, vocab: int, in_place: bool, device: torch.device
) -> tuple[dict[str, torch.Tensor], int, int]:
    """Everything that the kernels need of the batch, in one transfer; the number of filtered and of edited rows."""
    rows = len(batch.temperatures)
    temperatures = batch.temperatures.astype(np.float32)
    greedy = temperatures <= 0
    filter_rows = np.flatnonzero(batch.filtered(vocab)).astype(np.int32)
    plan = np.where(greedy, GREEDY, RACE).astype(np.int32)
    plan[filter_rows] = np.arange(len(filter_rows))
    arrays: dict[str, np.ndarray] = {
        "seeds": batch.seeds.astype(np.uint64).view(np.int32),
        "positions": batch.positions.astype(np.int64).view(np.int32),
        "scale": np.float32(1.0) / np.where(greedy, np.float32(1.0), temperatures),
        "plan": plan,
        "slots": np.full(rows, -1, np.int32),
    }
    if len(filter_rows):
        top_k = np.zeros(rows, np.int32) if batch.top_k is None else batch.top_k
        top_p = np.ones(rows) if batch.top_p is None else batch.top_p
        min_p = np.zeros(rows) if batch.min_p is None else batch.min_p.astype(np.float64)
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p).astype(np.float32)
        arrays |= {
            "filter_rows": filter_rows,
            "top_k": np.where((top_k > 0) & (top_k < vocab), top_k, 0).astype(np.int32),
            "top_p": np.maximum(top_p, np.finfo(np.float32).tiny).astype(np.float32),  # 0 would keep no token
            "log_min_p": log_min_p,
        }
    edited = batch.edited()
    num_edited = int(edited.sum())
    if batch.edits is not None and num_edited:
        slots = np.where(edited, np.cumsum(edited) - 1, -1).astype(np.int32)
        entry_rows = np.repeat(np.arange(rows, dtype=np.int32), np.diff(batch.edits.offsets))
        arrays |= {
            "slots": arrays["slots"] if in_place else slots,
            "edit_rows": np.flatnonzero(edited).astype(np.int32),
            "entry_rows": entry_rows,
            "entry_slots": entry_rows if in_place else slots[entry_rows],
            "entry_tokens": batch.edits.tokens.astype(np.int32),
            "entry_factors": batch.edits.factors.astype(np.float32),
            "entry_amounts": batch.edits.amounts.astype(np.float32),
        }
    starts = np.cumsum([0, *(-(-len(array) // 4) * 4 for array in arrays.values())])  # 16-byte pieces
    packed = np.zeros(starts[-1], np.int32)
    for start, array in zip(starts, arrays.values(), strict=False):
        packed[start : start + len(array)] = array.view(np.int32)
    on_device = torch.from_numpy(packed).to(device)
    types = {"seeds": torch.int64, "positions": torch.int64}
    types |= dict.fromkeys(("scale", "top_p", "log_min_p", "entry_factors", "entry_amounts"), torch.float32)
    args = {
        name: on_device[start : start + len(array)].view(types.get(name, torch.int32))
        for (name, array), start in zip(arrays.items(), starts.tolist(), strict=False)
    }
    return args, len(filter_rows), num_edited


def _edit(logits: torch.Tensor, args: dict[str, torch.Tensor], edited: int, in_place: bool) -> torch.Tensor:
    """float32 [edited, V] (the logits themselves if `in_place`) with bans and penalties applied."""
    vocab = logits.shape[1]
    work = logits
    if not in_place:
        work = torch.empty(edited, vocab, dtype=torch.float32, device=logits.device)
        copy_kernel[(edited, -(-vocab // COPY))](
            logits,
            args["edit_rows"],
            work,
            VOCAB=vocab,
            STRIDE=logits.stride(0),
            BLOCK=COPY,
            num_warps=num_warps_for(COPY),
        )
    entries = len(args["entry_tokens"])
    edit_kernel[(-(-entries // ENTRIES),)](
        logits,
        work,
        args["entry_rows"],
        args["entry_slots"],
        args["entry_tokens"],
        args["entry_factors"],
        args["entry_amounts"],
        entries,
        STRIDE=logits.stride(0),
        WORK_STRIDE=work.stride(0),
        BLOCK=ENTRIES,
        enable_fp_fusion=False,
        num_warps=4,
    )
    return work
