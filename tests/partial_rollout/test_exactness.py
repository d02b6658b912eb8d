"""P1: what a sample becomes depends on its prompt, its parameters, its seed and the weights, and on nothing else."""

from __future__ import annotations

import numba
import pytest
import torch
from tests.partial_rollout.conftest import EngineMaker, assert_same, generate, group, make_model, prompt, run

from longtail import NativeEngine, SamplingParams
from longtail.sample import Sample

KINDS = ["llama", "qwen3", "llama-interface"]
LENGTH = 40


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, make_engine: EngineMaker) -> NativeEngine:
    """Also on the attention interface, which any other architecture takes."""
    kind, _, path = request.param.partition("-")
    return make_engine(make_model(kind), fused=False if path else None)


def undisturbed(engine: NativeEngine, name: str = "a", **params: object) -> Sample:
    engine.reset_prefix_cache()
    return generate(engine, group(name, prompt(21), max_tokens=LENGTH, **params))[0]


@pytest.mark.parametrize("snapshot", [True, False], ids=["from-snapshot", "from-tokens"])
def test_cut_at_every_position(engine: NativeEngine, snapshot: bool) -> None:
    expected = undisturbed(engine)
    assert len(set(expected.output_ids)) > LENGTH // 2  # the model does not merely repeat itself
    for cut in range(1, LENGTH):
        engine.reset_prefix_cache()  # or a resume from tokens would find the KV it is meant to do without
        sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
        run(engine, [sample], until=cut)
        (paused,) = engine.pause(snapshot=snapshot)
        assert paused is sample and len(sample.output_ids) == cut and sample.status == "paused"
        assert (sample.snapshot is not None) == snapshot
        engine.reset_prefix_cache()
        run(engine, [sample])
        assert_same(sample, expected)
        assert [s.kv for s in sample.segments] == ["computed", "restored" if snapshot else "recomputed"]


def test_resume_computes_only_what_is_missing(make_engine: EngineMaker) -> None:
    engine = make_engine()
    events: list = []
    for snapshot, rows in [(True, 1), (False, 21 + 10)]:
        sample = group(f"s{snapshot}", prompt(21)).samples[0]
        run(engine, [sample], until=10)
        engine.pause(snapshot=snapshot)
        engine.reset_prefix_cache()
        engine.add([sample])
        events.clear()
        engine.listener = events.append
        engine.step()
        assert [e.num_tokens for e in events if e.kind == "step"] == [rows]
        engine.abort([sample.id])


def test_resume_in_another_engine(make_engine: EngineMaker) -> None:
    expected = undisturbed(make_engine())
    for snapshot in (True, False):
        first, second = make_engine(name="first"), make_engine(name="second", max_num_batched_tokens=16, max_num_seqs=4)
        sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
        run(first, [sample], until=17)
        first.pause(snapshot=snapshot)
        run(second, [sample])
        assert_same(sample, expected)
        assert [s.engine for s in sample.segments] == ["first", "second"]


def test_snapshot_of_other_arithmetic_is_not_used(make_engine: EngineMaker) -> None:
    """Same weights, other bits: fast numerics, another rotary base. Such KV is computed again."""
    twin = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    for other in (make_engine(numerics="fast"), make_engine(twin)):
        engine = make_engine()
        sample = group("a", prompt(21)).samples[0]
        run(engine, [sample], until=9)
        engine.pause()
        run(other, [sample])
        assert other.stats().num_restored_tokens == 0 and sample.segments[-1].kv == "recomputed"


def test_alone_or_in_a_mixed_batch(engine: NativeEngine) -> None:
    expected = undisturbed(engine)
    engine.reset_prefix_cache()
    sample = group("a", prompt(21), max_tokens=LENGTH).samples[0]
    others = [group(f"o{i}", prompt(5 + 13 * i, i), max_tokens=4 + 7 * i).samples[0] for i in range(6)]
    engine.add(others[:3])
    engine.step()
    engine.step()
    engine.add([sample, *others[3:]])  # prefills of the one beside decodes of the others
    run(engine)
    assert_same(sample, expected)


