"""`longtail bench`: the same prompts and seeds under several strategies, measured in one process.

For each strategy: all prompts are submitted, as a trainer's data loader has them all, and the rollout collects batch
after batch until everything is handed over; graders work beside it. After each batch the weights are updated, to the
same weights under the next version: the update and what follows from it take their time, tokens get their age, and
every regime makes the same samples; their tokens are compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench import analysis, machine
from longtail.bench.engines import Engines, batched_tokens, check_engine, ending, renew_drafter, speculation_of
from longtail.bench.models import needed_tokenizer
from longtail.bench.strategy_specs import BUDGET_SHARE, check_specs, samples_for, strategy_for
from longtail.bench.tasks import Task, grade_request, load_tasks, prompt_ids
from longtail.bench.trace import TraceWriter, replacing
from longtail.bench.vllm_alone import COUNTER, OWN, VllmAlone
from longtail.events import Event, Listener
from longtail.partial_rollout.grading import GradeRequest, GraderPool
from longtail.partial_rollout.length_bias import LengthBiasWarning
from longtail.partial_rollout.rollout import Rollout
from longtail.partial_rollout.strategies import Strategy
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas

STRATEGIES = ("sync", "token-budget")
"""Of the demo."""
ROUNDING = 1e-4
"""Between log-probabilities of one token in two runs, where an engine's numerics depend on the batch."""
ASSUMED_SHARE_OF_CAP = 0.35
"""Mean length over the cap, where no sync run has measured it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    model: str = "smollm2-135m"
    tasks: str = "mixed"
    strategies: tuple[str, ...] = STRATEGIES
    iterations: int = 3
    """Batches in all."""
    prompts: int = 6
    """Of a batch: what a trainer takes from an iteration, at least on average."""
    group_size: int = 4
    slots: int = 24
    max_tokens: int = 512
    temperature: float = 0.7
    token_budget: int | None = None
    """Output tokens of an iteration under token-budget; None: see BUDGET_SHARE."""
    seed: int = 0
    threads: int | None = None
    numerics: str | None = None
    """Of the native engine, where None is "exact". vLLM's are its own."""
    kv_on_update: str = "recompute"
    """What becomes of unfinished samples' KV at an update: computed again, as new weights demand, or kept ("keep")."""
    drafter: str | None = None
    """For speculative decoding, as the engine takes it; None: no drafts."""
    engine: str = "native"
    """Or "vllm": tokens are compared, and log-probabilities up to `ROUNDING`."""
    alone: bool = False
    """Of vLLM: the first runs are vLLM without longtail, driven synchronously (`vllm_alone`)."""
    engines: int = 1
    """A pool of so many, which share the slots; 1, without ray: one, without a pool."""
    ray: str | None = None
    """The engines are Ray actors: "local", "auto" or an address; None: they are in this process, and take turns."""
    slowed: float = 1.0
    """Each engine on Ray sleeps until a pass has taken so many times what it would, so that few cores have room for
    many."""

    def __post_init__(self) -> None:
        for name in ("iterations", "prompts", "group_size", "slots", "engines"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.token_budget is not None and self.token_budget < 1:
            raise ValueError(f"token_budget must be at least 1, not {self.token_budget}")
        if self.kv_on_update not in ("recompute", "keep"):
            raise ValueError(f'kv_on_update must be "recompute" or "keep", not {self.kv_on_update!r}')
        numerics = check_engine(self.engine, threads=self.threads, numerics=self.numerics)
        object.__setattr__(self, "numerics", numerics)
        self.pool()  # checks it
        if self.alone and self.engine != "vllm":
            raise ValueError(f"alone: it is vLLM that runs alone; leave it out with engine {self.engine!r}")
        check_specs(self.strategies)
        self.params(0)  # checks the sampling fields

    def pool(self) -> Engines:
        return Engines(self.engines, self.ray, self.engine, self.slowed)

    def params(self, prompt: int, samples: int | None = None) -> SamplingParams:
        return SamplingParams(
            n=samples or self.group_size,
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
    source = str(model or config.model)
    tokenizer = needed_tokenizer(source)
    tasks = load_tasks(config.tasks, config.prompts * config.iterations, config.seed)
    prompts = [prompt_ids(task, tokenizer) for task in tasks]
    max_model_len = max(map(len, prompts)) + config.max_tokens
    model_weights = load_weights(source)
    trace = TraceWriter()
    samples: dict[str, dict[str, Sample]] = {}
    extras: dict[str, dict[str, Any]] = {}
    if config.alone:
        alone = VllmAlone(
            source, slots=config.slots, max_model_len=max_model_len, decode=functools.partial(_decode, tokenizer)
        )
        samples |= _run_alone(alone, config, tasks, prompts, model_weights, trace, progress)
        extras |= {name: {"warnings": []} for name in samples}
    engine = config.pool().make(
        source,
        tokenizer=tokenizer,
        threads=config.threads,
        numerics=config.numerics,
        slots=config.slots,
        max_model_len=max_model_len,
        kv_on_update=config.kv_on_update,
        drafter=config.drafter if config.engine == "vllm" else None,  # vLLM is made for it; the native one takes any
        fingerprint_versions=True,
    )
    measured: float | None = None
    with ending(engine), GraderPool(grade_request, workers=1) as graders:
        _warm_up(engine, config, model_weights)
        _warm_up_graders(graders, tasks[0])
        for name in config.strategies:
            strategy = _strategy(name, config, measured)
            _warm_up(engine, config, None)
            record = trace.listener(name)

            def listen(event: Event, name: str = name, record: Listener = record) -> None:
                record(event)
                progress(name, event)

            renew_drafter(engine, config.drafter)  # no run may learn from the one before
            rollout = Rollout(
                engine,
                strategy=strategy,
                grader=graders,
                decode=functools.partial(_decode, tokenizer),
                listener=listen,
            )
            groups = _groups(config, tasks, prompts, samples_for(strategy, config.group_size))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", LengthBiasWarning)
                done = _run_strategy(rollout, config, groups, model_weights, listen)
            samples[name] = {s.id: s for g in done for s in g.samples}
            extras[name] = {
                "ledger": rollout.store.ledger.as_dict(),
                **speculation_of(engine),
                "length_estimates": rollout.lengths.report(),
                "length_bias": rollout.length_bias.report(),
                "warnings": [str(one.message) for one in caught],
            }
            if strategy.name == "sync" and measured is None:
                measured = sum(len(s.output_ids) for s in samples[name].values()) / config.iterations
    frame = trace.frame()
    runs = analysis.summary(frame)
    for name, extra in extras.items():
        runs[name] |= extra
    summary = {
        "config": dataclasses.asdict(config),
        "machine": machine.describe(),
        "runs": runs,
        "compare": analysis.compare(runs),
        "identical_tokens": _identical(
            {name: own for name, own in samples.items() if name != OWN}, 0.0 if config.engine == "native" else ROUNDING
        ),
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


def _run_alone(
    alone: VllmAlone,
    config: BenchConfig,
    tasks: list[Task],
    prompts: list[list[int]],
    weights: dict[str, Any],
    trace: TraceWriter,
    progress: Progress,
) -> dict[str, dict[str, Sample]]:
    """And closes it. -> by run, every sample by id."""
    made: dict[str, dict[str, Sample]] = {}
    try:
        with GraderPool(grade_request, workers=1) as graders:
            _warm_up_graders(graders, tasks[0])
            for name in (COUNTER, OWN):
                alone.sample_by_counter(name == COUNTER)
                alone.warm_up(_warm_up_group("alone", config, alone.max_model_len).samples, weights)
                groups = _groups(config, tasks, prompts, config.group_size)
                record = trace.listener(name)

                def listen(event: Event, name: str = name, record: Listener = record) -> None:
                    record(event)
                    progress(name, event)

                alone.run(groups, config.prompts, weights, graders, listen, dataclasses.asdict(config))
                made[name] = {sample.id: sample for group in groups for sample in group.samples}
    finally:
        alone.close()
    return made


def load_weights(source: str) -> dict[str, Any]:
    """A state dict, as a trainer has it."""
    from longtail.partial_rollout.engines.native.loader import load_model

    model, _ = load_model(source)
    return dict(model.state_dict())


def _strategy(name: str, config: BenchConfig, measured: float | None) -> Strategy:
    mean = measured or ASSUMED_SHARE_OF_CAP * config.max_tokens * config.prompts * config.group_size
    budget = config.token_budget or max(1, round(BUDGET_SHARE * mean))
    return strategy_for(name, groups=config.prompts, samples=config.group_size, budget=budget)


def _warm_up(engine: Any, config: BenchConfig, weights: dict[str, Any] | None) -> None:
    """First calls compile and allocate; and no run may find the prefixes of the one before. The prompt is long enough
    for the kernel that uses all threads, the few tokens after it take the one that does not."""
    for number in range(config.engines):  # each engine of a pool gets one: the one with the least to do
        engine.add(_warm_up_group(str(number), config, engine.max_model_len).samples)
    while engine.has_work:
        engine.step()
    if weights is not None:
        engine.update_weights(weights, engine.version + 1)
    engine.reset_prefix_cache()


def _warm_up_group(name: str, config: BenchConfig, max_model_len: int) -> Group:
    prompt = [5 + i % 90 for i in range(min(128, max_model_len - 8))]
    params = SamplingParams(n=min(2, config.slots), max_tokens=4, seed=1)
    return Group.from_prompt(f"warm-up-{name}", prompt, params)


def _groups(config: BenchConfig, tasks: list[Task], prompts: list[list[int]], samples: int) -> list[Group]:
    """Of all batches. samples: of each prompt."""
    return [
        Group.from_prompt(f"p{i}", prompt, config.params(i, samples), task=task)
        for i, (prompt, task) in enumerate(zip(prompts, tasks, strict=True))
    ]


def _decode(tokenizer: Any, token_ids: Any) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def _warm_up_graders(graders: GraderPool, task: Task) -> None:
    """A worker imports its verifiers with the first request."""
    graders.submit(
        GradeRequest(
            sample_id="warm-up",
            group_id="warm-up",
            task=task,
            prompt_ids=(1,),
            output_ids=(1,),
            text="",
            finish_reason="stop",
        )
    )
    graders.wait()


def _run_strategy(
    rollout: Rollout, config: BenchConfig, groups: list[Group], weights: dict[str, Any], listen: Listener
) -> list[Group]:
    """-> what was handed over."""
    engine: Any = rollout.engine
    strategy = rollout.strategy
    settings = {
        **dataclasses.asdict(config),
        "strategy": strategy.name,
        "prompts_per_iteration": config.prompts,
        "token_budget": getattr(strategy, "tokens", None),
        "max_num_batched_tokens": batched_tokens(engine, config.engine),
    }
    listen(Event("run_start", engine.now(), detail=json.dumps(settings)))
    engine.listener = listen
    done: list[Group] = []
    try:
        rollout.submit(groups)
        while len(rollout.store):
            done += rollout.collect()
            if len(rollout.store):
                rollout.update_weights(weights, engine.version + 1)
    finally:
        engine.listener = lambda event: None
    engine.check_integrity()
    rollout.check_integrity()
    listen(Event("run_end", engine.now()))
    return done


def _identical(samples: dict[str, dict[str, Sample]], rounding: float) -> bool | None:
    """Whether every sample has the same tokens, and log-probabilities that are no further apart than `rounding`, under
    every strategy that handed it over; None with only one."""
    if len(samples) < 2:
        return None
    first: dict[str, Sample] = {}
    for by_id in samples.values():
        for name, sample in by_id.items():
            other = first.setdefault(name, sample)
            if sample.output_ids != other.output_ids:
                return False
            apart = (abs(a - b) for a, b in zip(sample.logprobs, other.logprobs, strict=True))
            if not all(distance <= rounding for distance in apart):
                return False
    return True
