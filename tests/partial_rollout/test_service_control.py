"""What bounds and controls a service: kept samples, pauses, updates, failures, the end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import (
    Stepped,
    again,
    assert_equals,
    barrier,
    continued,
    expected,
    joined,
    make_stepped,
    params,
    result,
    serving,
    steps,
    submit,
    undisturbed,
)

from longtail import NativeEngine
from longtail.partial_rollout.service import KeptConfig, RolloutService, ServiceStopped


@pytest.fixture(scope="module")
def engine() -> Stepped:
    return make_stepped()


@pytest.fixture(scope="module")
def alone() -> NativeEngine:
    """Undisturbed: for what is to be expected."""
    return make_stepped()


@pytest.fixture(autouse=True)
def as_new(engine: Stepped) -> None:
    engine.reset_prefix_cache()


# ---- bounds


def test_bounds_of_what_is_kept(engine: Stepped) -> None:
    now = [0.0]
    kept = KeptConfig(max_samples=3, max_age=10.0)
    with serving(engine, kept=kept, clock=lambda: now[0]) as service:
        requests = submit(service, 5)
        steps(service, 4)
        service.abort([requests[0].id]).result()
        now[0] = 6.0
        service.abort_all().result()
        stats = service.stats()
        assert (stats.num_kept, stats.num_evicted, stats.num_evicted_kv) == (3, 2, 0)
        assert stats.kept_bytes == engine.tiers.host_used > 0
        now[0] = 15.9
        barrier(service)
        assert service.stats().num_kept == 3
        now[0] = 16.0
        barrier(service)
        barrier(service)
        stats = service.stats()
        assert (stats.num_kept, stats.num_evicted, stats.kept_bytes, engine.tiers.host_used) == (0, 5, 0, 0)
        rest = again(service, requests[4], [result(requests[4])])
        steps(service, None)
        assert result(rest).num_resumed_tokens == 0


def test_bytes_are_those_of_parts_and_the_oldest_loses_them(engine: Stepped, alone: NativeEngine) -> None:
    """Siblings share their prompt's part. Whoever lost its KV resumes from its tokens, to the same result."""
    p = params(seed=3)
    with serving(engine) as service:
        requests = [service.generate(prompt(33), p, index=i) for i in range(3)]
        steps(service, 6)
        service.abort_all().result()
        whole = service.stats().kept_bytes
        assert whole == engine.tiers.host_used
        assert service.drop_kept().result() == 3
        assert (service.stats().kept_bytes, service.stats().num_kept) == (0, 0)
    engine.reset_prefix_cache()
    with serving(engine, kept=KeptConfig(max_bytes=whole - 1)) as service:
        requests = [service.generate(prompt(33), p, index=i) for i in range(3)]
        steps(service, 6)
        service.abort_all().result()
        stats = service.stats()
        assert (stats.num_kept, stats.num_evicted, stats.num_evicted_kv) == (3, 0, 1)
        assert 0 < stats.kept_bytes < whole
        parts = [result(r) for r in requests]
        rests = [service.generate([*prompt(33), *c.token_ids], p) for c in parts]
        steps(service, None)
        for i in range(3):
            assert_equals([parts[i], result(rests[i])], undisturbed(alone, prompt(33), p, index=i))
        assert [result(r).kv[0] for r in rests] == ["recomputed", "restored", "restored"]


def test_nothing_is_kept_where_nothing_may_be(engine: Stepped) -> None:
    with serving(engine, kept=KeptConfig(max_samples=0)) as service:
        (request,) = submit(service, 1)
        steps(service, 4)
        service.abort_all().result()
        assert (service.stats().num_kept, engine.tiers.host_used) == (0, 0)
        rest = again(service, request, [result(request)])
        steps(service, None)
        assert result(rest).num_resumed_tokens == 0


@pytest.mark.parametrize(
    "fields",
    [{"max_samples": -1}, {"max_samples": True}, {"max_bytes": 1.5}, {"max_age": 0.0}, {"max_age": float("nan")}],
)
def test_wrong_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        KeptConfig(**fields)


def test_a_cancelled_request_leaves_nothing(engine: Stepped) -> None:
    with serving(engine) as service:
        a, b, c = submit(service, 3)
        steps(service, 4)
        a.cancel()
        service.pause().result()
        d = service.generate(prompt(9), params(seed=9))
        d.cancel()
        service.resume().result()
        barrier(service)
        assert (result(a).finish_reason, len(result(a).token_ids)) == ("abort", 4)
        assert result(d).token_ids == []
        stats = service.stats()
        assert (stats.num_cancelled, stats.num_discarded_tokens, stats.num_kept, stats.num_requests) == (2, 4, 0, 2)
        steps(service, None)
        a.cancel()
        assert len(result(b).token_ids) == len(result(c).token_ids) == 24


# ---- pauses


