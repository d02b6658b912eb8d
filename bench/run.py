"""`longtail bench`: the same prompts and seeds under several strategies, measured in one process.

For each strategy: in every iteration new prompts are submitted, the rollout collects, and what is handed over is
graded. After the last iteration what is still unfinished is waited for, so that every regime ends with the same
samples; their tokens are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench import analysis, machine
from longtail.bench.tasks import Task, grade, load_tasks, prompt_ids
from longtail.bench.trace import TraceWriter, replacing
from longtail.events import Event, Listener
from longtail.partial_rollout.engines.native.engine import NativeEngine
from longtail.partial_rollout.rollout import Rollout
from longtail.partial_rollout.strategies import Strategy, Sync, TokenBudget
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas

STRATEGIES = ("sync", "token-budget")
BUDGET_SHARE = 0.9
"""Automatic token budget: this share of what sync generates in an iteration. At 1.0 the budget would now and then not
be reached before the tail; far below it, unfinished work would pile up from iteration to iteration."""
ASSUMED_SHARE_OF_CAP = 0.35
"""Mean length over the cap, where no sync run has measured it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    model: str = "smollm2-135m"
    tasks: str = "mixed"
    strategies: tuple[str, ...] = STRATEGIES
    iterations: int = 3
    prompts: int = 6
    """New prompts of an iteration."""
    group_size: int = 4
    slots: int = 24
    max_tokens: int = 512
    temperature: float = 0.7
    token_budget: int | None = None
    """Output tokens of an iteration under token-budget; None: see BUDGET_SHARE."""
    seed: int = 0
    threads: int | None = None
    numerics: str = "exact"
    drafter: str | None = None
    """For speculative decoding, as `NativeEngine.use_drafter` takes it; None: no drafts."""

    def __post_init__(self) -> None:
        for name in ("iterations", "prompts", "group_size", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.token_budget is not None and self.token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, not {self.token_budget}")
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ValueError(f"strategies: {', '.join(unknown) or 'none given'}; choose from {', '.join(STRATEGIES)}")
        if len(set(self.strategies)) < len(self.strategies):
            raise ValueError(f"strategies: {', '.join(self.strategies)} names one twice")
        self.params(0)  # checks the sampling fields

    def params(self, prompt: int) -> SamplingParams:
        return SamplingParams(
            n=self.group_size,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed * 1_000_003 + prompt,
        )


@dataclasses.dataclass(slots=True)
class BenchResult:
    summary: dict[str, Any]
    """What summary.json holds."""
    trace: TraceWriter
    frame: pandas.DataFrame
    """The trace's events."""
    samples: dict[str, dict[str, Sample]]
    """Per strategy, every sample by id."""


Progress = Callable[[str, Event], None]
"""Called with the strategy's name and each event."""


def run(
    config: BenchConfig, *, model: str | Path | None = None, progress: Progress = lambda name, event: None
) -> BenchResult:
    """model: a resolved directory or hub id; None takes config.model as it stands."""
    from transformers import AutoTokenizer

    source = str(model or config.model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tasks = load_tasks(config.tasks, config.prompts * config.iterations, config.seed)
    prompts = [prompt_ids(task, tokenizer) for task in tasks]
    engine = NativeEngine(
        source,
        tokenizer=tokenizer,
        threads=config.threads,
        numerics=config.numerics,
        max_num_seqs=config.slots,
        max_model_len=max(map(len, prompts)) + config.max_tokens,
    )
    trace = TraceWriter()
    samples: dict[str, dict[str, Sample]] = {}
    ledgers: dict[str, dict[str, int]] = {}
    drafting: dict[str, dict[str, Any] | None] = {}
    measured: float | None = None
    for name in config.strategies:
        strategy = _strategy(name, config, measured)
        _warm_up(engine, config)
        record = trace.listener(name)

        def listen(event: Event, name: str = name, record: Listener = record) -> None:
            record(event)
            progress(name, event)

        engine.use_drafter(config.drafter)  # anew: no run may learn from the one before
        groups, ledgers[name] = _run_strategy(engine, strategy, config, tasks, prompts, tokenizer, listen)
        drafting[name] = None if engine.speculation is None else engine.speculation.report()
        samples[name] = {s.id: s for g in groups for s in g.samples}
        if name == "sync":
            measured = sum(len(s.output_ids) for s in samples[name].values()) / config.iterations
    frame = trace.frame()
    runs = analysis.summary(frame)
    for name, ledger in ledgers.items():
        runs[name]["ledger"] = ledger
        runs[name]["speculation"] = drafting[name]
    summary = {
        "config": dataclasses.asdict(config),
        "machine": machine.describe(),
        "runs": runs,
        "compare": analysis.compare(runs),
        "identical_tokens": _identical(samples),
    }
    return BenchResult(summary, trace, frame, samples)


def write(result: BenchResult, out: Path) -> None:
    """summary.json, trace.parquet and report.html into `out`."""
    from longtail.bench.report import write_report

    out.mkdir(parents=True, exist_ok=True)
    meta = {
        **result.summary["config"],
        **result.summary["machine"],
        "identical_tokens": result.summary["identical_tokens"],
    }
    result.trace.write(out / "trace.parquet", meta)
    with replacing(out / "summary.json") as file:
        file.write(json.dumps(result.summary, indent=1).encode())
    write_report(out / "report.html", result.frame, result.summary["runs"], meta)


def _strategy(name: str, config: BenchConfig, measured: float | None) -> Strategy:
    if name == "sync":
        return Sync()
    samples = config.prompts * config.group_size
    mean = measured if measured is not None else ASSUMED_SHARE_OF_CAP * config.max_tokens * samples
    return TokenBudget(config.token_budget or max(1, round(BUDGET_SHARE * mean)))


def _warm_up(engine: NativeEngine, config: BenchConfig) -> None:
    """First calls compile and allocate; and no run may find the prefixes of the one before. The prompt is long enough
    for the kernel that uses all threads, the few tokens after it take the one that does not."""
    prompt = [5 + i % 90 for i in range(min(128, engine.max_model_len - 8))]
    engine.add(
        Group.from_prompt("warm-up", prompt, SamplingParams(n=min(2, config.slots), max_tokens=4, seed=1)).samples
    )
    while engine.has_work:
        engine.step()
    engine.reset_prefix_cache()


def _run_strategy(
    engine: NativeEngine,
    strategy: Strategy,
    config: BenchConfig,
    tasks: list[Task],
    prompts: list[list[int]],
    tokenizer: Any,
    listen: Listener,
) -> tuple[list[Group], dict[str, int]]:
    """-> what was handed over, and the ledger (`Ledger.as_dict`)."""
    settings = {
        **dataclasses.asdict(config),
        "strategy": strategy.name,
        "prompts_per_iteration": config.prompts,
        "token_budget": getattr(strategy, "tokens", None),
    }
    listen(Event("run_start", engine.now(), detail=json.dumps(settings)))
    engine.listener = listen
    rollout = Rollout(engine, strategy=strategy, listener=listen)
    done: list[Group] = []
    try:
        for iteration in range(config.iterations):
            numbers = range(iteration * config.prompts, (iteration + 1) * config.prompts)
            rollout.submit(Group.from_prompt(f"p{i}", prompts[i], config.params(i), task=tasks[i]) for i in numbers)
            done += _graded(rollout.collect(), engine, tokenizer, listen)
        if len(rollout.store):
            done += _graded(rollout.collect(wait=True), engine, tokenizer, listen)
    finally:
        engine.listener = lambda event: None
    engine.check_integrity()
    rollout.store.check_balance()
    listen(Event("run_end", engine.now()))
    return done, rollout.store.ledger.as_dict()


def _graded(groups: list[Group], engine: NativeEngine, tokenizer: Any, listen: Listener) -> list[Group]:
    for group in groups:
        for sample in group.samples:
            start = engine.now()
            sample.reward = grade(group.task, tokenizer.decode(sample.output_ids, skip_special_tokens=True))
            listen(
                Event(
                    "grade",
                    start,
                    engine.now() - start,
                    sample=sample.id,
                    group=group.id,
                    value=sample.reward,
                )
            )
    return groups


def _identical(samples: dict[str, dict[str, Sample]]) -> bool | None:
    """Whether every sample has the same tokens and log-probabilities under every strategy; None with only one."""
    if len(samples) < 2:
        return None
    records = [{i: (s.output_ids, s.logprobs) for i, s in by_id.items()} for by_id in samples.values()]
    return all(record == records[0] for record in records[1:])
