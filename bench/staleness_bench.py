"""What it costs to keep KV over weight updates (drift), and what it costs to compute it again (time).

Contexts are the model's own samples, cut where an update finds them. The KV of the cut part is made by an older version
(age: so many versions older than the newest), or by one version after the other ("mixed": a sample that lived through
all of them), and the newest version continues on it. The reference has all KV from the newest version. Both compute the
same continuation, so that positions compare.

    keep       the newest version on older KV: what is sampled from, and recorded
    recompute  the newest version throughout: what the trainer's forward pass computes
    policy     the older version throughout: what the updates changed, and what older tokens were sampled from

Drift is a matter of arithmetic: it does not depend on the machine's load. `staleness_time` measures the time.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longtail.bench.engine_bench import BenchFailed
from longtail.bench.machine import describe
from longtail.bench.models import needed_tokenizer

if TYPE_CHECKING:
    from longtail.bench.staleness_drift import Drift
    from longtail.bench.staleness_replay import Context, History
    from longtail.bench.staleness_versions import Weights
    from longtail.partial_rollout.engines.native.engine import NativeEngine
    from longtail.sample import Group

Progress = Callable[[str], None]
AGES = (1, 2, 4, 8)
TEMPERATURE = 1.0
REFERENCE_CONTEXTS = 2
"""On which the model's own forward pass, in float32 and in bfloat16, is compared with the engine's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBenchConfig:
    """Checked at construction."""

    model: str | Path
    """A directory or a hub id; with a tokenizer."""
    weights: tuple[Path, ...] = ()
    """Directories of versions that are there already, oldest first, of the same architecture; empty: train some."""
    rates: tuple[float, ...] = (1e-6, 1e-5, 1e-4)
    """Learning rates to train at."""
    ages: tuple[int, ...] = ()
    """Versions between the KV and the weights; empty: 1, 2, 4 and 8, as far as there are versions."""
    contexts: int = 8
    stale_tokens: int = 128
    """Output tokens of a context whose KV becomes stale; its prompt is stale too."""
    new_tokens: int = 64
    """Tokens of the continuation."""
    tasks: str = "gsm"
    """Task mix of the contexts."""
    train_tasks: str = "gsm_symbolic=1,chain_sum=1"
    train_groups: int = 8
    group_size: int = 4
    train_tokens: int = 32
    """Cap on the output of a training sample."""
    live: int = 8
    """Samples in the slots at an update; 0: times are not measured."""
    lengths: tuple[int, ...] = (128, 512)
    """Known tokens of each at the update."""
    iteration: tuple[int, ...] = (64, 256, 1024, 4096)
    """Tokens that a sample decodes between two updates."""
    repeats: int = 3
    """Pairs of the times."""
    kv_cache_bytes: int = 512 << 20
    """Of an engine; all live samples and all contexts should have room at once."""
    numerics: Literal["exact", "fast"] = "exact"
    seed: int = 0
    threads: int = 2

    def __post_init__(self) -> None:
        counts = ("contexts", "stale_tokens", "new_tokens", "train_groups", "train_tokens", "repeats", "threads")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.group_size < 2:
            raise ValueError(f"group_size must be at least 2, not {self.group_size}: advantages are within a group")
        if self.live < 0:
            raise ValueError(f"live must be at least 0, not {self.live}")
        if len(self.weights) == 1:
            raise ValueError("weights must name at least 2 versions, oldest first, not 1")
        if not self.weights and not self.rates:
            raise ValueError("lr must name at least one learning rate, or weights the versions")
        for rate in self.rates:
            if not 0.0 <= rate < math.inf:
                raise ValueError(f"lr must be at least 0, not {rate}")
        for name, least in (("ages", 1), ("lengths", 2), ("iteration", 1)):
            values = getattr(self, name)
            if any(value < least for value in values) or list(values) != sorted(set(values)):
                raise ValueError(f"{name} must rise and be at least {least}, not {', '.join(map(str, values))}")
        if not self.lengths or not self.iteration:
            raise ValueError("lengths and iteration must each name at least one number of tokens")
        if self.weights and self.ages and self.ages[-1] >= len(self.weights):
            oldest = len(self.weights) - 1
            raise ValueError(f"ages: of {oldest + 1} versions none is {self.ages[-1]} versions old; at most {oldest}")

    @property
    def newest(self) -> int:
        """Number of the newest version."""
        return len(self.weights) - 1 if self.weights else max(self.measured_ages)

    @property
    def measured_ages(self) -> tuple[int, ...]:
        oldest = len(self.weights) - 1 if self.weights else AGES[-1]
        return self.ages or tuple(sorted({*(a for a in AGES if a < oldest), oldest}))


