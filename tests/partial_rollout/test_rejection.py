"""Verification by rejection: other samples than without drafts, of the same distribution."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.partial_rollout.conftest import VOCAB, EngineMaker, assert_same, generate, group, make_model, prompt, run
from tests.partial_rollout.drafters import Oracle
from tests.partial_rollout.test_drafting import LENGTH, groups
from tests.partial_rollout.test_model_drafter import close_model, small_model, step_all, target

from longtail import NativeEngine
from longtail.kernels.process_logits import process_logits
from longtail.partial_rollout.engines.native.model_drafter import ModelDrafter, SelfDrafter
from longtail.partial_rollout.engines.native.sampler import check_end
from longtail.sample import Sample
from longtail.spec_decode.choice import FirstOf
from longtail.spec_decode.controller import FixedLength
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest

FALSE_ALARM = 1e-6
"""Of each statistical comparison."""


@functools.cache
def engine_of(make_engine: EngineMaker) -> NativeEngine:
    return make_engine(verification="rejection", max_num_seqs=64, kv_cache_bytes=16 << 20)


def log_probs(sample: Sample, output_ids: Sequence[int], eos_token_ids: Sequence[int] = ()) -> torch.Tensor:
    """float64 [V] of the token after these, by the model itself."""
    p = sample.params
    with torch.no_grad():
        logits = target("llama")(torch.tensor([[*sample.prompt_ids, *output_ids]])).logits[0, -1].numpy()
    banned: tuple[int, ...] = ()
    if len(output_ids) < p.min_tokens:
        banned = p.stop_token_ids if p.ignore_eos else (*eos_token_ids, *p.stop_token_ids)
    process_logits(
        logits,
        prompt_ids=sample.prompt_ids,
        output_ids=output_ids,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty,
        banned=banned,
    )
    return torch.log_softmax(torch.from_numpy(logits).double() / (p.temperature or 1.0), -1)


def tree_of(sample: Sample, depth: int) -> dict[tuple[int, ...], float]:
    """Probabilities of all outputs of so many tokens."""
    leaves: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        grown: dict[tuple[int, ...], float] = {}
        for path, p in leaves.items():
            probs = log_probs(sample, path).exp()
            grown |= {(*path, t): p * float(probs[t]) for t in probs.nonzero()[:, 0].tolist()}
        leaves = grown
    return leaves


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square; outputs expected fewer than 8 times are one cell."""
    assert set(counts) <= set(expected)
    n = sum(counts.values())
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for path, p in expected.items():
        if n * p < 8:
            rare[0] += counts[path]
            rare[1] += n * p
        else:
            cells.append((counts[path], n * p))
    if rare[1]:
        cells.append((rare[0], rare[1]))
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class Choosy(FixedLength):
    """Verifies drafts up to the first one that is estimated below the step's median, somewhat as a controller does."""

    def plan(self, acceptance: Any, *args: Any) -> Any:
        plan = super().plan(acceptance, *args)
        median = np.median(np.concatenate(acceptance))
        plan.lengths[:] = [len(list(itertools.takewhile(lambda x: x >= median, a))) for a in acceptance]
        return plan


