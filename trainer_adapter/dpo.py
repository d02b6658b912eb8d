"""Direct preference optimisation: a loss on pairs of a chosen and a rejected response of one prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from longtail.trainer_adapter.batch import Inputs, counts, expand, moved, parts, sums
from longtail.trainer_adapter.preferences import Pair

DPOKind = Literal["sigmoid", "ipo"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceBatch:
    """P pairs, packed as 2P sequences with N output tokens: 2i is the chosen response of pair i, 2i + 1 the rejected.

    ValueError, which names the field, for shapes that do not fit."""

    lengths: torch.Tensor
    """int64 [2P], output tokens."""
    mask: torch.Tensor
    """bool [N]."""
    logprobs: torch.Tensor | None = None
    """float [N], now. The only one through which gradients flow."""
    ref_logprobs: torch.Tensor | None = None
    """float [N], under the reference policy."""
    weights: torch.Tensor | None = None
    """float [P]: what a pair's loss counts, where this is a part of a batch; default 1 / pairs."""
    inputs: Inputs | None = None

    def __post_init__(self) -> None:
        if len(self.lengths) % 2:
            raise ValueError(f"lengths has {len(self.lengths)} entries; pairs are two each, chosen and rejected")
        n = int(self.lengths.sum())
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask is {self.mask.dtype}, must be bool")
        wanted = {"mask": n, "logprobs": n, "ref_logprobs": n, "weights": len(self.lengths) // 2}
        for name, size in wanted.items():
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (size,):
                raise ValueError(f"{name} has shape {tuple(value.shape)}, must be [{size}]")

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair]) -> PreferenceBatch:
        """On the CPU, with `inputs`: each sequence is the prompt and one response. Tokens that a pair's mask leaves out
        are read and not trained on."""
        ids: list[int] = []
        mask: list[bool] = []
        lengths: list[int] = []
        prompts: list[int] = []
        for pair in pairs:
            sides = ((pair.chosen_ids, pair.chosen_mask), (pair.rejected_ids, pair.rejected_mask))
            for response, trained in sides:
                ids += [*pair.prompt_ids, *response]
                mask += [True] * len(response) if trained is None else trained
                lengths.append(len(response))
                prompts.append(len(pair.prompt_ids))
        outputs = torch.tensor(lengths, dtype=torch.int64)
        prompt_lengths = torch.tensor(prompts, dtype=torch.int64)
        return cls(
            lengths=outputs,
            mask=torch.tensor(mask, dtype=torch.bool),
            inputs=Inputs(
                input_ids=torch.tensor(ids, dtype=torch.int64),
                lengths=outputs + prompt_lengths,
                prompt_lengths=prompt_lengths,
            ),
        )

    def __len__(self) -> int:
        """Pairs."""
        return len(self.lengths) // 2

    def replace(self, **fields: Any) -> PreferenceBatch:
        """A batch with other fields, such as logprobs=..."""
        return dataclasses.replace(self, **fields)

    def to(self, device: torch.device | str) -> PreferenceBatch:
        return dataclasses.replace(self, **moved(self, device))

    @property
    def pairs(self) -> torch.Tensor:
        """bool [P]: both responses have a token in the mask. Others have no loss and are not counted."""
        return (counts(self.mask, self.lengths).view(-1, 2) > 0).all(1)

    def pair_weights(self) -> torch.Tensor:
        """float64 [P], of the whole batch: 1 / pairs. Its parts take theirs from it: `part.replace(weights=...)`."""
        pairs = self.pairs
        return pairs.double() / pairs.sum().clamp(min=1)

    def select(self, chosen: torch.Tensor) -> PreferenceBatch:
        """chosen bool [P] -> those pairs, in their order."""
        if chosen.dtype != torch.bool or tuple(chosen.shape) != (len(self),):
            raise ValueError(f"chosen is {chosen.dtype} of shape {tuple(chosen.shape)}, must be bool [{len(self)}]")
        sequences = chosen.repeat_interleave(2)
        tokens = expand(sequences, self.lengths)
        return PreferenceBatch(
            lengths=self.lengths[sequences],
            mask=self.mask[tokens],
            logprobs=None if self.logprobs is None else self.logprobs[tokens],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[tokens],
            weights=None if self.weights is None else self.weights[chosen],
            inputs=None if self.inputs is None else self.inputs.select(sequences),
        )

    def split(self, max_tokens: int) -> Iterator[PreferenceBatch]:
        """Micro-batches of whole pairs, in order, each of at most `max_tokens` input tokens (output tokens where there
        are no inputs) or of one longer pair. Pairs without a loss are skipped.

        ValueError without `weights`: a micro-batch cannot know what its pairs count in the whole batch."""
        if self.weights is None:
            raise ValueError("weights: a part cannot know what its pairs count; batch.replace(weights=pair_weights())")
        lengths = self.lengths if self.inputs is None else self.inputs.lengths
        for part in parts(lengths.view(-1, 2).sum(1), self.pairs, max_tokens):
            yield self.select(part)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DPOResult:
    """Scalars, which add up over micro-batches: a + b. All but `loss` are sums over pairs, to be divided by `pairs`."""

    loss: torch.Tensor
    pairs: torch.Tensor
    """int64."""
    chosen_reward: torch.Tensor
    """beta (log pi - log ref) of the chosen response, as the loss takes it (normalised by length or not)."""
    rejected_reward: torch.Tensor
    chosen_logprob: torch.Tensor
    """log pi of the chosen response, summed over its tokens in the mask."""
    rejected_logprob: torch.Tensor
    correct: torch.Tensor
    """int64: pairs whose chosen response has the higher reward."""

    def __add__(self, other: DPOResult) -> DPOResult:
        names = [field.name for field in dataclasses.fields(self)]
        return DPOResult(**{name: getattr(self, name) + getattr(other, name) for name in names})


