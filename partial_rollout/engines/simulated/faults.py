"""Faults on order: what an engine may do to its caller, at a moment that a test chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from longtail.sample import Sample


@dataclasses.dataclass(slots=True)
class Faults:
    """What is ordered happens once. A sample that fails is not among them: see `SimulatedEngine.fail`, `Length`."""

    _steps: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    _after: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    _refused: dict[str, Exception] = dataclasses.field(default_factory=dict)
    _count: int = 0

    def in_step(self, error: BaseException, *, steps: int = 1, after_tokens: bool = False) -> None:
        """The step after `steps` - 1 others raises this: before it has done anything, or when its tokens are made and
        what they finished is out of the engine, so that the caller does not hear of it from the step."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be an integer of at least 1, not {steps!r}")
        (self._after if after_tokens else self._steps)[self._count + steps] = error

    def in_add(self, sample_id: str, error: Exception) -> None:
        """The next `add` that is given this sample raises this, and takes none."""
        self._refused[sample_id] = error

    def begin_step(self) -> None:
        self._count += 1
        if (error := self._steps.pop(self._count, None)) is not None:
            raise error

    def end_step(self) -> None:
        if (error := self._after.pop(self._count, None)) is not None:
            raise error

    def begin_add(self, samples: Iterable[Sample]) -> None:
        if not self._refused:
            return
        for sample in samples:
            if (error := self._refused.pop(sample.id, None)) is not None:
                raise error
