"""Requests from other threads and event loops; aborted ones go on bit for bit; nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.partial_rollout.conftest import generate, group, make_model, prompt
from tests.partial_rollout.service_helpers import (
    Stepped,
    assert_equals,
    barrier,
    continued,
    joined,
    make_stepped,
    params,
    result,
    serving,
    steps,
    undisturbed,
)

from longtail import NativeEngine
from longtail.partial_rollout.service import Completion, KeptConfig, Request, RolloutService, ServiceStopped


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


def submit(service: RolloutService, count: int, **fields: Any) -> list[Request]:
    """A request for each of so many prompts, with seeds."""
    return [service.generate(prompt(9 + 3 * i, i), params(seed=i, **fields)) for i in range(count)]


def expected(alone: NativeEngine, request: Request) -> Any:
    return undisturbed(alone, list(request.prompt_ids), request.params)


# ---- requests


def test_a_request_is_the_sample_of_its_seed(engine: Stepped, alone: NativeEngine) -> None:
    """Also in a group: index counts as in one."""
    want = generate(make_stepped(), group("g", prompt(9), n=3, max_tokens=12, seed=7))
    with serving(engine, steps=None) as service:
        requests = [service.generate(prompt(9), params(seed=7, max_tokens=12), index=i) for i in range(3)]
        for request, sample in zip(requests, want, strict=True):
            got = result(request)
            assert_equals([got], sample)
            assert got.versions == [0] * 12 and got.kv == ["computed"] * 12
            assert (got.num_prompt_tokens, got.num_resumed_tokens, got.version) == (9, 0, 0)
        stats = service.stats()
        assert (stats.num_completed, stats.num_output_tokens, stats.num_requests) == (3, 36, 0)


def test_chunks_are_the_completion(engine: Stepped) -> None:
    with serving(engine) as service:
        requests = submit(service, 3)
        steps(service, 5)
        chunks = [[next(iter(r))] for r in requests]
        engine.budget = None
        for request, read in zip(requests, chunks, strict=True):
            barrier(service)
            read += list(request)
            done = result(request)
            assert len(read[0].token_ids) == 5  # a reader that is slow gets what there is, at once
            assert [t for c in read for t in c.token_ids] == done.token_ids
            assert [p for c in read for p in c.logprobs] == done.logprobs
            assert [v for c in read for v in c.versions] == done.versions


def test_event_loops_and_threads(engine: Stepped, alone: NativeEngine) -> None:
    """Many callers at once, in two loops and four threads, each by another way."""

    async def ask(service: RolloutService, seed: int) -> tuple[list[int], Completion]:
        request = service.generate(prompt(9, seed), params(seed=seed))
        if seed % 2:
            return [], await request
        read = [t async for chunk in request for t in chunk.token_ids]
        return read, await request

    async def many(service: RolloutService, seeds: range) -> list[tuple[list[int], Completion]]:
        return await asyncio.gather(*(ask(service, seed) for seed in seeds))

    def in_thread(service: RolloutService, seed: int) -> tuple[list[int], Completion]:
        request = service.generate(prompt(9, seed), params(seed=seed))
        return [t for chunk in request for t in chunk.token_ids], result(request)

    with serving(engine, steps=None) as service, ThreadPoolExecutor(6) as pool:
        loops = [pool.submit(asyncio.run, many(service, range(k, k + 8))) for k in (0, 8)]
        threads = [pool.submit(in_thread, service, seed) for seed in range(16, 24)]
        got = [*loops[0].result(), *loops[1].result(), *(t.result() for t in threads)]
    for seed, (read, completion) in enumerate(got):
        assert_equals([completion], undisturbed(alone, prompt(9, seed), params(seed=seed)))
        assert read in ([], completion.token_ids)


def test_a_reader_that_is_cancelled_ends_nothing(engine: Stepped) -> None:
    async def read(service: RolloutService) -> Completion:
        request = service.generate(prompt(9), params(seed=1))
        reader = asyncio.ensure_future(request.__aiter__().__anext__())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await request
        engine.budget = None
        await asyncio.wrap_future(service.resume())
        return await request

    with serving(engine) as service:
        assert len(asyncio.run(read(service)).token_ids) == 24


def test_a_loop_that_is_gone_hurts_nobody(engine: Stepped) -> None:
    async def wait_a_little(request: Request) -> None:
        asyncio.ensure_future(request.__aiter__().__anext__())  # noqa: RUF006
        await asyncio.sleep(0)

    with serving(engine) as service:
        first, second = submit(service, 2)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(wait_a_little(first))
        loop.close()
        steps(service, None)
        assert len(result(first).token_ids) == len(result(second).token_ids) == 24


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1, -2]}, "prompt_ids must be non-negative"),
        ({"prompt_ids": [1, True]}, "prompt_ids must be non-negative"),
        ({"prompt_ids": [1, 2.0]}, "prompt_ids must be non-negative"),
        ({"prompt_ids": [1, 10**30]}, "below 2\\^31"),
        ({"prompt_ids": [1], "params": params(n=2)}, "n must be 1"),
        ({"prompt_ids": [1], "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt_ids": [1], "index": -1}, "index"),
    ],
)
def test_a_wrong_request_is_refused(engine: Stepped, fields: dict[str, Any], named: str) -> None:
    with serving(engine) as service, pytest.raises(ValueError, match=named):
        service.generate(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_ids": [1, 600]}, "token id 600 is outside the vocabulary of 512"),
        ({"prompt_ids": [5] * 256}, "prompt_ids has 256 tokens"),
        ({"prompt_ids": [1], "params": params(min_tokens=9), "max_new_tokens": 3}, "min_tokens 9 exceeds"),
        ({"prompt_ids": [1], "params": params(stop="x")}, "tokenizer"),
        ({"prompt_ids": [1], "request_id": "twice"}, "'twice' is that of a request"),
    ],
)
def test_what_the_engine_refuses(engine: Stepped, fields: dict[str, Any], named: str) -> None:
    with serving(engine) as service:
        service.generate([7], request_id="twice")
        request = service.generate(**fields)
        for wait in (request.accepted.result, lambda: result(request), lambda: list(request)):
            with pytest.raises(ValueError, match=named):
                wait()
        assert service.stats().num_requests == 1


# ---- aborted and resumed


def again(service: RolloutService, request: Request, parts: list[Completion], **fields: Any) -> Request:
    """The same request, sent again with what has come of it."""
    tokens = [*request.prompt_ids, *joined(*parts)[0]]
    return service.generate(tokens, **{"params": request.params, **fields})


@pytest.mark.parametrize("kept", [None, KeptConfig(max_bytes=0)], ids=["kv", "tokens"])
def test_aborted_requests_go_on_bit_for_bit(engine: Stepped, alone: NativeEngine, kept: KeptConfig | None) -> None:
    """Three cuts in each of five samples, in whatever order they come back; from kept KV, or from their tokens."""
    with serving(engine, kept=kept) as service:
        first = submit(service, 5, presence_penalty=0.7, repetition_penalty=1.3, top_k=40)
        parts: list[list[Completion]] = [[] for _ in first]
        requests = first
        for cut in (1, 7, 4):
            steps(service, cut)
            assert service.abort_all().result() == 5
            for request, got in zip(requests, parts, strict=True):
                got.append(result(request))
                assert got[-1].finish_reason == "abort"
            assert (service.stats().num_kept, service.stats().num_requests) == (5, 0)
            assert engine.stats().num_free_blocks == engine.stats().num_blocks
            order = [3, 0, 4, 1, 2]
            back = {i: again(service, first[i], parts[i]) for i in order}
            requests = [back[i] for i in range(5)]
        steps(service, None)
        for request, got, one in zip(requests, parts, first, strict=True):
            got.append(result(request))
            assert_equals(got, expected(alone, one))
            assert got[-1].num_resumed_tokens == len(joined(*got[:-1])[0])
        assert service.stats().num_kept == 0
        assert (service.stats().num_resumed, service.stats().num_output_tokens) == (15, 5 * 24)
        source = {kv for got in parts for c in got[1:] for kv in c.kv}
        assert source == {"restored" if kept is None else "recomputed"}


def test_siblings_of_equal_tokens_are_a_multiset(engine: Stepped) -> None:
    """Requests without a seed have noise of their own: after a cut each goes on with its own, though three of them share
    prompt and tokens at one cut or another. (Here at the first, before any token.)"""
    with serving(engine, steps=None) as service:
        want = sorted(joined(result(r)) for r in [service.generate(prompt(9), params()) for _ in range(4)])
    with serving(engine) as service:
        requests = [service.generate(prompt(9), params()) for _ in range(4)]
        barrier(service)
        service.abort_all().result()  # before any token
        assert [result(r).token_ids for r in requests] == [[]] * 4
        requests = [service.generate(prompt(9), params()) for _ in range(4)]
        steps(service, 6)
        service.abort_all().result()
        parts = [[result(r)] for r in requests]
        requests = [service.generate([*prompt(9), *p[0].token_ids], params()) for p in parts]
        steps(service, None)
        assert sorted(joined(p[0], result(r)) for p, r in zip(parts, requests, strict=True)) == want
        assert service.stats().num_resumed == 4


def test_same_seed_same_tokens_two_samples(engine: Stepped, alone: NativeEngine) -> None:
    """Two requests of one seed are aborted at the same place; both come back, and a third one that is too many.
    (With a longer prompt the second one waits for the first one's KV of it.)"""
    p = params(seed=3)
    want = undisturbed(alone, [7], p)
    with serving(engine) as service:
        requests = [service.generate([7], p) for _ in range(2)]
        steps(service, 5)
        service.abort_all().result()
        parts = [result(r) for r in requests]
        assert parts[0].token_ids == parts[1].token_ids
        more = [service.generate([7, *parts[0].token_ids], p) for _ in range(3)]
        steps(service, None)
        assert_equals([parts[0], result(more[0])], want)
        assert_equals([parts[0], result(more[1])], want)
        assert [result(r).num_resumed_tokens for r in more] == [5, 5, 0]
        assert result(more[2]).token_ids != want.output_ids[5:]  # a fresh sample of a longer prompt
        assert len(result(more[2]).token_ids) == 24


def test_the_seed_is_part_of_what_is_recognised(engine: Stepped) -> None:
    with serving(engine) as service:
        request = service.generate(prompt(9), params(seed=3))
        steps(service, 5)
        service.abort_all().result()
        tokens = [*prompt(9), *result(request).token_ids]
        other = [service.generate(tokens, params(seed=s)) for s in (4, None, 3)]
        steps(service, None)
        assert [result(r).num_resumed_tokens for r in other] == [0, 0, 5]


def test_lengths_count_as_their_names_say(engine: Stepped, alone: NativeEngine) -> None:
    """max_tokens and min_tokens over the whole sample, max_new_tokens of the request; servers' clients lower the latter
    by what they have."""
    p = params(seed=3, max_tokens=20)
    want = undisturbed(alone, prompt(9), p)
    with serving(engine) as service:
        request = service.generate(prompt(9), p)
        steps(service, 5)
        service.abort_all().result()
        first = result(request)
        short = service.generate([*prompt(9), *first.token_ids], p, max_new_tokens=4)
        steps(service, None)
        assert (result(short).token_ids, result(short).finish_reason) == (want.output_ids[5:9], "length")

        engine.budget = 0
        late = params(seed=3, max_tokens=None, min_tokens=12)
        request = service.generate(prompt(9), late, max_new_tokens=20)
        steps(service, 11)
        service.abort_all().result()
        rest = service.generate([*prompt(9), *result(request).token_ids], late, max_new_tokens=9)
        steps(service, None)
        assert_equals([result(request), result(rest)], undisturbed(alone, prompt(9), dataclasses.replace(late, max_tokens=20)))


def test_min_tokens_count_from_the_start_of_the_sample() -> None:
    """A stop id that the model would draw at once is banned for six tokens, two of them after the cut."""
    engine, alone = make_stepped(), make_stepped()
    greedy = params(temperature=0.0, max_tokens=16, seed=0)
    drawn = undisturbed(alone, prompt(9), greedy).output_ids
    p = dataclasses.replace(greedy, stop_token_ids=tuple(set(drawn)), min_tokens=6)
    want = undisturbed(alone, prompt(9), p)
    assert len(want.output_ids) >= 6
    with serving(engine) as service:
        request = service.generate(prompt(9), p)
        steps(service, 4)
        service.abort_all().result()
        rest = again(service, request, [result(request)])
        steps(service, None)
        assert_equals([result(request), result(rest)], want)


def test_a_stop_string_over_the_cut(letters: Any) -> None:
    """Half of it before the abort, half after."""
    engine, alone = make_stepped(tokenizer=letters), make_stepped(tokenizer=letters)
    p = params(seed=3)
    drawn = undisturbed(alone, prompt(9), p).output_ids
    stop = dataclasses.replace(p, stop=(letters.decode(drawn[9:12]),))
    want = undisturbed(alone, prompt(9), stop)
    assert (want.finish_reason, len(want.output_ids)) == ("stop", 12)
    with serving(engine) as service:
        request = service.generate(prompt(9), stop)
        steps(service, 11)
        service.abort_all().result()
        rest = again(service, request, [result(request)])
        steps(service, None)
        assert_equals([result(request), result(rest)], want)
        assert result(rest).stop_reason == stop.stop[0]


def test_what_has_ended_by_the_new_parameters_is_a_fresh_sample(engine: Stepped) -> None:
    with serving(engine) as service:
        request = service.generate(prompt(9), params(seed=3))
        steps(service, 5)
        service.abort_all().result()
        first = result(request)
        ends = params(seed=3, stop_token_ids=(first.token_ids[-1],))
        fresh = service.generate([*prompt(9), *first.token_ids], ends)
        fits = again(service, request, [first])
        steps(service, None)
        assert (result(fresh).num_resumed_tokens, result(fits).num_resumed_tokens) == (0, 5)


def test_abort_names_requests(engine: Stepped) -> None:
    with serving(engine) as service:
        a, b = (service.generate(prompt(9, i), params(seed=i), request_id=name) for i, name in enumerate("ab"))
        steps(service, 3)
        assert service.abort(["a", "never", "a"]).result() == 1
        assert (len(result(a).token_ids), b.completion.done()) == (3, False)
        assert service.abort(["a"]).result() == 0
        steps(service, None)
        assert result(b).finish_reason == "length"


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
    "fields", [{"max_samples": -1}, {"max_samples": True}, {"max_bytes": 1.5}, {"max_age": 0.0}, {"max_age": float("nan")}]
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
    read: list[Any] = []
    thread = threading.Thread(target=lambda: read.append(pytest.raises(ServiceStopped, list, requests[0])))
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
    assert len(read) == 1
    assert service.stopped is caught.value
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
