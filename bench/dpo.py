"""`longtail dpo`: preference pairs -> a trained model, and the same after `kill -9`.

    DIR/run.json                 the settings
        reference.safetensors    what the model said of each pair before training
        checkpoints/             weights, optimiser, number of the step
        metrics.jsonl            one line a step      eval.jsonl    one line a measurement of the held-out pairs
        summary.json, model/     at the end
        lock                     held by the process that trains
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from longtail.bench import machine
from longtail.bench.models import tokenizer_of
from longtail.bench.trace import replacing
from longtail.bench.train_model import export
from longtail.partial_rollout.directory_lock import locked
from longtail.partial_rollout.engines.native.loader import load_model
from longtail.trainer_adapter.checkpoint import Checkpoints, rng_state, set_rng_state
from longtail.trainer_adapter.dpo_trainer import DPOConfig, DPOTrainer
from longtail.trainer_adapter.metrics import MetricsLog, TensorBoard, read_metrics
from longtail.trainer_adapter.order_swap import order_swap
from longtail.trainer_adapter.pair_files import check_pair_file, read_pairs
from longtail.trainer_adapter.policy import Policy, TransformersPolicy, freeze_parameters
from longtail.trainer_adapter.preferences import Pair, hold_out, length_bias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPORunConfig:
    """Checked at construction, but for what needs the model or the pairs."""

    model: str = "smollm2-135m"
    pairs: str = "pairs.jsonl"
    """.jsonl or .parquet (`pair_files`)."""
    held_out: float = 0.1
    """Share of the prompts that is measured on and not trained on."""
    eval_pairs: str | None = None
    """A file of such pairs, instead."""
    reason: str | None = None
    """For rows that give none."""
    ignore: tuple[str, ...] = ()
    """Fields of the files that are not read."""
    dpo: DPOConfig = dataclasses.field(default_factory=DPOConfig)
    lora: int = 0
    """Rank of adapters; 0: the model itself is trained."""
    freeze: str | None = None
    """Parameters whose names match this regular expression are not trained."""
    gradient_checkpointing: bool = False
    threads: int | None = None
    """CPU threads; None: as many as torch takes. The bits of a run depend on it."""
    eval_every: int = 0
    """Steps between measurements of the held-out pairs; 0: before the first and after the last only."""
    checkpoint_every: int = 50
    keep: int = 2
    """Checkpoints that stay."""
    export: bool = True
    """Write the model at the end, as `from_pretrained` reads it."""

    def __post_init__(self) -> None:
        for name, low in (("lora", 0), ("eval_every", 0), ("checkpoint_every", 1), ("keep", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out must be at least 0 and below 1, not {self.held_out}")
        if self.lora and self.freeze:
            raise ValueError("freeze with lora: the model is frozen, and the adapters are what is trained")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")


MAY_CHANGE = ("eval_every", "checkpoint_every", "keep", "export")
"""Settings that a resumed run may have others of, beside dpo.epochs: no update depends on them."""


class Progress(Protocol):
    def __call__(self, what: str, values: Any) -> None:
        """ "note": text; "pairs": DPOPairs; "start": steps in all, steps made; "step": a line of metrics.jsonl; "eval":
        one of eval.jsonl."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOPairs:
    """What a run's files hold."""

    train: tuple[Pair, ...]
    held_out: tuple[Pair, ...]
    set_aside: Mapping[str, int]
    """Pairs that a judge did not confirm in both orders, by outcome."""


def run(
    config: DPORunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    model: str | Path | None = None,
    progress: Progress = lambda what, values: None,
) -> dict[str, Any]:
    """Trains in the directory `out`. resume: goes on where a run with these settings stands there, if there is one.
    model: a resolved directory or hub id (None: config.model as it stands). -> what summary.json holds.

    ValueError: settings, files or a run in `out` that do not fit. DirectoryLocked: a run is under way in `out`."""
    for path in (config.pairs, config.eval_pairs):
        if path is not None:
            check_pair_file(path)
    with locked(Path(out)):  # before it is looked into: a run may just be beginning there
        return _run(config, Path(out), resume, str(model or config.model), progress)


def _run(config: DPORunConfig, out: Path, resume: bool, source: str, progress: Progress) -> dict[str, Any]:
    config = dataclasses.replace(config, threads=machine.use_threads(config.threads))
    _check_directory(out, config, resume)
    tokenizer = tokenizer_of(source)
    loaded, _ = load_model(source)
    pairs = load_pairs(config, loaded.config, tokenizer)
    progress("pairs", pairs)
    trainer = DPOTrainer(
        make_policy(config, loaded),
        pairs.train,
        held_out=pairs.held_out,
        config=config.dpo,
        cache=out / "reference.safetensors",
    )
    with replacing(out / "run.json") as file:
        file.write(json.dumps({"config": dataclasses.asdict(config)}, indent=1).encode())
    checkpoints = Checkpoints(out / "checkpoints", keep=config.keep)
    found = checkpoints.newest()
    for damage in checkpoints.damages:
        progress("note", f"{damage}; an older checkpoint is used")
    if found is not None:
        trainer.load_state_dict(found.state["trainer"])
        set_rng_state(found.state["rng"])
        progress("note", f"resumed at step {trainer.num_steps}")
    progress("start", (config.dpo.epochs * trainer.steps_per_epoch, trainer.num_steps))
    with contextlib.ExitStack() as stack:
        _Run(config, out, trainer, checkpoints, progress, stack).train()
    if config.export:
        export(source, trainer.policy.weights(), tokenizer, out / "model")
    return _summary(config, out, trainer, pairs)


