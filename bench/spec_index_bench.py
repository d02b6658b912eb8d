"""What the group index costs: microseconds a token of lookup and update, bytes a token.

The streams: each group has a stock of phrases (3 to 24 tokens, drawn from a vocabulary with Zipf frequencies); a sample
mixes phrases of its group with novel tokens, so that lookups find short and long matches, and often several.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import numpy as np

from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.drafter import DraftRequest
from longtail.spec_decode.suffix_drafter import SuffixDrafter, group_drafter
from longtail.version import PolicyVersion

VOCABULARY = 49_152


def spec_index_bench(
    *,
    groups: int = 125,
    group_size: int = 8,
    tokens_per_sample: int = 8000,
    measured_tokens: int = 64,
    max_draft: int = 8,
    novel: float = 0.4,
    seed: int = 0,
) -> dict[str, Any]:
    """Fills an index with groups x group_size live samples that interleave token by token, then measures: each of
    `measured_tokens` steps proposes for every live sample (max_draft tokens) and commits one token to it. Times are
    CPU time of this thread: other work on the machine shows through its use of the caches only.

    novel: share of the tokens that repeat nothing. -> lookup_us, update_us, total_us: mean microseconds a token;
    total_p50_us, total_p95_us: over steps; bytes_per_token; draft_tokens: mean length of
    a draft; fill_us: of an update in chunks of 32 tokens, growth of the index included.
    """
    rng = np.random.default_rng(seed)
    drafter = group_drafter()
    samples, streams = [], []
    for g in range(groups):
        prompt = tuple(_zipf(rng, 100).tolist())
        phrases = [_zipf(rng, int(rng.integers(3, 25))) for _ in range(400)]
        for i in range(group_size):
            samples.append(_sample(f"{g}/{i}", str(g), i, prompt))
            streams.append(_stream(rng, phrases, tokens_per_sample, novel))
    warm = tokens_per_sample - measured_tokens
    start = time.thread_time()
    chunk = 32  # the samples of a group lie interleaved in memory, as they do in a run
    for position in range(0, warm, chunk):
        for sample, stream in zip(samples, streams, strict=True):
            _commit(drafter, sample, stream[position : min(position + chunk, warm)])
    filled = time.thread_time() - start
    lookups, updates, drafted = [], [], 0
    gc.freeze()  # else its walks over the samples' own records are counted here
    for position in range(warm, tokens_per_sample):
        requests = [DraftRequest(sample, max_draft) for sample in samples]
        start = time.thread_time()
        drafts = drafter.propose(requests)
        lookups.append(time.thread_time() - start)
        drafted += sum(map(len, drafts))
        seconds = 0.0
        for sample, stream in zip(samples, streams, strict=True):
            _extend(sample, stream[position : position + 1])
            start = time.thread_time()
            drafter.observe(sample, 1)
            seconds += time.thread_time() - start
        updates.append(seconds)
    gc.unfreeze()
    total = [(a + b) / len(samples) * 1e6 for a, b in zip(lookups, updates, strict=True)]
    return {
        "samples": len(samples),
        "tokens": drafter.num_tokens,
        "lookup_us": statistics.fmean(lookups) / len(samples) * 1e6,
        "update_us": statistics.fmean(updates) / len(samples) * 1e6,
        "total_us": statistics.fmean(total),
        "total_p50_us": statistics.median(total),
        "total_p95_us": sorted(total)[int(0.95 * len(total))],
        "bytes_per_token": drafter.num_bytes / drafter.num_tokens,
        "draft_tokens": drafted / (len(samples) * measured_tokens),
        "fill_us": filled / (len(samples) * warm) * 1e6,
    }


def _zipf(rng: np.random.Generator, count: int) -> np.ndarray:
    """Tokens with frequencies about 1 / rank, as words have them."""
    ranks = np.exp(rng.random(count) * np.log(VOCABULARY)).astype(np.int64) - 1
    return (ranks * 7919) % VOCABULARY


def _stream(rng: np.random.Generator, phrases: list[np.ndarray], length: int, novel: float) -> list[int]:
    parts: list[np.ndarray] = []
    total = 0
    while total < length:
        phrase = phrases[int(rng.integers(len(phrases)))]
        gap = _zipf(rng, int(rng.poisson(len(phrase) * novel / (1 - novel))))
        parts += [phrase, gap]
        total += len(phrase) + len(gap)
    return [int(token) for token in np.concatenate(parts)[:length]]


def _sample(name: str, group: str, index: int, prompt: tuple[int, ...]) -> Sample:
    return Sample(id=name, group_id=group, index=index, prompt_ids=prompt, params=SamplingParams(), seed=0)


def _extend(sample: Sample, tokens: list[int]) -> None:
    sample.output_ids += tokens
    sample.logprobs += [0.0] * len(tokens)
    sample.versions += [PolicyVersion(0)] * len(tokens)


def _commit(drafter: SuffixDrafter, sample: Sample, tokens: list[int]) -> None:
    _extend(sample, tokens)
    drafter.observe(sample, len(tokens))


if __name__ == "__main__":
    import json

    print(json.dumps({k: round(v, 3) for k, v in spec_index_bench().items()}))
