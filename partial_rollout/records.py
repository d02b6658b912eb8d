"""Samples and groups as rows: numbers, JSON, and arrays of int32 (token ids) and float64 (log-probabilities)."""

from __future__ import annotations

import dataclasses
import json
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from longtail.sample import Group, Sample, Segment, Timings
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion


def sample_of(
    row: Sequence[Any],
    group_id: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    output: tuple[list[int], list[float]] | None,
) -> Sample:
    """row: name, position, seed, prompt, params, status, finish and stop reason, failure, segments, timings, reward.

    Built without the checks of the constructor: what is read was checked when it was submitted."""
    sample = Sample.__new__(Sample)
    sample.id, sample.index, seed, own_prompt, own_params, status, sample.finish_reason, stop_reason, *rest = row
    sample.failure, segments, timings, sample.reward = rest
    sample.group_id = group_id
    sample.prompt_ids = prompt if own_prompt is None else tuple(unpack_ids(own_prompt))
    sample.params = params if own_params is None else params_of(own_params)
    sample.seed = seed % 2**64
    sample.status = status
    sample.stop_reason = None if stop_reason is None else json.loads(stop_reason)
    sample.output_ids, sample.logprobs = output or ([], [])
    sample.segments, sample.versions = [], []
    for start, end, version, engine, kv in json.loads(segments):
        end = min(end, len(sample.output_ids))
        if start < end:
            sample.segments.append(Segment(start, end, PolicyVersion(version), engine, kv))
            sample.versions.extend([PolicyVersion(version)] * (end - start))
    sample.timings = Timings(*json.loads(timings))
    sample.snapshot = None
    if not sample.is_done:  # nobody runs it now
        sample.status = "paused" if sample.output_ids else "waiting"
    return sample


def cut_short(sample: Sample) -> None:
    """A sample whose later tokens are damaged goes on from those before, to the same end: what follows a token is a
    function of it."""
    sample.status = "paused" if sample.output_ids else "waiting"
    sample.finish_reason = sample.stop_reason = sample.failure = sample.snapshot = None


def state_of(sample: Sample) -> tuple[Any, ...]:
    t = sample.timings
    return (
        sample.status,
        sample.finish_reason,
        None if sample.stop_reason is None else json.dumps(sample.stop_reason),
        sample.failure,
        len(sample.output_ids),
        json.dumps([[s.start, s.end, s.version, s.engine, s.kv] for s in sample.segments]),
        json.dumps([t.submitted, t.first_token, t.finished, t.running]),
        sample.reward,
    )


def pack_ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return array("i", data).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    return array("d", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    return array("d", data).tolist()


def checksum_of(tokens: bytes, logprobs: bytes) -> int:
    return zlib.crc32(logprobs, zlib.crc32(tokens))


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def params_json(params: SamplingParams) -> str:
    defaults = SamplingParams()
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    return json.dumps({name: v for name, v in values.items() if v != getattr(defaults, name)})


def params_of(text: str) -> SamplingParams:
    return SamplingParams.from_dict(json.loads(text))


def task_json(group: Group) -> str:
    try:
        return json.dumps(group.task)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"group {group.id!r}: task cannot be stored ({error}); a store on disk takes what JSON can say: numbers, "
            "strings, lists, dicts"
        ) from error
