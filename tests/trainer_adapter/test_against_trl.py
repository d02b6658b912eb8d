"""Our losses against TRL's on the same tensors: float64, values and gradients, to 1e-10.

TRL's are methods of its trainers. They are called here as they stand, on an object that has the settings they read and,
in place of a model, a function that hands back the log-probabilities. `make test` installs TRL.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.trainer_adapter.helpers import grad

from longtail.trainer_adapter.advantages import Advantage, group_advantages
from longtail.trainer_adapter.batch import TrainBatch
from longtail.trainer_adapter.corrections import (
    Correction,
    divergent_sequence_mask,
    icepop,
    sequence_mask,
    tis,
)
from longtail.trainer_adapter.dpo import PreferenceBatch, dpo_loss
from longtail.trainer_adapter.losses import PolicyLoss, dapo, decoupled_ppo, dr_grpo, grpo, gspo

pytest.importorskip("trl", minversion="1.16", reason="TRL is not installed; pip install -e '.[trl]'")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer

B, T, LENGTH = 6, 9, 32
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """TRL makes tensors of lists, in the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Trainer(SimpleNamespace):
    """What TRL's methods read of their trainer."""

    def __init__(self, **settings: Any) -> None:
        same = lambda x, **_: x  # noqa: E731
        super().__init__(
            accelerator=SimpleNamespace(
                device=torch.device("cpu"),
                num_processes=1,
                process_index=0,
                sync_gradients=True,
                gather=same,
                gather_for_metrics=same,
                reduce=same,
                unwrap_model=same,
            ),
            model=SimpleNamespace(training=True),
            _metrics={"train": collections.defaultdict(list)},
            aux_loss_enabled=False,
        )
        self.__dict__.update(settings)


def tensors(seed: int) -> dict[str, Any]:
    """[B, T] each; every row has a token in the mask, and ratios are from about 0.4 to 2.5."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(B, T, generator=generator) * 2 - 0.1
    lengths = torch.randint(1, T + 1, (B, 1), generator=generator)
    found = {
        "rollout_logprobs": rollout,
        "mask": (torch.arange(T) < lengths).long(),
        "advantages": torch.tensor([1.2, -0.8, -0.3, 0.9, 0.0, -1.1]),
    }
    for name in ("logprobs", "proximal_logprobs", "ref_logprobs"):
        found[name] = rollout + 0.4 * torch.randn(B, T, generator=generator)
    found["logprobs"].requires_grad_()
    return found


def ours(t: dict[str, Any], loss: PolicyLoss) -> tuple[torch.Tensor, torch.Tensor]:
    value = loss(TrainBatch.from_padded(**t)).loss
    return value.detach(), torch.autograd.grad(value, [t["logprobs"]])[0]


def theirs(
    t: dict[str, torch.Tensor],
    *,
    old: str | None = "rollout_logprobs",
    factors: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPOTrainer._compute_loss. old: what its old_per_token_logps are; None: the current ones, detached. factors: its
    importance_sampling_ratio."""
    known: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "beta": 0.0,
        "use_bias_correction_kl": False,
        "off_policy_mask_threshold": None,
        "max_completion_length": LENGTH,
    }
    assert set(settings) <= set(known)
    known |= settings
    trainer = Trainer(
        **known,
        args=SimpleNamespace(
            delta=known["delta"], use_bias_correction_kl=known["use_bias_correction_kl"], steps_per_generation=1
        ),
        top_entropy_quantile=1.0,
        use_vllm=factors is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (t["logprobs"], torch.zeros(B, T), None),
        get_off_policy_mask=grpo_trainer.get_off_policy_mask,
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": t["mask"],
        "advantages": t["advantages"],
        "ref_per_token_logps": t["ref_logprobs"],
        "num_items_in_batch": t["mask"].sum(),
        "sampling_per_token_logps": t["rollout_logprobs"],
    }
    if old is not None:
        inputs["old_per_token_logps"] = t[old]
    if factors is not None:
        inputs["importance_sampling_ratio"] = factors
    value = grpo_trainer._compute_loss(trainer, trainer.model, inputs)
    return value.detach(), torch.autograd.grad(value, [t["logprobs"]])[0]


