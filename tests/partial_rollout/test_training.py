"""`ExactPolicy`: the rollout's log-probabilities bit for bit, with the gradients of the model's own forward pass."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any

import numba
import pytest
import torch
import torch.nn.functional as F
from tests.partial_rollout import test_hybrid, test_latent, test_moe, test_windows
from tests.partial_rollout.conftest import SIZES, EngineMaker, generate, group, make_model, prompt, run
from tests.partial_rollout.drafters import Oracle
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from longtail import ExactNumericsUnavailable, NativeEngine, UnsupportedModel
from longtail.kernels import norm
from longtail.kernels.attention import paged_attention
from longtail.kernels.linear import PackedLinear
from longtail.partial_rollout.engines.native import differentiable, training_forward
from longtail.partial_rollout.engines.native.training import ExactPolicy
from longtail.sample import Sample
from longtail.spec_decode.controller import FixedLength
from longtail.trainer_adapter.batch import Inputs

NUMBA_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]


def qwen2() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"hidden_size": 60, "intermediate_size": 97, "tie_word_embeddings": False}
    sizes.pop("head_dim")
    sizes["num_attention_heads"], sizes["num_key_value_heads"] = 5, 1
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval()


MODELS = {
    "llama": lambda: make_model("llama"),
    "llama-interface": lambda: make_model("llama"),
    "qwen2": qwen2,
    "qwen3": lambda: make_model("qwen3"),
    "mistral": lambda: test_windows.make_model("mistral"),
    "gemma2": lambda: test_windows.make_model("gemma2"),
    "gemma3": lambda: test_windows.make_model("gemma3"),
    "gpt_oss": lambda: test_windows.make_model("gpt_oss"),
    "mixtral": lambda: test_moe.make_model("mixtral"),
    "qwen2_moe": lambda: test_moe.make_model("qwen2_moe"),
    "qwen3_moe": lambda: test_moe.make_model("qwen3_moe"),
    "deepseek_v3": lambda: test_latent.make_model("deepseek_v3"),
    "deepseek_v2": lambda: test_latent.make_model("deepseek_v2"),
    "lfm2": lambda: test_hybrid.make_model("lfm2"),
    "qwen3_next": lambda: test_hybrid.make_model("qwen3_next"),
    "bamba": lambda: test_hybrid.make_model("bamba"),
    "minimax": lambda: test_hybrid.make_model("minimax"),
}


def make(kind: str, make_engine: EngineMaker, **settings: object) -> tuple[ExactPolicy, NativeEngine]:
    model = MODELS[kind]()
    engine = make_engine(model, fused=False if kind.endswith("-interface") else None, **settings)
    return ExactPolicy(model, engine), engine


def packed(samples: Sequence[Sample]) -> Inputs:
    return Inputs(
        input_ids=torch.tensor([i for s in samples for i in (*s.prompt_ids, *s.output_ids)]),
        lengths=torch.tensor([s.num_tokens for s in samples]),
        prompt_lengths=torch.tensor([len(s.prompt_ids) for s in samples]),
    )


def recorded(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([x for s in samples for x in s.logprobs])


def disturbed(engine: NativeEngine, **params: object) -> list[Sample]:
    """Five samples of two prompts: late arrivals, chunks, drafts that are half right, pauses with and without KV."""
    groups = [
        group("a", prompt(21), n=3, max_tokens=26, **params),
        group("b", prompt(9, 1), n=2, max_tokens=19, **params),
    ]
    samples = [sample for g in groups for sample in g.samples]
    known = {s.id: s.output_ids for s in generate(engine, *(copy.deepcopy(g) for g in groups))}
    engine.reset_prefix_cache()
    engine.use_drafter(Oracle(known, 0.5), FixedLength(3))
    run(engine, samples[:3], until=4)
    engine.add(engine.pause([samples[1].id], snapshot=True))
    run(engine, samples[3:], until=6)
    paused = engine.pause(snapshot=False)
    engine.reset_prefix_cache()
    run(engine, paused)
    engine.use_drafter(None)
    assert all(len(s.segments) > 1 for s in paused)
    assert {s.id: s.output_ids for s in samples} == known
    return samples


def assert_equal(policy: ExactPolicy, samples: Sequence[Sample], **sampling: Any) -> None:
    with torch.no_grad():
        assert torch.equal(policy.logprobs(packed(samples), **sampling), recorded(samples))


@pytest.mark.parametrize("kind", list(MODELS))
def test_bits_of_a_disturbed_rollout(kind: str, make_engine: EngineMaker) -> None:
    policy, engine = make(kind, make_engine, max_num_batched_tokens=16)
    samples = disturbed(engine, temperature=0.8)
    order = random.Random(0)
    present = torch.get_num_threads()
    try:
        for threads in sorted({1, min(2, NUMBA_THREADS)}):
            numba.set_num_threads(threads)
            torch.set_num_threads(threads)
            assert_equal(policy, samples, temperature=0.8)
            for _ in range(3):
                some = order.sample(samples, order.randint(1, len(samples)))
                assert_equal(policy, some, temperature=torch.full((sum(len(s.output_ids) for s in some),), 0.8))
    finally:
        numba.set_num_threads(min(present, NUMBA_THREADS))
        torch.set_num_threads(present)
    # With a graph, and with layers that are computed again, the values are the same.
    assert torch.equal(policy.logprobs(packed(samples), temperature=0.8).detach(), recorded(samples))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_after_an_update(kind: str, make_engine: EngineMaker) -> None:
    """Optimiser steps change the policy, not the engine; update_weights hands them over, and the bits agree again."""
    policy, engine = make(kind, make_engine)
    old = generate(engine, group("a", prompt(12), n=2, max_tokens=12))
    optimiser = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for version in (1, 2):
        for _ in range(2):
            optimiser.zero_grad()
            (-policy.logprobs(packed(old)).mean()).backward()
            optimiser.step()
        assert not torch.equal(policy.logprobs(packed(old)).detach(), recorded(old))
        between = generate(engine, group(f"b{version}", prompt(11), max_tokens=6))
        assert set(between[0].versions) == {version - 1}
        engine.update_weights(policy.weights(), version)
        samples = generate(engine, group(f"c{version}", prompt(15), n=2, max_tokens=9))
        assert_equal(policy, samples)
        with torch.no_grad():
            assert not torch.equal(policy.logprobs(packed(between)), recorded(between))


# ---- gradients


def gradients(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


def ordinary(model: PreTrainedModel, samples: Sequence[Sample], temperature: float) -> torch.Tensor:
    found = []
    for s in samples:
        ids = torch.tensor([*s.prompt_ids, *s.output_ids])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1] / temperature
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(s.output_ids)[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("checkpointing", [False, True], ids=["whole", "checkpointed"])
def test_gradients(kind: str, checkpointing: bool, make_engine: EngineMaker) -> None:
    """Those of the model's own pass in float32, to 1e-4 of each parameter's gradient, and on the whole as close to
    float64 as it is."""
    model = MODELS[kind]()
    engine = make_engine(model, fused=False if kind.endswith("-interface") else None)
    policy = ExactPolicy(model, engine, checkpointing=checkpointing, check=False)
    first = group("a", prompt(21), n=2, max_tokens=15, temperature=0.7)
    samples = generate(engine, first, group("b", prompt(9, 1), max_tokens=20, temperature=0.7))
    torch.manual_seed(1)
    weights = torch.randn(sum(len(s.output_ids) for s in samples))
    parameters = policy.parameters()
    got = policy.logprobs(packed(samples), temperature=0.7)
    assert torch.equal(got.detach(), recorded(samples))
    own = gradients((got * weights).sum(), parameters)
    assert any(g.abs().max() > 0 for g in own)
    model.set_experts_implementation("eager")
    plain = gradients((ordinary(model, samples, 0.7) * weights).sum(), parameters)
    double = copy.deepcopy(model).double()
    truth = gradients((ordinary(double, samples, 0.7) * weights).sum(), list(double.parameters()))
    whole = torch.cat([g.flatten() for g in truth]).norm()
    for (name, _), a, b in zip(model.named_parameters(), own, plain, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6 * whole, name
    errors = [torch.cat([(g - t).flatten() for g, t in zip(x, truth, strict=True)]).norm() for x in (own, plain)]
    assert errors[0] <= 3 * errors[1]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_gradients(
    window: int, softcap: float, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gradcheck in float64 of attention written out, with the backward pass under test; in pieces of a few rows."""
    monkeypatch.setattr(differentiable, "SCORES_AT_ONCE", 4 * 9 * 2)
    lengths, scale, (heads, kv_heads, dim, v_dim) = (9, 1, 4), 0.4, (4, 2, 3, 5)
    rows = sum(lengths) + 2  # of padding

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        out = q.new_zeros(rows, heads, v_dim)
        for t in range(sum(lengths)):
            start = next(s for s, n in ((0, 9), (9, 1), (10, 4)) if s <= t < s + n)
            first = max(start, t - window + 1) if window else start
            for h in range(heads):
                s = (k[first : t + 1, h // 2] @ q[t, h]) * scale
                s = softcap * torch.tanh(s / softcap) if softcap else s
                s = s if sinks is None else torch.cat([s, sinks[h : h + 1]])
                out[t, h] = torch.softmax(s, 0)[: t + 1 - first] @ v[first : t + 1, h // 2]
        return out

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            ctx.save_for_backward(*args)
            return plain(*args)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            q, k, v, sinks = ctx.saved_tensors
            return differentiable.attention_gradients(q, k, v, grad, lengths, scale, window, softcap, sinks)

    torch.manual_seed(0)
    shapes = [(rows, heads, dim), (rows, kv_heads, dim), (rows, kv_heads, v_dim)]
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True) if with_sinks else None
    given = [*args, *([] if sinks is None else [sinks])]
    assert torch.autograd.gradcheck(lambda *x: Own.apply(*x, *([None] if sinks is None else [])), given)


def test_linear_gradients() -> None:
    torch.manual_seed(0)
    x, residual, bias, a, b = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 4), (6, 8), (8,), (5, 4), (3, 4))
    )

    def linear(*args: torch.Tensor) -> torch.Tensor:
        x, residual, bias, *weights = args
        return differentiable.TrainedLinear(weights, bias, "aten")(x, residual)

    assert torch.autograd.gradcheck(linear, [x, residual, bias, a, b])
    want = F.linear(x, torch.cat([a, b]), bias) + residual
    assert torch.allclose(linear(x, residual, bias, a, b), want)


