"""Requests from other threads and event loops; aborted ones go on bit for bit; nothing is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.partial_rollout.conftest import generate, group, prompt
from tests.partial_rollout.service_helpers import (
    Stepped,
    again,
    assert_equals,
    barrier,
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
from longtail.partial_rollout.service import Completion, KeptConfig, Request, RolloutService


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
    """Requests without a seed have noise of their own: after a cut each goes on with its own, though all of them share
    prompt and tokens at the first, before any token."""
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
        whole = undisturbed(alone, prompt(9), dataclasses.replace(late, max_tokens=20))
        assert_equals([result(request), result(rest)], whole)


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