def test_keep(engine: Stepped, alone: NativeEngine) -> None:
    """Requests stand still and go on; those that come are queued."""
    with serving(engine) as service:
        (a,) = submit(service, 1)
        steps(service, 4)
        service.pause("keep").result()
        engine.budget = None
        b = service.generate(prompt(9, 7), params(seed=7))
        b.accepted.result()
        barrier(service)
        stats = service.stats()
        assert (stats.is_paused, stats.num_requests, stats.num_queued, stats.num_output_tokens) == (True, 2, 1, 4)
        service.check_integrity()
        service.resume().result()
        assert_equals([result(a)], expected(alone, a))
        assert_equals([result(b)], expected(alone, b))
        assert not service.stats().is_paused


def test_wait(engine: Stepped) -> None:
    """Those that run are finished; a resume ends the waiting."""
    with serving(engine) as service:
        (a,) = submit(service, 1)
        steps(service, 4)
        paused = service.pause("wait")
        b = service.generate(prompt(9, 7), params(seed=7))
        b.accepted.result()
        steps(service, 3)
        assert not paused.done() and not a.completion.done()
        engine.budget = None
        barrier(service)
        paused.result(timeout=60)
        assert result(a).finish_reason == "length"
        assert (service.stats().num_queued, b.completion.done()) == (1, False)
        service.pause("wait").result()
        service.resume().result()
        result(b)
        engine.budget = 0
        c = service.generate(prompt(9), params(seed=1))
        steps(service, 1)
        waiting = service.pause("wait")
        service.resume().result()
        waiting.result(timeout=60)
        steps(service, None)
        assert result(c).finish_reason == "length"


def test_abort_and_the_queue(engine: Stepped, alone: NativeEngine) -> None:
    """What is queued ends too, keeps its place, and a kept sample that was to go on can be aborted again."""
    with serving(engine) as service:
        (a,) = submit(service, 1)
        steps(service, 4)
        service.pause("abort").result()
        parts = [result(a)]
        back = again(service, a, parts)
        fresh = service.generate(prompt(12, 1), params(seed=1))
        fresh.accepted.result()
        assert service.stats().num_queued == 2
        service.pause("abort").result()
        assert result(back).token_ids == result(fresh).token_ids == []
        assert service.stats().num_kept == 2
        service.resume().result()
        parts += [result(back)]
        last, other = again(service, a, parts), again(service, fresh, [])
        steps(service, None)
        assert_equals([*parts, result(last)], expected(alone, a))
        assert_equals([result(other)], expected(alone, fresh))


def test_a_mode_that_is_none(engine: Stepped) -> None:
    with serving(engine) as service, pytest.raises(ValueError, match="keep, abort or wait"):
        service.pause("drop")  # type: ignore[arg-type]


# ---- new weights


@pytest.mark.parametrize("mode", [None, "keep", "abort"])
@pytest.mark.parametrize("rule", ["recompute", "keep"])
def test_an_update_in_flight(mode: Any, rule: str) -> None:
    """Every token has the version that made it. Where KV is computed again, the tokens after the update are those that
    the new weights make of the tokens before; where it is kept, the segments say so."""
    old, new = make_model("llama"), make_model("llama", seed=1)
    engine = make_stepped(old, kv_on_update=rule)
    alone_old, alone_new = make_stepped(old), make_stepped(new)
    with serving(engine) as service:
        requests = submit(service, 3)
        steps(service, 6)
        if mode is not None:
            service.pause(mode).result()
        assert service.update_weights(new.state_dict(), 4).result() == 4
        if mode is not None:
            service.resume().result()
        parts = [[result(r)] if mode == "abort" else [] for r in requests]
        rests = [again(service, r, p) for r, p in zip(requests, parts, strict=True)] if mode == "abort" else requests
        steps(service, None)
        for request, got, rest in zip(requests, parts, rests, strict=True):
            got.append(result(rest))
            tokens, logprobs = joined(*got)
            assert [v for c in got for v in c.versions] == [0] * 6 + [4] * 18
            assert got[-1].version == 4
            sample = expected(alone_old, request)
            assert (tokens[:6], logprobs[:6]) == (sample.output_ids[:6], sample.logprobs[:6])
            kv = [k for c in got for k in c.kv]
            assert kv == ["computed"] * 6 + ["recomputed" if rule == "recompute" else "kept"] * 18
            want = continued(alone_new, sample, 6, 24)
            assert ((tokens[6:], logprobs[6:]) == want) == (rule == "recompute")


def test_an_update_that_does_not_fit_changes_nothing(engine: Stepped, alone: NativeEngine) -> None:
    weights = make_model("llama", seed=1).state_dict()
    with serving(engine) as service:
        (request,) = submit(service, 1)
        steps(service, 3)
        for wrong, version in ((dict(list(weights.items())[1:]), 1), (weights, 0), (weights, "7")):
            with pytest.raises(ValueError):
                service.update_weights(wrong, version).result()  # type: ignore[arg-type]
        steps(service, None)
        assert_equals([result(request)], expected(alone, request))
        assert service.stats().version == 0