# ---- sampling parameters

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 1.0, "ignore_eos": False, "min_tokens": 12, "stop_token_ids": (5, 6)},
]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_sampling_parameters(kind: str, make_engine: EngineMaker) -> None:
    """Of several kinds in one batch; those without a temperature's record are not reproduced by one."""
    policy, engine = make(kind, make_engine)
    groups = [group(str(i), prompt(9, i), n=2, max_tokens=20, **own) for i, own in enumerate(SAMPLINGS)]
    samples = generate(engine, *groups)
    params = [s.params for s in samples]
    assert_equal(policy, samples, params=params)
    for one in samples[2:]:
        with torch.no_grad():
            plain = policy.logprobs(packed([one]), temperature=one.params.temperature)
        assert not torch.equal(plain, recorded([one]))
    got = policy.logprobs(packed(samples), params=params)
    assert torch.equal(got.detach(), recorded(samples))
    assert all(g.isfinite().all() for g in gradients(got.sum(), policy.parameters()))


def test_gradient_through_penalties(make_engine: EngineMaker) -> None:
    """Against the formula written out: factors on the logits of known tokens, a softmax over what the filters keep."""
    policy, engine = make("llama", make_engine)
    own: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.25, "top_k": 40}
    (sample,) = generate(engine, group("a", prompt(9), max_tokens=12, **own))
    model, inputs = policy.model, packed([sample])
    ids, start = inputs.input_ids, len(sample.prompt_ids)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
    found = []
    for i, row in enumerate(logits):
        known = torch.unique(ids[: start + i])
        count = torch.bincount(ids[start : start + i], minlength=len(row))
        factor = torch.ones(len(row))
        factor[known] = 1.3
        row = torch.where(row > 0, row / factor, row * factor) - 0.25 * count
        row = row.masked_fill(row < row.topk(40).values[-1], -torch.inf)
        found.append(torch.log_softmax(row / 0.8, -1)[sample.output_ids[i]])
    weights = torch.linspace(-1, 2, len(found))
    want = gradients((torch.stack(found) * weights).sum(), policy.parameters())
    got = gradients((policy.logprobs(inputs, params=[sample.params]) * weights).sum(), policy.parameters())
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


