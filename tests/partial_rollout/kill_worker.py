"""Runs rollouts on a tiny model in child processes and kills them. A program: kill_worker.py DIRECTORY KILLS SEED.

The engine is built once; each child is a fork of this process, with tiers of its own. A third of the kills come at a
random time, a third from inside the database (at a random statement, or at a random one after the beginning of a
hand-over), a third from inside the saved KV: before a random write, flush, rename or removal of a file. Prints a JSON
line with what was seen. Between collects some samples are cut, so that kills come in cuts too.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["NUMBA_THREADING_LAYER"] = "workqueue"  # the one that survives a fork

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longtail import Group, NativeEngine, Rollout, SampleStore, SamplingParams, TokenBudget
from longtail.events import Event
from longtail.kv_manager import snapshot_file
from longtail.kv_manager import tiers as tiers_module
from longtail.kv_manager.tiers import Tiers
from longtail.partial_rollout.database import Database
from longtail.partial_rollout.ledger import LINES
from longtail.partial_rollout.saved_kv import names_in, parse

GROUPS, SIZE, ROUNDS = 3, 2, 3
PARAMS = {"n": SIZE, "max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3}


def make_engine() -> NativeEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return NativeEngine(LlamaForCausalLM(config).eval(), threads=1, max_num_seqs=4, kv_cache_bytes=1 << 21)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Of engine: what differs between them."""

    make: Callable[[], Any] = make_engine
    give_tiers: Callable[[Any, Tiers], None] = lambda engine, tiers: setattr(engine.kv, "tiers", tiers)
    is_same: Callable[[list, list], bool] = operator.eq
    """Of a group's samples (`record`), as they came and as they were undisturbed."""


