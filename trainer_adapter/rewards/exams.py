"""Which exam a reward is of. A mean reward that rises because the grader changed is no better model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

UNKNOWN = "unknown grader"


def exams(graders: Iterable[tuple[int, str | None]]) -> dict[str, tuple[int, ...]]:
    """graders: policy version and `Sample.grader` of each reward. -> by grader, in order of appearance, the policy
    versions that it graded, ascending."""
    found: dict[str, set[int]] = {}
    for version, grader in graders:
        found.setdefault(grader or UNKNOWN, set()).add(version)
    return {grader: tuple(sorted(versions)) for grader, versions in found.items()}


def mixed(found: Mapping[str, tuple[int, ...]]) -> str | None:
    """A warning if rewards of several graders stand in one curve; None if they do not. found: of `exams`."""
    if len(found) < 2:
        return None
    ordered = sorted(found.items(), key=lambda item: item[1])
    who = "; ".join(f"{grader} graded policy versions {ranges(versions)}" for grader, versions in ordered)
    return (
        f"these rewards are of {len(found)} exams, and a curve through them shows no progress: {who}. Grade all "
        "of them with one grader: longtail regrade"
    )


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0 to 2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in parts)
