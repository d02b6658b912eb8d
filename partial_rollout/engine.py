"""What the rollout needs of an engine. Native, vLLM, simulated and pooled engines all look like this."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from longtail.sample import FinishReason, Sample
from longtail.version import PolicyVersion

if TYPE_CHECKING:
    from longtail.kv_manager.tiers import Tiers


@dataclasses.dataclass(slots=True)
class StepOutput:
    """What one step did. Tokens are already in the samples."""

    version: PolicyVersion
    """Policy that made the tokens of this step."""
    finished: list[Sample] = dataclasses.field(default_factory=list)
    """Finished or failed in this step."""
    num_output_tokens: int = 0
    num_seqs: int = 0
    at_limit: list[Sample] = dataclasses.field(default_factory=list)
    """Have reached their limit in this step, or before it: still running. Each limit is reported once."""
    turns: list[Sample] = dataclasses.field(default_factory=list)
    """`multi_turn` samples of which a turn has ended: out of the engine, paused, with `turn_ended` set and their KV
    saved."""


@dataclasses.dataclass(slots=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_output_tokens: int
    num_recomputed_tokens: int
    """Known tokens of samples with output that neither snapshot nor cache brought when they were admitted again (after
    a pause, a preemption, a weight update): their KV is computed again. An observation that has just come is not."""
    num_restored_tokens: int
    num_cached_tokens: int
    """Known tokens (prompt, and output of resumed samples) found in the prefix cache at admission."""
    num_preemptions: int
    """For lack of blocks."""
    num_draft_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Of these, those that were accepted and committed."""
    num_overrun_tokens: int = 0
    """Made, by an engine that runs ahead, for samples that had ended or left by then, and dropped."""
    num_news: int = 0
    """Of a pool: messages with which its engines were told what siblings of their samples wrote elsewhere, for drafts;
    all with steps."""
    num_news_tokens: int = 0
    num_news_bytes: int = 0
    """As they are sent."""

    @property
    def num_rejected_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_tokens


class Engine(Protocol):
    """The engine appends tokens, log-probabilities and versions to the samples it was given, and to nothing else."""

    name: str

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def num_free_slots(self) -> int:
        """How many more samples it would run at once."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of prompt and output together; None: however many."""
        ...

    @property
    def tiers(self) -> Tiers | None:
        """Where it saves the KV of samples that it pauses, as `Snapshot`s; None: none that a store could keep."""
        ...

    def now(self) -> float:
        """Seconds on this engine's clock (real or virtual)."""
        ...

    def check(self, sample: Sample) -> None:
        """Raises the ValueError with which `add` would refuse this sample."""
        ...

    def add(self, samples: Iterable[Sample], *, limit: int | None = None) -> None:
        """Fresh and paused samples alike; a paused one continues from its snapshot or from its tokens.

        One whose last observation has used up its max_tokens, or the model's length, is finished by the next step.

        limit: output tokens from here on after which `step` lists each of them in `at_limit`; it runs on. (With drafts
        a step makes several tokens, so that it may be a few further by then.) None: never."""
        ...

    def set_limit(self, sample_id: str, limit: int | None) -> None:
        """A new limit in place of the old one, counted from now. ValueError if the sample is not in the engine."""
        ...

    def step(
        self, *, horizon: int | None = None, until: float | None = None, refilled: bool = False, finishes: int = 1
    ) -> StepOutput:
        """horizon: output tokens after which, and until: time on this engine's clock at which, the caller wants to look
        again; None: no matter. One forward pass, whatever they say, on a real engine; a virtual one goes on, not beyond
        either, until there is something to report. refilled: others wait for the slots that become free (where not, the
        run ends with the slowest sample, which is to be helped by drafts rather than all together). finishes: samples
        that may have finished, none of them failed, before the caller wants to hear of it: a virtual engine may report
        so many at once."""
        ...

    def pause(self, sample_ids: Iterable[str] | None = None, *, snapshot: bool = True) -> list[Sample]:
        """Takes samples (default: all) out, unfinished, with or without their KV."""
        ...

    def abort(self, sample_ids: Iterable[str], *, reason: FinishReason = "aborted") -> list[Sample]:
        """Ends samples; they keep what they have."""
        ...

    def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Between steps; tokens made so far keep their version."""
        ...

    def stats(self) -> EngineStats: ...
