"""The verifiers of `reasoning-gym`, with their partial credit."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from longtail.errors import GradeError
from longtail.trainer_adapter.rewards.answers import are_different_numbers, behind, extract_answer
from longtail.trainer_adapter.rewards.grader import Grader, Request, Score, task_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGymGrader(Grader):
    """What the dataset's own `score_answer` gives, in [0, 1].

    The task is reasoning-gym's entry (question, answer, metadata), or holds it under `entry` and the dataset's name
    under `dataset` (as `bench.tasks.Task` does); an entry by itself says its dataset in metadata.source_dataset."""

    name: ClassVar[str] = "reasoning-gym"
    revision: ClassVar[int] = 1
    libraries: ClassVar[tuple[str, ...]] = ("reasoning-gym",)

    entry: str = "entry"
    dataset: str = "dataset"
    after: str | None = None
    """As of `MathGrader`."""
    strict_numbers: bool = True
    """A number that is not the expected number, and that the verifier does not accept in full, scores 0: some verifiers
    pay partial credit because the expected digits occur in it (13 for 3, -5 for 5), or because any number was given."""

    def __call__(self, request: Request) -> Score:
        entry, dataset = self._entry(request.task)
        verifier = _verifier(dataset)
        if "answer" not in entry:
            raise GradeError(f"the {dataset} entry has no answer; pass reasoning-gym's whole record")
        expected = entry["answer"]
        answer = extract_answer(behind(request.text, self.after), expected)
        try:
            value = float(verifier.score_answer(answer, entry))
        except Exception as error:  # foreign code fed with free text: whatever it raises is a verdict of 0
            return Score(0.0, answer=answer[:200], reason=f"{dataset} verifier: {type(error).__name__}: {error}"[:300])
        if not math.isfinite(value):
            raise GradeError(f"the verifier of {dataset} gave {value}")
        if self.strict_numbers and value < 1.0 and are_different_numbers(answer, expected):
            return Score(0.0, answer=answer[:200], reason=f"another number than expected (the verifier gave {value:g})")
        return Score(min(max(value, 0.0), 1.0), answer=answer[:200])

    def _entry(self, task: Any) -> tuple[Mapping[str, Any], str]:
        is_entry = isinstance(task, Mapping) and "metadata" in task and self.entry not in task
        entry = task if is_entry else task_field(task, self.entry)
        if not isinstance(entry, Mapping):
            raise GradeError(f"the task's {self.entry!r} must be reasoning-gym's record, not {type(entry).__name__}")
        dataset = task_field(entry, "metadata.source_dataset") if is_entry else task_field(task, self.dataset)
        return entry, str(dataset)


@functools.cache
def _verifier(name: str) -> Any:
    """A dataset for the sake of its `score_answer`, which reads the entry, not the dataset's items."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise GradeError(f"reasoning-gym has no dataset {name!r}{hint}")
    return reasoning_gym.create_dataset(name, seed=0, size=1)
