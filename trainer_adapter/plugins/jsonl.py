"""Samples as an iterator, and as JSON lines in the names of slime's `Sample`, both ways.

    for sample in iter_samples(rollout): ...
    write_jsonl("rollouts.jsonl", samples, decode=tokenizer.decode)
    samples = list(read_jsonl("rollouts.jsonl"))

A line has slime's fields (tokens, response, response_length, loss_mask, rollout_log_probs, weight_versions, reward,
status, ...: slime/utils/types.py of THUDM/slime), one weight version a segment as there, and what slime has no field
for under metadata["longtail"]: per-token versions, seed, sampling parameters. A line that we wrote gives the same
sample back; one that slime wrote gives what it says.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from longtail.routing import RoutedExperts
from longtail.sample import ENVIRONMENT, OBSERVATION, Group, Sample, Segment, Timings
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

OURS = "longtail"
UNKNOWN_ENGINE = "slime"
PLAIN = ("id", "group_id", "index", "seed", "status", "finish_reason", "stop_reason", "failure", "grade_failure")
PLAIN_TOO = ("multi_turn", "turn_ended", "masked", "attempts")


class Collects(Protocol):
    def collect(self, *, wait: bool = False) -> list[Group]: ...


def iter_samples(rollout: Collects) -> Iterator[Sample]:
    """Those of complete groups, group after group, until the rollout has nothing left. It generates when the next
    group is asked for, and what is submitted in between comes too."""
    while groups := rollout.collect() or rollout.collect(wait=True):
        for group in groups:
            yield from group.samples


def to_record(
    sample: Sample,
    *,
    group_index: int | None = None,
    prompt: str = "",
    label: str | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `json.dumps` takes. decode: for slime's text of the response; None: it is empty. The snapshot of a paused
    sample is left out: it is no part of it. ValueError if metadata has a key of ours."""
    if metadata is not None and OURS in metadata:
        raise ValueError(f"metadata has a key {OURS!r}, which is ours; name it otherwise")
    ours: dict[str, Any] = {name: getattr(sample, name) for name in (*PLAIN, *PLAIN_TOO)}
    ours["params"] = dataclasses.asdict(sample.params)
    ours["segments"] = [[s.start, s.end, s.version, s.engine, s.kv] for s in sample.segments]
    ours["timings"] = dataclasses.asdict(sample.timings)
    if (routed := sample.routed_experts) is not None:
        data = base64.b64encode(bytes(routed.data)).decode()
        ours["routed_experts"] = {"layers": routed.layers, "top_k": routed.top_k, "data": data}
    return {
        "group_index": group_index,
        "index": sample.index,
        "prompt": prompt,
        "tokens": [*sample.prompt_ids, *sample.output_ids],
        "response": "" if decode is None else decode(sample.output_ids),
        "response_length": len(sample.output_ids),
        "label": label,
        "reward": sample.reward,
        "loss_mask": [int(trained) for trained in sample.loss_mask],
        "weight_versions": [str(s.version) for s in sample.segments if s.version != OBSERVATION],
        "rollout_log_probs": list(sample.logprobs),
        "remove_sample": False,
        "status": _slime_status(sample),
        "metadata": {**(metadata or {}), OURS: ours},
    }


def from_record(record: Mapping[str, Any], *, reward_key: str | None = None) -> Sample:
    """The inverse. Of a line that slime wrote: its weight versions have no borders, so that all tokens get the oldest;
    leading zeros of the loss mask are `masked`, later ones observations. reward_key: where slime's reward is an object.

    ValueError that names the field for a line that is none."""
    if not isinstance(record, Mapping):
        raise ValueError(f"a record must be a JSON object, not {record!r:.80}")
    tokens, length = _ints(record, "tokens"), record.get("response_length", 0)
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < max(len(tokens), 1):
        raise ValueError(f"response_length must be 0 to the {len(tokens)} tokens less a prompt, not {length!r}")
    prompt, output = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    logprobs = record.get("rollout_log_probs") or []
    if len(logprobs) != length or not all(type(p) in (int, float) for p in logprobs):
        raise ValueError(f"rollout_log_probs must have a number for each of the {length} tokens of the response")
    reward = record.get("reward")
    if isinstance(reward, Mapping):
        if reward_key not in reward:
            raise ValueError(f"reward is an object with {', '.join(map(str, reward))}; give the reward_key of one")
        reward = reward[reward_key]
    metadata = record.get("metadata") or {}
    ours = metadata.get(OURS) if isinstance(metadata, Mapping) else None
    fields = _theirs(record, length) if ours is None else _ours(ours)
    if ours is None:
        logprobs = [0.0 if v == OBSERVATION else p for p, v in zip(logprobs, fields["versions"], strict=True)]
    sample = Sample(
        prompt_ids=tuple(prompt),
        output_ids=output,
        logprobs=[float(p) for p in logprobs],
        reward=None if reward is None else float(reward),
        **fields,
    )
    try:
        sample.check_integrity()
    except AssertionError as error:
        raise ValueError(f"metadata: versions and tokens of sample {sample.id} do not fit: {error}") from None
    return sample


