"""The DPO trainer on a model small enough to be written out (a table of bigrams, float64) and on a tiny transformer."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from longtail.trainer_adapter.batch import Inputs
from longtail.trainer_adapter.checkpoint import Checkpoints
from longtail.trainer_adapter.dpo import PreferenceBatch, dpo_loss
from longtail.trainer_adapter.dpo_reference import digest_of, fingerprint, reference_logprobs
from longtail.trainer_adapter.dpo_trainer import DPOConfig, DPOTrainer
from longtail.trainer_adapter.policy import Policy, TransformersPolicy
from longtail.trainer_adapter.preferences import Pair, hold_out
from longtail.trainer_adapter.updates import TrainingDiverged, UpdateConfig, Updater

V = 12


class Bigrams:
    """A `Policy` of V x V logits, a row for each token before."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(V, V, generator=generator, dtype=torch.float64))
        self.passes: list[int] = []
        """Tokens read in each."""

    def logprobs(self, inputs: Inputs, *, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
        self.passes.append(len(inputs.input_ids))
        rows = (self.table / temperature).log_softmax(1)
        return rows[inputs.input_ids[inputs.logit_index], inputs.labels]

    def parameters(self) -> Iterable[nn.Parameter]:
        return [self.table]

    def weights(self) -> dict[str, torch.Tensor]:
        return {"table": self.table.detach()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.weights()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self.table.copy_(state["table"])


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    """The chosen response is made of even tokens, the rejected one of odd ones; prompts are all different."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        chosen = tuple(rng.choices(range(0, V, 2), k=rng.randint(1, 6)))
        rejected = tuple(rng.choices(range(1, V, 2), k=rng.randint(1, 6)))
        prompt = (i % V, i // V, rng.randrange(V))
        made.append(Pair(prompt_ids=prompt, chosen_ids=chosen, rejected_ids=rejected, reason="even"))
    return made


PAIRS = make_pairs(30)


def make(policy: Policy | None = None, pairs: list[Pair] = PAIRS, **fields: Any) -> DPOTrainer:
    known: dict[str, Any] = {"learning_rate": 0.05, "batch_pairs": 8, "epochs": 3}
    config = DPOConfig(**known | {k: v for k, v in fields.items() if k not in ("held_out", "cache", "reference")})
    others = {k: v for k, v in fields.items() if k in ("held_out", "cache", "reference")}
    return DPOTrainer(policy or Bigrams(), pairs, config=config, **others)


# ---- a step


KINDS: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "smoothed": {"label_smoothing": 0.1},
    "normalised": {"length_normalized": True, "beta": 2.0},
    "ipo": {"kind": "ipo"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 40, 10_000])
def test_micro_batches_are_the_unsplit_batch(kind: str, tokens: int) -> None:
    """Loss, figures and weights after some steps, against the loss on the whole batch and an optimiser beside it."""
    trainer = make(micro_batch_tokens=tokens, max_grad_norm=None, **KINDS[kind])
    beside, start = Bigrams(), Bigrams()
    optimiser = torch.optim.AdamW([beside.table], lr=0.05, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(6):
        batch = PreferenceBatch.from_pairs([PAIRS[i] for i in trainer.batch_of(step)])
        assert batch.inputs is not None
        with torch.no_grad():
            reference = start.logprobs(batch.inputs).float().double()
        whole = batch.replace(ref_logprobs=reference, logprobs=beside.logprobs(batch.inputs))
        expected = dpo_loss(whole, **trainer.config.loss)
        optimiser.zero_grad()
        expected.loss.backward()
        optimiser.step()
        found = trainer.step()
        assert found.figures.loss == pytest.approx(float(expected.loss.detach()), rel=1e-12)
        assert found.figures.accuracy == int(expected.correct) / len(batch)
        margin = float(expected.chosen_reward - expected.rejected_reward) / len(batch)
        assert found.figures.margin == pytest.approx(margin, rel=1e-9, abs=1e-12)
        assert found.figures.chosen_logprob == pytest.approx(float(expected.chosen_logprob) / len(batch), rel=1e-12)
        assert found.tokens == int(batch.mask.sum())
        torch.testing.assert_close(trainer.policy.weights()["table"], beside.table.detach(), rtol=0, atol=1e-12)


def test_before_the_first_update_nothing_is_preferred() -> None:
    """The policy is the reference: log 2, no margin. (The reference is kept in float32.)"""
    trainer = make()
    first = trainer.step()
    assert first.figures.loss == pytest.approx(math.log(2), abs=1e-6)
    assert first.figures.margin == pytest.approx(0.0, abs=1e-6)
    assert (first.step, first.epoch, first.learning_rate) == (0, 0, 0.05)


def test_each_pair_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    trainer = make()
    assert trainer.steps_per_epoch == 4
    epochs = [list(itertools.chain(*(trainer.batch_of(4 * e + i) for i in range(4)))) for e in range(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, range(30)]}) == 4
    assert [len(trainer.batch_of(i)) for i in range(4)] == [8, 8, 8, 6]
    assert make(seed=1).batch_of(0) != trainer.batch_of(0) == make().batch_of(0)


def test_a_run_has_its_epochs() -> None:
    trainer = make(epochs=2)
    steps = []
    while not trainer.is_done:
        steps.append(trainer.step())
    assert [s.epoch for s in steps] == [0] * 4 + [1] * 4
    assert [s.figures.pairs for s in steps] == [8, 8, 8, 6] * 2
    with pytest.raises(ValueError, match="step: all 8 are made"):
        trainer.step()


def test_what_a_tool_wrote_is_read_and_not_trained_on() -> None:
    """Only rows of the table from which a token in the mask is predicted have a gradient."""
    pair = Pair(
        prompt_ids=(0,),
        chosen_ids=(1, 2, 3, 4),
        chosen_mask=(True, False, False, True),
        rejected_ids=(5, 6),
        reason="r",
    )
    policy = Bigrams()
    before = policy.table.detach().clone()
    make(policy, [pair], epochs=1).step()
    changed = (policy.table.detach() != before).any(1).nonzero()[:, 0].tolist()
    assert changed == [0, 3, 5]  # 0 -> 1 and 5, 3 -> 4, 5 -> 6; not 1 -> 2 nor 2 -> 3


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    policy = Bigrams()
    trainer = make(policy)
    trainer.step()
    with torch.no_grad():
        policy.table[0, 0] = math.nan
    before = policy.table.detach().clone()
    with pytest.raises(TrainingDiverged, match="step 1: loss nan"):
        trainer.step()
    assert torch.equal(policy.table.detach(), before) or torch.equal(
        policy.table.detach().nan_to_num(), before.nan_to_num()
    )
    assert policy.table.grad is None


# ---- learning


def test_it_learns_what_is_preferred() -> None:
    """On at least 30 held-out pairs, which a policy that learnt nothing has right by chance: 27 of 30 with p = 4e-6."""
    train, held_out = hold_out(make_pairs(160), 0.25)
    trainer = make(pairs=list(train), held_out=held_out, learning_rate=0.02)
    before = trainer.evaluate()
    while not trainer.is_done:
        trainer.step()
    after = trainer.evaluate()
    assert before is not None and after is not None and after.pairs == len(held_out) >= 30
    assert after.accuracy >= 0.9 and after.margin > before.margin + 0.1 and after.loss < before.loss
    assert make().evaluate() is None


def tiny_llama(seed: int = 0) -> TransformersPolicy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        return TransformersPolicy(LlamaForCausalLM(config).eval())


def test_a_transformer_learns_what_is_preferred(tmp_path: Path) -> None:
    train, held_out = hold_out(make_pairs(120), 0.25)
    trainer = make(tiny_llama(), list(train), held_out=held_out, learning_rate=3e-3, cache=tmp_path / "r.safetensors")
    while not trainer.is_done:
        trainer.step()
    after = trainer.evaluate()
    assert after is not None and after.accuracy >= 0.9 and after.margin > 0.05


# ---- the reference


def test_the_reference_is_computed_once(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "reference.safetensors"
    policy = Bigrams()
    first = make(policy, cache=cache)
    assert sum(policy.passes) == sum(2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in PAIRS)
    again = Bigrams()
    second = make(again, cache=cache)
    assert again.passes == []
    for a, b in zip(first.reference.logprobs, second.reference.logprobs, strict=True):
        assert torch.equal(a, b)
    first.step()
    assert torch.equal(first.reference.of(range(30)), second.reference.of(range(30)))


@pytest.mark.parametrize("what", ["other weights", "other pairs", "damaged", "bits flipped", "empty"])
def test_a_reference_of_something_else_is_computed_again(what: str, tmp_path: Path) -> None:
    cache = tmp_path / "reference.safetensors"
    make(cache=cache)
    if what == "damaged":
        cache.write_bytes(cache.read_bytes()[:-3])
    if what == "empty":
        cache.write_bytes(b"")
    if what == "bits flipped":
        data = bytearray(cache.read_bytes())
        data[-1] ^= 1
        data[-600] ^= 1
        cache.write_bytes(data)
    policy = Bigrams(seed=int(what == "other weights"))
    pairs = PAIRS[1:] if what == "other pairs" else PAIRS
    found = make(policy, pairs, cache=cache).reference
    assert policy.passes
    expected = reference_logprobs(Bigrams(seed=int(what == "other weights")), pairs)
    assert torch.equal(found.of(range(len(pairs))), expected.of(range(len(pairs))))
    later = Bigrams(seed=int(what == "other weights"))
    make(later, pairs, cache=cache)
    assert later.passes == []


def test_another_policy_as_the_reference() -> None:
    trainer = make(reference=Bigrams(seed=3))
    assert trainer.reference.weights == fingerprint(Bigrams(seed=3).weights())
    assert trainer.step().figures.loss != pytest.approx(math.log(2), abs=1e-3)


def test_a_fingerprint_sees_every_bit() -> None:
    weights = {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}
    same = fingerprint(weights)
    assert same == fingerprint(dict(reversed(weights.items())))
    changed = torch.zeros(3)
    changed[1] = -0.0
    others = [{"a": changed}, {"a": torch.zeros(1, 3)}, {"b": torch.zeros(2, 2, dtype=torch.float16)}]
    assert same not in [fingerprint(weights | other) for other in others]
    assert same != fingerprint({"a": weights["a"], "c": weights["b"]})


def test_a_digest_sees_every_token_and_mask() -> None:
    pair = PAIRS[0]
    masked = dataclasses.replace(pair, chosen_mask=(True,) * len(pair.chosen_ids))
    moved = dataclasses.replace(
        pair, prompt_ids=pair.prompt_ids[:-1], chosen_ids=(pair.prompt_ids[-1], *pair.chosen_ids)
    )
    swapped = dataclasses.replace(pair, chosen_ids=pair.rejected_ids, rejected_ids=pair.chosen_ids)
    digests = [digest_of([p]) for p in (pair, masked, moved, swapped)] + [digest_of([]), digest_of([pair, pair])]
    assert len(set(digests)) == len(digests)
    assert digest_of([dataclasses.replace(pair, reason="other")]) == digests[0]


# ---- coming back


@pytest.mark.parametrize("policy", [Bigrams, tiny_llama], ids=["bigrams", "llama"])
@pytest.mark.parametrize("after", [1, 4, 7])
def test_a_resumed_run_is_the_undisturbed_one(policy: Any, after: int, tmp_path: Path) -> None:
    """Bit for bit, through a checkpoint on disk and the cached reference."""
    whole = make(policy())
    expected = [whole.step() for _ in range(12)]
    first = make(policy(), cache=tmp_path / "r.safetensors")
    for _ in range(after):
        first.step()
    Checkpoints(tmp_path / "c").save(after, first.state_dict())
    second = make(policy(), cache=tmp_path / "r.safetensors")
    found = Checkpoints(tmp_path / "c").newest()
    assert found is not None
    second.load_state_dict(found.state)
    assert [second.step() for _ in range(12 - after)] == expected[after:]
    assert second.is_done
    for name, tensor in whole.policy.weights().items():
        assert torch.equal(second.policy.weights()[name], tensor), name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pairs": PAIRS[1:]}, "other pairs"),
        ({"policy": Bigrams(seed=1)}, "another reference"),
        ({"beta": 0.2}, "with beta 0.1, not 0.2"),
        ({"seed": 5}, "with seed 0, not 5"),
    ],
)
def test_a_state_of_another_run_is_refused(fields: dict[str, Any], says: str) -> None:
    state = make().state_dict()
    trainer = make(**fields)
    before = {name: tensor.clone() for name, tensor in trainer.policy.weights().items()}
    with pytest.raises(ValueError, match=says):
        trainer.load_state_dict(state)
    assert all(torch.equal(trainer.policy.weights()[name], tensor) for name, tensor in before.items())
    make(epochs=9).load_state_dict(state)  # may be raised


# ---- bad input


def test_pairs_that_cannot_be_trained_on() -> None:
    with pytest.raises(ValueError, match="pairs: there are none"):
        make(pairs=[])
    with pytest.raises(ValueError, match=r"held_out: 2 pairs have prompts.*hold_out"):
        make(held_out=PAIRS[:2])
    broken = Bigrams()
    with torch.no_grad():
        broken.table[:] = math.nan
    with pytest.raises(ValueError, match="reference: gives log-probabilities that are not finite"):
        make(broken)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"beta": 0.0}, "beta"),
        ({"kind": "hinge"}, "kind 'hinge'"),
        ({"label_smoothing": 0.6}, "label_smoothing"),
        ({"batch_pairs": 0}, "batch_pairs"),
        ({"epochs": True}, "epochs"),
        ({"micro_batch_tokens": 1.5}, "micro_batch_tokens"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"warmup": -1}, "warmup"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"max_grad_norm": math.nan}, "max_grad_norm"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DPOConfig(**settings)


# ---- held out


def test_hold_out_keeps_prompts_together_and_stays() -> None:
    pairs = [dataclasses.replace(p, chosen_ids=(*p.chosen_ids, i)) for p in make_pairs(200) for i in range(2)]
    train, held_out = hold_out(pairs, 0.3, seed=4)
    assert len(train) + len(held_out) == 400
    assert not {p.prompt_ids for p in train} & {p.prompt_ids for p in held_out}
    # 200 prompts: 60 with a standard deviation of 6.5; 25 is 3.9 of them (one fixed seed).
    assert abs(len(held_out) / 2 - 60) < 25
    assert set(hold_out(pairs[:100], 0.3, seed=4)[1]) == set(held_out) & set(pairs[:100])
    assert hold_out(pairs, 0.0) == (tuple(pairs), ())
    assert hold_out(pairs, 0.3, seed=5) != (train, held_out)
    for share, says in ((1.0, "share must"), (0.001, "holds out 0")):
        with pytest.raises(ValueError, match=says):
            hold_out(pairs[:4], share)


# ---- updates


def test_an_update_by_hand() -> None:
    """Gradient (3, 4), norm 5, clipped to 1; SGD with rates 0.5 and 1.0 of 0.1 in the warm-up."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    updater = Updater([p], UpdateConfig(warmup=2), torch.optim.SGD([p], lr=0.1))
    for expected, rate in ((0.05, 0.05), (0.15, 0.1), (0.25, 0.1)):
        p.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
        assert updater.update(1.0, "here") == 5.0
        assert p.detach().tolist() == pytest.approx([-0.6 * expected, -0.8 * expected], abs=1e-6)
        assert updater.learning_rate == pytest.approx(rate) and p.grad is None
    assert updater.num_updates == 3


def test_a_gradient_of_zero_moves_nothing() -> None:
    """Neither momentum nor weight decay does."""
    p = nn.Parameter(torch.ones(2))
    updater = Updater([p], UpdateConfig(weight_decay=0.1, learning_rate=0.1))
    p.grad = torch.ones(2)
    updater.update(1.0, "a")
    before = p.detach().clone()
    for gradient in (torch.zeros(2), None):
        p.grad = gradient
        assert updater.update(0.0, "b") == 0.0
    assert torch.equal(p.detach(), before) and updater.num_updates == 1


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_what_is_not_finite_is_refused(loss: float, gradient: float) -> None:
    p = nn.Parameter(torch.ones(2))
    updater = Updater([p], UpdateConfig())
    p.grad = torch.tensor([gradient, 0.0])
    with pytest.raises(TrainingDiverged, match="place: loss"):
        updater.update(loss, "place")
    assert torch.equal(p.detach(), torch.ones(2)) and p.grad is None
    with pytest.raises(ValueError, match="no parameters"):
        Updater([], UpdateConfig())