def test_raw_mode(make_engine: EngineMaker) -> None:
    policy, engine = make("llama", make_engine, logprobs_mode="raw")
    samples = disturbed(engine, temperature=0.6, top_p=0.7)
    assert_equal(policy, samples, temperature=0.6)
    assert_equal(policy, samples, params=[s.params for s in samples])


def test_rejection_verification(make_engine: EngineMaker) -> None:
    policy, engine = make("llama", make_engine, verification="rejection")
    known = {s.id: s.output_ids for s in generate(engine, group("a", prompt(21), n=4))}
    engine.use_drafter(Oracle(known, 0.6), FixedLength(3))
    assert_equal(policy, generate(engine, group("a", prompt(21), n=4)))


# ---- what is refused, and faults that are seen


def test_refusals(make_engine: EngineMaker) -> None:
    model = make_model("llama")
    engine = make_engine(model)
    with pytest.raises(ValueError, match="numerics are 'fast'"):
        ExactPolicy(model, make_engine(model, numerics="fast"))
    with pytest.raises(ValueError, match=r"float64.*float32 on the CPU"):
        ExactPolicy(make_model("llama").double(), engine)
    with pytest.raises(ValueError, match="weights are not the model's"):
        ExactPolicy(make_model("llama", seed=1), engine)
    with pytest.raises(ValueError, match="weights"):
        ExactPolicy(make_model("qwen3"), engine)
    policy = ExactPolicy(model, engine)
    (sample,) = generate(engine, group("a", prompt(9), max_tokens=5))
    with pytest.raises(ValueError, match="params: 2 for 1"):
        policy.logprobs(packed([sample]), params=[sample.params] * 2)
    inputs = packed([sample])
    inputs.input_ids[3] = 512
    with pytest.raises(ValueError, match=r"input_ids must lie in 0\.\.511"):
        policy.logprobs(inputs)
    none = torch.zeros(0, dtype=torch.long)
    assert len(policy.logprobs(Inputs(input_ids=none, lengths=none, prompt_lengths=none))) == 0