def write_jsonl(path: str | Path, samples: Iterable[Sample], **fields: Any) -> int:
    """A line for each, in a file that is there whole or not at all. fields: as of `to_record`, for all of them;
    group_index is counted by `group_id`, from 0, if none is given. -> how many. ValueError, with the sample's id, if
    one holds NaN or infinity."""
    path, count = Path(path), 0
    groups: dict[str, int] = {}
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            for sample in samples:
                number = groups.setdefault(sample.group_id, len(groups))
                record = to_record(sample, **({"group_index": number} | fields))
                try:
                    file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")
                except ValueError as error:
                    raise ValueError(f"sample {sample.id} is not finite: {error}") from error
                count += 1
        fresh.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
    return count


def read_jsonl(path: str | Path, *, reward_key: str | None = None) -> Iterator[Sample]:
    """ValueError that names the line for one that is no sample; empty lines are skipped."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield from_record(json.loads(line), reward_key=reward_key)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def _slime_status(sample: Sample) -> str:
    if sample.status == "failed":
        return "failed"
    if sample.status == "finished":
        return {"stop": "completed", "aborted": "aborted"}.get(sample.finish_reason or "", "truncated")
    return "aborted" if sample.output_ids else "pending"


def _ours(ours: Mapping[str, Any]) -> dict[str, Any]:
    segments = [Segment(start, end, PolicyVersion(v), engine, kv) for start, end, v, engine, kv in ours["segments"]]
    fields: dict[str, Any] = {name: ours[name] for name in (*PLAIN, *PLAIN_TOO)}
    if (routed := ours.get("routed_experts")) is not None:
        data = base64.b64decode(routed["data"])
        fields["routed_experts"] = RoutedExperts(routed["layers"], routed["top_k"], data)
    if fields["status"] == "running":
        fields["status"] = "paused"  # nothing runs it any more
    return fields | {
        "params": SamplingParams.from_dict(ours["params"]),
        "segments": segments,
        "versions": [s.version for s in segments for _ in range(len(s))],
        "timings": Timings(**ours["timings"]),
    }


def _theirs(record: Mapping[str, Any], length: int) -> dict[str, Any]:
    mask = record.get("loss_mask")
    mask = [1] * length if mask is None else mask
    if len(mask) != length or not set(mask) <= {0, 1}:
        raise ValueError(f"loss_mask must have 0 or 1 for each of the {length} tokens of the response")
    stamps = record.get("weight_versions") or ["0"]
    try:
        version = PolicyVersion(min(int(stamp) for stamp in stamps))
    except ValueError:
        raise ValueError(f"weight_versions must be whole numbers, not {stamps!r}") from None
    masked = mask.index(1) if 1 in mask else length
    versions = [version if i < masked or mask[i] else OBSERVATION for i in range(length)]
    segments: list[Segment] = []
    for i, v in enumerate(versions):
        if segments and segments[-1].version == v:
            segments[-1].end = i + 1
        else:
            segments.append(Segment(i, i + 1, v, ENVIRONMENT if v == OBSERVATION else UNKNOWN_ENGINE))
    group, index = record.get("group_index") or 0, record.get("index") or 0
    status = record.get("status", "pending")
    ends = {"completed": ("finished", "stop"), "truncated": ("finished", "length"), "failed": ("failed", "error")}
    open_status = "paused" if length else "waiting"
    if status not in (*ends, "aborted", "pending"):
        raise ValueError(f"status must be one of slime's, not {status!r}")
    ours, reason = ends.get(status, (open_status, None))
    return {
        "id": f"g{group}/{index}",
        "group_id": f"g{group}",
        "index": index,
        "seed": 0,
        "params": SamplingParams(),
        "status": ours,
        "finish_reason": reason,
        "failure": "slime: failed" if status == "failed" else None,
        "masked": masked,
        "segments": segments,
        "versions": versions,
    }


def _ints(record: Mapping[str, Any], name: str) -> list[int]:
    value = record.get(name)
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise ValueError(f"{name} must be a list of token ids, with at least one")
    return value
