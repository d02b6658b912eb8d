"""Will speculation pay here? From a profile of this machine and model, and acceptance on its own rollouts.

    acceptance    what the drafters would have reached on recorded streams: finished samples of a store, or rollouts
                  made on the spot. Under match verification the record tells exactly (bench/spec_replay.py).
    costs         seconds of a verify step of the engine, by sequences and draft rows, round and round: what slows the
                  machine down for a while hits all of them. Each batch size has a curve of its own: as many rows of
                  fewer sequences read less KV.
    advice        expected speed-up and break-even acceptance at each batch size (spec_decode/break_even.py)

The acceptance counts a step in which the drafter is silent as one whose draft is rejected, and charges its rows: the
controller, which leaves such rows out, does a little better. Samples are replayed all at once; in a tail, where the
siblings are done, `group` does a little better as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longtail.bench.machine import describe
from longtail.bench.models import needed_tokenizer, resolve_model
from longtail.bench.spec_oracle import Counting, Noise
from longtail.bench.spec_replay import Recorded, Replayed, replay
from longtail.sample import Group
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.break_even import advise, speedups
from longtail.spec_decode.step_cost import StepCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from longtail.events import Event
    from longtail.partial_rollout.engines.native.engine import NativeEngine

ROLLOUT_SHARE = 0.35
"""Of the time, for rollouts where there is no store."""
ROLLOUT_SLOTS = 32
"""Samples that run at once there, at least."""
REPLAYED_TOKENS = 30_000
"""At most; about a second for each drafter."""
LONGEST_CONTEXT = 512
"""KV tokens of a sequence in the profile, at most: longer ones cost time to prefill."""
FEW_STEPS = 16
"""Of the rollouts, at least."""
MARGIN = 0.01
"""Expected gain from which on drafting pays: the controller's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdviseConfig:
    """Checked at construction."""

    model: str | Path
    """A name that `longtail model` knows, a directory or a hub id."""
    store: str | Path | None = None
    """Directory of a sample store whose finished samples tell the acceptance; None: rollouts are made."""
    minutes: float = 2.0
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    drafters: tuple[str, ...] = ("ngram", "group", "group>ngram")
    max_drafts: int = 8
    tasks: str = "mixed"
    """Task mix of the rollouts (bench/tasks.py)."""
    group_size: int = 8
    max_tokens: int = 256
    temperature: float = 0.7
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_drafts", "group_size", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0.0 < self.minutes < float("inf"):
            raise ValueError(f"minutes must be a positive number, not {self.minutes}")
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise ValueError(f"batches must be one or more different positive numbers, not {self.batches}")
        if not self.drafters or len(set(self.drafters)) < len(self.drafters):
            raise ValueError(f"drafters must be one or more names, each once, not {', '.join(self.drafters) or 'none'}")
        self.params(0)  # checks the sampling fields

    def params(self, group: int) -> SamplingParams:
        return SamplingParams(
            n=self.group_size,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed * 1_000_003 + group,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Drafts a sequence that are profiled: each of the first few, and the most."""
        return tuple(sorted({n for n in (0, 1, 2, 3, 4, 6) if n < self.max_drafts} | {self.max_drafts}))


@dataclasses.dataclass(frozen=True, slots=True)
class Acceptances:
    """Of one drafter on the recorded streams."""

    by_position: list[float]
    """Of the j-th draft token given those before it, in every step, with a draft or without."""
    acceptance_length: float
    """Tokens a step at the most drafts, steps without a draft counted."""
    draft_seconds: float
    """To draft for one sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """Of one drafter at one batch size."""

    drafter: str
    speedup: float
    """1 where it does not pay."""
    length: float
    """Drafts a sequence with which."""
    acceptance: float
    """One number for its acceptance by position: the acceptance which, the same for every token, brings as many tokens
    with as many drafts; below `break_even` exactly where drafting does not pay."""
    break_even: float | None
    """Acceptance from which on drafting pays, if it is the same for every token; None: none does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """At one batch size."""

    batch: int
    step_seconds: float
    """Without drafts."""
    drafters: list[Expected]

    @property
    def best(self) -> Expected:
        """The quickest; where none pays, the most accepted."""
        return max(self.drafters, key=lambda e: (e.speedup, e.acceptance))

    @property
    def pays(self) -> bool:
        return self.best.speedup > 1.0 + MARGIN


# ---- the measurement


def run(config: AdviseConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """-> JSON-ready: what was measured, and the advice. Takes about `minutes`, loading left out."""
    from longtail.partial_rollout.engines.native.engine import NativeEngine
    from longtail.spec_decode.choice import make_drafter

    for name in config.drafters:  # an unknown name is told before anything is measured
        make_drafter(name)
    progress(f"loading {config.model}")
    source = resolve_model(str(config.model))
    most = max(config.batches)
    engine = NativeEngine(
        source,
        threads=config.threads,
        max_num_seqs=max(most, ROLLOUT_SLOTS),
        max_num_batched_tokens=max(512, most * (1 + config.max_drafts)),
    )
    start = time.perf_counter()
    seconds = 60.0 * config.minutes
    if config.store is None:
        progress("rollouts, to see what is accepted")
        groups = make_rollouts(engine, source, config, start + ROLLOUT_SHARE * seconds)
    else:
        groups = read_store(config.store, engine.spec.vocab_size)
    accepted = {}
    for name in config.drafters:
        progress(f"replaying with {name}")
        accepted[name] = replayed(groups, name, config.max_drafts)
    contexts = _contexts(groups, engine.max_model_len - 8 * len(config.lengths))
    costs, overhead, points = profile(engine, contexts, config, start + seconds, progress)
    rows = advice(costs, accepted, config.max_drafts, overhead)
    machine = describe()
    return {
        "settings": dataclasses.asdict(config)
        | {"model": str(config.model), "store": None if config.store is None else str(config.store)},
        "machine": machine,
        "versions": {name: machine[name] for name in ("torch", "transformers", "longtail", "numba")},
        "streams": {
            "groups": len(groups),
            "samples": sum(map(len, groups)),
            "tokens": sum(len(output) for group in groups for _, output in group),
        },
        "acceptance": {name: dataclasses.asdict(a) for name, a in accepted.items()},
        "context_per_sequence": statistics.fmean(len(contexts[i % len(contexts)]) for i in range(most)),
        "profile": points,
        "rows": [dataclasses.asdict(row) for row in rows],
        "verdict": verdict(rows),
    }


def make_rollouts(engine: NativeEngine, source: str | Path, config: AdviseConfig, until: float) -> list[list[Recorded]]:
    """Samples of the task mix, as far as they come until then (a time of perf_counter)."""
    from longtail.bench.tasks import load_tasks, prompt_ids

    tokenizer = needed_tokenizer(source)
    count = max(4 * -(-engine.config.max_num_seqs // config.group_size), 8)
    prompts = [prompt_ids(task, tokenizer) for task in load_tasks(config.tasks, count, config.seed)]
    groups = [Group.from_prompt(f"advise {i}", prompt, config.params(i)) for i, prompt in enumerate(prompts)]
    engine.add(sample for group in groups for sample in group.samples)
    steps = 0
    while engine.has_work and (steps < FEW_STEPS or time.perf_counter() < until):
        engine.step()
        steps += 1
    engine.pause(snapshot=False)
    made: list[list[Recorded]] = [
        [(s.prompt_ids, s.output_ids) for s in group.samples if len(s.output_ids) > 1] for group in groups
    ]
    return [group for group in made if group]


def read_store(directory: str | Path, vocab_size: int) -> list[list[Recorded]]:
    """Finished samples, newest groups first, up to REPLAYED_TOKENS. Works while a run has the store open. Raises
    ValueError if there are none, or they are not this model's."""
    from longtail.partial_rollout.database import Database

    with contextlib.closing(Database(Path(directory), read_only=True)) as database:
        found = database.query(
            "SELECT g.id, sum(s.num_tokens) FROM groups g JOIN samples s ON s.group_id = g.id"
            " WHERE s.status = 'finished' GROUP BY g.id ORDER BY g.id DESC"
        )
        groups: list[list[Recorded]] = []
        total = 0
        for row, _ in found:
            if total >= REPLAYED_TOKENS:
                break
            loaded, damages = database.load("g.id = ?", (row,))
            damaged = {damage.sample.id for damage in damages}  # forgotten tokens as well
            kept: list[Recorded] = [
                (sample.prompt_ids, sample.output_ids)
                for sample in loaded[0].samples
                if sample.status == "finished" and len(sample.output_ids) > 1 and sample.id not in damaged
            ]
            if kept:
                groups.append(kept)
                total += sum(len(output) for _, output in kept)
    if not groups:
        raise ValueError(
            f"store: {directory} has no finished samples whose tokens are kept; leave the store out to make rollouts"
        )
    largest = max(max(*prompt, *output) for group in groups for prompt, output in group)
    if largest >= vocab_size:
        raise ValueError(
            f"store: {directory} holds token {largest}, and the model has {vocab_size}; give the model that made it"
        )
    return groups


def replayed(groups: Sequence[Sequence[Recorded]], name: str, max_drafts: int) -> Acceptances:
    from longtail.spec_decode.choice import make_drafter

    made: list[Counting] = []

    def make() -> Counting:
        made.append(Counting(make_drafter(name)))
        return made[-1]

    kept, total = [], 0
    for group in groups:
        if total < REPLAYED_TOKENS:
            kept.append(group)
            total += sum(len(output) for _, output in group)
    out = replay(kept, make, max_draft=max_drafts)
    asked = sum(drafter.asked for drafter in made)
    seconds = sum(drafter.seconds for drafter in made) / asked if asked else 0.0
    return Acceptances(unconditional(out), out.acceptance_length, seconds)


def unconditional(out: Replayed) -> list[float]:
    """Acceptance by position, steps without a draft counted as rejected: its cumulated product is exactly the tokens
    that a step gains, by the most drafts."""
    before = [out.steps, *out.accepted_by_position]
    return [a / b if b else 0.0 for a, b in zip(out.accepted_by_position, before, strict=False)]


def _contexts(groups: Sequence[Sequence[Recorded]], most: int) -> list[list[int]]:
    """Known tokens of the profile's sequences: prompts with half of their outputs, a sample of each group by turns."""
    by_turns = itertools.zip_longest(*groups)
    samples = [recorded for turn in by_turns for recorded in turn if recorded is not None]
    most = min(most, LONGEST_CONTEXT)
    return [[*prompt, *output[: len(output) // 2]][:most] for prompt, output in samples]


def profile(
    engine: NativeEngine,
    contexts: Sequence[Sequence[int]],
    config: AdviseConfig,
    until: float,
    progress: Callable[[str], None],
) -> tuple[dict[int, StepCost], float, list[dict[str, Any]]]:
    """Verify steps of every batch size with every draft length, by rounds, until then (a time of perf_counter), but two
    rounds at least; the first is not counted. -> what a step costs, by batch size; seconds to have one sequence's
    drafts made, the drafter's own left out; the points."""
    from longtail.spec_decode.controller import FixedLength

    costs = {batch: StepCost(engine.row_rule.multiple) for batch in config.batches}
    points: dict[tuple[int, int], list[float]] = {}
    overheads: list[float] = []
    events: list[Event] = []
    engine.listener = events.append
    noise = Counting(Noise(engine.spec.vocab_size, config.seed))
    params = SamplingParams(temperature=config.temperature, ignore_eos=True, seed=config.seed)
    for turn in itertools.count():
        for batch in config.batches:
            if turn > 1 and time.perf_counter() >= until:
                break
            progress(f"profile, round {turn}, batch {batch}")
            samples = [
                Group.from_prompt(f"profile {batch}/{i}", contexts[i % len(contexts)], params).samples[0]
                for i in range(batch)
            ]
            engine.use_drafter(None)
            engine.add(samples)
            while not all(sample.output_ids for sample in samples):
                engine.step()
            shift = turn % len(config.lengths)
            for length in config.lengths[shift:] + config.lengths[:shift]:
                engine.use_drafter(noise if length else None, FixedLength(length, StepCost()) if length else None)
                for _ in range(2 if turn else 1):
                    step = _step(engine, events)
                    if not turn or step.num_tokens != batch * (1 + length):
                        continue
                    seconds = step.duration - step.draft_seconds
                    costs[batch].record(step.num_tokens, seconds)
                    points.setdefault((batch, length), []).append(seconds)
                    if length:
                        overheads.append(step.draft_seconds / batch)
            engine.abort([sample.id for sample in samples])
        if turn and time.perf_counter() >= until:
            break
    engine.use_drafter(None)
    own = noise.seconds / noise.asked if noise.asked else 0.0
    overhead = max(statistics.median(overheads) - own, 0.0) if overheads else 0.0
    listed = [
        {"batch": batch, "drafts": length, "rows": batch * (1 + length), "seconds": seconds}
        for (batch, length), seconds in sorted(points.items())
    ]
    return costs, overhead, listed


def _step(engine: NativeEngine, events: list[Event]) -> Event:
    events.clear()
    engine.step()
    return next(event for event in events if event.kind == "step")


# ---- the advice


def advice(
    costs: Mapping[int, StepCost], accepted: Mapping[str, Acceptances], max_drafts: int, overhead: float = 0.0
) -> list[Advice]:
    """costs: by batch size. overhead: seconds for one sequence's drafts besides the drafter's own."""
    rows = []
    for batch, cost in costs.items():
        expected = []
        for name, own in accepted.items():
            seconds = overhead + own.draft_seconds
            (even,) = advise(cost, [batch], {name: own.by_position}, max_drafts=max_drafts, draft_seconds=seconds)
            speedup, drafts = even.speedups[name], round(even.lengths[name] * batch)
            if not drafts:  # compared where the break-even is reached
                curve = cost.curve(batch * (1 + max_drafts))
                uniform = 1.0 if even.acceptance is None else even.acceptance
                drafts = 1 + int(speedups(curve, batch, uniform, max_drafts, seconds * batch)[1:].argmax())
            level = equivalent(own.by_position, batch, drafts, max_drafts)
            expected.append(Expected(name, speedup, even.lengths[name], level, even.acceptance))
        rows.append(Advice(batch, even.step_seconds, expected))
    return rows


def equivalent(by_position: Sequence[float], batch: int, drafts: int, max_drafts: int) -> float:
    """The acceptance which, the same for every token, gains as many tokens with that many draft rows."""
    flat = np.ones(batch * (1 + max_drafts) + 1)  # rows that cost nothing: a speed-up is tokens against tokens
    wanted = speedups(flat, batch, by_position, max_drafts)[drafts]
    low, high = 0.0, 1.0
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if speedups(flat, batch, middle, max_drafts)[drafts] >= wanted else (middle, high)
    return low


def _answer(row: Advice) -> tuple[bool, str, bool]:
    """Pays, with which drafter, could pay."""
    return row.pays, row.best.drafter, row.best.break_even is not None


def verdict(rows: Sequence[Advice]) -> list[str]:
    """In words: a sentence for each run of batch sizes with the same answer."""
    lines = []
    for (pays, name, _), run_of in itertools.groupby(rows, key=_answer):
        own = list(run_of)
        first, last = own[0], own[-1]
        where = f"At batch {first.batch}" if len(own) == 1 else f"At batch {first.batch} to {last.batch}"
        if len(own) > 1 and last is rows[-1] and first is not rows[0]:
            where = f"From batch {first.batch} on"
        if pays:
            speeds = [row.best.speedup for row in own]
            low, high = f"{min(speeds):.1f}x", f"{max(speeds):.1f}x"
            expected = high if low == high else f"{low} to {high}"
            lines.append(f"{where} drafting with {name} pays: {expected} expected.")
        elif first.best.break_even is None:
            lines.append(f"{where} drafting does not pay: not even drafts that are always right would.")
        else:
            lines.append(
                f"{where} drafting does not pay: break-even acceptance {first.best.break_even:.2f} against "
                f"{first.best.acceptance:.2f} measured ({name})."
            )
    return lines


# ---- what a person looks at


def table(result: Mapping[str, Any]) -> Table:
    from rich.table import Table

    about, streams = result["machine"], result["streams"]
    out = Table(title="Will speculation pay here?", title_justify="left")
    out.caption = (
        f"acceptance on {streams['tokens']:,} tokens of {streams['samples']} samples, contexts of "
        f"{result['context_per_sequence']:.0f} tokens\n{about['cpu']}, {about['threads']} threads"
    )
    out.add_column("batch", justify="right")
    out.add_column("step ms", justify="right")
    out.add_column("drafter", no_wrap=True)
    for header in ("acceptance", "break-even", "drafts", "speed-up"):
        out.add_column(header, justify="right")
    for row in result["rows"]:
        out.add_section()
        for i, own in enumerate(row["drafters"]):
            even = own["break_even"]
            out.add_row(
                "" if i else str(row["batch"]),
                "" if i else f"{1e3 * row['step_seconds']:.1f}",
                own["drafter"],
                f"{own['acceptance']:.2f}",
                "none" if even is None else f"{even:.2f}",
                f"{own['length']:.1f}",
                f"{own['speedup']:.2f} x",
            )
    return out


def picture(result: Mapping[str, Any]) -> Figure:
    import pandas as pd

    from longtail.bench import plots

    return plots.speculation(
        pd.DataFrame([{"batch": row["batch"], **own} for row in result["rows"] for own in row["drafters"]])
    )
