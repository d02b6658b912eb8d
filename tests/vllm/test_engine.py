"""The exactness suite of the native engine, on vLLM: tokens do not depend on cuts, batches, drafts or preemptions, and
log-probabilities by no more than rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.partial_rollout.conftest import group, prompt
from tests.vllm.conftest import NOISE, EngineMaker, assert_same, generate, run
from tests.vllm.oracle import Oracle
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from longtail import NativeEngine, Sample
from longtail.events import Event
from longtail.sample import OBSERVATION

LENGTH = 72
"""With a prompt of 21 it crosses the ends of two blocks of 32."""
PARAMS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.05},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "temperature": 0.5},
    {"min_tokens": 40, "ignore_eos": False, "stop_token_ids": list(range(3, 60))},
]
names = pytest.mark.parametrize("params", PARAMS, ids=lambda p: "-".join(p) or "plain")


def one(name: str = "a", **params: object) -> Sample:
    return group(name, prompt(21), **{"max_tokens": LENGTH, **params}).samples[0]


@names
def test_cut(make_vllm: EngineMaker, params: dict) -> None:
    """Cut at several places, also twice, with other samples in the batch afterwards, with and without what was computed
    before."""
    engine = make_vllm()
    expected = one(**params)
    run(engine, [expected])
    cuts = [c for c in (1, 2, 11, 12, 30, 43, 44, 60) if c < len(expected.output_ids)]
    assert len(cuts) >= 6, "the sample ends before the cuts: the test would show nothing"
    for cut in cuts:
        sample = one(**params)
        run(engine, [sample], until=cut)
        (paused,) = engine.pause()
        assert paused is sample and len(sample.output_ids) == cut and sample.status == "paused"
        if cut % 2:
            engine.reset_prefix_cache()
        engine.add([*group("noise", prompt(33), n=3, max_tokens=20).samples])
        engine.add([sample])
        while len(sample.output_ids) < min(cut + 9, len(expected.output_ids) - 1):
            engine.step()
        engine.pause([sample.id])
        run(engine, [sample])
        assert_same(sample, expected)
        assert [s.kv for s in sample.segments] == ["computed", "restored"]  # both later stays


@names
def test_as_the_native_engine(make_vllm: EngineMaker, tiny: LlamaForCausalLM, params: dict) -> None:
    """Same noise, same processing: the same sample, where rounding does not decide between two tokens."""
    native = NativeEngine(tiny, kv_cache_bytes=4 << 20)
    expected = group("a", prompt(21), n=4, **{"max_tokens": LENGTH, **params}).samples
    native.add(expected)
    while native.has_work:
        native.step()
    got = generate(make_vllm(), group("a", prompt(21), n=4, **{"max_tokens": LENGTH, **params}))
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_against_transformers(make_vllm: EngineMaker, directories: dict, kind: str, mode: str) -> None:
    """Greedy tokens, and log-probabilities of sampled ones, across a cut: under the temperature, or of the logits."""
    model = AutoModelForCausalLM.from_pretrained(directories[kind])
    ids = prompt(25)
    with torch.no_grad():
        greedy = model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=None)
    engine = make_vllm(kind, logprobs_mode=mode)
    for temperature in (0.0, 0.5):
        sample = group("a", ids, temperature=temperature, max_tokens=50).samples[0]
        run(engine, [sample], until=20)
        engine.pause()
        run(engine, [sample])
        if temperature == 0.0:
            assert sample.output_ids == greedy[0, 25:].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([ids + sample.output_ids])).logits[0].float()
        scale = temperature if temperature and mode == "processed" else 1.0
        rows = torch.log_softmax(logits[24:-1] / scale, -1)
        want = rows.gather(1, torch.tensor(sample.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), want, atol=NOISE, rtol=0)


def test_alone_or_in_a_mixed_batch(make_vllm: EngineMaker) -> None:
    engine = make_vllm(max_num_batched_tokens=24)  # prompts in chunks
    expected = one()
    run(engine, [expected])
    engine.reset_prefix_cache()
    sample = one()
    others = [group(f"o{i}", prompt(5 + 13 * i, i), max_tokens=4 + 7 * i).samples[0] for i in range(6)]
    engine.add(others[:3])
    engine.step()
    engine.step()
    engine.add([sample, *others[3:]])
    run(engine)
    assert_same(sample, expected)


def test_after_preemption(make_vllm: EngineMaker) -> None:
    """Blocks for about two and a half of the six samples."""
    groups = [group(f"g{i}", prompt(40, i), max_tokens=100) for i in range(6)]
    expected = generate(make_vllm(), *groups)
    block = 2 * 2 * 32 * 32 * 4  # layers, keys and values, tokens, head, float32
    tight = make_vllm(kv_cache_bytes=13 * block, max_model_len=160)
    events: list[Event] = []
    tight.listener = events.append
    got = generate(tight, *(group(f"g{i}", prompt(40, i), max_tokens=100) for i in range(6)))
    assert tight.stats().num_preemptions > 0
    preempted = [e.sample for e in events if e.kind == "preempt"]
    assert len(preempted) == tight.stats().num_preemptions
    assert {e.detail for e in events if e.kind == "preempt"} == {"out of blocks"}
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)
        assert ("recomputed" in [s.kv for s in a.segments]) == (a.id in preempted)


DRAFTERS: dict[str, dict] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "oracle": {"method": "custom_class", "model": "tests.vllm.oracle.Oracle", "num_speculative_tokens": 3},
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"presence_penalty": 1.0, "top_p": 0.9}], ids=str)
def test_drafts_change_nothing(make_vllm: EngineMaker, drafter: str, params: dict) -> None:
    """Verified by match, across a cut, as without drafts. The oracle's are mostly accepted."""
    ids = prompt(7) * 4
    expected = generate(make_vllm(), group("a", ids, n=4, max_tokens=60, **params))
    Oracle.streams = [[*s.prompt_ids, *s.output_ids] for s in expected]
    drafting = make_vllm(speculative=DRAFTERS[drafter])
    before = drafting.stats()
    samples = group("a", ids, n=4, max_tokens=60, **params).samples
    run(drafting, samples, until=25)
    paused = drafting.pause()
    run(drafting, paused)
    stats = drafting.stats()
    drafts = stats.num_draft_tokens - before.num_draft_tokens
    accepted = stats.num_accepted_tokens - before.num_accepted_tokens
    steps = stats.num_steps - before.num_steps
    assert drafts > 0 and accepted <= drafts and stats.num_output_tokens - before.num_output_tokens == 4 * 60
    if drafter == "oracle":
        assert accepted > 0.7 * drafts and steps < 30
    for a, b in zip(samples, expected, strict=True):
        assert_same(a, b)


