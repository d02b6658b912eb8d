"""What `longtail simulate` runs on: a cluster in a TOML file.

    name = "8 instances of a 7B model"
    workload = "lognormal(median=2000, sigma=1.0, cap=16384, icc=0.5)"   # if none is given on the command line

    [batch]            # groups of an iteration, samples of each, iterations
    groups = 64
    group_size = 8
    iterations = 8

    [[instances]]      # kinds of instances; costs: a file of `longtail calibrate`, or an accelerator and a model
    count = 8
    slots = 128
    accelerator = "H100"
    model = "models/qwen2.5-7b.json"
    tensor_parallel = 1

    [seconds]          # update, train, grade (of a sample); save, restore and transfer of the KV of a token
    update = 5.0
    train = 60.0

    [speculation]      # acceptance length (with the bonus token) by sequences that decode together
    acceptance = { 1 = 2.8, 64 = 1.9 }
    draft_tokens = 4

    [[faults]]         # an instance is lost, and perhaps comes back
    time = 600.0
    instance = 3

Paths are relative to the file. Errors name the file, the field and the fix.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtail.bench.accelerators import analytic, kv_capacity
from longtail.bench.cost_model import CostModel, Transfer, check_keys, read_cost
from longtail.partial_rollout.engines.simulated import Instances, Loss, StepSeconds

CONFIGS = Path(__file__).parent / "configs"
DEFAULT = CONFIGS / "demo.toml"
BATCHED = 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a trainer takes from an iteration, at least on average."""

    groups: int
    group_size: int
    iterations: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _count(field.name, getattr(self, field.name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """None: what the costs say, or else 0."""

    update: float | None = None
    train: float = 0.0
    grade: float | None = None
    """Of one sample."""
    graders: int | None = None
    """That work at once; None: any number."""
    save: float | None = None
    """Of the KV of a token,"""
    restore: float | None = None
    """and bringing it back,"""
    transfer: float = 0.0
    """and, besides, from another instance."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "graders" and value is not None:
                _count("graders", value)
            elif value is not None:
                _at_least(field.name, value, 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Drafting as an acceptance model: what a verified pass yields on average, and what it costs."""

    acceptance: Mapping[int, float]
    """Tokens that a pass yields a sequence, the bonus among them (at least 1), by the number of sequences; linear in
    between, beyond the ends as at them."""
    draft_tokens: int = 4
    """Rows that a sequence has verified besides its own."""
    verify_factor: float = 1.0
    """Of the verifying pass, on top of what its rows cost."""
    draft_seconds: float = 0.0
    """Of a pass."""

    def __post_init__(self) -> None:
        if not isinstance(self.acceptance, Mapping) or not self.acceptance:
            raise ValueError("acceptance must be a table of sequences = tokens a pass, such as { 1 = 2.5, 64 = 1.8 }")
        table = {}
        for key, value in self.acceptance.items():
            if not str(key).isdecimal() or int(key) < 1:
                raise ValueError(f"acceptance: {key!r} must be a number of sequences of at least 1")
            table[int(key)] = _at_least(f"acceptance.{key}", value, 1.0)
        object.__setattr__(self, "acceptance", dict(sorted(table.items())))
        _count("draft_tokens", self.draft_tokens)
        _at_least("verify_factor", self.verify_factor, 0.0)
        _at_least("draft_seconds", self.draft_seconds, 0.0)


class Drafting:
    """A `StepSeconds`: each token of a decode pass takes its share of a verifying pass; where that is more than the
    pass without drafts, there are none. An average: the passes themselves stay passes of one token."""

    def __init__(self, step: StepSeconds, speculation: Speculation) -> None:
        self.step, self.speculation = step, speculation
        self._sizes = list(speculation.acceptance)
        self._lengths = list(speculation.acceptance.values())

    def seconds(self, num_seqs: int, query_tokens: int, context_tokens: int) -> float:
        if query_tokens != num_seqs:
            return self.step.seconds(num_seqs, query_tokens, context_tokens)
        return self.decode_seconds(num_seqs, context_tokens, 1)

    def decode_seconds(self, num_seqs: int, context_tokens: int, num_passes: int) -> float:
        plain = self.step.decode_seconds(num_seqs, context_tokens, num_passes)
        last = context_tokens + (num_passes - 1) * num_seqs
        verify = num_passes * (self._verify(num_seqs, context_tokens) + self._verify(num_seqs, last)) / 2.0
        return min(plain, verify / self.acceptance(num_seqs))

    def _verify(self, num_seqs: int, context: int) -> float:
        rows = num_seqs * (1 + self.speculation.draft_tokens)
        spec = self.speculation
        return spec.verify_factor * self.step.seconds(num_seqs, rows, context) + spec.draft_seconds

    def acceptance(self, num_seqs: int) -> float:
        sizes, lengths = self._sizes, self._lengths
        above = bisect.bisect_left(sizes, num_seqs)
        if above == 0:
            return lengths[0]
        if above == len(sizes):
            return lengths[-1]
        share = (num_seqs - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return lengths[above - 1] + share * (lengths[above] - lengths[above - 1])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Instances that are alike. cost: a file; or accelerator and model: analytic."""

    count: int
    slots: int
    kv_tokens: int | None = None
    """None: what the accelerator's memory leaves; without one, any number."""
    max_num_batched_tokens: int = BATCHED
    cost: str | None = None
    accelerator: str | None = None
    model: Any = None
    """A config.json, or a table of what it holds."""
    tensor_parallel: int = 1
    dtype: str | None = None
    kv_dtype: str | None = None
    bandwidth_efficiency: float = 0.7
    compute_efficiency: float = 0.6
    overhead: float = 0.002
    memory_share: float = 0.85

    def __post_init__(self) -> None:
        for name in ("count", "slots", "max_num_batched_tokens"):
            _count(name, getattr(self, name))
        if self.kv_tokens is not None:
            _count("kv_tokens", self.kv_tokens)
        if (self.cost is None) == (self.accelerator is None):
            raise ValueError("give either cost (a file of `longtail calibrate`) or accelerator and model")
        if self.accelerator is not None and self.model is None:
            raise ValueError("accelerator needs model: a config.json, or a table of its keys")

    def costs(self, folder: Path) -> tuple[CostModel, int | None]:
        """And the KV tokens that fit."""
        if self.cost is not None:
            return read_cost(folder / self.cost), self.kv_tokens
        model = folder / self.model if isinstance(self.model, str) else self.model
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("tensor_parallel", "dtype", "kv_dtype")}
        costs = analytic(
            str(self.accelerator),
            model,
            bandwidth_efficiency=self.bandwidth_efficiency,
            compute_efficiency=self.compute_efficiency,
            overhead=self.overhead,
            **fields,
        )
        room = kv_capacity(str(self.accelerator), model, memory_share=self.memory_share, **fields)
        return costs, room if self.kv_tokens is None else self.kv_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Checked at construction; `read_spec` reads it."""

    name: str
    batch: Batch
    instances: tuple[Kind, ...]
    note: str = ""
    workload: str | None = None
    strategies: str | None = None
    seconds: Seconds = dataclasses.field(default_factory=Seconds)
    speculation: Speculation | None = None
    faults: tuple[Loss, ...] = ()
    kv_on_update: str = "recompute"
    """Or "keep"."""
    affinity: bool = True
    """Paused samples return to where their KV is."""
    siblings: bool = False
    """A group's samples go to where the last of it went, as in an `EnginePool`."""
    routing: str = "load"
    """Or "group": each group is bound to an instance (`SimulatedCluster`)."""
    published: Mapping[str, Any] | None = None
    """A published result to compare with (`simulate_published`)."""
    folder: Path = Path(".")

    @property
    def slots(self) -> int:
        return sum(kind.count * kind.slots for kind in self.instances)

    def kinds(self) -> list[Instances]:
        """For `SimulatedCluster`."""
        made = []
        for number, kind in enumerate(self.instances):
            try:
                costs, room = kind.costs(self.folder)
            except ValueError as error:
                raise ValueError(f"instances[{number}]: {error}") from error
            step = costs.step if self.speculation is None else Drafting(costs.step, self.speculation)
            seconds = self.seconds
            settings = {
                "slots": kind.slots,
                "max_num_batched_tokens": max(kind.max_num_batched_tokens, kind.slots),
                "kv_tokens": room,
                "kv_on_update": self.kv_on_update,
                "update_seconds": _first(seconds.update, costs.update),
                "save_seconds": _first(seconds.save, _per_token(costs.save)),
                "restore_seconds": _first(seconds.restore, _per_token(costs.restore)),
                "transfer_seconds": seconds.transfer,
            }
            made.append(Instances(count=kind.count, cost=step, settings=settings))
        return made

    def grade_seconds(self) -> float:
        fitted = [kind.costs(self.folder)[0].grade for kind in self.instances[:1]]
        return _first(self.seconds.grade, fitted[0])

    def describe(self) -> str:
        """In a line."""
        parts = []
        for kind in self.instances:
            costs, room = kind.costs(self.folder)
            memory = "" if room is None else f", {room:,} KV tokens"
            parts.append(f"{kind.count} x {kind.slots} slots{memory} ({costs.label or costs.source})")
        return "; ".join(parts)


def read_spec(path: str | Path) -> ClusterSpec:
    """path: a file, or the name of a bundled one ("demo"). ValueError names the file, the field and the fix."""
    path = Path(path)
    if not path.is_file():
        bundled = CONFIGS / f"{path}.toml"
        if not bundled.is_file():
            known = ", ".join(sorted(str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.toml")))
            raise ValueError(f"{path}: there is no such file; give a cluster.toml, or a bundled one: {known}")
        path = bundled
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not readable as TOML ({error})") from error
    try:
        return spec_of(plain, path.parent)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def spec_of(plain: Mapping[str, Any], folder: Path = Path(".")) -> ClusterSpec:
    """Of a file's content. ValueError names the field and the fix."""
    fields = dict(plain)
    made: dict[str, Any] = {"folder": folder}
    tables: dict[str, Any] = {"batch": Batch, "seconds": Seconds, "speculation": Speculation}
    for name, kind in tables.items():
        if name in fields:
            made[name] = made_of(kind, name, fields.pop(name))
    lists: dict[str, Any] = {"instances": Kind, "faults": Loss}
    for name, kind in lists.items():
        entries = fields.pop(name, [])
        if not isinstance(entries, list):
            raise ValueError(f"{name} must be tables, each under [[{name}]]")
        made[name] = tuple(made_of(kind, f"{name}[{number}]", entry) for number, entry in enumerate(entries))
    known = {field.name for field in dataclasses.fields(ClusterSpec)} - {"folder"}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    made.update(fields)
    if "name" not in made or not isinstance(made["name"], str):
        raise ValueError("name is missing; say in a few words what the cluster is")
    if "batch" not in made:
        raise ValueError("batch is missing; add [batch] with groups and group_size")
    if not made["instances"]:
        raise ValueError("instances is missing; add [[instances]] with count, slots and cost")
    if made.get("kv_on_update", "recompute") not in ("recompute", "keep"):
        raise ValueError(f'kv_on_update must be "recompute" or "keep", not {made["kv_on_update"]!r}')
    if made.get("routing", "load") not in ("load", "group"):
        raise ValueError(f'routing must be "load" or "group", not {made["routing"]!r}')
    spec = ClusterSpec(**made)
    total = sum(kind.count for kind in spec.instances)
    for number, fault in enumerate(spec.faults):
        if not 0 <= fault.instance < total:
            raise ValueError(f"faults[{number}]: there is no instance {fault.instance}; they are 0 to {total - 1}")
    return spec


def made_of(kind: Any, name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} must be a table")
    check_keys(kind, name, values)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _first(*values: float | None) -> float:
    return next((value for value in values if value is not None), 0.0)


def _per_token(transfer: Transfer | None) -> float | None:
    return None if transfer is None else transfer.per_token


def _count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def _at_least(name: str, value: Any, low: float) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < low:
        raise ValueError(f"{name} must be a finite number of at least {low:g}, not {value!r}")
    return float(value)
