"""A simulated engine that somebody else drives from event to event: one instance of a cluster."""

from __future__ import annotations

from longtail.events import ignore
from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.engines.base import find
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.sample import Sample


class Instance(SimulatedEngine):
    """Its clock is its own: it stands where its last pass ended, or where it was told to wait until."""

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def sample_ids(self) -> list[str]:
        return list(self._sequences)

    def limit_left(self, sample_id: str) -> int | None:
        """Of a sample's limit; at least 1."""
        seq = find(self._sequences, sample_id)
        return None if seq.limit is None else max(seq.limit - seq.num_output_tokens, 1)

    def plan(self) -> tuple[float, int] | None:
        """When there is something to do for it: at the end of a run of passes that are alike, and how many they are
        (for `leap`), or at the start of one that is not, and 0 (for `advance`). What comes or goes before then changes
        it. None: there is no work."""
        if not self._sequences:
            return None
        scheduler = self.scheduler
        most = 0 if self._used_up or self._at_limit else scheduler.num_alike()
        if not most:
            return self._timing.now(), 0
        n, count = len(scheduler.running), scheduler.passes.count
        return self._timing.plan(n, scheduler.num_decoding_tokens, count, most), most

    def leap(self, passes: int, end: float, out: StepOutput) -> None:
        """What was planned: passes alike, up to `end`."""
        if self._journal.listener is ignore:
            self._leap(passes, end, out)
        else:
            with self._journal.telling():
                self._leap(passes, end, out)

    def _leap(self, passes: int, end: float, out: StepOutput) -> None:
        if self._new_weights:
            self._begin_versions()
        context = 0 if self._journal.listener is ignore else self.scheduler.num_decoding_tokens
        self._decoded(passes, (self._timing.leap(end), end), context, out)
        if self.config.materialise:
            self.records.catch_up()
        if self._at_limit:
            out.at_limit += [seq.sample for seq in self._at_limit.values()]
            self._at_limit.clear()

    def advance(self) -> StepOutput:
        """Does what is due at once, and no more. Its end is `now()`."""
        out = StepOutput(self._version)
        if self._journal.listener is ignore:
            self._advance(out)
        else:
            with self._journal.telling():
                self._advance(out)
        if self._at_limit:
            out.at_limit = [seq.sample for seq in self._at_limit.values()]
            self._at_limit.clear()
        return out

    def _advance(self, out: StepOutput) -> None:
        if self._used_up:
            self._finish_used_up(out)
        if self._sequences and not out.finished and not self._at_limit:
            self._turn(out, None, None)
        self.records.catch_up()

    def wait_until(self, time: float) -> None:
        """Nothing happens to it before this time."""
        self._timing.wait_until(time)

    def pace(self) -> float:
        """Output tokens a second when all that are here decode; 0 if there is nobody (or a pass takes no time)."""
        n = min(len(self._sequences), self.config.slots)
        tokens = self.scheduler.num_decoding_tokens + sum(seq.known for seq in self.scheduler.prefilling.values())
        seconds = self._timing.cost.seconds(n, n, tokens) if n else 0.0
        return n / seconds if seconds else 0.0

    def has_room_for(self, sample: Sample) -> bool:
        """KV memory that is free, and that nobody who waits here will take at once."""
        scheduler = self.scheduler
        return (
            scheduler.memory.capacity is None or scheduler.num_free - scheduler.num_waiting_tokens >= sample.num_tokens
        )
