"""What drafting brings: drafter x batch size, in wall time against drafting off, pair by pair in one process.

    record        all samples of all groups, once, without drafts: the streams that every contestant must make again
    for each batch size, for each repeat, each contestant (in an order that rotates):
        |<-- prefill -->| all have their first token |<-- timed -->| all are done

`batch` samples decode at once: real task prompts in groups, a fixed number of new tokens each, EOS ignored. A batch
below the group's size is the tail: the other samples of the group are done, and the drafter knows them. Each run begins
with a new drafter and a new controller, which does not know the acceptance: what it takes to learn it is in the
figures, and the shorter the run, the more. What a step costs is kept from run to run and from contestant to contestant,
as an engine keeps it. Nothing waits for the slots, and the ends are known: the run ends with its slowest sequence,
which is what the controller then goes by. Exact numerics, so that the streams of all contestants must be equal,
whatever the batch; a run with another token has no speed.

Contestants: each drafter under the controller (what a user gets), and with fixed lengths where asked for. Besides the
drafters that an engine takes by name there are "oracle:0.8", which knows the recorded stream and is right with that
probability at every token, and "garbage", which is always wrong.

Two speed-ups. Wall time ends with the last sequence: where drafts go to the sequences that accept them, the others are
not done sooner, and the batch thins out. Tokens a second while all decode is what a run gains that fills its slots
again. Beside them stands what the parts let expect of the latter (`expected_speedup`): an acceptance above the
break-even speeds up the steps that have drafts, and a drafter that is silent in most steps cannot make the run as much
faster as its acceptance sounds.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.engine_bench import BenchFailed, quantiles, ratios
from longtail.bench.machine import describe
from longtail.bench.models import needed_tokenizer, resolve_model
from longtail.bench.spec_oracle import Counting, Oracle
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.drafter import Drafter

if TYPE_CHECKING:
    from longtail.events import Event
    from longtail.partial_rollout.engines.native.engine import NativeEngine
    from longtail.spec_decode.controller import Controller, ControllerConfig

DRAFTERS = ("ngram", "group", "group>ngram", "oracle:0.8", "garbage")
OFF = "off"
Make = Callable[["NativeEngine"], Drafter]
"""Makes a drafter for a run, for names that the engine does not know by itself (a draft model, an MTP head)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecBenchConfig:
    """Checked at construction."""

    model: str | Path
    """A name that `longtail model` knows, a directory or a hub id."""
    drafters: tuple[str, ...] = DRAFTERS
    """Names, or several joined by ">" in order of preference."""
    lengths: tuple[int, ...] = ()
    """Fixed draft lengths; each drafter also runs with each of them."""
    batches: tuple[int, ...] = (1, 4, 16, 32)
    new_tokens: int = 64
    """Of each sequence; the first belongs to the prefill."""
    repeats: int = 3
    temperature: float = 0.7
    group_size: int = 8
    tasks: str = "gsm"
    """Task mix (bench/tasks.py)."""
    max_drafts: int = 8
    """Most drafts of a sequence under the controller."""
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("new_tokens", 2), ("repeats", 1), ("group_size", 1), ("max_drafts", 1), ("threads", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise ValueError(f"batches must be one or more different positive numbers, not {self.batches}")
        if len(set(self.lengths)) < len(self.lengths) or min(self.lengths, default=1) < 1:
            raise ValueError(f"lengths must be different positive numbers, not {self.lengths}")
        if not self.drafters or len(set(self.drafters)) < len(self.drafters) or OFF in self.drafters:
            raise ValueError(
                f"drafters must be one or more names, each once, not {', '.join(self.drafters) or 'none'}; "
                f"{OFF!r} runs in any case"
            )
        self.params()  # checks the temperature

    def params(self) -> SamplingParams:
        return SamplingParams(
            n=self.group_size,
            temperature=self.temperature,
            max_tokens=self.new_tokens,
            ignore_eos=True,
            seed=self.seed,
        )

    @property
    def num_groups(self) -> int:
        """Enough for the largest batch, and for other samples in each repeat of a small one."""
        return max(-(-max(self.batches) // self.group_size), self.repeats)


@dataclasses.dataclass(frozen=True, slots=True)
class Contestant:
    drafter: str | None
    """None: drafting off."""
    length: int | None = None
    """Fixed; None: the controller chooses."""

    @property
    def label(self) -> str:
        if self.drafter is None:
            return OFF
        return self.drafter if self.length is None else f"{self.drafter}, always {self.length}"


@dataclasses.dataclass(slots=True)
class SpecRun:
    seconds: float
    """From the moment that all have their first token until all are done."""
    steps: list[Event]
    """Of that time."""
    drafted_for: int = 0
    """Times that a sequence was drafted for, verified or not."""
    report: dict[str, Any] | None = None
    """`Speculation.report()`."""

    def rate(self, batch: int) -> float:
        """Tokens a second of the steps in which all sequences decode."""
        full = [step for step in self.steps if step.num_seqs == batch]
        return sum(step.num_output_tokens for step in full) / sum(step.duration for step in full)


# ---- a run


def run(
    config: SpecBenchConfig, progress: Callable[[str], None], makers: Mapping[str, Make] | None = None
) -> dict[str, Any]:
    """Runs everything; JSON-ready. `progress` gets a line now and then; makers: further drafters by name."""
    bench = _Bench(config, progress, makers or {})
    rows = []
    gc.collect()
    gc.freeze()  # the collections between runs look at what the runs made, not at every module
    try:
        for batch in config.batches:
            rows += bench.rows(batch)
    finally:
        gc.unfreeze()
    machine = describe()
    return {
        "settings": dataclasses.asdict(config) | {"model": str(config.model)},
        "machine": machine,
        "versions": {name: machine[name] for name in ("torch", "transformers", "longtail", "numba")},
        "prompt_tokens": [len(group.samples[0].prompt_ids) for group in bench.groups],
        "rows": rows,
        "must_hold": must_hold(rows),
    }


class _Bench:
    """An engine, the recorded streams, and the contestants."""

    def __init__(self, config: SpecBenchConfig, progress: Callable[[str], None], makers: Mapping[str, Make]) -> None:
        from longtail.bench.tasks import load_tasks, prompt_ids
        from longtail.partial_rollout.engines.native.engine import NativeEngine

        self.config, self.progress, self.makers = config, progress, makers
        self.contestants = [Contestant(None), *(Contestant(name) for name in config.drafters)]
        self.contestants += [Contestant(name, length) for name in config.drafters for length in config.lengths]
        progress(f"loading {config.model}")
        source = resolve_model(str(config.model))
        tokenizer = needed_tokenizer(source)
        tasks = load_tasks(config.tasks, config.num_groups, config.seed)
        self.prompts = [prompt_ids(task, tokenizer) for task in tasks]
        self.groups = self._new_groups()
        rows = max(config.batches) * max(map(len, self.prompts))  # every prompt of a batch in one pass
        self.engine = NativeEngine(
            source,
            threads=config.threads,
            max_num_seqs=config.num_groups * config.group_size,
            max_num_batched_tokens=max(rows, config.num_groups * config.group_size),
        )
        longest = max(map(len, self.prompts)) + config.new_tokens
        if longest > self.engine.max_model_len:
            raise ValueError(
                f"new_tokens: the run needs sequences of {longest} tokens, the model has {self.engine.max_model_len} "
                "positions"
            )
        self.streams: dict[str, list[int]] = {}
        for contestant in self.contestants:  # an unknown name is told before anything is measured
            self._drafter(contestant)
        progress("recording the streams")
        samples = [sample for group in self.groups for sample in group.samples]
        self.engine.add(samples)
        while self.engine.has_work:
            self.engine.step()
        self.streams = {sample.id: list(sample.output_ids) for sample in samples}

    def _new_groups(self) -> list[Group]:
        params = self.config.params()
        return [
            Group.from_prompt(f"group {g}", prompt, dataclasses.replace(params, seed=self.config.seed * 1_000_003 + g))
            for g, prompt in enumerate(self.prompts)
        ]

    def _drafter(self, contestant: Contestant) -> Counting | None:
        from longtail.spec_decode.choice import make_drafter

        if contestant.drafter is None:
            return None
        made: dict[str, Drafter] = {}
        for name in (part.strip() for part in contestant.drafter.split(">")):
            right = _right(name)
            if right is not None:
                made[name] = Oracle(name, self.streams, right, self.engine.spec.vocab_size, self.config.seed)
            elif name in self.makers:
                made[name] = self.makers[name](self.engine)
        return Counting(make_drafter(contestant.drafter, made))

    def _controller(self, contestant: Contestant) -> Controller | ControllerConfig:
        from longtail.spec_decode.controller import ControllerConfig, FixedLength
        from longtail.spec_decode.step_cost import StepCost

        if contestant.length is not None:
            return FixedLength(contestant.length, StepCost(self.engine.row_rule.multiple))
        return ControllerConfig(max_drafts=self.config.max_drafts)

    def rows(self, batch: int) -> list[dict[str, Any]]:
        """One of each contestant, from all repeats."""
        runs: dict[str, list[SpecRun]] = {contestant.label: [] for contestant in self.contestants}
        self.progress(f"batch {batch}, warming up")
        for contestant in self.contestants:  # kernels of these shapes, compiled and planned; the clocks have settled
            self.run_once(contestant, batch, 0, warm=True)
        for repeat in range(self.config.repeats):
            shift = repeat % len(self.contestants)
            for contestant in self.contestants[shift:] + self.contestants[:shift]:
                self.progress(f"batch {batch}, repeat {repeat + 1} of {self.config.repeats}, {contestant.label}")
                runs[contestant.label].append(self.run_once(contestant, batch, repeat))
        tokens = batch * (self.config.new_tokens - 1)
        return [make_row(c, batch, tokens, runs[c.label], runs[OFF]) for c in self.contestants]

    def run_once(self, contestant: Contestant, batch: int, repeat: int, *, warm: bool = False) -> SpecRun:
        """warm: only a few tokens."""
        groups = self._new_groups()
        first = repeat % len(groups)
        samples = [sample for group in groups[first:] + groups[:first] for sample in group.samples]
        running, last = samples[:batch], samples[batch - 1].group_id
        if warm:
            for sample in running:
                sample.params = dataclasses.replace(sample.params, max_tokens=min(WARM_TOKENS, self.config.new_tokens))
        drafter = self._drafter(contestant)
        engine = self.engine
        engine.use_drafter(drafter, self._controller(contestant))
        if drafter is not None:
            for sibling in (s for s in samples[batch:] if s.group_id == last):
                for token in self.streams[sibling.id]:
                    sibling.append(token, 0.0, engine.version, "recorded", "computed")
                drafter.observe(sibling, len(sibling.output_ids))
                drafter.forget(sibling.id)
        gc.collect()
        events: list[Event] = []
        engine.listener = events.append
        engine.add(running)
        engine.step()
        if any(len(sample.output_ids) != 1 for sample in running):
            raise BenchFailed(f"{contestant.label}, batch {batch}: the prompts were to be computed in one pass")
        events.clear()
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - start
        check_streams(contestant.label, running, self.streams)
        steps = [event for event in events if event.kind == "step"]
        if drafter is None or engine.speculation is None:
            return SpecRun(seconds, steps)
        return SpecRun(seconds, steps, drafter.asked, engine.speculation.report())


WARM_TOKENS = 12


def check_streams(label: str, samples: Sequence[Sample], streams: Mapping[str, Sequence[int]]) -> None:
    """BenchFailed unless each sample has the recorded tokens, all that it was to make."""
    for sample in samples:
        wanted, made = list(streams[sample.id])[: sample.params.max_tokens], sample.output_ids
        if made != wanted:
            place = next(
                (i for i, (a, b) in enumerate(zip(made, wanted, strict=False)) if a != b), min(len(made), len(wanted))
            )
            raise BenchFailed(
                f"{label}: sample {sample.id} has other tokens than without drafts, from output position {place} on "
                f"({len(made)} tokens of {len(wanted)}); a verification that changes tokens has no speed"
            )


def _right(name: str) -> float | None:
    """Of an oracle's name; None for other names."""
    if name == "garbage":
        return 0.0
    if not name.startswith("oracle"):
        return None
    if not re.fullmatch(r"oracle:(0(\.\d+)?|1(\.0+)?|\.\d+)", name):
        raise ValueError(f'drafters: {name!r} is not "oracle:P" with a probability P from 0 to 1, as in oracle:0.8')
    return float(name.partition(":")[2])


# ---- figures


def make_row(
    contestant: Contestant, batch: int, tokens: int, runs: Sequence[SpecRun], off: Sequence[SpecRun]
) -> dict[str, Any]:
    """tokens: made in each run's time; off: those without drafts; both one a repeat."""
    steps = [step for run in runs for step in run.steps]
    full = [step for step in steps if step.num_seqs == batch]
    plain = [s.duration - s.draft_seconds for s in full if not s.num_draft_tokens]
    verifying = [s.duration - s.draft_seconds for s in full if s.num_draft_tokens]
    without = [s for run in off for s in run.steps if s.num_seqs == batch]
    reports = [run.report for run in runs if run.report is not None]
    by_drafter = [drafter for report in reports for drafter in report["drafters"].values()]
    times = sum(drafter["steps"] for drafter in by_drafter)
    judged = sum(sum(drafter["judged_by_position"]) for drafter in by_drafter)
    asked, made = sum(run.drafted_for for run in runs), len(runs) * tokens
    at_batch = [b for report in reports for b in report["batches"] if b["batch"] == batch]
    even = [b["break_even_acceptance"] for b in at_batch if b["break_even_acceptance"] is not None]
    reasons: dict[str, int] = {}
    for entry in (b["steps"] for report in reports for b in report["batches"]):
        for reason, count in entry.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return {
        "drafter": contestant.drafter or OFF,
        "batch": batch,
        "length": contestant.length,
        "label": contestant.label,
        "tokens": tokens,
        "per_repeat": [run.seconds for run in runs],
        "seconds": quantiles([run.seconds for run in runs]),
        "speedup": ratios([run.seconds for run in off], [run.seconds for run in runs]),
        "full_batch_speedup": ratios([run.rate(batch) for run in runs], [run.rate(batch) for run in off]),
        "acceptance_length": sum(d["emitted"] for d in by_drafter) / times if times else None,
        "acceptance": sum(sum(d["accepted_by_position"]) for d in by_drafter) / judged if judged else None,
        "break_even_acceptance": quantiles(even)["p50"] if even else None,
        "drafted_per_token": sum(s.num_draft_tokens for s in steps) / made,
        "accepted_per_token": sum(s.num_accepted_tokens for s in steps) / made,
        "draft_us": 1e6 * sum(s.draft_seconds for s in steps) / asked if asked else None,
        "steps": len(steps),
        "steps_with_drafts": sum(s.num_draft_tokens > 0 for s in steps) / len(steps),
        "silent": reasons.get("nothing drafted", 0) / max(sum(reasons.values()), 1),
        "expected_speedup": None if contestant.drafter is None else expected_speedup(batch, full, without),
        "step_seconds": quantiles(plain) if plain else None,
        "verify_seconds": quantiles(verifying) if verifying else None,
        "reasons": reasons,
        "reports": reports,
    }


FLOOR, TAIL, TAIL_SPEEDUP = 0.97, 4, 1.3


def expected_speedup(batch: int, steps: Sequence[Event], off: Sequence[Event]) -> float:
    """Of tokens a second while all decode, from its parts: what a step takes with drafts and, from the runs with
    drafting off, without them (medians), the time to make drafts, and the tokens that they brought. All steps count:
    a drafter that speaks in 40 % of them gains in these, and what it costs to ask it in all.

    steps, off: of all sequences of the batch."""
    share = sum(s.num_draft_tokens > 0 for s in steps) / len(steps)
    gained = sum(s.num_accepted_tokens for s in steps) / (batch * len(steps))
    making = sum(s.draft_seconds for s in steps) / len(steps)
    plain = quantiles([s.duration for s in off])["p50"]
    verifying = [s.duration - s.draft_seconds for s in steps if s.num_draft_tokens]
    with_drafts = quantiles(verifying)["p50"] if verifying else 0.0
    return (1.0 + gained) * plain / ((1.0 - share) * plain + share * with_drafts + making)


def must_hold(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is promised of the controller, in wall time. floor: the slowest row under it, medians, which must reach 0.97
    of drafting off. tail: rows of batch <= 4 where the measured acceptance is above the break-even; those of which the
    costs and the steps with drafts let expect as much (in_reach) must reach 1.3."""
    led = [row for row in rows if row["drafter"] != OFF and row["length"] is None]
    if not led:
        return {"floor": None, "tail": []}
    worst = min(led, key=lambda row: row["speedup"]["p50"])
    shown = ("label", "batch", "acceptance", "break_even_acceptance", "steps_with_drafts", "silent", "expected_speedup")
    tail = [
        {name: row[name] for name in shown}
        | {
            "speedup": row["speedup"]["p50"],
            "in_reach": row["expected_speedup"] >= TAIL_SPEEDUP,
            "holds": row["speedup"]["p50"] >= TAIL_SPEEDUP,
        }
        for row in led
        if row["batch"] <= TAIL
        and None not in (row["acceptance"], row["break_even_acceptance"])
        and row["acceptance"] > row["break_even_acceptance"]
    ]
    slowest = worst["speedup"]["p50"]
    return {
        "floor": {"label": worst["label"], "batch": worst["batch"], "speedup": slowest, "holds": slowest >= FLOOR},
        "tail": tail,
    }
