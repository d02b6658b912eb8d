"""Runs `longtail train` on a tiny model in child processes, kills them and lets others go on. A program:
train_kill_worker.py DIRECTORY STRATEGY KILLS SEED [ENGINE].

Each child is a fork of this process. A third of the kills come at a random time, a third at a random event of the run
(or line of metrics), a third before a random flush, renaming or removal of a file. When a run is through, its metrics,
its evaluations, its weights, its optimiser, and every sample that it ever handed over must be those of a run that
nobody killed. Prints a JSON line with what was seen.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

os.environ["NUMBA_THREADING_LAYER"] = "workqueue"  # the one that survives a fork
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import torch

from longtail.bench import train
from longtail.bench.engines import EngineName
from longtail.bench.train import run
from longtail.bench.train_config import RunConfig
from longtail.partial_rollout.store import SampleStore
from longtail.trainer_adapter.checkpoint import Checkpoints
from longtail.trainer_adapter.metrics import read_metrics

STEPS = 6
vars(train)["SampleStore"] = partial(SampleStore, commit_every=0.0)  # so that kills leave tokens behind
train_toys: Any = importlib.import_module("train_toys")


def config_of(strategy: str, engine: EngineName) -> RunConfig:
    return RunConfig(
        model="tiny",
        engine=engine,
        strategy=strategy,
        loss="dapo",
        correction="none" if strategy == "sync" else "tis:cap=2",
        steps=STEPS,
        prompts=3,
        group_size=4,
        learning_rate=3e-3,
        threads=1,
        kv_cache_bytes=1 << (24 if engine == "native" else 22),
        policy="transformers",
        eval_every=3,
        checkpoint_every=2,
        keep=100,  # so that the store keeps every delivery, to be compared
        export=False,
    )


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_files(calls: int) -> None:
    for name in ("fsync", "rename", "replace", "rmdir"):
        call = getattr(os, name)

        def counted(*arguments: Any, call: Any = call, **options: Any) -> Any:
            nonlocal calls
            calls -= 1
            if calls < 0:
                kill()
            return call(*arguments, **options)

        setattr(os, name, counted)


def live(model: Path, config: RunConfig, out: Path, events: int | None) -> int:
    """-> events of the run; it kills itself at number `events`."""
    count = 0

    def progress(what: str, values: Any) -> None:
        nonlocal count
        count += 1
        if count == events:
            kill()

    run(config, out, resume=True, model=model, prompts=train_toys.ToyPrompts(), progress=progress)
    return count


def record(out: Path) -> dict[str, Any]:
    """All that must be the same."""
    lines = read_metrics(out / "metrics.jsonl")
    for line in lines:
        for name in ("seconds", "ledger"):  # a killed run has made tokens again
            del line[name]
    found = Checkpoints(out / "checkpoints").newest()
    assert found is not None and found.step == STEPS
    tensors: dict[str, str] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors[path] = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{path}/{key}", item)

    walk("", found.state["trainer"])
    with SampleStore(out / "store") as store:
        store.check_integrity()
        samples: dict[str, list[Any]] = {
            s.id: [delivery.iteration, s.output_ids, [x.hex() for x in s.logprobs], s.versions, s.reward]
            for delivery in store.deliveries()
            for group in delivery.groups
            for s in group.samples
        }
        pending: dict[str, list[Any]] = {s.id: [s.output_ids, s.versions] for group in store for s in group.samples}
        ledger = store.ledger
    spent = ledger.generated - ledger.lines["stale"]
    assert spent == sum(len(s[1]) for s in samples.values()) + sum(len(s[0]) for s in pending.values())
    evals = read_metrics(out / "eval.jsonl")
    return {"metrics": lines, "evals": evals, "tensors": tensors, "samples": samples, "pending": pending}


def main(root: Path, strategy: str, kills: int, seed: int, engine: EngineName = "native") -> None:
    rng = random.Random(seed)
    config, model = config_of(strategy, engine), root / "model"
    train_toys.save_model(model, **{} if engine == "native" else {"num_attention_heads": 1, "num_key_value_heads": 1})
    live(model, config, root / "undisturbed", None)  # once more than needed: children find everything compiled
    shutil.rmtree(root / "undisturbed")
    start = time.perf_counter()
    total = live(model, config, root / "undisturbed", None)
    took = time.perf_counter() - start
    expected = record(root / "undisturbed")
    if strategy != "sync":
        ages = [line["staleness"]["max"] for line in expected["metrics"]]
        assert any(age for age in ages), f"nothing was left unfinished: {ages}"
    found: Counter = Counter()
    while found["kills"] < kills:
        out = root / f"run-{found['runs']}"
        while True:
            way = rng.choice(["time", "event", "file"])
            events = rng.randrange(1, total) if way == "event" else None
            child = os.fork()
            if child == 0:
                try:
                    if way == "file":
                        kill_in_files(rng.randrange(60))
                    live(model, config, out, events)
                except BaseException as error:
                    print(repr(error), file=sys.stderr, flush=True)
                    os._exit(1)
                os._exit(0)
            if way == "time":
                time.sleep(rng.uniform(0, took))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status):
                found["kills"] += 1
                found[f"kills by {way}"] += 1
                with SampleStore(out / "store") as store:  # also that its lock went with the process
                    found["lives that left deliveries"] += store.last_delivery > 0
                    store.check_integrity()
                continue
            assert os.WEXITSTATUS(status) == 0, "the worker failed"
            break
        found["runs"] += 1
        got = record(out)
        for name, value in expected.items():
            if got[name] != value:
                keys = value if isinstance(value, dict) else range(len(value))
                wrong = [key for key in keys if len(got[name]) != len(value) or got[name][key] != value[key]]
                raise AssertionError(f"{name} differ at {wrong[:3]}: {len(wrong)} of {len(value)}")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *cast(Any, sys.argv[5:]))
