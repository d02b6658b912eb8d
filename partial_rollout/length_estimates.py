"""How long a response will be, from what is known: siblings, earlier epochs, its task, or else its cap.

estimates = LengthEstimates(task_of=lambda group: group.task["name"])
estimates.add(group)                       # when it is submitted
estimates.admit(sample)                    # an Estimate; this one is compared with the length in the end
estimates.estimate(sample)                 # the same, for ordering: at any time, as often as wanted
estimates.observe(sample)                  # when it ends
estimates.forget(group.id)                 # when the group leaves, handed over or dropped: always

What is estimated is the response's output tokens when it ends, observations of an environment among them, its cap
included: min(length, cap). A response that ended at a cap is known to be at least that long, so it counts as endless,
and every estimate is clamped to the cap of the sample that asks: exact where caps are equal, on the safe side where
the cap grew.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

from longtail.partial_rollout.length_calibration import Calibration
from longtail.sample import Group, Sample

Source = Literal["siblings", "epochs", "task", "cap"]
SOURCES: tuple[Source, ...] = get_args(Source)
"""From the most to the least specific; the first that has an answer is taken."""

Rule = Literal["longest", "mean"] | float
"""How lengths become one estimate; a number is a quantile, in (0, 1]."""

FEW = 32
"""Lengths that are put in order one by one; more are sorted with the others."""

STATE = 1
"""Format of `to_dict`."""


class Estimate(NamedTuple):
    tokens: float
    """Output tokens of the whole response; never fewer than it has."""
    source: Source


class LengthEstimates:
    """Estimates in order of preference, each conditional on being longer than what the sample has by now:

    "siblings": finished responses of its group; by default the longest of them (Seer), because the short ones finish
        first.
    "epochs": responses to the same prompt token ids that left earlier, the newest `per_prompt` of them. At most
        `prompts` prompts are kept (up to half a kilobyte each); those not seen for longest go.
    "task": the newest `window` lengths of its task, once there are `min_task`. A window and not a P-square marker or
        a reservoir: it forgets the lengths of older policies, and it answers for any quantile above any length, which
        the condition needs. Short responses end first, so right after the start it is too short: `report` shows it.
    "cap": params.max_tokens, or what `context` (the engine's tokens of prompt and output) leaves.

    A source with no length above what the sample has by now does not know: the next one answers.

    task_of: the task of a group, hashable (to be saved: a string, number, bool, None or a tuple of them); None: all
    groups are one task. At most `tasks` are kept, those that ended a response last.
    siblings, epochs, task: the rule of each source. "longest" and quantiles are lengths that were seen.

    Responses that were cut short (failed, aborted) say nothing about lengths: they are counted and left out. One that
    is ended for repetition has the length at which that happened.

    An estimate costs a few dictionary look-ups and bisections, whatever the number of samples. Memory: two small
    records for each sample of an open group. Not thread-safe.
    """

    def __init__(
        self,
        *,
        context: int | None = None,
        task_of: Callable[[Group], Hashable] | None = None,
        siblings: Rule = "longest",
        epochs: Rule = "mean",
        task: Rule = 0.9,
        per_prompt: int = 16,
        prompts: int = 65_536,
        window: int = 512,
        min_task: int = 16,
        tasks: int = 1_024,
        calibration: int = 4_096,
    ) -> None:
        self.settings: dict[str, Any] = {
            "context": context,
            "siblings": siblings,
            "epochs": epochs,
            "task": task,
            "per_prompt": per_prompt,
            "prompts": prompts,
            "window": window,
            "min_task": min_task,
            "tasks": tasks,
            "calibration": calibration,
        }
        for name, value in self.settings.items():
            if name in ("siblings", "epochs", "task"):
                continue
            if name == "context" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
        if min_task > window:
            raise ValueError(f"min_task {min_task} exceeds window {window}, so that no task would ever speak; lower it")
        self.context = context
        self.task_of = task_of
        self._siblings = _quantile("siblings", siblings)
        self._epochs = _quantile("epochs", epochs)
        self._task = _quantile("task", task)
        self._groups: dict[str, _Group] = {}
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._tasks: OrderedDict[Hashable, _Task] = OrderedDict()
        self._calibration = {name: Calibration(calibration) for name in (*SOURCES, "all")}
        self.interrupted = 0
        """Responses that ended failed or aborted, and were left out."""

    def add(self, group: Group) -> None:
        """Makes a group known; again is no error. Needed before its samples are estimated if there is a `task_of`."""
        if group.id not in self._groups:
            if not group.samples:
                raise ValueError(f"group {group.id} has no samples")
            task = None if self.task_of is None else self.task_of(group)
            try:
                hash(task)
            except TypeError:
                raise ValueError(f"task_of must return something hashable, not {task!r} (group {group.id})") from None
            self._open(group.id, group.samples[0].prompt_ids, task)

    def estimate(self, sample: Sample, group: Group | None = None) -> Estimate:
        """group: adds it if it is not known yet. ValueError for a sample that is done, or that has no cap at all."""
        if sample.status == "finished" or sample.status == "failed":
            raise ValueError(f"sample {sample.id} is {sample.status}: there is nothing to estimate")
        known = self._groups.get(sample.group_id)
        if known is None:
            known = self._find(sample, group)
        now = len(sample.output_ids)
        cap = self._cap(sample)
        if known.lengths:
            tokens = _beyond(known.lengths, now, self._siblings, cap)
            if tokens is not None:
                return Estimate(tokens, "siblings")
        prompt = self._prompts.get(known.prompt)
        if prompt is not None:
            tokens = _beyond(prompt.ordered, now, self._epochs, cap)
            if tokens is not None:
                return Estimate(tokens, "epochs")
        task = self._tasks.get(known.task)
        if task is not None and len(task.arrived) >= self.settings["min_task"]:
            tokens = _beyond(task.ordered, now, self._task, cap)
            if tokens is not None:
                return Estimate(tokens, "task")
        return Estimate(float(cap if cap > now else now), "cap")

    def remaining(self, sample: Sample) -> float:
        """Output tokens still to come; 0 for a sample that is done."""
        return 0.0 if sample.is_done else self.estimate(sample).tokens - len(sample.output_ids)

    def admit(self, sample: Sample, group: Group | None = None) -> Estimate:
        """`estimate`, kept for calibration: the first one since the sample was submitted or cut short."""
        estimate = self.estimate(sample, group)
        self._groups[sample.group_id].admitted.setdefault(sample.id, estimate)
        return estimate

    def observe(self, sample: Sample) -> None:
        """Learns from a sample that has ended. ValueError if it has not, or was observed before."""
        if sample.status != "finished" and sample.status != "failed":
            raise ValueError(f"sample {sample.id} is {sample.status}; observe it when it has ended")
        known = self._groups.get(sample.group_id) or self._find(sample, None)
        if sample.id in known.observed:
            raise ValueError(f"sample {sample.id} was observed before; a length counts once")
        given = known.admitted.pop(sample.id, None)
        if sample.status == "failed" or sample.finish_reason in ("aborted", "error"):
            self.interrupted += 1
            return
        length = len(sample.output_ids)
        if not length:
            raise ValueError(f"sample {sample.id} is finished without an output token")
        known.observed.add(sample.id)
        if given is not None:
            self._calibration[given.source].add(given.tokens, length)
            self._calibration["all"].add(given.tokens, length)
        tokens = math.inf if sample.finish_reason == "length" else float(length)
        insort(known.lengths, tokens)
        task = self._tasks.get(known.task)
        if task is None:
            task = self._tasks[known.task] = _Task()
            if len(self._tasks) > self.settings["tasks"]:
                self._tasks.popitem(last=False)
        else:
            self._tasks.move_to_end(known.task)
        task.add(tokens, self.settings["window"])

    def forget(self, group_id: str) -> None:
        """A group leaves, handed over or dropped: its lengths become an earlier epoch of its prompt. A group that is
        not known is no error."""
        known = self._groups.pop(group_id, None)
        if known is None or not known.lengths:
            return
        prompt = self._prompts.get(known.prompt)
        arrived = [*(prompt.arrived if prompt is not None else ()), *known.lengths]
        self._prompts[known.prompt] = _Prompt(_newest(arrived, len(known.lengths), self.settings["per_prompt"]))
        self._prompts.move_to_end(known.prompt)
        if len(self._prompts) > self.settings["prompts"]:
            self._prompts.popitem(last=False)

    def report(self) -> dict[str, Any]:
        """Calibration by source and of all together (`Calibration.report`), and how many responses were left out."""
        figures: dict[str, Any] = {name: figures.report() for name, figures in self._calibration.items()}
        return figures | {"interrupted": self.interrupted}

    # ---- state

    def to_dict(self) -> dict[str, Any]:
        """All that is known, JSON-able; lengths that ended at a cap are None. ValueError for a task that is not."""
        return {
            "state": STATE,
            "settings": dict(self.settings),
            "groups": {
                name: {
                    "prompt": known.prompt.hex(),
                    "task": _task_out(known.task),
                    "lengths": _out(known.lengths),
                    "admitted": {sample: list(estimate) for sample, estimate in known.admitted.items()},
                    "observed": sorted(known.observed),
                }
                for name, known in self._groups.items()
            },
            "prompts": [[name.hex(), _out(prompt.arrived)] for name, prompt in self._prompts.items()],
            "tasks": [[_task_out(name), _out(task.arrived)] for name, task in self._tasks.items()],
            "calibration": {name: [c.count, [list(pair) for pair in c.pairs]] for name, c in self._calibration.items()},
            "interrupted": self.interrupted,
        }

    @classmethod
    def from_dict(
        cls, state: Mapping[str, Any], *, task_of: Callable[[Group], Hashable] | None = None
    ) -> LengthEstimates:
        """What `to_dict` saved. task_of is not in it: pass the same one. ValueError for anything else."""
        if not isinstance(state, Mapping) or state.get("state") != STATE:
            raise ValueError(f"state is not what LengthEstimates.to_dict of this version saved (state: {STATE})")
        try:
            self = cls(**state["settings"], task_of=task_of)
            for name, known in state["groups"].items():
                group = _Group(bytes.fromhex(known["prompt"]), _task_in(known["task"]))
                group.lengths = sorted(_in(known["lengths"]))
                group.admitted = {sample: _estimate(*pair) for sample, pair in known["admitted"].items()}
                group.observed = set(known["observed"])
                self._groups[name] = group
            for name, arrived in state["prompts"]:
                self._prompts[bytes.fromhex(name)] = _Prompt(_in(arrived))
            for name, arrived in state["tasks"]:
                task = self._tasks[_task_in(name)] = _Task()
                for tokens in _in(arrived):
                    task.add(tokens, self.settings["window"])
            for name, (count, pairs) in state["calibration"].items():
                for tokens, length in pairs:
                    self._calibration[name].add(tokens, length)
                self._calibration[name].count = count
            self.interrupted = state["interrupted"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"state of the length estimates is damaged: {error!r}; start without it") from error
        return self

    # ---- inside

    def _find(self, sample: Sample, group: Group | None) -> _Group:
        if group is not None:
            if group.id != sample.group_id:
                raise ValueError(f"sample {sample.id} is of group {sample.group_id}, not of {group.id}")
            self.add(group)
        elif self.task_of is not None:
            raise ValueError(f"group {sample.group_id} is not known, nor is its task; `add` it, or pass group")
        else:
            self._open(sample.group_id, sample.prompt_ids, None)
        return self._groups[sample.group_id]

    def _open(self, name: str, prompt_ids: tuple[int, ...], task: Hashable) -> None:
        # A digest, not the ids: 16 bytes a prompt, and no two prompts in a lifetime share one.
        known = self._groups[name] = _Group(blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest(), task)
        if known.prompt in self._prompts:
            self._prompts.move_to_end(known.prompt)

    def _cap(self, sample: Sample) -> int:
        cap = sample.params.max_tokens
        if self.context is not None:
            room = self.context - len(sample.prompt_ids)
            return room if cap is None or room < cap else cap
        if cap is None:
            raise ValueError(
                f"sample {sample.id} has no max_tokens, and nothing else bounds it: set max_tokens, or max_model_len "
                "of the engine (`context` of LengthEstimates)"
            )
        return cap


class _Group:
    __slots__ = ("admitted", "lengths", "observed", "prompt", "task")

    def __init__(self, prompt: bytes, task: Hashable) -> None:
        self.prompt = prompt
        self.task = task
        self.lengths: list[float] = []
        """Of the finished ones, ascending; inf: ended at a cap."""
        self.admitted: dict[str, Estimate] = {}
        self.observed: set[str] = set()


class _Prompt:
    __slots__ = ("arrived", "ordered")

    def __init__(self, arrived: Sequence[float]) -> None:
        self.arrived = array("d", arrived)
        self.ordered = array("d", sorted(arrived))


class _Task:
    __slots__ = ("_late", "_ordered", "arrived")

    def __init__(self) -> None:
        self.arrived: deque[float] = deque()
        self._ordered: list[float] = []
        self._late: list[tuple[float, float | None]] = []
        """What came, and what went for it, since somebody asked for the order; more than FEW: the first of these."""

    def add(self, tokens: float, window: int) -> None:
        self.arrived.append(tokens)
        gone = self.arrived.popleft() if len(self.arrived) > window else None
        if len(self._late) <= FEW:
            self._late.append((tokens, gone))

    @property
    def ordered(self) -> list[float]:
        if len(self._late) > FEW:
            self._ordered = sorted(self.arrived)
        else:
            for tokens, gone in self._late:
                insort(self._ordered, tokens)
                if gone is not None:
                    del self._ordered[bisect_left(self._ordered, gone)]
        self._late.clear()
        return self._ordered


def _newest(arrived: list[float], new: int, keep: int) -> list[float]:
    """The last `keep`. Of a group alone larger than that (its lengths, ascending, are the last `new`), lengths at even
    distances, the longest among them, so that what is kept is as long as the group."""
    if new <= keep:
        return arrived[-keep:]
    first = len(arrived) - new
    return [arrived[first + (i + 1) * new // keep - 1] for i in range(keep)]


def _beyond(ordered: Sequence[float], now: int, quantile: float | None, cap: int) -> float | None:
    """What the lengths above `now` say, each clamped to the cap; quantile None: their mean. None: there are none."""
    count = len(ordered)
    start = bisect_right(ordered, now) if now else 0
    if start == count:
        return None
    if quantile is None:
        end = bisect_left(ordered, cap, start)
        tokens = (sum(ordered[start:end]) + cap * (count - end)) / (count - start)
    else:  # the smallest length that a share of at least `quantile` does not exceed; 0.7 * 10 is a little more than 7
        tokens = ordered[start + math.ceil(quantile * (count - start) - 1e-9) - 1]
        if tokens > cap:
            tokens = float(cap)
    return tokens if tokens > now else float(now)


def _quantile(name: str, rule: Rule) -> float | None:
    if rule == "longest":
        return 1.0
    if rule == "mean":
        return None
    if isinstance(rule, bool) or not isinstance(rule, int | float) or not 0.0 < rule <= 1.0:
        raise ValueError(f'{name} must be "longest", "mean" or a quantile in (0, 1], not {rule!r}')
    return float(rule)


def _estimate(tokens: float, source: Source) -> Estimate:
    if source not in SOURCES:
        raise ValueError(f"state of the length estimates is damaged: source {source!r}; start without it")
    return Estimate(tokens, source)


def _out(lengths: Sequence[float] | deque[float]) -> list[float | None]:
    return [None if math.isinf(tokens) else tokens for tokens in lengths]


def _in(lengths: Sequence[float | None]) -> list[float]:
    return [math.inf if tokens is None else float(tokens) for tokens in lengths]


def _task_out(task: Hashable) -> Any:
    """Tuples as lists, which nothing hashable is."""
    if isinstance(task, tuple):
        return [_task_out(part) for part in task]
    if task is None or isinstance(task, str | bool | int | float):
        return task
    raise ValueError(f"task_of must return a string, number, bool, None or a tuple of them to be saved, not {task!r}")


def _task_in(task: Any) -> Hashable:
    return tuple(_task_in(part) for part in task) if isinstance(task, list) else task
