"""Two lives of a rollout on vLLM, each a process of its own: lives.py STORE MODEL KILL_AFTER

KILL_AFTER > 0: submits, collects, flushes, and kills itself with SIGKILL in the middle of the next collect, after so
many steps. 0: opens the store, runs to the end, and prints as a line of JSON what it saw, and whether every sample is
what it becomes undisturbed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.vllm.kv_helpers import SETTINGS, assert_same, group, plain

from longtail import Group, Rollout, TokenBudget
from longtail.events import Event
from longtail.partial_rollout.engines.vllm import VllmEngine
from longtail.partial_rollout.store import SampleStore

TOKENS = 6
"""Of each sample in an iteration."""


def groups() -> list[Group]:
    return [
        group("a", n=3, max_tokens=40),
        group("b", range(10, 42), n=2, max_tokens=33),
        group("c", range(10, 15), n=2, max_tokens=25, temperature=0.0),
    ]


def first(engine: VllmEngine, directory: Path, kill_after: int) -> None:
    rollout = Rollout(engine, strategy=TokenBudget(TOKENS, per="sample"), store=SampleStore(directory, commit_every=0))
    rollout.submit(groups())
    rollout.collect()
    rollout.store.flush()
    rollout.store.commit()
    step = engine.step

    def dying(**options: int) -> object:
        nonlocal kill_after
        if kill_after == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        kill_after -= 1
        return step(**options)  # type: ignore[arg-type]

    engine.step = dying  # type: ignore[method-assign, assignment]
    rollout.collect()


def second(engine: VllmEngine, directory: Path) -> None:
    events: list[Event] = []
    engine.listener = events.append
    with Rollout(engine, store=directory) as rollout:
        store = rollout.store
        store.check_integrity()
        left = {s.id: (len(s.output_ids), s.snapshot is not None) for g in store for s in g.samples}
        rollout.collect(wait=True)
        store.check_integrity()
        done = {s.id: s for d in store.deliveries(after=0) for g in d.groups for s in g.samples}
        stats, ledger = engine.stats(), store.ledger
        found = {
            "left": left,
            "restores": [(e.num_tokens, e.detail) for e in events if e.kind == "restore"],
            "kinds": {name: [s.kv for s in one.segments] for name, one in done.items()},
            "restored": stats.num_restored_tokens,
            "recomputed": stats.num_recomputed_tokens,
            "cached": stats.num_cached_tokens,
            "generated": ledger.generated,
            "trained": ledger.lines["trained"],
            "damages": list(store.damages),
        }
    engine.check_integrity()
    expected = plain(engine, [s for g in groups() for s in g.samples])
    assert done.keys() == expected.keys()
    for name, one in done.items():
        assert_same(one, expected[name])
    print(json.dumps(found))


if __name__ == "__main__":
    engine = VllmEngine(sys.argv[2], **SETTINGS)
    if kill_after := int(sys.argv[3]):
        first(engine, Path(sys.argv[1]), kill_after)
    else:
        second(engine, Path(sys.argv[1]))