class Telling(ModelDrafter):
    """Says of each token that it drew how likely it was, which must not decide what is verified."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        for draft in drafts:
            if draft.distributions is not None:
                draft.probs = draft.distributions.gather(1, torch.tensor(draft.tokens)[:, None])[:, 0].tolist()
        return drafts


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "close": lambda: ModelDrafter(close_model(target("llama"), 0.02)),
    "telling": lambda: Telling(close_model(target("llama"), 0.02)),
    "small": lambda: ModelDrafter(small_model()),
    "self": SelfDrafter,
    "garbage": lambda: Oracle({}, 1.0),
    "composed": lambda: FirstOf([Sometimes(), ModelDrafter(close_model(target("llama"), 0.02))]),
}


class Sometimes:
    """Knows the likeliest token of some contexts, for certain."""

    name = "sometimes"

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for r in requests:
            ids = r.sample.output_ids
            best = [int(log_probs(r.sample, ids).argmax())] if ids[-1] % 2 and r.max_tokens else []
            drafts.append(Draft(best, self.name))
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        pass

    def forget(self, sample_id: str) -> None:
        pass


PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"temperature": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.3},
}


@functools.cache
def expected_tree(name: str) -> dict[tuple[int, ...], float]:
    (sample,) = group("x", prompt(9), top_k=3, **PARAMS[name]).samples
    return tree_of(sample, 4)


def outputs(engine: NativeEngine, name: str, n: int) -> Counter[tuple[int, ...]]:
    samples = generate_quickly(engine, [group("x", prompt(9), n=n, max_tokens=4, top_k=3, **PARAMS[name])])
    return Counter(tuple(s.output_ids) for s in samples)


def generate_quickly(engine: NativeEngine, chosen: Sequence[Any]) -> list[Sample]:
    samples = [s for g in chosen for s in g.samples]
    engine.add(samples)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    return samples


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("controller", [FixedLength, Choosy], ids=["fixed", "choosy"])
def test_distribution(make_engine: EngineMaker, name: str, params: str, controller: Any) -> None:
    """All four tokens together, against probabilities by the model without drafts, engine or KV."""
    if name == "composed" and params == "penalties":
        pytest.skip("one kind of parameters is enough for it")
    engine = engine_of(make_engine)
    engine.use_drafter(DRAFTERS[name](), controller(3))
    before = engine.stats()
    n = 400 if name == "composed" else 1500
    counts = outputs(engine, params, n)
    after = engine.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert drafted > (0 if controller is Choosy else n)
    assert 0 <= after.num_accepted_tokens - before.num_accepted_tokens <= drafted
    assert sum(counts.values()) == n
    assert p_value(counts, expected_tree(params)) > FALSE_ALARM


def test_without_drafts_it_is_the_same_stream(make_engine: EngineMaker) -> None:
    want = generate(make_engine(), *groups())
    for got, expected in zip(generate(make_engine(verification="rejection"), *groups()), want, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("name", ["close", "small", "self", "garbage"])
def test_greedy_samples_are_the_same(make_engine: EngineMaker, name: str) -> None:
    params: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"ignore_eos": False, "stop_token_ids": tuple(range(3, 60)), "min_tokens": 12},
    ]
    chosen = [group(f"g{i}", prompt(9, i), temperature=0.0, max_tokens=LENGTH, **p) for i, p in enumerate(params)]
    again = [group(f"g{i}", prompt(9, i), temperature=0.0, max_tokens=LENGTH, **p) for i, p in enumerate(params)]
    want = generate(make_engine(), *chosen)
    engine = make_engine(verification="rejection", drafter=DRAFTERS[name](), controller=FixedLength(4))
    for got, expected in zip(generate(engine, *again), want, strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("name", ["close", "self", "garbage"])
def test_reproducible_and_well_formed(make_engine: EngineMaker, name: str, mode: str) -> None:
    """The same drafts, the same samples, also in other batches; each ends at the first event; log-probabilities are the
    target's."""
    engine = make_engine(verification="rejection", logprobs_mode=mode)
    engine.use_drafter(DRAFTERS[name](), FixedLength(3))
    samples = generate(engine, *groups())
    if name != "garbage":  # its tokens depend on the order in which it is asked
        engine.use_drafter(DRAFTERS[name](), FixedLength(3))
        alone = [s for g in groups() for s in g.samples]
        for sample in alone[::3]:
            step_all(engine, [sample])
        for got, expected in zip(alone[::3], samples[::3], strict=True):
            assert_same(got, expected)
    eos = engine.spec.eos_token_ids
    for sample in samples:
        ids, probe = (
            sample.output_ids,
            Sample(id="", group_id="", index=0, prompt_ids=sample.prompt_ids, params=sample.params, seed=0),
        )
        for i in range(len(ids)):
            probe.output_ids, probe.versions = ids[: i + 1], sample.versions[: i + 1]
            end = check_end(probe, eos, engine.max_model_len, None)
            assert (end is not None) == (i == len(ids) - 1), (sample.id, i)
        assert end is not None
        assert (sample.finish_reason, sample.stop_reason) == (end.reason, end.stop_reason)
        for i in range(0, len(ids), 7):
            if mode == "raw":
                with torch.no_grad():
                    logits = target("llama")(torch.tensor([[*sample.prompt_ids, *ids[:i]]])).logits[0, -1]
                want = torch.log_softmax(logits.double(), -1)
            else:
                want = log_probs(sample, ids[:i], eos)
            assert sample.logprobs[i] == pytest.approx(float(want[ids[i]]), abs=2e-4)


def test_stop_strings(make_engine: EngineMaker, letters: Any) -> None:
    engine = make_engine(verification="rejection", tokenizer=letters)
    drafter = ModelDrafter(close_model(target("llama")))
    engine.use_drafter(drafter, FixedLength(5))
    plain = generate(engine, group("a", prompt(9), max_tokens=LENGTH))[0]
    text = letters.decode(plain.output_ids)
    for end in (2, 5, 11, 20):
        stop = text[end - 2 : end]
        (got,) = generate(engine, group("a", prompt(9), max_tokens=LENGTH, stop=(stop,)))
        assert got.output_ids == plain.output_ids[: len(got.output_ids)]
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert letters.decode(got.output_ids).find(stop) == len(got.output_ids) - 2