def run(config: StalenessBenchConfig, progress: Progress) -> dict[str, Any]:
    """-> {settings, machine, contexts, reference, drift, time, load, seconds} of plain values. load: the machine's load
    average after the times. Sets the threads of torch and numba, which are process-wide."""
    begin = time.perf_counter()
    bench = _Bench(config, progress)
    reference = bench.reference()
    drift = [row for series, rate, versions in bench.series() for row in bench.measure(series, rate, versions)]
    drifted = time.perf_counter()
    times = bench.times() if config.live else []
    return {
        "settings": dataclasses.asdict(config)
        | {"model": str(config.model), "weights": [str(path) for path in config.weights]}
        | {"ages": config.measured_ages},
        "machine": describe(),
        "contexts": [{"prompt": c.prompt, "stale": c.stale, "new": len(c.targets)} for c in bench.contexts],
        "reference": reference,
        "drift": drift,
        "time": times,
        "load": os.getloadavg()[0],
        "seconds": {"drift": drifted - begin, "time": time.perf_counter() - drifted},
    }


class _Bench:
    def __init__(self, config: StalenessBenchConfig, progress: Progress) -> None:
        from longtail.bench.staleness_replay import Replay
        from longtail.partial_rollout.engines.native.loader import load_model

        self.config, self.progress = config, progress
        progress(f"loading {config.weights[0] if config.weights else config.model}")
        self.model = load_model(config.weights[0] if config.weights else config.model)[0]
        self.engine = self._engine("recompute")
        self.tokenizer = needed_tokenizer(config.model)
        self.contexts = self._contexts()
        self.replay = Replay(self.engine, max(len(c.ids) for c in self.contexts))

    def _engine(self, kv_on_update: Literal["recompute", "keep"]) -> NativeEngine:
        from longtail.partial_rollout.engines.native.engine import NativeEngine

        config = self.config
        slots = max(config.live, 2 * config.contexts, config.group_size)
        return NativeEngine(
            self.model,
            numerics=config.numerics,
            threads=config.threads,
            max_num_seqs=slots,
            max_num_batched_tokens=max(512, slots),
            kv_cache_bytes=config.kv_cache_bytes,
            kv_on_update=kv_on_update,
        )

    # -- what is measured on -------------------------------------------------------------------------------------------

    def _contexts(self) -> list[Context]:
        """Of twice as many samples those that are long enough, as the samples are that updates cut."""
        from longtail.bench.staleness_replay import Context

        config = self.config
        length = config.stale_tokens + 1 + config.new_tokens
        found = []
        for group in self._generate("contexts", config.tasks, config.contexts, 2, length, config.seed):
            for sample in group.samples:
                if len(sample.output_ids) == length:
                    known = len(sample.prompt_ids) + config.stale_tokens + 1
                    found.append(Context((*sample.prompt_ids, *sample.output_ids), len(sample.prompt_ids), known))
        if not found:
            raise ValueError(
                f"stale_tokens: none of {2 * config.contexts} samples has {length} tokens; lower stale_tokens or "
                "new_tokens, raise contexts, or choose tasks with longer answers"
            )
        return found[: config.contexts]

    def _generate(self, what: str, mix: str, prompts: int, size: int, most: int, seed: int) -> list[Group]:
        from longtail.bench.tasks import load_tasks, prompt_ids
        from longtail.sample import Group
        from longtail.sampling_params import SamplingParams

        params = SamplingParams(n=size, temperature=TEMPERATURE, max_tokens=most, seed=seed)
        tasks = load_tasks(mix, prompts, seed)
        groups = [Group.from_prompt(f"{what}/{t.id}", prompt_ids(t, self.tokenizer), params, t) for t in tasks]
        before = self.engine.stats().num_output_tokens
        self.engine.add([s for group in groups for s in group.samples])
        while self.engine.has_work:
            self.engine.step()
            self.progress(f"generating {what}: {self.engine.stats().num_output_tokens - before:,} tokens")
        for sample in (s for group in groups for s in group.samples):
            if sample.failure is not None:
                raise BenchFailed(f"{sample.id}: {sample.failure}")
        return groups

    def series(self) -> Iterator[tuple[str, float | None, Iterator[Weights]]]:
        """(name, learning rate, versions from 0 to the newest) of each."""
        import numpy as np

        from longtail.bench.staleness_versions import Training, checkpoints
        from longtail.bench.tasks import grade

        config = self.config
        if config.weights:
            yield "given", None, checkpoints(config.weights)
            return
        seed = config.seed + 1  # other prompts than the contexts'
        groups = self._generate(
            "training samples", config.train_tasks, config.train_groups, config.group_size, config.train_tokens, seed
        )
        rewards = [
            [grade(g.task, self.tokenizer.decode(s.output_ids)) + sum(s.logprobs) / len(s.logprobs) for s in g.samples]
            for g in groups
        ]
        training = Training(self.model, groups, rewards, self.progress)
        for rate in config.rates:
            yield (
                f"lr {np.format_float_scientific(rate, trim='-', exp_digits=1)}",
                rate,
                training.versions(rate, config.newest),
            )

    # -- drift --------------------------------------------------------------------------------------------------------

    def measure(self, series: str, rate: float | None, versions: Iterator[Weights]) -> list[dict[str, Any]]:
        """One row an age, and one for the mixed history."""
        from longtail.bench.staleness_drift import by_distance, share, summary
        from longtail.bench.staleness_versions import probe, relative_change

        newest, oldest = self.config.newest, max(self.config.measured_ages)
        histories = [age_history(age, newest) for age in self.config.measured_ages]
        if oldest > 1:
            histories.append(mixed_history(oldest, newest))
        control = age_history(0, newest)
        saved: dict[History, list[Any]] = {h: [None] * len(self.contexts) for h in (*histories, control)}
        policy: dict[int, list[Any]] = {}
        probes: dict[int, Any] = {}
        for version, weights in enumerate(versions):
            self.progress(f"{series}: KV of version {version}")
            self.engine.update_weights(weights, self.engine.version + 1)
            for history, kv in saved.items():
                self._extend(history, version, kv)
                if not history.mixed and history.made_by == version:
                    probes[version] = probe(weights)
                    policy[version] = self._logits(kv)
        self.progress(f"{series}: comparing")
        reference = self._logits([None] * len(self.contexts))
        self._check(reference, policy[newest])
        rows = []
        for history in histories:
            kept = self._drifts(reference, self._logits(saved.pop(history)))
            base = self._drifts(reference, policy[history.made_by])  # of a mixed one: the oldest of its versions
            row: dict[str, Any] = {"series": series, "lr": rate, "history": "mixed" if history.mixed else "age"}
            row |= {"age": newest - history.made_by, "mean_age": history.mean_age(newest)}
            row |= {"weight_change": relative_change(probes[history.made_by], probes[newest])}
            row |= {"keep": summary(kept), "policy": summary(base), "by_distance": by_distance(kept, base)}
            row["share_of_policy"] = share(row["keep"]["kl"], row["policy"]["kl"])
            rows.append(row)
        return rows

    def _extend(self, history: History, version: int, saved: list[Any]) -> None:
        """Computes what this version computes of a history, in every context."""
        for by, part in history.pieces:
            if by == version:
                for i, context in enumerate(self.contexts):
                    saved[i] = self.replay.extend(context.ids, saved[i], history.stop(context, part))

    def _logits(self, saved: Sequence[Any]) -> list[Any]:
        """Of the continuations, by the weights that the engine has."""
        return [self.replay.logits(c, kv) for c, kv in zip(self.contexts, saved, strict=True)]

    def _drifts(self, reference: Sequence[Any], other: Sequence[Any]) -> list[Drift]:
        from longtail.bench.staleness_drift import drift

        return [drift(p, q, c.targets) for p, q, c in zip(reference, other, self.contexts, strict=True)]

    def _check(self, reference: Sequence[Any], control: Sequence[Any]) -> None:
        """KV of the newest version, saved and restored, must be the newest version's KV."""
        import torch

        same = all(torch.equal(p, q) for p, q in zip(reference, control, strict=True))
        if self.config.numerics == "exact" and not same:
            raise BenchFailed("KV of the same weights, saved and restored, gave other logits: no drift was measured")

    def reference(self) -> list[dict[str, Any]]:
        """The model's own forward pass against the engine's, of the same weights: what rounding does, to compare
        drift with."""
        import torch

        from longtail.bench.staleness_drift import drift, summary

        contexts = self.contexts[:REFERENCE_CONTEXTS]
        ours = [self.replay.logits(context, None) for context in contexts]
        rows = []
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            self.progress(f"the model's own forward pass in {name}")
            model = self.model if dtype == torch.float32 else copy.deepcopy(self.model).to(dtype)
            with torch.inference_mode():
                theirs = [
                    model(input_ids=torch.tensor([c.ids]), use_cache=False).logits[0, c.stale : -1].float()
                    for c in contexts
                ]
            found = [drift(p, q, c.targets) for p, q, c in zip(ours, theirs, contexts, strict=True)]
            rows.append({"dtype": name} | summary(found))
        return rows

    # -- time ---------------------------------------------------------------------------------------------------------

    def times(self) -> list[dict[str, Any]]:
        from longtail.bench.staleness_time import time_rows
        from longtail.partial_rollout.engines.native.decoder import weights_of

        config = self.config
        return time_rows(
            {"recompute": self.engine, "keep": self._engine("keep")},
            weights_of(self.model),
            live=config.live,
            lengths=config.lengths,
            iteration=config.iteration,
            repeats=config.repeats,
            progress=lambda text: self.progress(f"update with {config.live} live samples of {text}"),
        )


def age_history(age: int, newest: int) -> History:
    from longtail.bench.staleness_replay import History

    return History(((newest - age, 1.0),))


def mixed_history(age: int, newest: int) -> History:
    """As many pieces as versions older than the newest, alike in length: a sample that was there all the time."""
    from longtail.bench.staleness_replay import History

    return History(tuple((newest - age + i, (i + 1) / age) for i in range(age)))
