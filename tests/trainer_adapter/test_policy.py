"""TransformersPolicy: the log-probabilities of the model itself, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from longtail.trainer_adapter.batch import Inputs
from longtail.trainer_adapter.policy import TransformersPolicy, freeze_parameters

SHARED: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHARED),
    "qwen3": transformers.Qwen3Config(**SHARED),
    "gemma2": transformers.Gemma2Config(**SHARED, final_logit_softcapping=5.0, sliding_window=4),  # not a plain head
    "gpt2": transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.5),
}


def make_model(name: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype)


def make_inputs(lengths: Sequence[tuple[int, int]], seed: int = 1) -> Inputs:
    """(prompt, output) tokens of each sequence."""
    total = sum(p + o for p, o in lengths)
    return Inputs(
        input_ids=torch.randint(0, 61, (total,), generator=torch.Generator().manual_seed(seed)),
        lengths=torch.tensor([p + o for p, o in lengths]),
        prompt_lengths=torch.tensor([p for p, _ in lengths]),
    )


def one_by_one(model: Any, inputs: Inputs, temperature: float) -> torch.Tensor:
    """Written out: each sequence alone, all logits, log-softmax."""
    parts = []
    sequences = inputs.input_ids.split(inputs.lengths.tolist())
    for ids, prompt in zip(sequences, inputs.prompt_lengths.tolist(), strict=True):
        logits = model.eval()(ids[None]).logits[0, :-1] / temperature
        parts.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[prompt - 1 :, 0])
    return torch.cat(parts)


LENGTHS = [(3, 5), (1, 1), (7, 2), (2, 0), (4, 9)]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients(name: str, checkpointing: bool) -> None:
    """float64, 1e-9; Gemma's norms compute in float32."""
    tolerance = 1e-5 if name == "gemma2" else 1e-9
    model, inputs = make_model(name), make_inputs(LENGTHS)
    policy = TransformersPolicy(make_model(name), gradient_checkpointing=checkpointing, rows_per_chunk=3)
    weights = torch.randn(17, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, got = one_by_one(model, inputs, 0.75), policy.logprobs(inputs, temperature=0.75)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    (weights * expected).sum().backward()
    (weights * got).sum().backward()
    for (which, p), q in zip(model.named_parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=10 * tolerance, atol=tolerance, msg=f"gradient of {which}")


def test_a_temperature_a_token() -> None:
    policy, inputs = TransformersPolicy(make_model()), make_inputs(LENGTHS)
    temperatures = torch.tensor([0.7] * 5 + [1.3] * 12)
    got = policy.logprobs(inputs, temperature=temperatures)
    assert torch.equal(got[:5], policy.logprobs(inputs, temperature=0.7)[:5])
    assert torch.equal(got[5:], policy.logprobs(inputs, temperature=1.3)[5:])


@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_do_not_see_each_other(name: str) -> None:
    """The gradient of one sequence's log-probabilities with respect to the others' embeddings is exactly 0."""
    policy, inputs = TransformersPolicy(make_model(name)), make_inputs([(3, 4), (2, 6), (5, 1)])
    seen: list[torch.Tensor] = []
    embeddings = policy.model.get_input_embeddings()

    def keep(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.detach().requires_grad_()
        seen.append(output)
        return output

    with embeddings.register_forward_hook(keep):
        policy.logprobs(inputs)[4:10].sum().backward()
    grad = seen[0].grad
    assert grad is not None
    assert grad[1, :7].abs().min() > 0
    assert not grad[0].any() and not grad[2].any() and not grad[1, 7:].any()


def test_weights_are_what_an_engine_takes() -> None:
    model = make_model(dtype=torch.float32)
    weights = TransformersPolicy(model).weights()
    assert weights.keys() >= dict(model.named_parameters()).keys()
    assert all(not tensor.requires_grad for tensor in weights.values())


def test_state_comes_back_bit_for_bit() -> None:
    policy, other = TransformersPolicy(make_model(seed=0)), TransformersPolicy(make_model(seed=1))
    other.load_state_dict(policy.state_dict())
    inputs = make_inputs(LENGTHS)
    assert torch.equal(policy.logprobs(inputs), other.logprobs(inputs))
    state = policy.state_dict()
    name = next(iter(state))
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    for wrong in (
        {key: tensor for key, tensor in state.items() if key != name},
        state | {"extra": torch.zeros(1)},
        state | {name: torch.zeros(1, dtype=torch.float64)},
        state | {name: state[name].float()},
    ):
        with pytest.raises(ValueError, match=rf"state: ({name}|extra)"):
            other.load_state_dict(wrong)
    assert all(torch.equal(before[key], tensor) for key, tensor in other.state_dict().items())


def test_freeze() -> None:
    model = make_model()
    freeze_parameters(model, "embed|lm_head|norm")
    policy = TransformersPolicy(model)
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert names and not [name for name in names if "norm" in name or "embed" in name]
    policy.logprobs(make_inputs(LENGTHS)).sum().backward()
    assert all(p.grad is not None for p in policy.parameters())
    with pytest.raises(ValueError, match="leaves no parameter"):
        freeze_parameters(make_model(), "")
    with pytest.raises(ValueError, match="no regular expression"):
        freeze_parameters(make_model(), "(")
