"""Preference pairs: a better and a worse response to one prompt, from groups whose samples were graded.

    group: rewards 0 1 1 0 - 1 ...  ->  usable samples  ->  candidates (a, b), a's reward above b's  ->  a rule's choice

Tokens in, tokens out: a pair holds the ids that the policy read and wrote, and no text is made of them. What gives no
pair is named, with the reason. Files of pairs: `pair_files`; asking a judge about them: `order_swap`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from longtail.sample import Group, Sample, is_zero_variance
from longtail.trainer_adapter.intervals import wilson

Rule = Literal["best_worst", "random_pair", "all_pairs"]
Truncated = Literal["leave_out", "reject", "use"]
Verdict = Literal["A", "B", "tie"]

ROUNDING = 1e-9
"""Relative: 0.3 - 0.2 has a margin of 0.1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where one response of a pair comes from."""

    sample: str
    """Its id."""
    reward: float | None = None
    grader: str | None = None
    """Name and version of what gave the reward."""
    versions: tuple[int, ...] = ()
    """Policy versions that wrote its tokens, ascending."""
    finish_reason: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """ValueError, which names the field: ids that are none, a response without a token that is trained on, a mask of
    another length, responses that are the same, an empty reason."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    reason: str
    """Why the chosen response is the better one."""
    chosen_mask: tuple[bool, ...] | None = None
    """Of each token of the chosen response whether it is trained on: not what a tool or an environment wrote. None: all
    are."""
    rejected_mask: tuple[bool, ...] | None = None
    group: str | None = None
    """Pairs of one group are not independent of each other."""
    chosen: Origin | None = None
    rejected: Origin | None = None
    verdicts: tuple[Verdict, Verdict] | None = None
    """A judge's, with the chosen response shown first (as A), and with it shown second (as B)."""

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
            ids = getattr(self, name)
            if not ids:
                raise ValueError(f"{name}: is empty; give at least one token")
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise ValueError(f"{name}: must be non-negative integers, not {token!r}")
        for name, ids in (("chosen_mask", self.chosen_ids), ("rejected_mask", self.rejected_ids)):
            mask = getattr(self, name)
            if mask is not None and len(mask) != len(ids):
                raise ValueError(f"{name}: has {len(mask)} entries for {len(ids)} tokens; give one a token")
            if mask is not None and not any(mask):
                raise ValueError(f"{name}: no token of the response is trained on; leave the pair out")
        if self.chosen_ids == self.rejected_ids:
            raise ValueError("rejected_ids: is the chosen response; a pair has two different ones")
        if not self.reason.strip():
            raise ValueError("reason: is empty; say why the chosen response is the better one")

    @property
    def chosen_tokens(self) -> int:
        """Trained on: what its length counts in a loss."""
        return len(self.chosen_ids) if self.chosen_mask is None else sum(self.chosen_mask)

    @property
    def rejected_tokens(self) -> int:
        return len(self.rejected_ids) if self.rejected_mask is None else sum(self.rejected_mask)


