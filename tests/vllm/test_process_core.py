"""vLLM's core in a process of its own (AsyncLLM): the same samples, versions and saved KV as with the core in this one,
however far it has run ahead; and nothing is lost when it is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.partial_rollout.conftest import group, make_model, prompt
from tests.processes import is_running, until
from tests.vllm.conftest import HEADS, EngineMaker, assert_same, generate

from longtail import Rollout, Sample
from longtail.events import Event, ignore
from longtail.spec_decode.choice import make_drafter
from longtail.spec_decode.controller import FixedLength
from longtail.version import PolicyVersion

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm import VllmEngine

SETTINGS: dict[str, Any] = {"kv_cache_bytes": 4 << 20, "max_num_seqs": 8, "block_size": 32}
LENGTH = 200
"""So long that a sample has not ended when the test looks, though the core runs on."""
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"presence_penalty": 1.5, "top_p": 0.9, "min_tokens": 40, "stop_token_ids": list(range(3, 60))},
]


@pytest.fixture(scope="module")
def started(directories: dict[str, Path]) -> Iterator[VllmEngine]:
    from longtail.partial_rollout.engines.vllm import VllmEngine

    engine = VllmEngine(directories["llama"], core="process", drafter="group", **SETTINGS)
    yield engine
    engine.close()


@pytest.fixture
def engine(started: VllmEngine) -> Iterator[VllmEngine]:
    """All blocks are free in the end."""
    started.reset_prefix_cache()
    yield started
    started.listener = ignore
    started.pause(snapshot=False)
    while started.has_work:  # what had ended meanwhile
        started.step()
    started.check_integrity()
    assert started.core.num_free_blocks == started.core.num_blocks


def some(name: str, **params: object) -> list[Sample]:
    return group(name, prompt(21), n=4, **{"max_tokens": LENGTH, **params}).samples


def run(engine: VllmEngine, samples: list[Sample], until: int | None = None) -> None:
    """Until the first one that goes on has so many output tokens at least, or until all are done."""
    while engine.has_work:
        if until is not None and all(len(s.output_ids) >= until or s.is_done for s in samples):
            break
        engine.step()


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "penalties"])
def test_cuts_change_nothing(engine: VllmEngine, make_vllm: EngineMaker, params: dict) -> None:
    expected = generate(make_vllm(), group("a", prompt(21), n=4, **{"max_tokens": LENGTH, **params}))
    samples = some("a", **params)
    before = engine.stats()
    engine.add(samples)
    for length in (5, 30):
        run(engine, samples, length)
        paused = engine.pause()
        assert all(s.status == "paused" for s in paused)
        assert all(s.snapshot is not None for s in paused if s.output_ids)  # the noise may not have begun
        engine.check_integrity()
        engine.reset_prefix_cache()
        engine.add(group(f"noise{length}", prompt(33), n=2, max_tokens=20).samples)
        engine.add(paused)
    run(engine, samples)
    for a, b in zip(samples, expected, strict=True):
        assert_same(a, b)
        a.check_integrity()
        assert {segment.kv for segment in a.segments} <= {"computed", "restored"}
        assert {segment.version for segment in a.segments} == {engine.version}
    after = engine.stats()
    assert after.num_recomputed_tokens == before.num_recomputed_tokens and after.num_preemptions == 0
    assert after.num_restored_tokens > before.num_restored_tokens


def test_drafts_change_nothing(engine: VllmEngine, make_vllm: EngineMaker) -> None:
    """Drafted in the core's process, in a batch that is paused and goes on; what it reports is what the engine saw."""
    params: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0.7}
    expected = generate(make_vllm(), group("a", [5, 6, 7, 8] * 4, n=4, **params))
    for name in ("ngram", "group>ngram"):
        engine.use_drafter(name, FixedLength(4))
        before = engine.stats()
        samples = group("a", [5, 6, 7, 8] * 4, n=4, **params).samples
        engine.add(samples)
        run(engine, samples, 20)
        engine.add(engine.pause())
        run(engine, samples)
        engine.pause()  # the core stands still: the last pass has been judged
        for a, b in zip(samples, expected, strict=True):
            assert_same(a, b)
        drafted = engine.stats().num_draft_tokens - before.num_draft_tokens
        accepted = engine.stats().num_accepted_tokens - before.num_accepted_tokens
        assert drafted > accepted > 0 and engine.speculation is not None
        report = engine.speculation.report()["drafters"]
        assert sum(of["accepted"] for of in report.values()) > 0
    engine.use_drafter("group")