def groups_of(round_: int) -> list[Group]:
    prompts = [[5 + round_, 7 + i, *range(10, 30 + 9 * i)] for i in range(GROUPS)]
    return [Group.from_prompt(f"r{round_}-{i}", p, SamplingParams(**PARAMS)) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


def record(groups: list[Group]) -> dict[str, list]:
    return {g.id: [[s.output_ids, [x.hex() for x in s.logprobs]] for s in g.samples] for g in groups}


def kill_in_files(calls: int) -> None:
    """Kills this process before it has made so many calls that change a KV file."""

    def counted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def count_down(*arguments: Any) -> Any:
            nonlocal calls
            if calls == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            calls -= 1
            return call(*arguments)

        setattr(module, name, count_down)

    for module, name in (
        (snapshot_file, "_write"),
        (snapshot_file, "flush"),
        (os, "replace"),
        (os, "fsync"),
        (tiers_module, "_remove"),
    ):
        counted(module, name)


class Resumes:
    """Writes down what became of the saved KV that an earlier life left."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.left: set[str] = set()

    def __call__(self, event: Event) -> None:
        if event.kind == "restore" and event.sample in self.left:
            self.left.remove(event.sample)
            with self.file.open("a") as out:
                out.write(f"{event.detail or 'restored'}\n")


def work(kind: Kind, engine: Any, directory: Path, log: Path, kill_at: tuple[int, int] | None) -> None:
    """The trainer's side: submits, collects, and writes down what it got, one line a delivery.

    kill_at: hand-overs that begin before the count of statements does, and that count."""
    kind.give_tiers(engine, Tiers())
    engine.listener = resumes = Resumes(directory / "resumes")
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    with SampleStore(directory / "store", commit_every=0.0) as store, log.open("a") as out:
        if kill_at is not None:
            hand_overs, statements = kill_at

            def count_down(statement: str) -> None:
                nonlocal hand_overs, statements
                if hand_overs:
                    hand_overs -= statement.startswith("INSERT INTO deliveries")
                elif statements:
                    statements -= 1
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

            store._database.connection.set_trace_callback(count_down)

        def keep(number: int, groups: list[Group]) -> None:
            out.write(json.dumps([number, record(groups)]) + "\n")
            out.flush()

        for delivery in store.deliveries(after=lines[-1][0] if lines else 0):
            keep(delivery.number, delivery.groups)
        rollout = Rollout(engine, strategy=TokenBudget(60), store=store)
        resumes.left = {s.id for s in store.unfinished() if s.snapshot is not None}

        def collect() -> None:
            if groups := rollout.collect():
                keep(store.last_delivery, groups)
            for sample in store.unfinished():
                if sample.output_ids and rng.random() < 0.15:
                    store.cut(sample, rng.randrange(len(sample.output_ids)), "stale")

        rng = random.Random(os.getpid())
        for round_ in range(ROUNDS):
            if f"r{round_}-0" not in store:
                rollout.submit(groups_of(round_))
            collect()
        while len(store):
            collect()


def check(directory: Path, found: Counter) -> None:
    """After a kill: the file is sound, the ledger balances, and whatever was submitted is there."""
    if not (directory / "store" / "samples.sqlite").exists():
        return
    database = Database(directory / "store")
    try:
        problems = database.check()
        assert problems == [], problems
        samples, damages = database.open_groups()
        assert damages == []
        for round_ in range(ROUNDS):  # a submission is whole or not there
            assert len({database.knows("groups", g.id) for g in groups_of(round_)}) == 1
        for group in samples:
            assert len(group.samples) == SIZE
            for sample in group.samples:
                sample.check_integrity()
                found["samples finished" if sample.is_done else "samples resumable"] += 1
        ledger = database.ledger()
        assert ledger.generated == ledger.pending + sum(ledger.lines[line] for line in LINES)
        found["stores with pending tokens"] += ledger.pending > 0
        before = kv_files(directory)
    finally:
        database.close()
    with SampleStore(directory / "store") as store:  # opening tidies up
        assert store.damages == [], store.damages
        store.check_integrity()
        records = [parse(text) for text in store._database.saved_kv().values()]
        named = {name for record in records for name in names_in(record)}
        assert kv_files(directory) == named, "a file without a row, or a row without its file"
        found["files found"] += len(named)
        found["files removed at opening"] += len(before - named)


def kv_files(directory: Path) -> set[str]:
    folder = directory / "store" / "kv"
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


def main(root: Path, kills: int, seed: int, kind: Kind = Kind()) -> None:
    rng = random.Random(seed)
    engine = kind.make()
    reference = Rollout(engine)
    reference.submit([g for round_ in range(ROUNDS) for g in groups_of(round_)])
    start = time.perf_counter()
    expected = record(reference.collect())
    found: Counter = Counter()
    took = time.perf_counter() - start
    while found["kills"] < kills:
        directory = root / str(found["lives"])
        directory.mkdir()
        log = directory / "log"
        while True:
            way = rng.choice(["time", "statement", "file"])
            by_statement = way == "statement"
            in_hand_over = by_statement and rng.random() < 0.5
            kill_at = (1, rng.randrange(20)) if in_hand_over else (0, int(10 ** rng.uniform(0, 3)))
            child = os.fork()
            if child == 0:
                try:
                    if way == "file":
                        kill_in_files(int(10 ** rng.uniform(0, 2)))
                    work(kind, engine, directory, log, kill_at if by_statement else None)
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
                found["kills inside the database"] += by_statement
                found["kills inside saved KV"] += way == "file"
                found["kills in or after a hand-over"] += in_hand_over
                torn = log.exists() and not log.read_text().endswith("\n") and log.stat().st_size
                if torn:  # the trainer's own file: its last line is not whole, so it has not seen that delivery
                    text = log.read_text()
                    log.write_text(text[: text.rfind("\n") + 1])
                    found["torn lines in the trainer's log"] += 1
                check(directory, found)
                continue
            assert os.WEXITSTATUS(status) == 0, "the worker failed"
            break
        found["lives"] += 1
        resumes = directory / "resumes"
        for line in resumes.read_text().splitlines() if resumes.exists() else ():
            found["resumed from KV on disk" if line == "restored" else line] += 1
        deliveries = [json.loads(line) for line in log.read_text().splitlines()]
        got = [name for _, groups in deliveries for name in groups]
        assert sorted(got) == sorted(expected), "a group is missing, or came twice"
        for _, groups in deliveries:
            for name, samples in groups.items():
                assert kind.is_same(samples, expected[name]), f"group {name} has other tokens or log-probabilities"
        found["groups delivered"] += len(got)
        with SampleStore(directory / "store") as store:
            store.check_integrity()
            tokens = sum(len(s[0]) for g in expected.values() for s in g)
            stale = store.ledger.lines["stale"]
            assert store.ledger.lines["trained"] == tokens == store.ledger.generated - stale
            found["tokens cut"] += stale
            assert kv_files(directory) == set()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