# ---- from groups


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairRules:
    """Which pairs a group gives. ValueError at construction for what does not exist or means nothing."""

    rule: Rule = "best_worst"
    """In which order candidates are taken until there are `per_group`:

    best_worst    the largest difference of rewards first, and each sample in one pair at most: the best against the
                  worst, the second best against the second worst, ... Among equal differences those of the most
                  similar lengths first
    random_pair   at random (by `seed`), each sample in one pair at most
    all_pairs     as best_worst, and a sample may be in several pairs"""
    per_group: int | None = None
    """Pairs of a group at most. Default: 1, for all_pairs 16."""
    margin: float = 0.0
    """Rewards differ by at least this, up to rounding (and differ: equal rewards are no preference)."""
    length_ratio: float | None = None
    """The longer response has at most so many times the tokens of the shorter one, counting those that are trained on:
    so that a loss of sums cannot learn length instead of quality."""
    truncated: Truncated = "leave_out"
    """Samples that did not end by themselves (length limit, repetition): in no pair, as the rejected response only, or
    as any other."""
    seed: int = 0
    """Of random_pair."""

    def __post_init__(self) -> None:
        for name, choices in (("rule", get_args(Rule)), ("truncated", get_args(Truncated))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; there are {', '.join(choices)}")
        if self.per_group is not None and self.per_group < 1:
            raise ValueError(f"per_group must be at least 1, not {self.per_group}")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise ValueError(f"margin must be a number of at least 0, not {self.margin}")
        if self.length_ratio is not None and not self.length_ratio >= 1:
            raise ValueError(f"length_ratio must be at least 1 (equal lengths), not {self.length_ratio}")

    @property
    def most(self) -> int:
        return self.per_group or (16 if self.rule == "all_pairs" else 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairSet:
    """What groups gave, and why the rest gave nothing."""

    pairs: tuple[Pair, ...]
    groups: int
    """Looked at."""
    without: Mapping[str, str]
    """Groups without a pair: id -> reason."""
    left_out: Mapping[str, str]
    """Samples of complete groups that could not be in a pair: id -> reason."""
    candidates: int
    """Pairs that the rules allowed; the difference to `pairs` is what `per_group` cut off."""

    def reasons(self) -> dict[str, dict[str, int]]:
        """{"groups": how many gave no pair, by reason; "samples": how many were left out, by reason}."""
        count = {"groups": Counter(self.without.values()), "samples": Counter(self.left_out.values())}
        return {what: dict(found.most_common()) for what, found in count.items()}


def pairs_from_groups(groups: Iterable[Group], rules: PairRules | None = None) -> PairSet:
    """Of complete groups only. What one group gives does not depend on the others, nor on the order of its samples.

    ValueError: samples of a group with different prompts, a reward that is not finite, two groups of one id."""
    rules = rules or PairRules()
    pairs: list[Pair] = []
    without: dict[str, str] = {}
    left_out: dict[str, str] = {}
    seen: set[str] = set()
    candidates = 0
    for group in groups:
        if group.id in seen:
            raise ValueError(f"group {group.id!r} comes twice; give each once")
        seen.add(group.id)
        if not group.is_complete:
            without[group.id] = "it is not complete"
            continue
        for sample in group.samples:
            if (why := _unusable(sample, rules)) is not None:
                left_out[sample.id] = why
        found = _candidates([s for s in group.samples if s.id not in left_out], rules)
        if isinstance(found, str):
            without[group.id] = found
            continue
        candidates += len(found)
        pairs += [_pair(*candidate) for candidate in _take(found, rules)]
    return PairSet(pairs=tuple(pairs), groups=len(seen), without=without, left_out=left_out, candidates=candidates)


def _unusable(sample: Sample, rules: PairRules) -> str | None:
    if sample.status == "failed":
        return "it failed"
    if sample.reward is None:
        return "it has no reward"
    if not math.isfinite(sample.reward):
        raise ValueError(f"sample {sample.id}: reward {sample.reward} is not finite; a grader that failed gives none")
    if not any(sample.loss_mask):
        return "no token of it is trained on"
    if rules.truncated == "leave_out" and _is_truncated(sample):
        return f"it did not end by itself ({sample.finish_reason})"
    return None


def _is_truncated(sample: Sample) -> bool:
    return sample.finish_reason != "stop"


Candidate = tuple[Sample, Sample]
"""The better one first."""


def _candidates(samples: Sequence[Sample], rules: PairRules) -> list[Candidate] | str:
    """Or why there are none."""
    if len(samples) < 2:
        return "fewer than two of its samples are usable"
    if any(sample.prompt_ids != samples[0].prompt_ids for sample in samples):
        raise ValueError(f"group {samples[0].group_id!r}: its samples have different prompts; a pair needs one")
    if is_zero_variance([sample.reward for sample in samples]):
        return "all rewards are equal"
    found = [(a, b) for a in samples for b in samples if _gap((a, b)) > 0]
    lengths = {sample.id: sum(sample.loss_mask) for sample in samples}
    filters: tuple[tuple[str, Callable[[Sample, Sample], bool]], ...] = (
        ("no two rewards of one grader differ", lambda a, b: grader_of(a) == grader_of(b)),
        ("no rewards differ by the margin", lambda a, b: _gap((a, b)) >= rules.margin * (1 - ROUNDING)),
        ("what is better did not end by itself", lambda a, b: rules.truncated == "use" or not _is_truncated(a)),
        ("responses of different rewards are the same tokens", lambda a, b: a.output_ids != b.output_ids),
        (
            "no lengths are within the ratio",
            lambda a, b: (
                rules.length_ratio is None
                or max(lengths[a.id], lengths[b.id]) <= rules.length_ratio * min(lengths[a.id], lengths[b.id])
            ),
        ),
    )
    for why, keep in filters:
        found = [candidate for candidate in found if keep(*candidate)]
        if not found:
            return why
    return _ordered(found, lengths, rules)


def _gap(candidate: Candidate) -> float:
    better, worse = candidate
    assert better.reward is not None and worse.reward is not None
    return better.reward - worse.reward


def _ordered(found: list[Candidate], lengths: Mapping[str, int], rules: PairRules) -> list[Candidate]:
    if rules.rule == "random_pair":
        return sorted(found, key=lambda c: hashlib.blake2b(f"{rules.seed}:{c[0].id}:{c[1].id}".encode()).digest())

    def place(candidate: Candidate) -> tuple[float, float, int, int]:
        a, b = candidate
        return -_gap(candidate), abs(math.log(lengths[a.id] / lengths[b.id])), a.index, b.index

    return sorted(found, key=place)


def _take(candidates: Sequence[Candidate], rules: PairRules) -> list[Candidate]:
    taken: list[Candidate] = []
    used: set[str] = set()
    for a, b in candidates:
        if len(taken) == rules.most:
            break
        if rules.rule == "all_pairs" or not used & {a.id, b.id}:
            taken.append((a, b))
            used |= {a.id, b.id}
    return taken


def _pair(better: Sample, worse: Sample) -> Pair:
    grader = grader_of(better)
    return Pair(
        prompt_ids=better.prompt_ids,
        chosen_ids=tuple(better.output_ids),
        rejected_ids=tuple(worse.output_ids),
        reason=f"reward {better.reward:g} against {worse.reward:g}" + (f" ({grader})" if grader else ""),
        chosen_mask=_mask(better),
        rejected_mask=_mask(worse),
        group=better.group_id,
        chosen=origin(better),
        rejected=origin(worse),
    )


def _mask(sample: Sample) -> tuple[bool, ...] | None:
    mask = tuple(sample.loss_mask)
    return None if all(mask) else mask


def grader_of(sample: Sample) -> str | None:
    """Name and version of what gave its reward, where that is recorded. Rewards of two graders are not compared."""
    return sample.grader


def origin(sample: Sample) -> Origin:
    return Origin(
        sample=sample.id,
        reward=sample.reward,
        grader=grader_of(sample),
        versions=tuple(sorted({int(version) for version in sample.versions if version >= 0})),
        finish_reason=sample.finish_reason,
    )


# ---- length bias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """Whether the longer response tends to be the chosen one: a loss then learns length too. Tokens: those that are
    trained on."""

    chosen_mean: float
    rejected_mean: float
    longer: int
    """Pairs whose chosen response is the longer one."""
    shorter: int
    equal: int
    share: float | None
    """longer / (longer + shorter); None where all lengths are equal."""
    interval: tuple[float, float] | None
    """95 % (Wilson). Pairs of one group count as one observation, for they may all say the same."""

    @property
    def is_biased(self) -> bool:
        """Whether the interval leaves one half out."""
        return self.interval is not None and not self.interval[0] <= 0.5 <= self.interval[1]


def length_bias(pairs: Sequence[Pair]) -> LengthBias | None:
    """None without pairs."""
    if not pairs:
        return None
    signs = [
        (pair.chosen_tokens > pair.rejected_tokens) - (pair.chosen_tokens < pair.rejected_tokens) for pair in pairs
    ]
    longer, shorter = signs.count(1), signs.count(-1)
    share = longer / (longer + shorter) if longer + shorter else None
    units = {pair.group or i for i, (pair, sign) in enumerate(zip(pairs, signs, strict=True)) if sign}
    return LengthBias(
        chosen_mean=sum(pair.chosen_tokens for pair in pairs) / len(pairs),
        rejected_mean=sum(pair.rejected_tokens for pair in pairs) / len(pairs),
        longer=longer,
        shorter=shorter,
        equal=signs.count(0),
        share=share,
        interval=None if share is None else wilson(share, len(units)),
    )


# ---- held out


def hold_out(pairs: Sequence[Pair], share: float, seed: int = 0) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """-> pairs to train on, pairs to measure on: about `share` of the prompts, by a hash of (seed, prompt), so that a
    prompt's pairs stay together and a prompt's side does not depend on what else is in the set.

    ValueError: a share outside [0, 1), or one that leaves a side empty that is asked for."""
    if not 0 <= share < 1:
        raise ValueError(f"share must be at least 0 and below 1, not {share}")
    sides: tuple[list[Pair], list[Pair]] = [], []
    for pair in pairs:
        digest = hashlib.blake2b(f"{seed}:{pair.prompt_ids}".encode(), digest_size=8).digest()
        sides[int.from_bytes(digest, "little") < share * 2**64].append(pair)
    if pairs and (not sides[0] or (share and not sides[1])):
        raise ValueError(
            f"share {share} of {len(pairs)} pairs holds out {len(sides[1])}; give more pairs or another share"
        )
    return tuple(sides[0]), tuple(sides[1])