class _Unproven(PackedLinear):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = (x.double() @ self.rows(torch.arange(self.out_features)).double().T).float()
        y = y if self.bias is None else y + self.bias
        return y if residual is None else y + residual


def test_checkpoint(make_engine: EngineMaker) -> None:
    policy, engine = make("llama", make_engine)
    (sample,) = generate(engine, group("a", prompt(9), max_tokens=5))
    kept = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    assert "lm_head.weight" not in kept  # tied: once
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    assert not torch.equal(policy.logprobs(packed([sample])).detach(), recorded([sample]))
    wrong = dict(kept)
    wrong["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.float32 \(3,\)"):
        policy.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        policy.load_state_dict({name: t for name, t in kept.items() if name != "model.norm.weight"})
    policy.load_state_dict(kept)
    assert_equal(policy, [sample])


def test_planted_faults_are_seen(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    engine = make_engine(model)
    with monkeypatch.context() as patch:  # a norm of other bits
        op = differentiable.differentiable(norm.rms_norm_reference, norm.rms_norm_reference)
        patch.setattr(training_forward, "rms_norm", op)
        with pytest.raises(ExactNumericsUnavailable, match="other bits"):
            ExactPolicy(model, engine)
    with monkeypatch.context() as patch:  # matmuls that no rule has proven: rows alone or in another batch differ
        patch.setattr(differentiable, "PackedLinear", _Unproven)
        with pytest.raises(ExactNumericsUnavailable, match="other bits"):
            ExactPolicy(model, engine)
    with monkeypatch.context() as patch:  # attention in plain torch
        reference = functools.partial(paged_attention, backend="reference")
        patch.setattr(differentiable, "paged_attention", reference)
        with pytest.raises(ExactNumericsUnavailable, match="other bits"):
            ExactPolicy(model, engine)
    own = differentiable.attention_gradients
    with monkeypatch.context() as patch:  # a gradient of keys that is 1 % off

        def wrong(*args: Any) -> Any:
            dq, dk, dv, dsinks = own(*args)
            return dq, 1.01 * dk, dv, dsinks

        patch.setattr(differentiable, "attention_gradients", wrong)
        with pytest.raises(UnsupportedModel, match="another gradient"):
            ExactPolicy(model, engine)
    ExactPolicy(model, engine)



def test_smollm2() -> None:
    """A real model: samples of two prompts, paused, drafted for, packed; one optimiser step, and again."""
    from longtail.bench.models import smollm2_135m

    path = smollm2_135m()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = NativeEngine(model, max_num_seqs=4, max_model_len=256, kv_cache_bytes=64 << 20)
    policy = ExactPolicy(model, engine, checkpointing=True, check=False)
    optimiser = torch.optim.SGD(policy.parameters(), lr=1e-2)
    ids = [[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47], [504, 1718, 282, 216, 34, 284, 216, 35, 314]]
    for version in (0, 1):
        groups = [
            group(f"{version}{i}", own, n=2, max_tokens=10, temperature=0.9) for i, own in enumerate(ids)
        ]
        samples = [s for g in groups for s in g.samples]
        engine.use_drafter("ngram")
        run(engine, samples, until=4)
        run(engine, engine.pause(snapshot=False))
        assert_equal(policy, samples, temperature=0.9)
        loss = -policy.logprobs(packed(samples), temperature=0.9).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        engine.update_weights(policy.weights(), version + 1)

