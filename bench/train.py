"""`longtail train`: rollout -> grade -> update -> rollout, in one process, and the same after `kill -9`.

    DIR/run.json         the settings
        store/           samples and the ledger (docs/store.md)
        checkpoints/     weights, optimiser, generators, and where the store stood
        metrics.jsonl    one line a step            eval.jsonl   one line an evaluation
        trace.parquet, summary.json, report.html    as `longtail bench` writes them; each life of the run is one run
        model/           the trained model, at the end

Iteration k runs on version k of the weights: submit, collect (delivery), train, update to version k + 1, perhaps a
checkpoint. A checkpoint of version k is of the moment before iteration k generates its first token. What a run that
comes back finds is never behind its checkpoint, and may be ahead of it by

    deliveries of iterations k, k + 1, ..., w - 1     whole iterations: trained on again, in order, nothing is generated
    tokens of version w                               of an iteration that was cut short: dropped (ledger: stale)

which leaves weights, optimiser and samples as an undisturbed run has them before iteration w. The tokens that are made
again are the same ones, because sampling noise is a function of seed and position.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from longtail.bench import analysis, machine
from longtail.bench.analysis.parts import SWITCH, TIMED, own_seconds
from longtail.bench.models import tokenizer_of
from longtail.bench.run import BenchResult, write
from longtail.bench.trace import TraceWriter, read_trace, replacing
from longtail.bench.train_config import FRESH, RunConfig, unlike
from longtail.bench.train_evaluation import evaluate
from longtail.bench.train_grading import SettledGrader
from longtail.bench.train_model import export, make_engine, make_policy
from longtail.bench.train_tasks import Prompts, load_prompts
from longtail.errors import StoreError, TraceError
from longtail.events import Event
from longtail.partial_rollout.engines.native.loader import load_model
from longtail.partial_rollout.grading import GraderPool
from longtail.partial_rollout.length_bias import LengthBiasWarning
from longtail.partial_rollout.rollout import Rollout
from longtail.partial_rollout.staleness import StalenessRule
from longtail.partial_rollout.store import SampleStore
from longtail.sample import OBSERVATION, Group
from longtail.sampling_params import SamplingParams
from longtail.trainer_adapter.checkpoint import Checkpoints, rng_state, set_rng_state
from longtail.trainer_adapter.metrics import MetricsLog, TensorBoard, read_metrics, reward_figures
from longtail.trainer_adapter.trainer import StepResult, Trainer


class Progress(Protocol):
    def __call__(self, what: str, values: Any) -> None:
        """ "note": text; "event": Event; "step": a line of metrics.jsonl; "eval": a line of eval.jsonl."""


class _Span(NamedTuple):
    kind: str
    time: float
    duration: float


def run(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    model: str | Path | None = None,
    prompts: Prompts | None = None,
    progress: Progress = lambda what, values: None,
) -> dict[str, Any]:
    """Trains in the directory `out`. resume: goes on where a run with these settings stands there, if there is one.
    model: a resolved directory or hub id (None: config.model as it stands). prompts: in place of config.task.
    -> what summary.json holds.

    ValueError: settings that do not fit each other, the model or the run in `out`."""
    with contextlib.ExitStack() as stack:
        return _Life(config, Path(out), resume, str(model or config.model), prompts, progress, stack).train()


class _Life:
    """One process's part of a run."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        resume: bool,
        source: str,
        prompts: Prompts | None,
        progress: Progress,
        stack: contextlib.ExitStack,
    ) -> None:
        self.config = config = _with_threads(config)
        self.out, self.source, self.progress, self.stack = out, source, progress, stack
        lives = _check_directory(out, config, resume)
        self.tokenizer = tokenizer_of(source)
        self.prompts = prompts or load_prompts(
            config.task, self.tokenizer, seed=config.seed, held_out=config.eval_prompts, grader=config.grader
        )
        self.max_tokens = config.max_tokens or self.prompts.max_tokens
        self.base = SamplingParams(max_tokens=self.max_tokens, stop_token_ids=self.prompts.stop_token_ids)
        self.strategy = config.make_strategy(self.max_tokens)
        model, _ = load_model(source)
        self.engine = make_engine(config, model, source)
        if (close := getattr(self.engine, "close", None)) is not None:
            stack.callback(close)
        self.policy, reference = make_policy(config, model, self.engine)
        self.trainer = Trainer(
            self.policy, config.make_loss(self.max_tokens), config=config.train_config(), reference=reference
        )
        out.mkdir(parents=True, exist_ok=True)
        self.store = stack.enter_context(SampleStore(out / "store"))  # from here on the directory is ours
        _write_run(out, config, lives)
        self.checkpoints = Checkpoints(out / "checkpoints", keep=config.keep)
        self.version = 0
        self.deliveries: list[int] = []
        """Of the checkpoints of this life, newest last."""
        self._restore()
        if self.version:
            self.engine.update_weights(self.policy.weights(), self.version)
        self._rollout(lives)

    # -- coming back --------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        found = self.checkpoints.newest()
        for damage in self.checkpoints.damages:
            self.progress("note", f"{damage}; an older checkpoint is used")
        delivery = 0
        if found is not None:
            self.trainer.load_state_dict(found.state["trainer"])
            set_rng_state(found.state["rng"])
            self.version, delivery = int(found.state["version"]), int(found.state["delivery"])
        if self.store.iteration < self.version or self.store.last_delivery < delivery:
            raise StoreError(
                f"{self.out}/store is at iteration {self.store.iteration}, its checkpoint at {self.version}: the store "
                "was exchanged or went back; train in another directory, from the checkpoint's weights"
            )
        old = {line["step"]: line for line in read_metrics(self.out / "metrics.jsonl")}
        lines = [line for step, line in old.items() if step < self.version]
        self.board = TensorBoard(self.out / "tensorboard")
        self.stack.callback(self.board.close)
        handed = {d.iteration: d.groups for d in self.store.deliveries(after=delivery)}
        first = self.version
        for step in range(first, self.store.iteration):
            groups = handed.get(step, [])
            result = self.trainer.step(groups, step)
            later = [g for iteration, groups in handed.items() if iteration > step for g in groups]
            line = self._line(step, groups, result, later)
            # What the step took is known to who took it first; None where that process died before it wrote it down.
            line |= {name: old.get(step, {}).get(name) for name in ("ledger", "seconds")}
            lines.append(line)
            self._show(line)
            self.version = step + 1
        self.log = self.stack.enter_context(MetricsLog(self.out / "metrics.jsonl", lines))
        dropped = rewind(self.store, self.version)
        if found is not None or self.version or dropped:
            of = "the start" if found is None else f"the checkpoint of version {first}"
            self.progress(
                "note",
                f"resumed from {of}: {self.version - first} iterations trained on again, {dropped} tokens of an "
                f"interrupted one dropped; continues with iteration {self.version}",
            )
        evals = read_metrics(self.out / "eval.jsonl", before=self.version + 1)
        self.evals = self.stack.enter_context(MetricsLog(self.out / "eval.jsonl", evals))
        self.evaluated = {line["step"] for line in evals}

    def _rollout(self, lives: int) -> None:
        config = self.config
        self.trace = TraceWriter()
        with contextlib.suppress(TraceError):
            if lives > 1:
                self.trace.extend(read_trace(self.out / "trace.parquet"))
        self.name = "train" if lives == 1 else f"train, life {lives}"
        self.record = self.trace.listener(self.name)
        self.spans: list[_Span] = []
        pool = self.stack.enter_context(GraderPool(self.prompts.grader, workers=1))
        overlaps = self.strategy.name == "sync"  # it waits for every grade anyway
        self.grader = SettledGrader(pool, settled=not overlaps, now=self.engine.now, listener=self.listen)
        decode = None
        if self.tokenizer is not None:
            decode = lambda ids: str(self.tokenizer.decode(ids, skip_special_tokens=True))  # noqa: E731
        self.decode: Callable[[Sequence[int]], str] | None = decode
        rule = None if config.max_staleness is None else StalenessRule(max_staleness=config.max_staleness)
        self.rollout = self.stack.enter_context(
            Rollout(
                self.engine,
                strategy=self.strategy,
                store=self.store,
                snapshots=False,  # other weights continue what was paused: its KV is of no use
                grader=self.grader,
                decode=decode,
                staleness=rule,
                listener=self.listen,
            )
        )

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        config = self.config
        settings = dataclasses.asdict(config) | {
            "tasks": config.task,
            "iterations": config.steps,
            "slots": config.num_slots,
            "max_tokens": self.max_tokens,
            "strategy": self.strategy.name,
            "token_budget": getattr(self.strategy, "tokens", None),
        }
        self.listen(Event("run_start", self.engine.now(), detail=json.dumps(settings)))
        self.engine.listener = self.listen
        self.since = self.engine.now()
        while self.version < config.steps:
            self._iteration(self.version)
        self._evaluate(self.version)
        self._checkpoint()
        self.listen(Event("run_end", self.engine.now()))
        if config.export:
            export(self.source, self.policy.weights(), self.tokenizer, self.out / "model")
        return self._report()

    def _iteration(self, step: int) -> None:
        config = self.config
        if config.eval_every and step % config.eval_every == 0:
            self._evaluate(step)
        self._submit()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LengthBiasWarning)
            groups = self.rollout.collect()
        for warning in caught:
            self.progress("note", str(warning.message))
        groups.sort(key=lambda group: int(group.id[1:]))
        start = self.engine.now()
        result = self.trainer.step(groups, step)
        self.listen(Event("train", start, self.engine.now() - start))
        self.rollout.update_weights(self.policy.weights(), step + 1)
        self.version = step + 1
        line = self._line(step, groups, result, ())
        self._say(line | {"ledger": self.store.ledger.as_dict(), "seconds": self._columns()})
        if self.version % config.checkpoint_every == 0 and self.version < config.steps:
            self._checkpoint()

    def _submit(self) -> None:
        """Prompts, until enough wait: a function of what the store holds."""
        fresh = sum(not any(s.output_ids or s.is_done for s in group.samples) for group in self.store)
        first = self.store.num_submitted
        groups = []
        for index in range(first, first + max(0, FRESH * self.config.prompts - fresh)):
            prompt = self.prompts.train(index)
            params = self.config.params(index, self.base)
            groups.append(Group.from_prompt(f"p{index}", prompt.token_ids, params, task=prompt.task))
        self.rollout.submit(groups)

    def _evaluate(self, step: int) -> None:
        if step in self.evaluated or not self.config.eval_every:
            return
        start = self.engine.now()
        self.engine.listener = lambda event: None
        try:
            figures = evaluate(
                self.engine,
                self.prompts.held_out(),
                dataclasses.replace(self.base, n=self.config.eval_samples, temperature=self.config.temperature),
                grade=self.grader.grade,
                decode=self.decode,
            )
        finally:
            self.engine.listener = self.listen
        line = {"step": step, "version": step, **figures}
        self.evals.write(line)
        self.evaluated.add(step)
        self.board.write({"step": step, "eval": figures})
        self.progress("eval", line)
        self.listen(Event("evaluate", start, self.engine.now() - start))

    def _checkpoint(self) -> None:
        start = self.engine.now()
        self.log.sync()
        self.checkpoints.save(
            self.version,
            {
                "trainer": self.trainer.state_dict(),
                "rng": rng_state(),
                "version": self.version,
                "delivery": self.store.last_delivery,
                "prompts": self.store.num_submitted,
                "config": dataclasses.asdict(self.config),
            },
        )
        self.deliveries.append(self.store.last_delivery)
        if len(self.deliveries) >= self.config.keep:
            self.store.prune(self.deliveries[-self.config.keep])
        self._write_trace()
        self.listen(Event("checkpoint", start, self.engine.now() - start))

    # -- what is written down -----------------------------------------------------------------------------------------

    def listen(self, event: Event) -> None:
        self.record(event)
        if event.kind in TIMED:
            self.spans.append(_Span(event.kind, event.time, event.duration))
        self.progress("event", event)

    def _columns(self) -> dict[str, float]:
        """Seconds since the last step's line: they add up to wall."""
        now = self.engine.now()
        columns = dict.fromkeys(("generate", "grade", "switch", "train", "evaluate", "checkpoint"), 0.0)
        places = {"step": "generate", "wait": "grade", **dict.fromkeys(SWITCH, "switch")}
        for span, seconds in zip(self.spans, own_seconds(self.spans, self.since, now), strict=True):
            columns[places.get(span.kind, span.kind)] += seconds
        wall = now - self.since
        columns["idle"] = max(0.0, wall - sum(columns.values()))
        self.spans, self.since = [], now
        return columns | {"wall": wall}

    def _line(
        self, step: int, groups: list[Group], result: StepResult, later: Sequence[Group]
    ) -> dict[str, Any]:
        """later: groups that were handed over since, by an earlier life."""
        ages: Counter[int] = Counter()
        for sample in (s for group in groups for s in group.samples):
            ages.update(step - v for v in sample.versions if v != OBSERVATION)
        made = sum(s.versions.count(step) for g in (*groups, *later, *self.store) for s in g.samples)
        handed = sum(ages.values())
        found = result.as_dict()
        return {
            "step": step,
            **reward_figures(groups),
            **found,
            "left_out": dict(Counter(result.left_out.values())),
            "generated": made,
            "handed_over": handed,
            "staleness": {
                "mean": sum(age * n for age, n in ages.items()) / handed if handed else None,
                "max": max(ages, default=None),
                "tokens": {str(age): n for age, n in sorted(ages.items())},
            },
            "updates": self.trainer.num_updates,
        }

    def _say(self, line: dict[str, Any]) -> None:
        self.log.write(line)
        self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        self.board.write(line)
        self.progress("step", line)

    def _meta(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.config), "max_tokens": self.max_tokens, **machine.describe()}

    def _write_trace(self) -> None:
        self.trace.write(self.out / "trace.parquet", self._meta())

    def _report(self) -> dict[str, Any]:
        frame = self.trace.frame()
        runs = analysis.summary(frame)
        speculation = self.engine.speculation
        runs[self.name] |= {
            "ledger": self.store.ledger.as_dict(),
            "speculation": None if speculation is None else speculation.report(),
        }
        summary = {
            "config": self._meta(),
            "machine": machine.describe(),
            "runs": runs,
            "compare": analysis.compare(runs),
            "identical_tokens": None,
            "evaluations": read_metrics(self.out / "eval.jsonl"),
        }
        write(BenchResult(summary, self.trace, frame, {}), self.out)
        return summary