@pytest.mark.parametrize("chunk", [8, 9, 16, 33])
def test_chunked_and_whole_prefill(make_engine: EngineMaker, chunk: int) -> None:
    whole = make_engine(max_num_batched_tokens=512)
    chunked = make_engine(max_num_batched_tokens=chunk)
    ids = prompt(100)
    expected = generate(whole, group("a", ids))[0]
    assert_same(generate(chunked, group("a", ids))[0], expected)
    assert chunked.stats().num_steps > whole.stats().num_steps


@pytest.mark.parametrize("preemption", ["snapshot", "recompute"])
def test_after_preemption(make_engine: EngineMaker, preemption: str) -> None:
    roomy = make_engine()
    groups = [group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)]
    expected = generate(roomy, *groups)
    # Blocks for about two and a half of the six samples.
    tight = make_engine(kv_cache_bytes=18 * roomy.kv.bytes_per_block, max_model_len=160, preemption=preemption)
    got = generate(tight, *(group(f"g{i}", prompt(40, i), max_tokens=60) for i in range(6)))
    assert tight.stats().num_preemptions > 0
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


def test_siblings_differ_and_rerun_identically(engine: NativeEngine) -> None:
    first = generate(engine, group("g", prompt(30), n=6))
    again = generate(engine, group("g", prompt(30), n=6))
    assert len({tuple(s.output_ids) for s in first}) == 6
    for a, b in zip(again, first, strict=True):
        assert_same(a, b)


def test_prompt_of_a_group_is_computed_once(make_engine: EngineMaker) -> None:
    engine = make_engine()
    steps: list = []
    engine.listener = steps.append
    samples = generate(engine, group("g", prompt(50), n=6, max_tokens=3))
    prefill = sum(e.num_prefill_tokens for e in steps if e.kind == "step")
    assert prefill == 50 + 5  # each sibling computes the last prompt token itself: its logits are needed
    alone = make_engine(enable_prefix_caching=False)
    for sample, lone in zip(samples, generate(alone, group("g", prompt(50), n=6, max_tokens=3)), strict=True):
        assert_same(sample, lone)


def test_two_threads_and_one(make_engine: EngineMaker) -> None:
    present = torch.get_num_threads(), numba.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            engine = make_engine(threads=threads)
            results.append(generate(engine, *(group(f"g{i}", prompt(11 * i + 3, i)) for i in range(5))))
    finally:
        torch.set_num_threads(present[0])
        numba.set_num_threads(present[1])
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


PARAMS = [
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.05},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "temperature": 0.5},
    {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": list(range(3, 60))},
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: "-".join(p))
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_sampling_parameters_across_a_cut(make_engine: EngineMaker, params: dict, mode: str) -> None:
    engine = make_engine(logprobs_mode=mode)
    expected = undisturbed(engine, **params)
    for cut in range(1, len(expected.output_ids), 6):
        sample = group("a", prompt(21), max_tokens=LENGTH, **params).samples[0]
        run(engine, [sample], until=cut)
        engine.pause()
        engine.add([group("noise", prompt(33)).samples[0]])
        run(engine, [sample])
        assert_same(sample, expected)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_against_transformers(make_engine: EngineMaker, kind: str, numerics: str) -> None:
    model = make_model(kind)
    ids = prompt(25)
    with torch.no_grad():
        expected = model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, eos_token_id=None)
        logprobs = torch.log_softmax(model(expected).logits[0].float(), -1)
    for fused in (True, False):
        engine = make_engine(model, numerics=numerics, fused=fused)
        sample = generate(engine, group("a", ids, temperature=0.0, max_tokens=50))[0]
        assert sample.output_ids == expected[0, 25:].tolist()
        want = [logprobs[24 + i, token].item() for i, token in enumerate(sample.output_ids)]
        torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(want), atol=1e-4, rtol=0)


