"""The record that a loss reads. Packed: one number an output token, the sequences one after the other.

    sequence              0             1       2         S = 3 sequences
    lengths               5             2       3         N = 10 output tokens
    logprobs          [ . . . . .      . .     . . . ]    and likewise all that is one number a token
    mask                0 1 1 0 1      1 1     1 1 1      0: an observation, too old, or left out on purpose
    inputs.input_ids  p p . . . . . p p p . . p . . .     what the trainer's forward pass reads (M tokens), p: prompt

Whatever `mask` leaves out does not exist for a loss: not in a sum, not in a count, and a NaN there harms nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from longtail.sample import OBSERVATION

# ---- sums over sequences


def sums(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """x float [N], lengths int64 [S] -> [S], the sum over each sequence, in its own order whatever stands beside it."""
    if not len(lengths):
        return x
    return torch.segment_reduce(x, "sum", lengths=lengths, axis=0, initial=0.0)


def means(x: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """x float [N], mask bool [N] -> [S], the mean over each sequence's tokens in `mask`; 0 where there are none."""
    total = sums(torch.where(mask, x, 0.0), lengths)
    return total / counts(mask, lengths).clamp(min=1).to(x.dtype)


def counts(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """mask bool [N] -> int64 [S]: tokens of each sequence that are in it. Exact at any length."""
    ends = torch.cat([lengths.new_zeros(1), mask.cumsum(0)])[lengths.cumsum(0)]
    return torch.diff(ends, prepend=ends.new_zeros(1))


def expand(y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """y [S, ...] -> [N, ...]: each sequence's value at each of its tokens."""
    return y.repeat_interleave(lengths, 0)


def parts(tokens: torch.Tensor, taken: torch.Tensor, max_tokens: int) -> Iterator[torch.Tensor]:
    """Items of a batch in parts: bool [S] each. tokens: int64 [S], of each item; taken: bool [S], those that are in a
    part at all, in order; a part has at most `max_tokens`, or one item of more. ValueError: max_tokens below 1."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    sizes = tokens.tolist()
    part: list[int] = []
    total = 0
    for i in taken.nonzero()[:, 0].tolist():
        if part and total + sizes[i] > max_tokens:
            yield _among(part, taken)
            part, total = [], 0
        part.append(i)
        total += sizes[i]
    if part:
        yield _among(part, taken)


def _among(items: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    chosen = torch.zeros_like(like)
    chosen[list(items)] = True
    return chosen


# ---- records


def moved(record: Any, device: torch.device | str) -> dict[str, Any]:
    """By name, a record's fields that live on a device, on that one: tensors, and records in it."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor | Inputs)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What the trainer's forward pass reads: prompts and outputs of S sequences, packed without padding."""

    input_ids: torch.Tensor
    """int64 [M]."""
    lengths: torch.Tensor
    """int64 [S], prompt and output."""
    prompt_lengths: torch.Tensor
    """int64 [S], at least 1 each."""

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 [S + 1]: where each sequence starts and ends, as variable-length attention wants it."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)]).to(torch.int32)

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [M], from 0 in each sequence."""
        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.input_ids), device=self.input_ids.device) - expand(starts, self.lengths)

    @property
    def logit_index(self) -> torch.Tensor:
        """int64 [N]: for each output token the row of the input whose logits predict it, which is the one before it."""
        return (self.position_ids >= expand(self.prompt_lengths, self.lengths)).nonzero()[:, 0] - 1

    @property
    def labels(self) -> torch.Tensor:
        """int64 [N]: the output tokens."""
        return self.input_ids[self.logit_index + 1]

    def to(self, device: torch.device | str) -> Inputs:
        return dataclasses.replace(self, **moved(self, device))

    def select(self, chosen: torch.Tensor) -> Inputs:
        """chosen bool [S] -> those sequences."""
        return Inputs(
            input_ids=self.input_ids[expand(chosen, self.lengths)],
            lengths=self.lengths[chosen],
            prompt_lengths=self.prompt_lengths[chosen],
        )


