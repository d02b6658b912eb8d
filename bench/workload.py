"""What a simulated run has to make: groups of samples, the tokens of each prompt and of each response.

    parse_workload("lognormal(median=8000, sigma=1.1, cap=65536, icc=0.5, groups=64, group_size=16)")
    parse_workload("histogram(servegen-r1, cap=32768, groups=64, group_size=16)")
    parse_workload("lengths.parquet")        # or .csv, .jsonl: these samples
    parse_workload("trace.parquet")          # a trace of ours: the samples of its first run

Siblings are alike: a hard prompt's responses are all long. Lengths are drawn through a Gaussian copula,

    z = sqrt(icc) u + sqrt(1 - icc) e       u: normal, one a group; e: normal, one a sample
    tokens = quantile function of the family at Phi(z)

so that icc, the intra-class correlation of the normal scores of the lengths, is the same number for every family, and
`intraclass_correlation` measures it on data. Group g of seed s is the same however many groups there are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

DEFAULT_PROMPT = 256
_NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """Samples in order of groups; n samples, G groups."""

    output_tokens: np.ndarray
    """int32 [n]: at least 1; the cap where it was reached."""
    prompt_tokens: np.ndarray
    """int32 [n], the same in a group."""
    group_starts: np.ndarray
    """int64 [G + 1]: group g has samples group_starts[g] to group_starts[g + 1] - 1."""
    capped: np.ndarray
    """bool [n]: ended by its cap."""
    label: str
    names: tuple[str, ...] | None = None
    """Of the groups; None: p0, p1, ..."""
    notes: tuple[str, ...] = ()
    """What was left out or assumed."""

    def __post_init__(self) -> None:
        n = len(self.output_tokens)
        if n == 0:
            raise ValueError(f"{self.label}: there is no sample in it")
        assert len(self.prompt_tokens) == len(self.capped) == n == self.group_starts[-1]
        assert self.names is None or len(self.names) == self.num_groups

    def __len__(self) -> int:
        return len(self.output_tokens)

    @property
    def num_groups(self) -> int:
        return len(self.group_starts) - 1

    @property
    def group_sizes(self) -> np.ndarray:
        """int64 [G]."""
        return np.diff(self.group_starts)

    def name(self, group: int) -> str:
        return f"p{group}" if self.names is None else self.names[group]

    def groups(self) -> Iterator[tuple[str, int, list[int]]]:
        """Of each group: its name, the tokens of its prompt, and those of its responses."""
        starts = self.group_starts.tolist()
        for group in range(self.num_groups):
            start, end = starts[group], starts[group + 1]
            yield self.name(group), int(self.prompt_tokens[start]), self.output_tokens[start:end].tolist()

    def tokens_of(self, sample_id: str) -> int:
        """Output tokens of sample NAME/INDEX, as `Group.from_prompt` names samples. ValueError for one it lacks."""
        name, _, index = sample_id.rpartition("/")
        group = self._numbers.get(name) if self.names is not None else _number_of(name, self.num_groups)
        if group is None or not index.isdecimal() or int(index) >= self.group_sizes[group]:
            raise ValueError(f"sample {sample_id!r} is not in the workload {self.label}")
        return int(self.output_tokens[self.group_starts[group] + int(index)])

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names or ())}

    def resample(self, groups: int, seed: int = 0) -> Workload:
        """So many groups drawn from these with replacement, whole: siblings stay together."""
        if groups < 1:
            raise ValueError(f"groups must be at least 1, not {groups}")
        picked = np.random.default_rng(seed).integers(self.num_groups, size=groups)
        sizes = self.group_sizes[picked]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        index = np.repeat(self.group_starts[picked] - starts[:-1], sizes) + np.arange(starts[-1])
        return Workload(
            output_tokens=self.output_tokens[index],
            prompt_tokens=self.prompt_tokens[index],
            group_starts=starts,
            capped=self.capped[index],
            label=self.label,
            notes=(*self.notes, f"{groups} groups drawn with replacement from {self.num_groups}"),
        )

    def summary(self) -> dict[str, Any]:
        """samples, groups, mean, p50, p90, p99, max (output tokens), capped (share), icc (None if no group has two)."""
        p50, p90, p99 = np.quantile(self.output_tokens, (0.5, 0.9, 0.99), method="inverted_cdf").tolist()
        numbers = {"mean": float(self.output_tokens.mean()), "p50": p50, "p90": p90, "p99": p99}
        numbers |= {"max": int(self.output_tokens.max()), "capped": float(self.capped.mean())}
        icc = intraclass_correlation(self.output_tokens, self.group_starts)
        return {"label": self.label, "samples": len(self), "groups": self.num_groups, **numbers, "icc": icc}


def _number_of(name: str, groups: int) -> int | None:
    digits = name[1:]
    number = int(digits) if name.startswith("p") and digits.isdecimal() else -1
    return number if 0 <= number < groups and str(number) == digits else None


# --- families: (parameters, quantile function of z)


def _survival(z: np.ndarray) -> np.ndarray:
    """1 - Phi(z), exact in the upper tail."""
    return np.array([0.5 * math.erfc(x) for x in (z / math.sqrt(2.0)).tolist()])


Quantiles = Callable[[np.ndarray], np.ndarray]


def _lognormal(median: float, sigma: float) -> Quantiles:
    return lambda z: median * np.exp(sigma * z)


def _weibull(scale: float, shape: float) -> Quantiles:
    return lambda z: scale * (-np.log(_survival(z))) ** (1.0 / shape)


def _pareto(minimum: float, alpha: float) -> Quantiles:
    return lambda z: minimum * _survival(z) ** (-1.0 / alpha)


def _exponential(mean: float) -> Quantiles:
    return _weibull(mean, 1.0)


def _uniform(low: float, high: float) -> Quantiles:
    if high < low:
        raise ValueError(f"uniform: high ({high:g}) must be at least low ({low:g})")
    return lambda z: low + (high - low) * (1.0 - _survival(z))


def _constant(tokens: float) -> Quantiles:
    return lambda z: np.full(len(z), tokens)


FAMILIES: dict[str, tuple[tuple[str, ...], Callable[..., Quantiles]]] = {
    "lognormal": (("median", "sigma"), _lognormal),
    "weibull": (("scale", "shape"), _weibull),
    "pareto": (("minimum", "alpha"), _pareto),
    "exponential": (("mean",), _exponential),
    "uniform": (("low", "high"), _uniform),
    "constant": (("tokens",), _constant),
}
_SHAPE = ("groups", "group_size", "icc", "cap", "prompt", "seed")
_FILE_OPTIONS = ("run", "groups", "group_size", "cap", "seed")


def generate(
    quantiles: Quantiles,
    *,
    groups: int,
    group_size: int,
    icc: float = 0.0,
    cap: int | None = None,
    prompt: int = DEFAULT_PROMPT,
    seed: int = 0,
    label: str = "generated",
) -> Workload:
    """Draws lengths as the module's docstring says. ValueError names the field and the fix."""
    for name, value in (("groups", groups), ("group_size", group_size), ("prompt", prompt), ("cap", cap)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    if not 0.0 <= icc <= 1.0:
        raise ValueError(f"icc must be from 0 (siblings are strangers) to 1 (all as long), not {icc!r}")
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of at least 0, not {seed!r}")
    shared, own = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    u = np.repeat(shared.standard_normal(groups), group_size)
    z = math.sqrt(icc) * u + math.sqrt(1.0 - icc) * own.standard_normal(groups * group_size)
    with np.errstate(over="ignore"):
        tokens = np.maximum(np.rint(quantiles(z)), 1.0)
    capped = tokens >= cap if cap is not None else np.zeros(len(tokens), bool)
    tokens = tokens if cap is None else np.minimum(tokens, cap)
    if not tokens.max() < 2**31:
        raise ValueError(f"{label}: a response of {tokens.max():.3g} tokens; give cap=, the longest that a run allows")
    return Workload(
        output_tokens=tokens.astype(np.int32),
        prompt_tokens=np.full(len(tokens), prompt, np.int32),
        group_starts=np.arange(groups + 1, dtype=np.int64) * group_size,
        capped=capped,
        label=label,
    )


def intraclass_correlation(lengths: np.ndarray, group_starts: np.ndarray) -> float | None:
    """Of the normal scores of lengths [n] in groups: the share of their variance that is between groups. One-way
    analysis of variance, ICC(1) of Shrout and Fleiss (1979), with Donner's (1986) mean size for unequal groups; below 0
    where siblings are less alike than strangers. None if no group has two, or all lengths are equal. Ties (a cap) draw
    it towards what the rest says."""
    sizes = np.diff(group_starts)
    n, k = int(sizes.sum()), len(sizes)
    if k < 2 or n <= k or len(np.unique(lengths)) < 2:
        return None
    values = _normal_scores(lengths)
    means = np.add.reduceat(values, group_starts[:-1]) / sizes
    between = float((sizes * (means - values.mean()) ** 2).sum()) / (k - 1)
    within = float(((values - np.repeat(means, sizes)) ** 2).sum()) / (n - k)
    size = (n - float((sizes**2).sum()) / n) / (k - 1)
    return (between - within) / (between + (size - 1.0) * within)


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Phi^-1((rank - 1/2) / n); equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - counts / 2.0
    scores = np.array([_NORMAL.inv_cdf(p) for p in (middle / len(values)).tolist()])
    return scores[inverse]


# --- text


def parse_workload(
    text: str, *, groups: int | None = None, group_size: int | None = None, seed: int | None = None
) -> Workload:
    """text: FAMILY(...), histogram(NAME or FILE, ...), file(PATH, ...), or the path of a lengths file or a trace. What
    the text does not say comes from the arguments. ValueError or TraceError names the fix."""
    outer = {"groups": groups, "group_size": group_size, "seed": seed}
    call = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*\((.*)\)\s*", text, re.DOTALL)
    if call is None:
        return _from_file(text.strip(), {}, outer)
    name, inside = call.group(1).lower(), call.group(2)
    positional, named = _arguments(inside)
    if name == "file":
        if len(positional) != 1:
            raise ValueError(f"file({inside}): write file(PATH), with options after it, such as run=sync")
        return _from_file(positional[0], named, outer)
    if name == "histogram":
        from longtail.bench.length_import import read_histogram

        if len(positional) != 1:
            raise ValueError(f"histogram({inside}): write histogram(NAME), with options after it, such as groups=64")
        histogram = read_histogram(positional[0])
        return _generate(text, histogram.quantile_function(_survival), named, outer, ())
    if name not in FAMILIES:
        known = ", ".join((*FAMILIES, "histogram", "file"))
        raise ValueError(f"workload {name!r} is not known; choose from {known}, or give a file of lengths or a trace")
    if positional:
        raise ValueError(f"{name}: write {', '.join(f'{key}=...' for key in FAMILIES[name][0])}, not {positional[0]!r}")
    parameters, family = FAMILIES[name]
    if lacking := [key for key in parameters if key not in named]:
        raise ValueError(
            f"{name} lacks {', '.join(lacking)}; write {name}({', '.join(f'{k}=...' for k in parameters)})"
        )
    values = [_positive(key, named[key]) for key in parameters]
    return _generate(text, family(*values), named, outer, parameters)


def _generate(
    text: str, quantiles: Quantiles, named: Mapping[str, str], outer: Mapping[str, int | None], known: tuple[str, ...]
) -> Workload:
    _no_others(text, named, (*known, *_SHAPE))
    given = {key: _number(key, named[key]) for key in _SHAPE if key in named}
    given = {key: value for key, value in outer.items() if value is not None} | given
    if lacking := [key for key in ("groups", "group_size") if key not in given]:
        raise ValueError(f"{text}: how many samples? Give {' and '.join(f'{key}=...' for key in lacking)}")
    return generate(quantiles, label=text.strip(), **given)


def _from_file(path: str, named: Mapping[str, str], outer: Mapping[str, int | None]) -> Workload:
    from longtail.bench.workload_files import read_workload

    _no_others(path, named, _FILE_OPTIONS)
    given = dict(outer) | {key: _number(key, value) for key, value in named.items() if key != "run"}
    workload = read_workload(Path(path), run=named.get("run"), group_size=given["group_size"], cap=given.get("cap"))
    return workload if given["groups"] is None else workload.resample(given["groups"], given["seed"] or 0)


def _arguments(text: str) -> tuple[list[str], dict[str, str]]:
    positional: list[str] = []
    named: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals:
            positional.append(part)
        elif not key or not value or key in named:
            raise ValueError(f"{part!r}: write each option once, as key=value")
        else:
            named[key] = value
    return positional, named


def _no_others(text: str, named: Mapping[str, str], known: tuple[str, ...]) -> None:
    if unknown := [key for key in named if key not in known]:
        raise ValueError(f"{text}: {', '.join(unknown)} is not an option; known are {', '.join(known)}")


def _number(key: str, text: str) -> Any:
    try:
        return float(text) if key == "icc" else int(text)
    except ValueError:
        raise ValueError(f"{key}={text}: must be a {'number' if key == 'icc' else 'whole number'}") from None


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{key}={text}: must be a finite number above 0")
    return value