def test_versions_at_an_update(engine: VllmEngine, make_vllm: EngineMaker) -> None:
    """Tokens before it are as if there was none; those behind it are what the new weights make of the tokens there, and
    so is a fresh sample, to whose prompt there is KV of the old ones."""
    other = make_model("llama", seed=7, **HEADS).state_dict()
    local = make_vllm()
    old = generate(local, group("a", prompt(21), n=4, max_tokens=LENGTH))
    samples, version = some("a"), engine.version
    own = make_model("llama", **HEADS).state_dict()
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.update_weights({k: v for k, v in other.items() if k != "model.norm.weight"}, version + 1)
    assert engine.version == version
    events: list[Event] = []
    engine.listener = events.append
    engine.add(samples)
    run(engine, samples, 20)
    try:
        engine.update_weights(other, version + 1)
        cuts = [len(s.output_ids) for s in samples]
        fresh = some("fresh")
        engine.add(fresh)
        run(engine, samples + fresh)
        assert all(20 <= cut < LENGTH for cut in cuts), "the update came too late to show something"
        local.update_weights(other, local.version + 1)
        for sample, before, cut in zip(samples, old, cuts, strict=True):
            assert sample.output_ids[:cut] == before.output_ids[:cut]
            assert sample.versions == [version] * cut + [version + 1] * (LENGTH - cut)
            again = some("a")[sample.index]
            again.extend(sample.output_ids[:cut], sample.logprobs[:cut], PolicyVersion(0), "earlier", "computed")
            local.add([again])
            run(local, [again])
            assert again.output_ids == sample.output_ids and again.output_ids != before.output_ids
            torch.testing.assert_close(again.logprobs, sample.logprobs, atol=1e-4, rtol=0)
        for a, b in zip(fresh, generate(local, group("fresh", prompt(21), n=4, max_tokens=LENGTH)), strict=True):
            assert_same(a, b)
            assert set(a.versions) == {version + 1}
    finally:
        engine.update_weights(own, engine.version + 1)
    kinds = [e.kind for e in events]
    assert kinds.count("update") == 2 and kinds.count("finish") == 8
    steps = [e for e in events if e.kind == "step"]
    assert sum(e.num_output_tokens for e in steps) == 8 * LENGTH