def test_processed_and_raw_logprobs(make_engine: EngineMaker, llama: torch.nn.Module) -> None:
    """processed: after temperature; raw: of the model's logits. Same tokens."""
    ids = prompt(12)
    raw = generate(make_engine(logprobs_mode="raw"), group("a", ids, temperature=0.5))[0]
    processed = generate(make_engine(), group("a", ids, temperature=0.5))[0]
    assert raw.output_ids == processed.output_ids
    with torch.no_grad():
        logits = llama(torch.tensor([ids + raw.output_ids])).logits[0].float()
    rows = range(11, 11 + len(raw.output_ids))
    for t, sample in ((1.0, raw), (0.5, processed)):
        want = [torch.log_softmax(logits[r] / t, -1)[i].item() for r, i in zip(rows, sample.output_ids, strict=True)]
        torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(want), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_smollm2_cut_anywhere_alone_mixed_chunked_preempted() -> None:
    """The real model: every position of a response, from snapshot and from tokens; then all else at once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from longtail.bench.models import smollm2_135m

    path = smollm2_135m()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he? Think step by step."}],
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    engine = NativeEngine(path, max_num_seqs=8, max_model_len=512, kv_cache_bytes=256 << 20)

    def make(name: str = "a", **params: object) -> Sample:
        return group(name, ids, temperature=0.7, max_tokens=32, **params).samples[0]

    expected = make()
    run(engine, [expected])
    for cut in range(1, 32):
        for snapshot in (True, False):
            engine.reset_prefix_cache()
            sample = make()
            run(engine, [sample], until=cut)
            engine.pause(snapshot=snapshot)
            engine.reset_prefix_cache()
            run(engine, [sample])
            assert_same(sample, expected)

    one_thread = make()
    present = torch.get_num_threads(), numba.get_num_threads()
    try:
        run(NativeEngine(path, threads=1, max_model_len=512, kv_cache_bytes=256 << 20), [one_thread])
    finally:
        torch.set_num_threads(present[0])
        numba.set_num_threads(present[1])
    assert_same(one_thread, expected)

    siblings = group("a", ids, n=4, temperature=0.7, max_tokens=32)
    others = [group(f"o{i}", prompt(9 + 31 * i, i), temperature=0.7, max_tokens=20 + i).samples[0] for i in range(3)]
    tight = NativeEngine(
        path,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=256,
        kv_cache_bytes=13 * engine.kv.bytes_per_block,
    )
    run(tight, [*others, *siblings.samples])
    assert tight.stats().num_preemptions > 0
    assert_same(siblings.samples[0], expected)
    assert len({tuple(s.output_ids) for s in siblings.samples}) == 4

    greedy = group("greedy", ids, temperature=0.0, max_tokens=32, ignore_eos=False).samples[0]
    run(tight, [greedy])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        want = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
        logprobs = torch.log_softmax(model(want).logits[0].float(), -1)
    assert greedy.output_ids == want[0, len(ids) :].tolist()
    start = len(ids) - 1
    difference = max(
        abs(logprobs[start + i, t].item() - p)
        for i, (t, p) in enumerate(zip(greedy.output_ids, greedy.logprobs, strict=True))
    )
    assert difference < 1e-4


def test_fast_numerics_stays_close(make_engine: EngineMaker) -> None:
    exact = generate(make_engine(), group("a", prompt(20), temperature=0.0))[0]
    fast = generate(make_engine(numerics="fast"), group("a", prompt(20), temperature=0.0))[0]
    assert fast.output_ids == exact.output_ids
    torch.testing.assert_close(torch.tensor(fast.logprobs), torch.tensor(exact.logprobs), atol=1e-4, rtol=0)


def test_seed_and_only_the_seed_decides(make_engine: EngineMaker) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    a = Sample(id="x", group_id="g", index=0, prompt_ids=tuple(prompt(9)), params=params, seed=11)
    b = Sample(id="y", group_id="h", index=5, prompt_ids=tuple(prompt(9)), params=params, seed=11)
    c = Sample(id="z", group_id="g", index=0, prompt_ids=tuple(prompt(9)), params=params, seed=12)
    run(engine, [a, b, c])
    assert a.output_ids == b.output_ids != c.output_ids
