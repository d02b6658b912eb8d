"""A simulated engine that somebody else drives from event to event: one instance of a cluster."""

from __future__ import annotations

from longtail.events import ignore
from longtail.partial_rollout.engine import StepOutput
from longtail.partial_rollout.engines.simulated.engine import SimulatedEngine
from longtail.partial_rollout.engines.simulated.scheduler import FOREVER


class Instance(SimulatedEngine):
    """Its clock is its own: it stands where its last pass ended, or where it was told to wait until."""

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def sample_ids(self) -> list[str]:
        return list(self._sequences)

    def limit_left(self, sample_id: str) -> int | None:
        """Of a sample's limit; at least 1."""
        seq = self._get(sample_id)
        return None if seq.limit is None else max(seq.limit - seq.num_output_tokens, 1)

    def next_time(self) -> float | None:
        """When `advance` has something to do: at the end of a run of passes that are alike, or at the start of one that
        is not. What comes or goes before then changes it. None: there is no work."""
        if not self._sequences:
            return None
        most = 0 if self._used_up or self._at_limit else self.scheduler.num_alike()
        if not most:
            return self.now()
        scheduler = self.scheduler
        n, context = len(scheduler.running), scheduler.num_decoding_tokens
        return self._timing.end_of(n, context, scheduler.passes.count, most)

    def advance(self) -> StepOutput:
        """Does what is due at `next_time`, and no more. Its end is `now()`."""
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

    def room(self) -> int:
        """KV tokens that are free, and that nobody who waits here will take at once."""
        if self.config.kv_tokens is None:
            return FOREVER
        return self.scheduler.num_free - self.scheduler.num_waiting_tokens