LOSSES: dict[str, tuple[PolicyLoss, dict[str, Any]]] = {
    "grpo": (grpo(), {}),
    "grpo with k3": (grpo(kl_coef=0.04), {"beta": 0.04}),
    "grpo with k3, weighted": (
        grpo(kl_coef=0.04, kl_weighted=True),
        {"beta": 0.04, "use_bias_correction_kl": True},
    ),
    "clip-higher": (grpo(clip_high=0.28), {"epsilon_high": 0.28}),
    "two-sided clip": (grpo(clip_dual=1.5), {"delta": 1.5}),
    "token mean": (grpo(aggregation="token_mean"), {"loss_type": "bnpo"}),
    "dapo": (dapo(), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": (dr_grpo(fixed_length=LENGTH), {"loss_type": "dr_grpo"}),
    "gspo": (
        gspo(),
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo, wide clip": (gspo(clip_low=0.2, clip_high=0.2), {"importance_sampling_level": "sequence"}),
    "sequence sum": (
        gspo(aggregation="sequence_sum", clip_low=0.2, clip_high=0.2),
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    ),
    "on-policy": (grpo(proximal="now"), {"old": None}),
    "proximal": (grpo(proximal="recorded"), {"old": "proximal_logprobs"}),
    "off-policy sequence mask": (
        grpo(corrections=divergent_sequence_mask(0.01)),
        {"off_policy_mask_threshold": 0.01},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(5))
def test_policy_losses(name: str, seed: int) -> None:
    loss, settings = LOSSES[name]
    t = tensors(seed)
    for mine, other in zip(ours(t, loss), theirs(t, **settings), strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("kind", "scale"), [("mean_std", "group"), ("mean", "none")])
def test_advantages(kind: Advantage, scale: str, seed: int) -> None:
    """Three groups of two; the rewards of one are equal, where TRL has 0 up to rounding and we have 0."""
    rewards = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
    rewards[1] = 0.1
    found = torch.tensor([group_advantages(r, kind) for r in rewards.tolist()])
    assert found[1].tolist() == [0.0, 0.0]
    expected = generated(tensors(seed), rewards=rewards.flatten(), scale=scale)["advantages"]
    torch.testing.assert_close(found.flatten(), expected, **EXACT)


def generated(
    t: dict[str, torch.Tensor], *, rewards: torch.Tensor, scale: str = "group", **settings: Any
) -> dict[str, torch.Tensor]:
    """GRPOTrainer._generate_and_score_completions, for groups of 2: its advantages and importance weights."""
    lengths = t["mask"].sum(1).tolist()
    rows = [[1] * n for n in lengths]
    sampled = [row[:n] for row, n in zip(t["rollout_logprobs"].tolist(), lengths, strict=True)]
    width = max(lengths)
    trainer = Trainer(
        environment_factories=None,
        environments=None,
        tools=None,
        _generate=lambda _: ([[1]] * B, rows, None, ["x"] * B, sampled, {}, None, None),
        _calculate_rewards=lambda *_: rewards[:, None],
        _get_per_token_logps_and_entropies=lambda *_, **__: (t["proximal_logprobs"][:, :width], None, None),
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        num_generations=2,
        args=SimpleNamespace(
            per_device_train_batch_size=B,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        beta=0.0,
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1),
        reward_func_names=["r"],
        scale_rewards=scale,
        _logs=collections.defaultdict(list, rewards=collections.defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        log_multimodal=False,
        **{
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": 3.0,
        }
        | settings,
    )
    return grpo_trainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * B)


CORRECTIONS: dict[str, tuple[tuple[Correction, ...], tuple[str, float | None, float]]] = {
    "tis": (tis(1.3), ("token_truncate", None, 1.3)),
    "icepop": (icepop(0.7, 1.3), ("token_mask", 0.7, 1.3)),
    "sequence tis": (tis(1.5, level="sequence"), ("sequence_truncate", None, 1.5)),
    "sequence mask": (sequence_mask(0.5, 1.5), ("sequence_mask", 0.5, 1.5)),
}


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("seed", range(5))
def test_importance_weights(name: str, seed: int) -> None:
    """TRL's weights, and its loss with them, which is decoupled PPO with GRPO's mean over sequences."""
    corrections, (mode, low, high) = CORRECTIONS[name]
    t = tensors(seed)
    t["advantages"] = generated(t, rewards=torch.tensor([1.0, 0.0, 0.2, 0.9, 0.5, 0.6]))["advantages"]
    found = generated(
        t,
        rewards=torch.arange(float(B)),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )["importance_sampling_ratio"]
    factors = torch.ones(B, T)
    factors[:, : found.shape[1]] = found
    if found.shape[1] == 1:  # one a sequence
        factors = found.expand(B, T)
    loss = decoupled_ppo(corrections=corrections, aggregation="sequence_mean")
    mask = t["mask"].bool()
    mine = loss.factors(TrainBatch.from_padded(**t)).view(B, T)
    assert mine[mask].unique().numel() > 1
    torch.testing.assert_close(mine[mask], factors[mask], **EXACT)
    for a, b in zip(ours(t, loss), theirs(t, old="proximal_logprobs", factors=factors), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


# ---- DPO


class Model(torch.nn.Module):
    """Its forward pass has been made already."""

    is_gradient_checkpointing = False

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, **_: Any) -> Any:
        return self.output


def their_dpo(b: PreferenceBatch, kind: str, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """DPOTrainer._compute_loss, of rows [chosen; rejected], behind one token of prompt."""
    assert b.logprobs is not None and b.ref_logprobs is not None
    order = [*range(0, B, 2), *range(1, B, 2)]
    now, ref, mask = (x.view(B, T)[order] for x in (b.logprobs, b.ref_logprobs, b.mask))
    nothing = torch.zeros(B, T)
    out = [
        SimpleNamespace(
            log_probs=x * mask, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), log_sum_sq_probs=nothing
        )
        for x in (now, ref)
    ]
    trainer = Trainer(
        **{"beta": 0.1, "label_smoothing": 0.0} | settings,
        loss_types=[kind],
        loss_weights=[1.0],
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        ref_model=Model(out[1]),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer.model = Model(out[0])
    inputs = {
        "input_ids": torch.zeros(B, T + 1, dtype=torch.long),
        "attention_mask": torch.ones(B, T + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(B, 1, dtype=torch.bool), mask], 1).long(),
    }
    value = dpo_trainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)
    return value.detach(), torch.autograd.grad(value, [b.logprobs])[0]


DPO: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "sigmoid": ({}, "sigmoid", {}),
    "sigmoid, normalised": ({"length_normalized": True, "beta": 2.0}, "sigmoid_norm", {"beta": 2.0}),
    "ipo": ({"kind": "ipo"}, "ipo", {}),
}


def preferences(seed: int) -> PreferenceBatch:
    t = tensors(seed)
    return PreferenceBatch(
        lengths=torch.full((B,), T),
        mask=t["mask"].bool().flatten(),
        logprobs=t["logprobs"].detach().flatten().requires_grad_(),
        ref_logprobs=t["ref_logprobs"].flatten(),
    )


@pytest.mark.parametrize("name", DPO)
@pytest.mark.parametrize("seed", range(5))
def test_dpo(name: str, seed: int) -> None:
    mine, kind, settings = DPO[name]
    batch = preferences(seed)
    loss = dpo_loss(batch, **mine).loss
    value, gradient = their_dpo(batch, kind, **settings)
    torch.testing.assert_close(loss.detach(), value, **EXACT)
    torch.testing.assert_close(grad(loss, batch), gradient, **EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_dpo_with_label_smoothing(seed: int) -> None:
    """TRL has no conservative DPO, but a robust one, (1 - e) f(x) - e f(-x) over 1 - 2e with f(x) = -log sigma(x). Of a
    clean and a robust loss follows f(-x), and from that ours."""
    batch, e = preferences(seed), 0.1
    clean, robust = their_dpo(batch, "sigmoid"), their_dpo(batch, "robust", label_smoothing=e)
    loss = dpo_loss(batch, label_smoothing=e).loss
    for mine, f, g in zip((loss.detach(), grad(loss, batch)), clean, robust, strict=True):
        flipped = ((1 - e) * f - (1 - 2 * e) * g) / e
        torch.testing.assert_close(mine, (1 - e) * f + e * flipped, **EXACT)
