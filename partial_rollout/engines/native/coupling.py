"""How well a model drafter fits its target, on the samples of a run: acceptance by match beside that by rejection.

At each output position of the samples, with p what the target samples from and q what the drafter samples from, both
given the same tokens:

    match       whether both sample the same token with the position's noise
    rejection   sum of min(p, q), the most that any verification can accept: 1 - TV(p, q)
    bound       (1 - TV) / (1 + TV), the least that match accepts in the mean over the noise (Daliri et al. 2024)

This is the acceptance of a draft's first token; later ones are judged only where those before them were accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from longtail.kernels.linear import RowRule
from longtail.kernels.sample import processed_logits, sample
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache, make_kv
from longtail.partial_rollout.engines.native.decoder import Decoder
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.partial_rollout.engines.native.model_drafter import DecoderDrafter, distribution
from longtail.partial_rollout.engines.native.sampler import Position, Sampler
from longtail.partial_rollout.engines.native.scheduler import Scheduled
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.sequence import Sequence
from longtail.version import Fingerprint

CHUNK = 128
"""Tokens whose logits are held at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Coupling:
    """Means over the positions."""

    positions: int
    match: float
    rejection: float
    bound: float


@torch.inference_mode()
def coupling(engine: NativeEngine, drafter: DecoderDrafter, samples: Iterable[Sample]) -> Coupling:
    """samples: with output, of this engine's model; drafter: given to this engine (`use_drafter`). Computes every token
    with both models, on KV of its own. ValueError if there is no output."""
    if drafter.decoder is None:
        raise ValueError(f"drafter {drafter.name}: it belongs to no engine yet; give it to one (use_drafter)")
    eos, block_size = engine.spec.eos_token_ids, engine.kv.block_size
    totals = np.zeros(3)
    positions = 0
    for one in samples:
        if not one.output_ids:
            continue
        target = _distributions(engine.decoder, engine.row_rule, block_size, eos, one)
        draft = _distributions(drafter.decoder, drafter.rule, block_size, eos, one)
        for (own, p), (guess, q) in zip(target, draft, strict=True):
            overlap = torch.minimum(p, q).double().sum(-1).numpy()
            totals += [(own == guess).sum(), overlap.sum(), (overlap / (2.0 - overlap)).sum()]
            positions += len(own)
    if not positions:
        raise ValueError("samples: none of them has output; give samples of a run")
    match, rejection, bound = (totals / positions).tolist()
    return Coupling(positions, match, rejection, bound)


def _distributions(
    decoder: Decoder, rule: RowRule, block_size: int, eos_token_ids: tuple[int, ...], one: Sample
) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
    """Of the output positions in order, some at a time: the tokens int64 [n] that are sampled with the sample's noise,
    and float32 [n, V] what from."""
    sampler = Sampler(eos_token_ids, raw_logprobs=False)
    first = len(one.prompt_ids) - 1
    blank = dataclasses.replace(one, output_ids=[], logprobs=[], versions=[], segments=[])
    for start, logits in _logits(decoder, rule, block_size, [*one.prompt_ids, *one.output_ids[:-1]]):
        rows = range(max(start, first), start + len(logits))
        if not rows:
            continue
        batch = sampler.batch([Position(blank, one.output_ids[: row - first]) for row in rows])
        processed = processed_logits(logits[rows.start - start :], batch)
        tokens, _ = sample(processed, dataclasses.replace(batch, top_k=None, top_p=None, min_p=None, edits=None))
        temperatures = batch.temperatures.tolist()
        yield tokens, torch.stack([distribution(x, t) for x, t in zip(processed, temperatures, strict=True)])


def _logits(decoder: Decoder, rule: RowRule, block_size: int, ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """(position of the first, float32 [n, V]) of all tokens, some at a time."""
    kv = make_kv(
        decoder.spec,
        budget=1 << 40,  # pages that are never touched
        block_size=block_size,
        longest=len(ids),
        max_num_seqs=1,
        max_rows=CHUNK,
        most_blocks=-(-len(ids) // block_size),
        fingerprint=Fingerprint("coupling"),
        prefix_caching=False,
    )
    cache = Cache.of(kv)
    seq = Sequence(Sample(id="", group_id="", index=0, prompt_ids=tuple(ids), params=SamplingParams(), seed=0))
    kv.attach(seq)
    for start in range(0, len(ids), CHUNK):
        count = min(CHUNK, len(ids) - start)
        if not kv.reserve(seq, start + count):
            raise AssertionError("blocks for every token were made")
        batch = ForwardBatch.build([Scheduled(seq, count)], kv, decoder.spec, rule, list(range(count)))
        yield start, decoder.forward(batch, cache)[:count]
        kv.advance(seq, count)
