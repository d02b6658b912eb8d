"""A tiny KVManager in which tests write recognisable KV: the number at a position is a function of its own.

Block size 16:

    tokens  0 .. 15 | 16 .. 31 | 32 ..
    block     [0]        [1]      [2]
"""

from __future__ import annotations

from typing import Any

import torch

from longtail.kernels.kv import store_kv
from longtail.kv_manager.layout import Layout
from longtail.kv_manager.manager import KVManager
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import Fingerprint

LAYERS, HEADS, SIZE, DIM = 2, 2, 16, 4
LAYOUT = Layout("kv", LAYERS, HEADS, SIZE, DIM)
A, B = Fingerprint("A"), Fingerprint("B")


def make_kv(num_blocks: int = 8, **fields: Any) -> KVManager:
    return KVManager([LAYOUT], [num_blocks], **({"fingerprint": A} | fields))


def make_seq(prompt: list[int], output: list[int] | None = None, name: str = "g/0") -> Sequence:
    sample = Sample(id=name, group_id="g", index=0, prompt_ids=tuple(prompt), params=SamplingParams(), seed=0)
    for token in output or []:
        sample.append(token, -1.0, 0, "e", "computed")  # type: ignore[arg-type]
    return Sequence(sample)


def write(kv: KVManager, seq: Sequence, start: int, stop: int, base: float = 0.0) -> None:
    """Position p of every layer, head and channel becomes base + p (+ 0.5 in v)."""
    slots = torch.tensor(kv.slots(seq, start, stop))
    numbers = (base + torch.arange(start, stop).float())[:, None, None].expand(-1, HEADS, DIM)
    for layer in range(LAYERS):
        store_kv(numbers, numbers + 0.5, kv.groups[0].cache, layer, slots, SIZE)


def read(kv: KVManager, seq: Sequence, stop: int | None = None) -> list[float]:
    """The numbers at positions 0 .. stop-1; every layer, head and channel must agree."""
    found = []
    for slot in kv.slots(seq, 0, seq.num_computed_tokens if stop is None else stop):
        block, offset = divmod(slot, SIZE)
        k = kv.groups[0].cache[block, :, 0].view(LAYERS, HEADS, DIM, SIZE)[..., offset]
        v = kv.groups[0].cache[block, :, 1].view(LAYERS, HEADS, SIZE, DIM)[:, :, offset]
        assert k.unique().numel() == 1
        assert torch.equal(k + 0.5, v)
        found.append(k.flatten()[0].item())
    return found


def compute(kv: KVManager, seq: Sequence, upto: int | None = None, base: float = 0.0) -> None:
    """What the engine does: reserve, forward, advance."""
    stop = seq.num_tokens if upto is None else upto
    assert kv.reserve(seq, stop)
    write(kv, seq, seq.num_computed_tokens, stop, base)
    kv.advance(seq, stop - seq.num_computed_tokens)


def start(kv: KVManager, seq: Sequence, upto: int | None = None, base: float = 0.0) -> Sequence:
    kv.attach(seq)
    compute(kv, seq, upto, base)
    return seq


def numbers(*spans: tuple[int, int, float]) -> list[float]:
    return [base + p for first, last, base in spans for p in range(first, last)]


def state(kv: KVManager, *seqs: Sequence) -> Any:
    """Everything that an operation without effect must leave alone."""
    pool = kv.groups[0].pool
    return (
        list(pool.ref_counts),
        list(pool._free_plain),
        list(pool._free_cached),
        dict(pool._block_of),
        {block: dict(keys) for block, keys in pool._keys_of.items()},
        [(list(seq.block_tables[0]), seq.num_computed_tokens) for seq in seqs],
        {seq: list(hashes) for seq, hashes in kv._hashes.items()},
        kv.groups[0].cache.numpy().tobytes(),
    )


PROMPT = list(range(100, 140))  # 40 tokens: two full blocks and eight of the third