def dpo_loss(
    batch: PreferenceBatch,
    *,
    beta: float = 0.1,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
    length_normalized: bool | None = None,
) -> DPOResult:
    """With x = log pi(y) - log ref(y), summed over a response's tokens in the mask, and delta = x_chosen - x_rejected:

    sigmoid   -(1 - e) log sigma(beta delta) - e log sigma(-beta delta)      DPO (Rafailov et al., arXiv 2305.18290, eq.
              7); e = label_smoothing > 0: conservative DPO, labels that are wrong with probability e (Mitchell 2023)
    ipo       (delta - 1 / (2 beta))^2      IPO (Azar et al., arXiv 2310.12036, eq. 17), beta being its tau

    averaged over pairs. length_normalized: x is the mean over the response's tokens (as in Tulu 3, arXiv 2411.15124,
    section 5.1, and SimPO). Default: for ipo, whose published results were made so, and not for sigmoid.

    A pair with a response that has no token in the mask has loss and gradient 0. ValueError: beta not above 0,
    label_smoothing outside [0, 0.5) or with ipo, a field that the batch lacks."""
    if kind not in get_args(DPOKind):
        raise ValueError(f"kind {kind!r} is unknown; there are {', '.join(get_args(DPOKind))}")
    if not beta > 0:
        raise ValueError(f"beta must be above 0, not {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5, not {label_smoothing}")
    if label_smoothing and kind == "ipo":
        raise ValueError("label_smoothing is for kind='sigmoid'; ipo is bounded as it is")
    for name in ("logprobs", "ref_logprobs"):
        if getattr(batch, name) is None:
            raise ValueError(f"{name}: this loss reads them and the batch has none; batch.replace({name}=...)")
    assert batch.logprobs is not None and batch.ref_logprobs is not None

    now = torch.where(batch.mask, batch.logprobs, 0.0)
    reference = torch.where(batch.mask, batch.ref_logprobs, 0.0).detach()
    scores = sums(now - reference, batch.lengths)
    if length_normalized if length_normalized is not None else kind == "ipo":
        scores = scores / counts(batch.mask, batch.lengths).clamp(min=1)
    chosen, rejected = scores.view(-1, 2).unbind(1)
    delta = chosen - rejected
    if kind == "ipo":
        per_pair = (delta - 1 / (2 * beta)) ** 2
    else:
        per_pair = -F.logsigmoid(beta * delta)
        if label_smoothing:
            per_pair = (1 - label_smoothing) * per_pair - label_smoothing * F.logsigmoid(-beta * delta)

    pairs = batch.pairs
    weights = batch.pair_weights() if batch.weights is None else batch.weights
    rewards = torch.where(pairs, beta * torch.stack([chosen, rejected]).detach(), 0.0)
    logprobs = torch.where(pairs, sums(now.detach(), batch.lengths).view(-1, 2).T, 0.0)
    return DPOResult(
        loss=(torch.where(pairs, per_pair, 0.0) * weights.to(per_pair.dtype)).sum(),
        pairs=pairs.sum(),
        chosen_reward=rewards[0].sum(),
        rejected_reward=rewards[1].sum(),
        chosen_logprob=logprobs[0].sum(),
        rejected_logprob=logprobs[1].sum(),
        correct=(pairs & (rewards[0] > rewards[1])).sum(),
    )
