"""Where samples live between iterations, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from longtail.sample import Group, Sample


class SampleStore:
    """Owns every group from submission until it is handed over, which happens exactly once.

    Unfinished samples stay here with their tokens and snapshots. Groups are kept in order of submission.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._handed_over: set[str] = set()
        self._samples: set[str] = set()

    def add(self, groups: Iterable[Group]) -> None:
        """All or none. ValueError if an id was used before, or a group is empty or mislabelled."""
        batch = list(groups)
        names: set[str] = set()
        samples: set[str] = set()
        for group in batch:
            if group.id in self or group.id in names:
                raise ValueError(f"group id {group.id!r} was submitted before; every group needs its own id")
            if not group.samples:
                raise ValueError(f"group {group.id!r} has no samples; n must be at least 1")
            names.add(group.id)
            for sample in group.samples:
                if sample.id in self._samples or sample.id in samples:
                    raise ValueError(f"sample id {sample.id!r} was submitted before; every sample needs its own id")
                if sample.group_id != group.id:
                    raise ValueError(f"sample {sample.id!r} has group_id {sample.group_id!r}, not {group.id!r}")
                samples.add(sample.id)
        self._samples |= samples
        for group in batch:
            self._groups[group.id] = group

    def __contains__(self, group_id: str) -> bool:
        """Whether a group of this id was ever submitted."""
        return group_id in self._groups or group_id in self._handed_over

    def __len__(self) -> int:
        """Groups not handed over yet."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def unfinished(self) -> list[Sample]:
        return [sample for group in self._groups.values() for sample in group.samples if not sample.is_done]

    def complete(self) -> list[Group]:
        """The groups whose samples are all done."""
        return [group for group in self._groups.values() if group.is_complete]

    def hand_over(self, groups: Iterable[Group]) -> None:
        """These groups are the caller's now; the store knows only their ids from here on."""
        for group in groups:
            del self._groups[group.id]
            self._handed_over.add(group.id)

    def snapshot_bytes(self) -> int:
        """Host memory held by snapshots of paused samples."""
        return sum(s.snapshot.nbytes for s in self.unfinished() if s.snapshot is not None)

    def check_integrity(self, extra: Iterable[Group] = ()) -> None:
        """AssertionError if a sample stands twice or a record does not add up."""
        seen: set[str] = set()
        for group in [*self._groups.values(), *extra]:
            for sample in group.samples:
                assert sample.id not in seen, f"sample {sample.id} is in two groups"
                seen.add(sample.id)
                sample.check_integrity()
                assert sample.is_done == (sample.finish_reason is not None or sample.status == "failed"), sample.id