def rewind(store: SampleStore, version: int) -> int:
    """Open samples as they were before `version` made its first token. -> tokens dropped."""
    if version:
        return store.rewind_to(version - 1)
    return sum(store.cut(s, 0, "stale") for group in store for s in group.samples if s.output_ids)


def _check_directory(out: Path, config: RunConfig, resume: bool) -> int:
    """-> number of this life, from 1."""
    file = out / "run.json"
    if not file.is_file():
        return 1
    if not resume:
        raise ValueError(f"out: {out} holds a run; --resume goes on with it, or choose another directory")
    try:
        found = json.loads(file.read_text())
        settings, lives = found["config"], int(found["lives"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"out: {file} is damaged or of something else ({error!r})") from error
    if differences := unlike(settings, dataclasses.asdict(config)):
        raise ValueError(f"out: the run in {out} has other settings: {differences[0]}; choose another directory")
    return lives + 1


def _write_run(out: Path, config: RunConfig, lives: int) -> None:
    with replacing(out / "run.json") as file:
        file.write(json.dumps({"config": dataclasses.asdict(config), "lives": lives}, indent=1).encode())


def _with_threads(config: RunConfig) -> RunConfig:
    """One number of threads from the first forward pass on: bits may depend on it."""
    return dataclasses.replace(config, threads=machine.use_threads(config.threads))
