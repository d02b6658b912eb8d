"""Samples and groups as rows: numbers, JSON, and arrays of int32 (token ids) and float64 (log-probabilities). Nothing
is pickled. Every row that a continuation or a trainer rests on carries a CRC-32."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from longtail.sample import OBSERVATION, Group, Sample, Segment, Timings, last_whole
from longtail.sampling_params import SamplingParams
from longtail.version import PolicyVersion

IDENTITY = ("name", "position", "seed", "prompt", "params", "multi_turn")
"""Columns of a sample that never change."""
STATE = (
    "status",
    "finish_reason",
    "stop_reason",
    "failure",
    "num_tokens",
    "segments",
    "submitted",
    "first_token",
    "finished",
    "running",
    "reward",
    "num_observed",
    "turn_ended",
    "masked",
    "num_masked",
    "attempts",
    "grade_failure",
    "grader",
    "grade_details",
)
"""Columns of a sample that change while it is made."""


ID_BYTES, FLOAT_BYTES = 4, 8
BLANK_STATE = ("waiting", None, None, None, 0, "[]", None, None, None, 0.0, None, 0, 0, 0, 0, 0, None, None, None)
OBSERVED = 1.0
"""Stored for the log-probability of an observation's token, which has none: no log-probability is above 0. So what was
generated can be told from what was not by a chunk alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A sample of which something was damaged on disk."""

    sample: Sample
    """As it goes on."""
    row: int
    lost: int
    """Output tokens that are gone, without observations. The sample makes them again if it can."""
    found: str
    done: str
    """What this means for the sample."""


class _Stored(Sample):
    """Unpacks its tokens when somebody first looks at them, so that a store of many samples opens soon and stays small
    in memory. From then on it is like any sample."""

    __slots__ = ("_packed",)
    _packed: tuple[bytes, bytes, str]

    def __getattr__(self, name: str) -> Any:  # asked only for what is not set
        if name not in ("output_ids", "logprobs", "versions", "segments"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        tokens, logprobs, text = self._packed
        ids = unpack_ids(tokens)
        floats = unpack_floats(logprobs)
        segments, versions = [], []
        for segment in _segments_of(text):
            segment.end = min(segment.end, len(ids))  # segments end where the readable output ends
            if segment.start < segment.end:
                segments.append(segment)
                versions += [segment.version] * len(segment)
                if segment.version == OBSERVATION:
                    floats[segment.start : segment.end] = [0.0] * len(segment)
        unpacked = {"output_ids": ids, "logprobs": floats, "versions": versions, "segments": segments}
        for field, value in unpacked.items():
            try:
                object.__getattribute__(self, field)  # set by somebody
            except AttributeError:
                setattr(self, field, value)
        self._packed = b"", b"", "[]"
        return object.__getattribute__(self, name)


def restore(
    row: int,
    record: Sequence[Any],
    readable: tuple[bool, bool],
    group_id: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    output: tuple[bytes, bytes],
) -> tuple[Sample, Damage | None]:
    """The sample from what is readable of it. Built without the checks of its constructor: what is read was checked
    when it was submitted.

    record: values of IDENTITY and STATE. readable: whether its prompt and parameters are as they were, and its state.
    output: tokens and log-probabilities up to the first that is damaged, packed."""
    identity, state = record[: len(IDENTITY)], record[len(IDENTITY) :]
    who, kept, lost = f"sample {identity[0]}", len(output[0]) // ID_BYTES, 0
    damage: tuple[str, str] | None = None
    turn_ended = bool(state[STATE.index("turn_ended")])
    if not readable[1]:
        lost, kept = _generated(output[1]), 0
        state, output, turn_ended = BLANK_STATE, (b"", b""), False
        damage = f"{who}: its record is damaged", "it starts again"
    elif kept != state[4]:
        readable_tokens = min(kept, state[4])
        segments = _segments_of(state[5])
        kept, turn_ended = last_whole(segments, readable_tokens)
        lost = sum(s.end - max(s.start, kept) for s in segments if s.end > kept and s.version != OBSERVATION)
        output = output[0][: kept * ID_BYTES], output[1][: kept * FLOAT_BYTES]
        damage = (
            f"{who}: output tokens {readable_tokens} to {state[4] - 1} are damaged",
            f"it continues from token {kept}",
        )
    if not readable[0]:
        identity = (*identity[:2], 0, None, None, False)
        prompt, params = (), SamplingParams()
        damage = f"{who}: its prompt or its parameters are damaged", "it cannot go on, and counts as failed"
    sample = _Stored.__new__(_Stored)
    sample.id, sample.index, seed, own_prompt, own_params, multi_turn = identity
    sample.status, sample.finish_reason, stop_reason, sample.failure, _, segments_text, *state = state
    *timings, reward, _, _, masked, _, sample.attempts, sample.grade_failure, sample.grader, grade_details = state
    sample.group_id = group_id
    sample.prompt_ids = prompt if own_prompt is None else tuple(unpack_ids(own_prompt))
    sample.params = params if own_params is None else params_of(own_params)
    sample.seed = seed % 2**64
    sample.stop_reason = None if stop_reason is None else json.loads(stop_reason)
    sample._packed = (*output, segments_text)
    sample.timings = Timings(*timings)
    sample.reward = None if reward is None else float(reward)
    sample.grade_details = None if grade_details is None else json.loads(grade_details)
    sample.multi_turn, sample.turn_ended, sample.masked = bool(multi_turn), turn_ended, min(masked, kept)
    sample.snapshot = sample.routed_experts = None
    if damage is not None:  # from the tokens that are left it goes on to the same end: they are all its state
        sample.finish_reason = sample.stop_reason = sample.failure = sample.timings.finished = None
        sample.reward = sample.grade_failure = sample.grader = sample.grade_details = None
    if damage is not None or not sample.is_done:  # nobody runs it now
        sample.status = "paused" if kept else "waiting"
    if not readable[0]:
        sample.status, sample.finish_reason = "failed", "error"
        sample.failure = "reading it from disk: its prompt or its parameters were damaged"
    return sample, None if damage is None else Damage(sample, row, lost, *damage)


def identity_of(sample: Sample, prompt: tuple[int, ...], params: SamplingParams) -> tuple[Any, ...]:
    """Values of IDENTITY. prompt, params: the group's; what is the same there is None."""
    own_prompt = None if same(sample.prompt_ids, prompt) else pack_ids(sample.prompt_ids)
    own_params = None if same(sample.params, params) else params_json(sample.params)
    return sample.id, sample.index, signed(sample.seed), own_prompt, own_params, int(sample.multi_turn)