# ---- the end


class Breaks(Stepped):
    """Its fourth step raises."""

    made = 0

    def step(self, **options: Any) -> Any:
        self.made += 1
        if self.made == 4:
            raise RuntimeError("cuda is on fire")
        return super().step(**options)


def test_an_engine_that_fails_answers_all() -> None:
    engine = Breaks(make_model("llama"), kv_cache_bytes=4 << 20, max_num_seqs=2, block_size=16)
    blocks = engine.stats().num_blocks
    engine.budget = 0
    service = RolloutService(engine)
    requests = submit(service, 4)  # two run, two wait
    steps(service, 2)
    told: list[BaseException] = []

    def read() -> None:
        try:
            list(requests[0])
        except ServiceStopped as error:
            told.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    waiting = service.pause("wait")
    engine.budget = None
    with pytest.raises(ServiceStopped, match="cuda is on fire") as caught:
        waiting.result(timeout=60)
    assert isinstance(caught.value.__cause__, RuntimeError)
    for request in requests:
        with pytest.raises(ServiceStopped, match="cuda is on fire"):
            result(request)
    thread.join()
    assert told == [caught.value] == [service.stopped]
    for call in (lambda: service.generate([1]), service.abort_all, service.resume, service.pause):
        with pytest.raises(ServiceStopped, match="cuda is on fire"):
            call()
    requests[0].cancel()
    service.close()
    stats = engine.stats()
    assert stats.num_free_blocks == blocks and not engine.is_busy
    assert service.stats().num_requests == 0


def test_a_call_that_breaks_the_engine_is_the_end(engine: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not misuse: weights half loaded would be served under the old version."""

    def broken(weights: Any, version: int) -> None:
        raise MemoryError("in the middle of it")

    with serving(engine) as service:
        (request,) = submit(service, 1)
        steps(service, 3)
        monkeypatch.setattr(engine, "update_weights", broken)
        update, later = service.update_weights({}), service.abort_all()
        for future in (update, later, request.completion):
            with pytest.raises(ServiceStopped, match="in the middle"):
                future.result(timeout=60)


def test_a_sample_that_fails_is_an_answer(engine: Stepped) -> None:
    """Weights with NaN: the engine goes on, the request says why it ended."""
    model = make_model("llama", seed=2)
    broken = {k: v.clone() for k, v in model.state_dict().items()}
    broken["model.norm.weight"][0] = float("nan")
    nan = make_stepped(make_model("llama", seed=2))
    with serving(nan) as service:
        (request,) = submit(service, 1)
        steps(service, 3)
        service.update_weights(broken).result()
        steps(service, None)
        done = result(request)
        assert done.finish_reason == "error" and "logits" in str(done.failure)
        assert (len(done.token_ids), service.stats().num_failed) == (3, 1)


def test_close_answers_all_with_what_they_have(engine: Stepped) -> None:
    with serving(engine) as service:
        requests = submit(service, 2)
        steps(service, 4)
        service.pause().result()
        queued = service.generate(prompt(9), params(seed=8))
        queued.accepted.result()
        service.close()
        assert [len(result(r).token_ids) for r in requests] == [4, 4]
        assert (result(queued).finish_reason, result(queued).token_ids) == ("abort", [])
        service.close()
        with pytest.raises(ServiceStopped, match="closed"):
            service.generate([1])
        assert engine.tiers.host_used == 0


def test_prefixes_are_forgotten_on_request(engine: Stepped) -> None:
    with serving(engine, steps=None) as service:
        for reset, cached in ((False, 0), (True, 32), (False, 32)):
            before = service.stats().engine.num_cached_tokens
            result(service.generate(prompt(33), params(seed=1, max_tokens=2)))
            barrier(service)
            assert service.stats().engine.num_cached_tokens - before == cached
            if reset:
                service.reset_prefix_cache().result()
                before = service.stats().engine.num_cached_tokens
                result(service.generate(prompt(33), params(seed=1, max_tokens=2)))
                barrier(service)
                assert service.stats().engine.num_cached_tokens == before


def test_drafts_change_nothing(alone: NativeEngine) -> None:
    engine = make_stepped(drafter="ngram")
    with serving(engine) as service:
        requests = [service.generate([5, 6, 7] * 4, params(seed=i, temperature=0.2)) for i in range(3)]
        steps(service, 5)
        service.abort_all().result()
        parts = [result(r) for r in requests]
        rests = [again(service, r, [c]) for r, c in zip(requests, parts, strict=True)]
        steps(service, None)
        for request, part, rest in zip(requests, parts, rests, strict=True):
            assert_equals([part, result(rest)], expected(alone, request))
        assert torch.isfinite(torch.tensor(joined(*parts)[1])).all()