class _Run:
    def __init__(
        self,
        config: DPORunConfig,
        out: Path,
        trainer: DPOTrainer,
        checkpoints: Checkpoints,
        progress: Progress,
        stack: contextlib.ExitStack,
    ) -> None:
        self.config, self.trainer, self.checkpoints, self.progress = config, trainer, checkpoints, progress
        kept = read_metrics(out / "metrics.jsonl", before=trainer.num_steps)
        self.log = stack.enter_context(MetricsLog(out / "metrics.jsonl", kept))
        evals = read_metrics(out / "eval.jsonl", before=trainer.num_steps + 1)
        self.evals = stack.enter_context(MetricsLog(out / "eval.jsonl", evals))
        self.measured = {line["step"] for line in evals}
        self.board = TensorBoard(out / "tensorboard")
        stack.callback(self.board.close)

    def train(self) -> None:
        trainer, config = self.trainer, self.config
        while not trainer.is_done:
            step = trainer.num_steps
            if step == 0 or (config.eval_every and step % config.eval_every == 0):
                self._measure()
            line = trainer.step().as_dict()
            self.log.write(line)
            self.board.write(line)
            self.progress("step", line)
            if trainer.num_steps % config.checkpoint_every == 0 and not trainer.is_done:
                self._checkpoint()
        self._measure()
        self._checkpoint()

    def _measure(self) -> None:
        step = self.trainer.num_steps
        if step in self.measured or (figures := self.trainer.evaluate()) is None:
            return
        line = {"step": step, **dataclasses.asdict(figures)}
        self.evals.write(line)
        self.measured.add(step)
        self.board.write({"step": step, "eval": dataclasses.asdict(figures)})
        self.progress("eval", line)

    def _checkpoint(self) -> None:
        self.log.sync()
        self.evals.sync()
        self.checkpoints.save(self.trainer.num_steps, {"trainer": self.trainer.state_dict(), "rng": rng_state()})


def make_policy(config: DPORunConfig, model: Any) -> Policy:
    checkpointing = config.gradient_checkpointing
    if config.lora:
        from longtail.trainer_adapter.lora import LoraPolicy, adapted

        model = adapted(model, rank=config.lora, seed=config.dpo.seed)
        return LoraPolicy(model, gradient_checkpointing=checkpointing)
    if config.freeze is not None:
        freeze_parameters(model, config.freeze)
    return TransformersPolicy(model, gradient_checkpointing=checkpointing)


def load_pairs(config: DPORunConfig, model_config: Any, tokenizer: Any) -> DPOPairs:
    """ValueError: as `read_pairs` has it, and for a pair that is longer than the model reads."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    settings: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": text.vocab_size}
    settings |= {"reason": config.reason, "ignore": config.ignore}
    swap = order_swap(read_pairs(config.pairs, **settings))
    train = swap.kept
    held_out: tuple[Pair, ...] = ()
    if not train:
        raise ValueError(f"{config.pairs}: no pair was confirmed in both orders; `longtail pairs check` shows why")
    if config.eval_pairs is not None:
        held_out = order_swap(read_pairs(config.eval_pairs, **settings)).kept
    elif config.held_out:
        train, held_out = hold_out(swap.kept, config.held_out, config.dpo.seed)
    most = getattr(text, "max_position_embeddings", None)
    for pair in (*train, *held_out):
        longest = len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))
        if most is not None and longest > most:
            raise ValueError(
                f"{config.pairs}: a pair ({pair.reason}) has {longest} tokens and the model reads {most}; remove it, "
                "or shorten its prompt: responses are not cut"
            )
    counts: dict[str, int] = {name: n for name, n in swap.counts.items() if n and name not in ("agrees", "not asked")}
    return DPOPairs(train=train, held_out=held_out, set_aside=counts)


def _check_directory(out: Path, config: DPORunConfig, resume: bool) -> None:
    file = out / "run.json"
    if not file.is_file():
        return
    if not resume:
        raise ValueError(f"out: {out} holds a run; --resume goes on with it, or choose another directory")
    try:
        found = json.loads(file.read_text())["config"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"out: {file} is damaged or of something else ({error!r})") from error
    own = json.loads(json.dumps(dataclasses.asdict(config)))
    for settings in (found, own):
        settings["dpo"] = {name: value for name, value in settings["dpo"].items() if name != "epochs"}
    differ = [name for name in own if name not in MAY_CHANGE and found.get(name) != own[name]]
    if differ:
        name = differ[0]
        raise ValueError(
            f"out: the run in {out} has {name} {found.get(name)!r}, not {own[name]!r}; choose another directory"
        )


def _summary(config: DPORunConfig, out: Path, trainer: DPOTrainer, pairs: DPOPairs) -> dict[str, Any]:
    evals: Sequence[dict[str, Any]] = read_metrics(out / "eval.jsonl")
    bias = length_bias(pairs.train)
    summary = {
        "config": dataclasses.asdict(config),
        "machine": machine.describe(),
        "pairs": len(pairs.train),
        "held_out": len(pairs.held_out),
        "set_aside": dict(pairs.set_aside),
        "length_bias": None if bias is None else dataclasses.asdict(bias),
        "steps": trainer.num_steps,
        "updates": trainer.updater.num_updates,
        "before": evals[0] if evals else None,
        "after": evals[-1] if evals else None,
    }
    with replacing(out / "summary.json") as file:
        file.write(json.dumps(summary, indent=1).encode())
    return summary