_TOKEN_FIELDS = ("logprobs", "proximal_logprobs", "ref_logprobs", "weights")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """S sequences with N output tokens, for a policy loss. Log-probabilities are natural, of the output tokens, under
    the distribution that was sampled from (the sampling temperature applied), which the trainer's must be too.

    ValueError, which names the field, for shapes or types that do not fit."""

    lengths: torch.Tensor
    """int64 [S], output tokens of each sequence; 0 is allowed."""
    mask: torch.Tensor
    """bool [N]: trained on."""
    advantages: torch.Tensor
    """float [N]."""
    rollout_logprobs: torch.Tensor
    """float [N], at generation: under the behaviour policy, that of each token's own version."""
    versions: torch.Tensor
    """int64 [N]: policy version that sampled the token; -1 (OBSERVATION) for one that an environment wrote."""
    version: int
    """The trainer's, of which `logprobs` are. A token's staleness is this minus its own."""
    groups: torch.Tensor
    """int64 [S]: which group each sequence is of."""
    logprobs: torch.Tensor | None = None
    """float [N], now: under the weights that are trained. The only one through which gradients flow."""
    proximal_logprobs: torch.Tensor | None = None
    """float [N], under the weights at the start of this update (the old policy of decoupled PPO)."""
    ref_logprobs: torch.Tensor | None = None
    """float [N], under the reference policy of a KL penalty."""
    weights: torch.Tensor | None = None
    """float [N]: what each token's loss counts in the whole batch, as `token_weights` makes them. With them the losses
    of micro-batches add up to the loss of the batch."""
    sample_ids: tuple[str, ...] = ()
    """S of them, or none."""
    inputs: Inputs | None = None
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Ids of samples that are not in the batch, and why."""

    def __post_init__(self) -> None:
        _want("lengths", self.lengths, (len(self.lengths),), "integer")
        n, s = int(self.lengths.sum()), len(self.lengths)
        if s and int(self.lengths.min()) < 0:
            raise ValueError(f"lengths has {int(self.lengths.min())}; the output tokens of a sequence are 0 or more")
        _want("mask", self.mask, (n,), "bool")
        _want("versions", self.versions, (n,), "integer")
        _want("groups", self.groups, (s,), "integer")
        for name in ("advantages", "rollout_logprobs", *_TOKEN_FIELDS):
            value = getattr(self, name)
            if value is not None:
                _want(name, value, (n,), "float")
        if self.sample_ids and len(self.sample_ids) != s:
            raise ValueError(f"sample_ids has {len(self.sample_ids)} entries for {s} sequences; give one each, or none")
        if self.inputs is not None:
            outputs = self.inputs.lengths - self.inputs.prompt_lengths
            if not torch.equal(outputs, self.lengths):
                raise ValueError("inputs.lengths minus inputs.prompt_lengths must be lengths, the output tokens")

    @classmethod
    def from_padded(
        cls,
        *,
        mask: torch.Tensor,
        advantages: torch.Tensor,
        rollout_logprobs: torch.Tensor | None = None,
        versions: torch.Tensor | None = None,
        version: int = 0,
        groups: torch.Tensor | None = None,
        **others: torch.Tensor | None,
    ) -> TrainBatch:
        """From tensors [B, T], one row a response: mask bool or 0/1 (padding: 0); advantages float [B] or [B, T];
        rollout_logprobs default to `logprobs`, detached (on-policy), versions to `version`, groups to one a row;
        others: logprobs, proximal_logprobs, ref_logprobs, weights. Each row is a sequence of T tokens of which `mask`
        says what is real."""
        if mask.dim() != 2:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, must be [B, T]")
        rows, length = mask.shape
        if unknown := set(others) - set(_TOKEN_FIELDS):
            raise ValueError(f"{', '.join(sorted(unknown))}: no such field; there are {', '.join(_TOKEN_FIELDS)}")
        if rollout_logprobs is None:
            if (now := others.get("logprobs")) is None:
                raise ValueError("rollout_logprobs: give those at generation, or logprobs if they are the same")
            rollout_logprobs = now.detach()
        if advantages.dim() == 1:
            _want("advantages", advantages, (rows,), "float")
            advantages = advantages[:, None].expand(rows, length)
        given = {"advantages": advantages, "rollout_logprobs": rollout_logprobs, "versions": versions, **others}
        for name, value in given.items():
            if value is not None and value.shape != mask.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, must be that of mask, {tuple(mask.shape)}")
        if versions is None:
            versions = torch.full_like(mask, version, dtype=torch.int64)
        flat: dict[str, Any] = {name: value.flatten() for name, value in others.items() if value is not None}
        return cls(
            lengths=torch.full((rows,), length, device=mask.device),
            mask=mask.bool().flatten(),
            advantages=advantages.flatten(),
            rollout_logprobs=rollout_logprobs.flatten(),
            versions=versions.flatten(),
            version=version,
            groups=torch.arange(rows, device=mask.device) if groups is None else groups,
            **flat,
        )

    # -- reading

    def __len__(self) -> int:
        return len(self.lengths)

    def need(self, name: str) -> torch.Tensor:
        """The field, float [N]; ValueError where it is None."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{name}: this loss reads them and the batch has none; batch.replace({name}=...)")
        return value

    @property
    def staleness(self) -> torch.Tensor:
        """int64 [N]: versions behind the trainer's. Without meaning at observations."""
        return self.version - self.versions

    @property
    def sampled(self) -> torch.Tensor:
        """bool [N]: written by a policy, trained on or not."""
        return self.versions != OBSERVATION

    @property
    def trained(self) -> torch.Tensor:
        """bool [S]: sequences with a token in `mask`. The others need no forward pass."""
        return counts(self.mask, self.lengths) > 0

    def padded(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """x [N], of this batch's tokens -> [S, longest output], padded on the right with `fill`."""
        _want("x", x, (len(self.mask),), "any")
        width = int(self.lengths.max()) if len(self) else 0
        real = torch.arange(width, device=x.device) < self.lengths[:, None]
        return torch.full(real.shape, fill, dtype=x.dtype, device=x.device).masked_scatter(real, x)

    # -- changing

    def replace(self, **fields: Any) -> TrainBatch:
        """A batch with other fields, such as logprobs=..."""
        return dataclasses.replace(self, **fields)

    def to(self, device: torch.device | str) -> TrainBatch:
        return dataclasses.replace(self, **moved(self, device))

    def without_stale(self, max_staleness: int) -> TrainBatch:
        """Tokens more than `max_staleness` versions behind are out of the mask."""
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, not {max_staleness}")
        return dataclasses.replace(self, mask=self.mask & (self.staleness <= max_staleness))

    def without_earlier_segments(self) -> TrainBatch:
        """Of each sequence only the tokens of its newest version stay in the mask: the segments that earlier iterations
        made are context, and not trained on (Kimi k1.5, arXiv 2501.12599, section 2.6.2)."""
        newest = self.versions.new_full((len(self),), int(OBSERVATION))
        owner = expand(torch.arange(len(self), device=self.versions.device), self.lengths)
        newest = newest.scatter_reduce(0, owner, self.versions, "amax")
        return dataclasses.replace(self, mask=self.mask & (self.versions == expand(newest, self.lengths)))

    def select(self, chosen: torch.Tensor) -> TrainBatch:
        """chosen bool [S] -> those sequences, in their order."""
        _want("chosen", chosen, (len(self),), "bool")
        tokens = expand(chosen, self.lengths)
        fields = {name: getattr(self, name) for name in ("mask", "advantages", "rollout_logprobs", "versions")}
        fields |= {name: getattr(self, name) for name in _TOKEN_FIELDS if getattr(self, name) is not None}
        return dataclasses.replace(
            self,
            lengths=self.lengths[chosen],
            groups=self.groups[chosen],
            sample_ids=tuple(i for i, c in zip(self.sample_ids, chosen.tolist(), strict=False) if c),
            inputs=None if self.inputs is None else self.inputs.select(chosen),
            **{name: value[tokens] for name, value in fields.items()},
        )

    def split(self, max_tokens: int) -> Iterator[TrainBatch]:
        """Micro-batches of whole sequences, in order, each of at most `max_tokens` input tokens (output tokens where
        there are no inputs) or of one longer sequence. Sequences without a token in the mask are skipped.

        ValueError without `weights`: a micro-batch cannot know what its tokens count in the whole batch."""
        self.need("weights")
        lengths = self.lengths if self.inputs is None else self.inputs.lengths
        for part in parts(lengths, self.trained, max_tokens):
            yield self.select(part)


def _want(name: str, value: torch.Tensor, shape: tuple[int, ...], kind: str) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, must be {list(shape)}")
    is_float = value.is_floating_point()
    is_kind = {"float": is_float, "bool": value.dtype == torch.bool, "any": True}
    is_kind["integer"] = not (is_float or value.is_complex() or value.dtype == torch.bool)
    if not is_kind[kind]:
        raise ValueError(f"{name} is {value.dtype}, must be {kind}")