def test_an_update_that_broke(
    engine: VllmEngine, make_vllm: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core makes nothing with weights that are neither the old nor the new ones, until an update has succeeded."""
    expected = generate(make_vllm(), group("a", prompt(21), n=4, max_tokens=LENGTH))
    samples, own = some("a"), make_model("llama", **HEADS).state_dict()
    engine.add(samples)
    run(engine, samples, 10)
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "rpc", lambda method, **_: (_ for _ in ()).throw(ConnectionError("lost")))
        with pytest.raises(ConnectionError):
            engine.update_weights(own, engine.version + 1)
    had = [list(s.output_ids) for s in samples]
    with pytest.raises(RuntimeError, match="failed half-way"):
        engine.step()
    engine.check_integrity()
    assert [s.output_ids for s in samples] == had
    engine.update_weights(own, engine.version + 1)
    run(engine, samples)
    for a, b in zip(samples, expected, strict=True):
        assert_same(a, b)


def test_refused_by_name(directories: dict[str, Path], engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match="core must be one of local, process"):
        type(engine)(directories["llama"], core="elsewhere")
    with pytest.raises(ValueError, match="scheduler_cls"):
        type(engine)(directories["llama"], core="process", engine_args={"scheduler_cls": "x"})
    with pytest.raises(ValueError, match="cannot go to the process"):
        engine.use_drafter(make_drafter("ngram"))
    with pytest.raises(ValueError, match="drafter"):
        engine.use_drafter("nonsense")
    assert engine.speculation is not None and engine.speculation.report()["batches"]


def test_limits_and_aborts(engine: VllmEngine) -> None:
    samples = some("a", max_tokens=100)
    engine.add(samples, limit=10)
    reached: dict[str, int] = {}
    while len(reached) < 4:
        for sample in engine.step().at_limit:
            assert sample.id not in reached
            reached[sample.id] = len(sample.output_ids)
    assert all(n >= 10 for n in reached.values())
    with pytest.raises(ValueError, match="'nobody' is not in the engine"):
        engine.abort([samples[0].id, "nobody"])
    aborted = engine.abort([samples[0].id, samples[1].id])
    assert all(s.finish_reason == "aborted" or len(s.output_ids) == 100 for s in samples[:2])
    assert {s.id for s in aborted} <= {samples[0].id, samples[1].id}
    engine.check_integrity()
    n = len(samples[0].output_ids)
    run(engine, samples[2:])
    assert [len(s.output_ids) for s in samples] == [n, len(samples[1].output_ids), 100, 100]


@pytest.mark.parametrize("to_the_end", [False, True], ids=["ahead", "ended"])
def test_a_turn_that_the_core_ran_past(engine: VllmEngine, to_the_end: bool) -> None:
    """What it made behind the turn is in neither the sample nor its saved KV."""
    samples = some("a", **PARAMS[2])
    for sample in samples:
        sample.multi_turn = True
    engine.add(samples)
    if to_the_end:  # of the context: vLLM has ended the requests
        while engine.core.call("requests")[0]:  # type: ignore[attr-defined]
            time.sleep(0.02)
    else:
        while min(map(len, engine.core.call("requests")[0].values())) < 21 + 60:  # type: ignore[attr-defined]
            time.sleep(0.005)
    turns: list[Sample] = []
    while engine.has_work:
        turns += engine.step().turns
    assert turns and all(s.turn_ended and s.output_ids[-1] in range(3, 60) for s in turns)
    for sample in turns:
        tokens = [*sample.prompt_ids, *sample.output_ids]
        assert sample.snapshot is None or sample.snapshot.num_tokens <= len(tokens)
        sample.append_observation([7, 8, 9])
    assert any(s.snapshot is not None for s in turns) != to_the_end
    restored = engine.stats().num_restored_tokens
    engine.add(turns)
    while engine.has_work:
        engine.step()
    assert (engine.stats().num_restored_tokens > restored) != to_the_end


def test_what_the_caller_has_dealt_with_is_not_told_again(engine: VllmEngine) -> None:
    """Samples end in a pause: the caller sees it, and begins them anew, or answers, before the next step."""
    ending, going = some("a", max_tokens=5), some("b")
    turn = some("c", min_tokens=5, stop_token_ids=list(range(90)))[0]
    turn.multi_turn = True
    engine.add([*ending, *going, turn])
    while not all(s.is_done for s in ending) or not turn.turn_ended:
        time.sleep(0.02)
        engine.add(engine.pause([going[0].id]))
    for sample in ending:
        sample.cut(0)
    turn.append_observation([7, 8, 9])
    engine.add([*ending, turn])
    out = engine.step()
    assert all(s.is_done for s in out.finished) and all(s.turn_ended for s in out.turns)
    told = [*out.finished, *out.turns]
    while engine.has_work:
        out = engine.step()
        told += [*out.finished, *out.turns]
    assert sorted(s.id for s in told) == sorted(s.id for s in [*ending, *going, turn])


def test_a_step_that_is_interrupted(
    engine: VllmEngine, make_vllm: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the passes that it takes in: those behind it are made again, and what had ended is told of later."""
    expected = generate(make_vllm(), group("a", prompt(21), n=4, max_tokens=LENGTH))
    short = group("b", prompt(9), n=1, max_tokens=3).samples
    samples, finished = some("a"), list[Sample]()
    engine.add([*short, *samples])
    book, count = engine._book, 0

    def interrupted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        book(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_book", interrupted)
        time.sleep(0.5)  # there are many
        with pytest.raises(KeyboardInterrupt):
            while True:
                finished += engine.step().finished
    while engine.has_work:
        finished += engine.step().finished
    assert {s.id for s in finished} == {s.id for s in [*short, *samples]}
    for a, b in zip(samples, expected, strict=True):
        assert_same(a, b)


def test_the_ledger_counts_what_it_ran_past(engine: VllmEngine) -> None:
    """What came from the core is in a sample, or counted as overrun, where there are no drafts."""
    engine.use_drafter(None)
    came, take = 0, engine.core.step

    def counted(**options: Any) -> Any:
        nonlocal came
        passes = take(**options)
        came += sum(len(e.token_ids) for done in passes for e in done.emitted)
        return passes

    before = engine.stats()
    engine.core.step = counted  # type: ignore[method-assign]
    try:
        rollout = Rollout(engine)
        rollout.submit([group("a", prompt(21), n=4, max_tokens=5)])
        add = engine.add

        def adding(*arguments: Any, **options: Any) -> None:
            add(*arguments, **options)
            while engine.core._queue.qsize() < 30:  # type: ignore[attr-defined]
                time.sleep(0.01)

        engine.add = adding  # type: ignore[method-assign]
        (done,) = rollout.collect()
    finally:
        del engine.core.step, engine.add
        engine.use_drafter("group")
    overrun = engine.stats().num_overrun_tokens - before.num_overrun_tokens
    assert [len(s.output_ids) for s in done.samples] == [5] * 4 and overrun > 0
    assert came == 20 + overrun == 20 + rollout.store.ledger.beside["overrun"]


def test_random_lives(engine: VllmEngine, make_vllm: EngineMaker) -> None:
    """Adds, steps, pauses with and without KV, aborts: what finishes is what an undisturbed engine makes."""
    rng = random.Random(3)
    everything = [s for i in range(12) for s in group(f"g{i}", prompt(9 + 4 * i, i), n=2, max_tokens=30 + i).samples]
    outside, aborted = list(everything), set()
    for _ in range(120):
        action = rng.choice(["add", "step", "step", "step", "pause", "abort", "forget"])
        inside = [s for s in everything if s.status in ("waiting", "running") and s not in outside]
        if action == "add" and outside:
            chosen = rng.sample(outside, min(len(outside), 3))
            engine.add(chosen)
            outside = [s for s in outside if s not in chosen]
        elif action == "step" and engine.has_work:
            engine.step()
        elif action == "pause" and inside:
            chosen = rng.sample(inside, min(len(inside), rng.randint(1, 4)))
            outside += engine.pause([s.id for s in chosen if not s.is_done], snapshot=rng.random() < 0.7)
        elif action == "abort" and inside and rng.random() < 0.2:
            aborted |= {s.id for s in engine.abort([inside[0].id])}
        elif action == "forget" and rng.random() < 0.2:
            engine.reset_prefix_cache()
        if rng.random() < 0.2:
            engine.check_integrity()
    engine.add(outside)
    run(engine, everything)
    local = make_vllm()
    for i in range(12):
        for want in generate(local, group(f"g{i}", prompt(9 + 4 * i, i), n=2, max_tokens=30 + i)):
            (got,) = [s for s in everything if s.id == want.id]
            if want.id in aborted:
                assert got.output_ids == want.output_ids[: len(got.output_ids)]
            else:
                assert_same(got, want)


def test_a_killed_core_loses_nothing(started: VllmEngine, make_vllm: EngineMaker) -> None:
    """The last test: there is no core behind it. What had come stays; all go on elsewhere, one with its saved KV."""
    from longtail.partial_rollout.engines.vllm.core import CoreDied

    expected = generate(make_vllm(), group("a", prompt(21), n=4, max_tokens=LENGTH))
    samples = some("a")
    started.add(samples)
    run(started, samples, 5)
    (first,) = started.pause([samples[0].id])
    (process,) = started.core.llm.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CoreDied, match="core is gone"):
        while started.has_work:
            started.step()
    paused = started.pause()
    assert not started.has_work and all(s.status == "paused" for s in paused)
    with pytest.raises(CoreDied):
        started.add(paused)
    unfinished = [s for s in samples if not s.is_done]
    assert first in unfinished and first.snapshot is not None and set(unfinished) == {first, *paused}
    other = make_vllm()
    other.add(unfinished)
    run(other, unfinished)
    for a, b in zip(samples, expected, strict=True):
        assert_same(a, b)
    assert first.segments[-1].kv == "restored"


def test_a_message_that_cannot_be_sent_is_not_waited_for(directories: dict[str, Path]) -> None:
    from longtail.partial_rollout.engines.vllm import VllmEngine
    from longtail.partial_rollout.engines.vllm.core import CoreDied

    engine = VllmEngine(directories["llama"], core="process", **SETTINGS)

    async def broken(request: Any) -> None:
        raise OSError("no buffer space")

    engine.core.llm.engine_core.add_request_async = broken
    samples = some("a")
    engine.add(samples)
    with pytest.raises(CoreDied, match="no buffer space"):
        engine.step()
    assert engine.pause() == samples
    engine.close()
    engine.close()
    with pytest.raises(CoreDied):
        engine.add(samples)


OWNER = """
import os, sys
from longtail.partial_rollout.engines.vllm import VllmEngine, process_core

start = process_core.ProcessCore._start

def by(self, executor):
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = sys.argv[2]
    start(self, executor)

process_core.ProcessCore._start = by
engine = VllmEngine(sys.argv[1], core="process", kv_cache_bytes=4 << 20, block_size=32)
(core,) = engine.core.llm.engine_core.resources.engine_manager.processes
print(core.pid, type(core).__name__, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_core_does_not_outlive_its_engine(directories: dict[str, Path], method: str) -> None:
    """The process that made it is killed, so that nobody tells it to end. (On GPUs vLLM forks, here it does not.)"""
    command = [sys.executable, "-c", OWNER, str(directories["llama"]), method]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdout is not None
        pid, kind = owner.stdout.readline().split()
        assert kind == f"{method.capitalize()}Process"
        assert "EngineCor" in Path(f"/proc/{pid}/stat").read_text()
        owner.kill()
    assert until(lambda: not is_running(int(pid)), 60.0)
