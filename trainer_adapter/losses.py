"""Policy-gradient losses: GRPO and its variants are settings of one clipped loss.

    r_t    = pi(t) / pi_prox(t)                  ratio = "token"
           = (prod_t pi(t) / pi_prox(t))^(1/T)   ratio = "sequence", at each of the T tokens in the mask
    L_t    = -c_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef k_t
    loss   = sum_t w_t L_t                       w_t: `aggregation`

A_t: advantages, c_t: `corrections`, k_t: `kl`; over the tokens in the mask. Nothing else has any influence.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch

from longtail.trainer_adapter.advantages import Advantage
from longtail.trainer_adapter.batch import TrainBatch, counts, expand, means
from longtail.trainer_adapter.corrections import Correction, decoupled

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length", "group_mean"]
Proximal = Literal["behaviour", "recorded", "now"]
KL = Literal["k1", "k2", "k3"]


def token_weights(batch: TrainBatch, aggregation: Aggregation, fixed_length: int | None = None) -> torch.Tensor:
    """What each token's loss counts, float [N], 0 outside the mask. n: tokens in the mask, of the batch, of a sequence
    or of a group; S: sequences, K: groups with a token in the mask (what is left out does not thin out the others).

    token_mean      1 / n            DAPO and most trainers: long responses count more, each token the same
    sequence_mean   1 / (S n_s)      GRPO: each response counts the same, its tokens less the longer it is
    sequence_sum    1 / S            the sum of a response's tokens
    fixed_length    1 / (S length)   Dr.GRPO: the same, scaled by a constant: no length bias
    group_mean      1 / (K n_k)      DAPO's equation to the letter: each question counts the same

    To be computed for the whole batch, before it is split (`TrainBatch.split`)."""
    if aggregation not in get_args(Aggregation):
        raise ValueError(f"aggregation {aggregation!r} is unknown; there are {', '.join(get_args(Aggregation))}")
    if (aggregation == "fixed_length") != (fixed_length is not None):
        raise ValueError(f"fixed_length is {fixed_length} with aggregation {aggregation!r}; the two go together")
    if fixed_length is not None and fixed_length < 1:
        raise ValueError(f"fixed_length must be at least 1 token, not {fixed_length}")
    mask, lengths = batch.mask, batch.lengths
    weights = mask.to(batch.advantages.dtype)
    per_sequence = counts(mask, lengths)
    sequences = (per_sequence > 0).sum().clamp(min=1)
    if aggregation == "token_mean":
        return weights / mask.sum().clamp(min=1)
    if aggregation == "sequence_mean":
        return weights / (expand(per_sequence.clamp(min=1), lengths) * sequences)
    if aggregation == "group_mean":
        if not len(batch):
            return weights
        per_group = per_sequence.new_zeros(int(batch.groups.max()) + 1).index_add(0, batch.groups, per_sequence)
        return weights / (expand(per_group[batch.groups].clamp(min=1), lengths) * (per_group > 0).sum().clamp(min=1))
    return weights / (sequences * (fixed_length or 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """Scalars. `loss` has the gradient. Each adds up over micro-batches: a + b."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    """The part of the advantages; weighted as `loss` is."""
    kl: torch.Tensor
    """The estimate of KL(pi || reference), without its coefficient; weighted as `loss` is. 0 without a penalty."""
    tokens: torch.Tensor
    """int64: in the mask."""
    clipped_low: torch.Tensor
    """int64: tokens of negative advantage whose gradient is cut off below 1 - clip_low (or above clip_dual)."""
    clipped_high: torch.Tensor
    """int64: tokens of positive advantage, above 1 + clip_high."""
    dropped: torch.Tensor
    """int64: tokens in the mask to which a correction gave factor 0."""

    def __add__(self, other: LossResult) -> LossResult:
        names = [field.name for field in dataclasses.fields(self)]
        return LossResult(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss, as settings. Called with a batch that has `logprobs` it gives a `LossResult`; a pure function.

    A mask without any token gives a loss of 0 and gradients of 0. A NaN in the mask comes out as NaN.

    ValueError: settings that contradict each other, or a field that the batch lacks."""

    advantage: Advantage = "mean_std"
    """For `pack`, which computes them; not read here."""
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float | None = 0.2
    """None: the ratio is not bounded below."""
    clip_high: float | None = 0.2
    clip_dual: float | None = None
    """Upper bound of the ratio at negative advantages, which the two others leave open (dual clip, Ye et al., arXiv
    1912.09729; TRL's delta). Above 1 + clip_high."""
    aggregation: Aggregation = "sequence_mean"
    fixed_length: int | None = None
    proximal: Proximal = "behaviour"
    """pi_prox. "behaviour": the policy at generation, pi_prox = mu; a batch may then be used for several updates, and
    what is stale is corrected by r itself, within its clip. "recorded": proximal_logprobs. "now": pi itself without
    its gradient, r = 1; for one update a batch; what is stale is left to `corrections`."""
    corrections: tuple[Correction, ...] = ()
    kl_coef: float = 0.0
    kl: KL = "k3"
    """Estimates KL(pi || ref) from d = log ref - log pi at the sampled token (Schulman 2020): k1 = -d, k2 = d^2 / 2,
    k3 = exp(d) - d - 1."""
    kl_in: Literal["loss", "reward"] | None = None
    """"loss": k is differentiated as it stands. On samples of pi, k2 then has the gradient of KL(pi || ref), k3 that of
    KL(ref || pi) (close to it near the reference), and k1 one of expectation 0: it would do nothing, and is refused.
    "reward": kl_coef k, without its gradient, is taken off the token's advantage, so that it goes through ratio, clip
    and corrections; k1 then has the gradient of KL(pi || ref), each token answering for its own. (Tang and Munos, arXiv
    2506.09477; Liu et al., arXiv 2510.01555.) Default: reward for k1, loss for k2 and k3."""
    kl_weighted: bool = False
    """With kl_in="loss": k times r c, the importance weight that gradients also flow through; k3 then has the gradient
    of KL(pi || ref) also on samples of mu (DeepSeek-V3.2, arXiv 2512.02556; TRL's use_bias_correction_kl)."""

    def __post_init__(self) -> None:
        if not isinstance(self.corrections, tuple):
            raise ValueError(f"corrections must be a tuple, such as tis(), not {self.corrections!r}")
        for name, choices in (
            ("advantage", get_args(Advantage)),
            ("ratio", ("token", "sequence")),
            ("aggregation", get_args(Aggregation)),
            ("proximal", get_args(Proximal)),
            ("kl", get_args(KL)),
            ("kl_in", ("loss", "reward", None)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; there are {', '.join(map(str, choices))}")
        if (self.aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(f"fixed_length is {self.fixed_length} with aggregation {self.aggregation!r}: give both")
        if self.clip_low is not None and not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low must be 0 to 1, or None, not {self.clip_low}")
        if self.clip_high is not None and not self.clip_high >= 0:
            raise ValueError(f"clip_high must be at least 0, or None, not {self.clip_high}")
        if self.clip_dual is not None and not self.clip_dual > 1 + (self.clip_high or 0):
            raise ValueError(f"clip_dual must be above 1 + clip_high, not {self.clip_dual}")
        if not (math.isfinite(self.kl_coef) and self.kl_coef >= 0):
            raise ValueError(f"kl_coef must be at least 0, not {self.kl_coef}")
        if self.kl == "k1" and self.kl_in == "loss":
            raise ValueError('kl_in="loss" with kl="k1" has a gradient of expectation 0; use "reward", or k2 or k3')
        if self.kl_weighted and self.kl_place != "loss":
            raise ValueError('kl_weighted is for kl_in="loss"; in the reward the penalty is weighted anyway')
        if self.proximal == "behaviour" and any(c.weighs for c in self.corrections):
            raise ValueError(
                'corrections weigh with pi_prox / mu, which is 1 with proximal="behaviour" (the ratio of the loss '
                'corrects already): use proximal="now" or "recorded", or corrections that only mask (weigh=False)'
            )

    @property
    def kl_place(self) -> Literal["loss", "reward"]:
        return self.kl_in or ("reward" if self.kl == "k1" else "loss")

    def weigh(self, batch: TrainBatch) -> TrainBatch:
        """The batch with `weights`, for `split`."""
        return batch.replace(weights=token_weights(batch, self.aggregation, self.fixed_length))

    def __call__(self, batch: TrainBatch) -> LossResult:
        mask = batch.mask
        # Selected before any arithmetic: what is masked has neither a value nor a gradient, whatever it is.
        now = torch.where(mask, batch.need("logprobs"), 0.0)
        proximal = torch.where(mask, self._proximal(batch), 0.0).detach()
        advantages = torch.where(mask, batch.advantages, 0.0)
        factors = self._factors(batch, proximal)

        kl = torch.zeros_like(now)
        if self.kl_coef:
            kl = kl_estimate(now, torch.where(mask, batch.need("ref_logprobs"), 0.0).detach(), self.kl)
            if self.kl_place == "reward":
                kl = kl.detach()
                advantages = advantages - self.kl_coef * kl

        log_ratio = now - proximal
        if self.ratio == "sequence":
            log_ratio = expand(means(log_ratio, mask, batch.lengths), batch.lengths)
        # Tokens without a policy gradient get ratio 1 and a finite factor: 0 times an infinite one would be NaN.
        idle = (advantages == 0) | (factors == 0)
        low, high = self._clipped(log_ratio.detach(), advantages)
        bounded = torch.where(idle & ~log_ratio.isnan(), 0.0, self._bounded(log_ratio, advantages))
        policy = -bounded.exp() * advantages * torch.where(idle, 0.0, factors)

        per_token = policy
        if self.kl_coef and self.kl_place == "loss":
            if self.kl_weighted:
                kl = kl * log_ratio.exp() * factors  # an overflow shows
            per_token = policy + self.kl_coef * kl
        weights = batch.weights
        if weights is None:
            weights = token_weights(batch, self.aggregation, self.fixed_length)
        return LossResult(
            loss=(weights * per_token).sum(),
            policy_loss=(weights * policy).sum().detach(),
            kl=(weights * kl).sum().detach(),
            tokens=mask.sum(),
            clipped_low=(low & ~idle).sum(),
            clipped_high=(high & ~idle).sum(),
            dropped=(mask & (factors == 0)).sum(),
        )

    def _proximal(self, batch: TrainBatch) -> torch.Tensor:
        fields = {"behaviour": "rollout_logprobs", "recorded": "proximal_logprobs", "now": "logprobs"}
        return batch.need(fields[self.proximal])

    def factors(self, batch: TrainBatch) -> torch.Tensor:
        """What the corrections multiply each token's policy loss with, float [N], 1 outside the mask."""
        return self._factors(batch, self._proximal(batch).detach())

    def _factors(self, batch: TrainBatch, proximal: torch.Tensor) -> torch.Tensor:
        factors = torch.ones_like(proximal)
        if self.proximal == "behaviour" and self.corrections:
            proximal = batch.need("logprobs").detach()  # what masks by a ratio masks by that of the current policy
        for correction in self.corrections:
            one = torch.where(batch.mask, correction(batch, proximal).detach(), 1.0)
            factors = torch.where((factors == 0) | (one == 0), 0.0, factors * one)
        return factors

    def _clipped(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bool [N] twice: where the clipped side of the minimum is the smaller one, at negative and positive A."""
        low, high, dual = self._bounds()
        negative = (advantages < 0) & ((log_ratio < low) | (log_ratio > dual))
        return negative, (advantages > 0) & (log_ratio > high)

    def _bounds(self) -> tuple[float, float, float]:
        """log of the ratio's: lower at A < 0, upper at A > 0, upper at A < 0."""
        low = -math.inf if self.clip_low in (None, 1.0) else math.log1p(-float(self.clip_low or 0.0))
        high = math.inf if self.clip_high is None else math.log1p(self.clip_high)
        return low, high, math.inf if self.clip_dual is None else math.log(self.clip_dual)

    def _bounded(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """The logarithm of the ratio that the minimum takes. Selected before exp, so that a ratio which overflows and
        is clipped has the gradient 0 and not NaN."""
        low, high, dual = self._bounds()
        bounded = torch.where((advantages > 0) & (log_ratio > high), high, log_ratio)
        bounded = torch.where((advantages < 0) & (log_ratio < low), low, bounded)
        return torch.where((advantages < 0) & (log_ratio > dual), dual, bounded)


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, kind: KL) -> torch.Tensor:
    """Of KL(pi || ref) at tokens that pi sampled (Schulman 2020, "Approximating KL divergence"): with
    d = ref_logprobs - logprobs, k1 = -d (unbiased), k2 = d^2 / 2 (low variance, biased), k3 = exp(d) - d - 1 (unbiased
    and never negative)."""
    d = ref_logprobs - logprobs
    if kind == "k1":
        return -d
    return d * d / 2 if kind == "k2" else torch.expm1(d) - d


# ---- by name


def grpo(**settings: Any) -> PolicyLoss:
    """GRPO (Shao et al., "DeepSeekMath", arXiv 2402.03300, eq. 3):

        A = (R - mean R) / std R of the group
        loss = -1/S sum_s 1/n_s sum_t min(r_t A, clip(r_t, 0.8, 1.2) A) + kl_coef k3

    The paper has kl_coef 0.04; the default here is 0. settings: fields of `PolicyLoss`."""
    return PolicyLoss(**settings)


def dr_grpo(*, fixed_length: int, **settings: Any) -> PolicyLoss:
    """Dr.GRPO (Liu et al., "Understanding R1-Zero-like training", arXiv 2503.20783): GRPO without the division by the
    standard deviation and by the response's length; fixed_length, a constant such as the longest response allowed,
    takes its place:

        A = R - mean R of the group
        loss = -1/S sum_s 1/fixed_length sum_t min(r_t A, clip(r_t, 0.8, 1.2) A)"""
    return _variant(settings, advantage="mean", aggregation="fixed_length", fixed_length=fixed_length)


def dapo(**settings: Any) -> PolicyLoss:
    """DAPO (Yu et al., arXiv 2503.14476, eq. 8): clip-higher, and the mean over tokens:

        loss = -1/n sum_s sum_t min(r_t A, clip(r_t, 0.8, 1.28) A)

    with GRPO's A and no KL. Of the paper, `pack` has dynamic sampling (zero_variance="leave_out") and overlong
    filtering (mask_truncated). Over a batch of several groups n is all its tokens, as in DAPO's own code;
    aggregation="group_mean" is the paper's equation."""
    return _variant(settings, clip_high=0.28, aggregation="token_mean")


def gspo(**settings: Any) -> PolicyLoss:
    """GSPO (Zheng et al., arXiv 2507.18071, eq. 5 to 7): one ratio a sequence, the geometric mean of its tokens':

        s = exp(1/n_s sum_t log pi(t) / pi_prox(t))
        loss = -1/S sum_s min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)

    with GRPO's A. Advantages that differ by token make it GSPO-token in value."""
    return _variant(settings, ratio="sequence", clip_low=3e-4, clip_high=4e-4)


def decoupled_ppo(*, cap: float = math.inf, **settings: Any) -> PolicyLoss:
    """Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, Fu et al., arXiv 2505.24298, eq. 5): the clip is around
    the proximal policy, which is close, and the behaviour policy, maybe many versions old, enters as a weight:

        loss = -1/n sum_t pi_prox(t) / mu(t) min(r_t A, clip(r_t, 0.8, 1.2) A),  r_t = pi(t) / pi_prox(t)

    cap: a token with pi_prox / mu above it is left out. Needs proximal_logprobs, computed once before the first update
    on a batch."""
    return _variant(settings, proximal="recorded", corrections=decoupled(cap), aggregation="token_mean")


def _variant(settings: dict[str, Any], **defaults: Any) -> PolicyLoss:
    return PolicyLoss(**defaults | settings)


POLICY_LOSSES: Mapping[str, Callable[..., PolicyLoss]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "decoupled_ppo": decoupled_ppo,
}


def policy_loss(name: str, **settings: Any) -> PolicyLoss:
    """By name. ValueError: one that does not exist, or settings that it does not have or lacks."""
    if name not in POLICY_LOSSES:
        raise ValueError(f"loss {name!r} is unknown; there are {', '.join(POLICY_LOSSES)}")
    try:
        return POLICY_LOSSES[name](**settings)
    except TypeError as error:
        own = [n for n in inspect.signature(POLICY_LOSSES[name]).parameters if n != "settings"]
        known = ", ".join(dict.fromkeys(own + [field.name for field in dataclasses.fields(PolicyLoss)]))
        raise ValueError(f"loss {name!r}: {error}; its settings: {known}") from None