def test_stop_string_across_a_cut(make_vllm: EngineMaker, letters: PreTrainedTokenizerFast) -> None:
    engine = make_vllm()
    engine._stop_text._tokenizer = letters
    free = one()
    run(engine, [free])
    text = letters.decode(free.output_ids)
    for at in (5, 31, 50):
        stop = text[at : at + 3]
        whole, cut = one(stop=stop), one(stop=stop)
        run(engine, [whole])
        assert whole.stop_reason == stop and len(whole.output_ids) <= at + 3
        run(engine, [cut], until=max(len(whole.output_ids) - 2, 1))  # in the middle of the string
        engine.pause()
        run(engine, [cut])
        assert_same(cut, whole)


def test_a_turn_ends_and_goes_on(make_vllm: EngineMaker) -> None:
    engine = make_vllm()
    free = one()
    run(engine, [free])
    stop = free.output_ids[40]
    sample = one(stop_token_ids=[stop])
    sample.multi_turn = True
    engine.add([sample])
    turns: list[Sample] = []
    while not turns:
        turns = engine.step().turns
    assert turns == [sample] and sample.turn_ended and sample.output_ids[-1] == stop and not engine.has_work
    engine.check_integrity()
    with pytest.raises(ValueError, match="append_observation"):
        engine.add([sample])
    sample.append_observation([7, 8, 9])
    engine.add([sample])
    while not (out := engine.step()).turns and not out.finished:
        engine.check_integrity()
    assert sample.versions.count(OBSERVATION) == 3
    sample.check_integrity()
    if engine.has_work:
        engine.abort([sample.id])


def test_observation_that_fills_a_sample(make_vllm: EngineMaker) -> None:
    engine = make_vllm()
    sample = one(stop_token_ids=list(range(3, 512)), max_tokens=5)
    sample.multi_turn = True
    engine.add([sample])
    assert engine.step().turns == [sample]
    sample.append_observation([5, 6, 7, 8])
    engine.add([sample])
    engine.check_integrity()
    assert engine.has_work and engine.step().finished == [sample]
    assert (sample.status, sample.finish_reason) == ("finished", "length")


def test_limits_and_model_length(make_vllm: EngineMaker) -> None:
    engine = make_vllm()
    assert engine.max_model_len == 256
    sample = group("a", prompt(21), max_tokens=None).samples[0]
    engine.add([sample], limit=10)
    reported = []
    while engine.has_work:
        out = engine.step()
        reported += [len(s.output_ids) for s in out.at_limit]
        if out.at_limit and len(reported) == 1:
            engine.set_limit(sample.id, 5)
    assert reported == [10, 15]
    assert (sample.num_tokens, sample.finish_reason) == (256, "length")


def test_an_engine_that_is_closed_hurts_no_other(make_vllm: EngineMaker, directories: dict[str, Path]) -> None:
    from longtail.partial_rollout.engines.vllm import VllmEngine

    engine = make_vllm()
    expected = generate(engine, group("a", prompt(21)))[0]
    another = VllmEngine(directories["llama"], kv_cache_bytes=4 << 20, max_num_seqs=8, block_size=32)
    assert_same(generate(another, group("a", prompt(21)))[0], expected)
    another.close()
    engine.reset_prefix_cache()
    assert_same(generate(engine, group("a", prompt(21)))[0], expected)