def state_of(sample: Sample) -> tuple[Any, ...]:
    """Values of STATE."""
    t = sample.timings
    return (
        sample.status,
        sample.finish_reason,
        None if sample.stop_reason is None else json.dumps(sample.stop_reason),
        _text(sample.failure),
        len(sample.output_ids),
        _segments_json(sample.segments),
        t.submitted,
        t.first_token,
        t.finished,
        t.running,
        None if sample.reward is None else storable(float(sample.reward)),
        len(sample.output_ids) - sample.num_generated,
        int(sample.turn_ended),
        sample.masked,
        sample.num_masked,
        sample.attempts,
        _text(sample.grade_failure),
        _text(sample.grader),
        None if sample.grade_details is None else json.dumps(sample.grade_details),
    )


def _text(value: str | None) -> str | None:
    """Without what is no text (lone surrogates), which SQLite would not take."""
    return None if value is None else value.encode(errors="backslashreplace").decode()


def copied(sample: Sample) -> Sample:
    """With lists, segments and timings of its own."""
    sample.output_ids  # noqa: B018  (unpacks a stored one)
    one = copy.copy(sample)
    one.output_ids, one.logprobs, one.versions = map(_own, (sample.output_ids, sample.logprobs, sample.versions))
    one.segments = [dataclasses.replace(segment) for segment in sample.segments]
    one.timings = dataclasses.replace(sample.timings)
    one.routed_experts = copy.deepcopy(sample.routed_experts)
    return one


def _own(column: Any) -> Any:
    """A list of the same; of a simulated sample, rules to compute it from."""
    frozen = getattr(column, "frozen", None)
    return [*column] if frozen is None else frozen()


def checksum_of(values: Sequence[Any]) -> int:
    """CRC-32 of what SQLite gives back as it took it: bytes, text, integers, floats (but NaN and -0.0) and None."""
    return zlib.crc32(repr(tuple(values)).encode())


def checksum_of_bytes(first: bytes, second: bytes) -> int:
    return zlib.crc32(second, zlib.crc32(first))


def pack_ids(ids: Sequence[int]) -> bytes:
    try:
        return array("i", ids).tobytes()
    except OverflowError as error:
        raise ValueError(f"token ids must be below 2**31, not {max(ids)}") from error


def unpack_ids(data: bytes) -> list[int]:
    return array("i", data).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    return array("d", values).tobytes()


def pack_logprobs(sample: Sample, start: int) -> bytes:
    """From output position `start` on."""
    values = sample.logprobs[start:]
    for segment in sample.segments:
        if segment.version == OBSERVATION and segment.end > start:
            first = max(segment.start - start, 0)
            values[first : segment.end - start] = [OBSERVED] * (segment.end - start - first)
    return pack_floats(values)


def _generated(logprobs: bytes) -> int:
    """How many of these the policy wrote."""
    return sum(value != OBSERVED for value in unpack_floats(logprobs))


def unpack_floats(data: bytes) -> list[float]:
    return array("d", data).tolist()


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def same(a: Any, b: Any) -> bool:
    """Equal, and soon known to be where they are one object."""
    return a is b or a == b


_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in dataclasses.fields(SamplingParams)}


def params_json(params: SamplingParams) -> str:
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return json.dumps({name: v for name, v in values.items() if v != _DEFAULTS[name]})


@functools.lru_cache(maxsize=4096)
def params_of(text: str) -> SamplingParams:
    return SamplingParams.from_dict(json.loads(text))


def task_json(group: Group) -> str:
    """ValueError if the task would not come back as it is (tuples come back as lists)."""
    try:
        _check_keys(group.task)
        return "null" if group.task is None else json.dumps(group.task)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"group {group.id!r}: task cannot be stored ({error}); a store on disk takes what JSON can say: numbers, "
            "strings, lists, and dicts with strings as keys; keep other objects yourself, by the group's id"
        ) from error


def _check_keys(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is no string")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def _segments_of(text: str) -> list[Segment]:
    return [Segment(start, end, PolicyVersion(v), engine, kv) for start, end, v, engine, kv in json.loads(text)]


def _segments_json(segments: list[Segment]) -> str:
    return json.dumps([[s.start, s.end, s.version, s.engine, s.kv] for s in segments]) if segments else "[]"


def storable(value: float) -> float | str:
    """SQLite takes NaN for NULL, and -0.0 for 0.0."""
    return value if value and value == value else repr(value)