def test_over_pauses_and_updates(make_engine: EngineMaker) -> None:
    """Nothing is held for rejected drafts, whatever comes between steps, and nothing of them is left."""
    engine = make_engine(verification="rejection", kv_cache_bytes=20 * make_engine().kv.bytes_per_block)
    engine.use_drafter(SelfDrafter(), FixedLength(4))
    samples = [group(f"g{i}", prompt(20, i), max_tokens=60).samples[0] for i in range(6)]
    run(engine, samples, until=10)
    engine.update_weights(make_model("llama", seed=1).state_dict(), 1)
    for _ in range(5):
        engine.step()
    paused = engine.pause()
    engine.check_integrity()
    step_all(engine, paused)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    assert all(len(s.output_ids) == 60 and s.finish_reason == "length" for s in samples)


class Recorder:
    """Keeps every draft with the output it was made after."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self.drafter, self.name, self.bind = drafter, drafter.name, drafter.bind
        self.observe, self.forget = drafter.observe, drafter.forget
        self.made: list[tuple[Sample, int, Draft]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self.drafter.propose(requests)
        self.made += [
            (r.sample, len(r.sample.output_ids), d) for r, d in zip(requests, drafts, strict=True) if d.tokens
        ]
        return drafts


def test_as_many_are_accepted_as_can_be(make_engine: EngineMaker) -> None:
    """A draft is accepted with probability sum min(p, q) given what came before, so that over n of them the accepted
    ones keep to the sum of that within sqrt(n log(2 / FALSE_ALARM) / 2) (Azuma)."""
    recorder = Recorder(ModelDrafter(close_model(target("llama"), 0.02)))
    engine = make_engine(verification="rejection", drafter=recorder, controller=FixedLength(3))
    generate(engine, *(group(f"g{i}", prompt(9, i), n=2, max_tokens=60, temperature=0.8) for i in range(3)))
    mean, judged, accepted = 0.0, 0, 0
    for sample, start, draft in recorder.made:
        assert draft.distributions is not None
        assert draft.distributions.shape == (len(draft), VOCAB)
        assert draft.probs is None
        for j, token in enumerate(draft.tokens):
            p, q = log_probs(sample, sample.output_ids[: start + j]).exp(), draft.distributions[j].double()
            assert float(q.sum()) == pytest.approx(1.0, abs=1e-5)
            mean += float(torch.minimum(p, q).sum())
            judged += 1
            if sample.output_ids[start + j] != token:  # a rejected one is never drawn again
                break
            accepted += 1
    assert engine.stats().num_accepted_tokens == accepted
    assert abs(accepted - mean) < math.sqrt(judged * math.log(2 / FALSE_ALARM) / 2)
    assert 0.2 * judged < mean < 0.95 * judged
    assert judged > 150
    assert engine.speculation is not None
    by_position = engine.speculation.acceptance.by_position()["draft_model"]
    assert [sum(column) for column in zip(*by_position, strict=True)] == [judged, accepted]


@pytest.mark.parametrize("params", [{"temperature": 0.5}, {"top_p": 0.8, "presence_penalty": 2.0}], ids=["t", "p"])
def test_drafts_are_drawn_from_what_they_say(make_engine: EngineMaker, params: dict[str, Any]) -> None:
    """Two drafts after the same output, with 4,000 seeds."""
    drafter = ModelDrafter(small_model())
    make_engine(verification="rejection", max_num_seqs=500, max_num_batched_tokens=1 << 14).use_drafter(drafter)
    counts: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]
    said: dict[tuple[int, ...], torch.Tensor] = {}
    for part in range(8):
        samples = group("y", prompt(9), n=500, max_tokens=9, top_k=3, seed=part, **params).samples
        for sample in samples:
            sample.output_ids = prompt(3, 1)
        for draft in drafter.propose([DraftRequest(s, 2) for s in samples]):
            assert draft.distributions is not None
            for n, q in enumerate(draft.distributions):
                assert torch.equal(said.setdefault(tuple(draft.tokens[:n]), q), q)
                counts[n][tuple(draft.tokens[: n + 1])] += 1
        for sample in samples:
            drafter.forget(sample.id)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for n in range(2):
        paths = [(path, t) for path in expected for t in said[path].nonzero()[:, 0].tolist()]
        expected = {(*path, t): expected[path] * float(said[path][t]) for path, t in paths}
        assert p_value(counts[n], expected) > FALSE_ALARM


def test_bad_mode_is_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="verification must be one of match, rejection, not 'typical'"):
        make_engine(verification="typical")
