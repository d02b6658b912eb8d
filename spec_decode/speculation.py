"""Speculation beside an engine's step loop: drafters, controller and measurements behind three calls.

    drafts = speculation.draft(samples, room, ...)   # before the pass: what to verify, cut to what pays
    ...verify_drafts, commit tokens to the samples...
    speculation.done(samples, drafts, accepted, emitted, seconds, ...)
    counts = speculation.forget(sample.id)           # once the sample is done

It hands out drafts and takes in what became of them. Verification, and the KV of rejected drafts, are the engine's.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from longtail.sample import Sample
from longtail.spec_decode.acceptance import Acceptance, AcceptanceConfig
from longtail.spec_decode.choice import parts
from longtail.spec_decode.controller import Controller, ControllerConfig, Plan
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest, Heard
from longtail.spec_decode.metrics import Counts
from longtail.spec_decode.step_cost import StepCost
from longtail.spec_decode.worth import OPEN, Worth


class DrafterDropped(UserWarning):
    """A drafter raised, or gave what is no draft."""


STOPS_PRIOR = (1.0, 256.0)
"""Samples that stopped before their cap, and tokens that could have been the last: what is assumed at first."""


class Speculation:
    """row_multiple: see `StepCost`; cost: measured before, by the same model on the same machine. match: verification
    is by match, so that drafts can be judged unverified; False for rejection sampling. vocab_size: ids of drafts are
    below it. clock: seconds. Drafts are paths.

    Drafts cannot change a token, so a drafter that fails cannot end a run: it is dropped with the warning
    `DrafterDropped`, and `failure` (in the report too) says why."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        row_multiple: int = 1,
        cost: StepCost | None = None,
        controller: Controller | ControllerConfig | None = None,
        acceptance: AcceptanceConfig | None = None,
        match: bool = True,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.match = match
        self.vocab_size = vocab_size
        self.failure: str | None = None
        """Why the drafter was dropped, if it was."""
        self.now = clock
        if isinstance(controller, Controller):
            self.controller, self.cost = controller, controller.cost
        else:
            self.cost = StepCost(row_multiple) if cost is None else cost
            self.controller = Controller(self.cost, controller)
        self.acceptance = Acceptance(acceptance)
        self.total = Counts()
        self.by_drafter: dict[str, Counts] = {}
        self.plan: Plan | None = None
        """Of the last step; None if no drafts were made."""
        self._by_sample: dict[str, Counts] = {}
        # Of each sample, drafts not judged to their end: (output tokens before it, the draft, tokens that came true).
        self._open: dict[str, list[tuple[int, Draft, int]]] = {}
        self._draft_seconds = 0.0
        self._drafted_for: list[int] = []  # numbers of the samples that drafts were made for in this step
        self._turn = 0
        self._worth = OPEN
        self._stopped, self._could_stop = STOPS_PRIOR

    def draft(
        self,
        samples: Sequence[Sample],
        room: Sequence[int],
        *,
        context: float = 0.0,
        prefill: int = 0,
        refilled: bool = True,
        left: Sequence[int] | None = None,
    ) -> list[Draft]:
        """samples: all that decode in this step; room: the most drafts that each can take (its length cap, its blocks,
        the row budget of the pass); context: KV tokens that the pass reads; prefill: rows of prompts in it; refilled:
        others wait for the slots of those that end; left: tokens that each may still make (by default room + 1).
        -> one draft each, many of them empty."""
        self._draft_seconds, self._drafted_for, self.plan = 0.0, [], None
        batch = len(samples)
        self._worth = OPEN
        if not refilled and batch:
            self._worth = self._worth_of(samples, [n + 1 for n in room] if left is None else left)
        asked = 0
        if self.failure is None and any(room):
            asked = self.controller.ask(batch, context, prefill, self._worth)
        if not asked:
            return [Draft([], self.drafter.name) for _ in samples]
        start = self.now()
        most = self.controller.config.max_drafts
        chosen = list(range(batch))
        if asked < batch:  # by turns
            chosen = [(self._turn + i) % batch for i in range(asked)]
            self._turn += asked
        requests = [DraftRequest(samples[i], max(min(room[i], most), 0)) for i in chosen]
        out = [Draft([], self.drafter.name) for _ in samples]
        try:
            drafts = [draft.cut(r.max_tokens) for r, draft in zip(requests, self._proposed(requests), strict=True)]
        except Exception as error:
            self._drop(error)
            return out
        for request, draft in zip(requests, drafts, strict=True):
            if self.match and draft.tokens:
                position, opened = len(request.sample.output_ids), self._open.setdefault(request.sample.id, [])
                if opened and opened[-1][0] == position:  # made for a step that came to nothing
                    opened.pop()
                opened.append((position, draft, 0))
            if draft.distributions is not None:
                # What tells of the tokens that were drawn may not decide which of them are verified: those that are cut
                # off would be made up for by the target's own ones, and come less often than they should.
                draft.probs = None
        estimates = self.acceptance.estimate(drafts)
        self.plan = self.controller.plan(estimates, batch, context, prefill, asked, self._worth)
        for i, draft, length in zip(chosen, drafts, self.plan.lengths, strict=True):
            out[i] = draft.cut(length)
        self._draft_seconds = self.now() - start
        self._drafted_for = [i for i, request in zip(chosen, requests, strict=True) if request.max_tokens]
        return out

    def _worth_of(self, samples: Sequence[Sample], left: Sequence[int]) -> Worth:
        """How likely it is that these samples come to their caps: surely where nothing else can end them, else as it
        went with those before."""
        if all(s.params.ignore_eos and not s.params.stop and not s.params.stop_token_ids for s in samples):
            return Worth.of(left, 1.0)
        certain = math.exp(-self._stopped / self._could_stop * max(left))
        return Worth.of(left, certain if certain > 0.01 else 0.0)

    def _proposed(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """ValueError for what is not a draft for each request."""
        drafts = self.drafter.propose(requests)
        if not isinstance(drafts, list) or len(drafts) != len(requests):
            raise ValueError(f"propose must give a list of {len(requests)} drafts, one a request, not {drafts!r:.200}")
        for draft in drafts:
            if not isinstance(draft, Draft):
                raise ValueError(f"propose must give Drafts, not {draft!r:.200}")
            if draft.parents is not None:
                raise ValueError("it drafts trees (parents), and the verification takes one path")
            tokens = draft.tokens
            if not isinstance(tokens, list) or (
                tokens
                and not (
                    set(map(type, tokens)) == {int}
                    and min(tokens) >= 0
                    and (self.vocab_size is None or max(tokens) < self.vocab_size)
                )
            ):
                limit = "" if self.vocab_size is None else f" below {self.vocab_size}"
                raise ValueError(f"tokens must be a list of ids from 0{limit}, not {tokens!r:.200}")
            for name in ("probs", "distributions"):
                value = getattr(draft, name)
                if value is not None and len(value) != len(tokens):
                    raise ValueError(f"{name} has {len(value)} entries for {len(tokens)} tokens; give one a token")
            if draft.probs is not None and not all(0.0 <= p <= 1.0 for p in draft.probs):
                raise ValueError(f"probs must be probabilities, not {draft.probs!r:.200}")
        return drafts

    def _drop(self, error: Exception) -> None:
        self.failure = f"drafter {self.drafter.name} was dropped, drafting is off: {error!r}"
        warnings.warn(DrafterDropped(self.failure), stacklevel=3)

    def done(
        self,
        samples: Sequence[Sample],
        drafts: Sequence[Draft],
        accepted: Sequence[int],
        emitted: Sequence[int],
        seconds: float,
        *,
        context: float = 0.0,
        prefill: int = 0,
    ) -> None:
        """As for `draft`, once the samples hold their tokens: for each sample, draft tokens accepted, and tokens
        committed; 0 where its result was thrown away (paused or preempted meanwhile, failed). seconds: of the step
        without the drafting."""
        rows = sum(map(len, drafts))
        if rows:
            row_seconds = seconds / (len(samples) + rows + prefill)
            for sample, draft, taken, new in zip(samples, drafts, accepted, emitted, strict=True):
                if draft.tokens and new:
                    if not self.match:
                        self.acceptance.judge(draft, taken, rejected=taken < len(draft) and new > taken)
                    did = Counts(1, len(draft), taken, new, verify_seconds=row_seconds * (len(draft) + 1))
                    for counts in self._counts_of(sample, draft):
                        counts.add(did)
        if self._drafted_for:
            each = self._draft_seconds / len(self._drafted_for)
            for i in self._drafted_for:
                for counts in self._counts_of(samples[i], drafts[i]):
                    counts.draft_seconds += each
        judging = bool(self._open)
        for sample, new in zip(samples, emitted, strict=True):
            if new:
                self.observe(sample, new)
        if judging and self.acceptance.has_risen():
            self.controller.look_again()
        self.controller.done(
            len(samples),
            rows,
            emitted,
            seconds,
            worth=self._worth,
            drafted_for=len(self._drafted_for),
            draft_seconds=self._draft_seconds,
            context=context,
            prefill=prefill,
        )
        self._draft_seconds, self._drafted_for = 0.0, []

    def _counts_of(self, sample: Sample, draft: Draft) -> tuple[Counts, Counts, Counts]:
        by_drafter = self.by_drafter.get(draft.drafter)
        if by_drafter is None:
            by_drafter = self.by_drafter[draft.drafter] = Counts()
        by_sample = self._by_sample.get(sample.id)
        if by_sample is None:
            by_sample = self._by_sample[sample.id] = Counts()
        return self.total, by_drafter, by_sample

    def observe(self, sample: Sample, num_new: int) -> None:
        """Tokens that `done` was not told of: the first one after a prompt, those of a sample that comes in."""
        if sample.id in self._open:
            self._judge(sample)
        if not sample.params.ignore_eos:
            self._could_stop += num_new
            self._stopped += sample.finish_reason == "stop"
        if self.failure is None:
            try:
                self.drafter.observe(sample, num_new)
            except Exception as error:
                self._drop(error)

    @property
    def hears(self) -> bool:
        """Whether its drafter can draft from what siblings write in other engines."""
        return self.failure is None and bool(self._hearers())

    def hear(self, prompt_ids: tuple[int, ...], heard: Heard) -> None:
        """What a sample of this prompt wrote in another engine."""
        if self.failure is None:
            try:
                for part in self._hearers():
                    part.hear(prompt_ids, heard)
            except Exception as error:
                self._drop(error)

    def _hearers(self) -> list[Any]:
        return [part for part in parts(self.drafter) if getattr(part, "hears", False)]

    def enter(self, sample_id: str) -> None:
        """The sample comes from elsewhere, perhaps with other tokens than it had here: what is kept of it goes, but for
        the counts."""
        self._open.pop(sample_id, None)
        if self.failure is None:
            try:
                self.drafter.forget(sample_id)
            except Exception as error:
                self._drop(error)

    def forget(self, sample_id: str) -> Counts:
        """The sample is done, or leaves. -> what drafting did for it since it came."""
        self.enter(sample_id)
        return self._by_sample.pop(sample_id, Counts())

    def weights_updated(self, version: int) -> None:
        self.acceptance.weights_updated(version)

    def _judge(self, sample: Sample) -> None:
        """Compares all drafts of the sample, verified or not, with what came; at most max_drafts of them are open."""
        still_open = []
        output = sample.output_ids
        for start, draft, same in self._open.pop(sample.id, ()):
            known = min(len(output) - start, len(draft))
            while same < known and output[start + same] == draft.tokens[same]:
                same += 1
            if same < known or same == len(draft) or sample.is_done or sample.turn_ended:
                self.acceptance.judge(draft, same, rejected=same < known)
            else:
                still_open.append((start, draft, same))
        if still_open:
            self._open[sample.id] = still_open

    def report(self) -> dict[str, Any]:
        """Counts, acceptance by drafter and position, and for each batch size what was done and why."""
        positions = self.acceptance.by_position()
        drafters = {}
        for name in dict.fromkeys([*positions, *self.by_drafter]):
            c = self.by_drafter.get(name, Counts())
            drafters[name] = {
                "drafted": c.drafted,
                "accepted": c.accepted,
                "emitted": c.emitted,
                "steps": c.steps,
                "acceptance_length": c.acceptance_length,
                "draft_seconds": c.draft_seconds,
                "verify_seconds": c.verify_seconds,
                "judged_by_position": [judged for judged, _ in positions.get(name, [])],
                "accepted_by_position": [accepted for _, accepted in positions.get(name, [])],
                "recent_first_token_acceptance": self.acceptance.first_token(name),
            }
        batches = []
        for batch in sorted({batch for batch, _ in self.controller.reasons}):
            batches.append(
                {
                    "batch": batch,
                    "steps": self.controller.reasons_of(batch),
                    "break_even_acceptance": self.controller.break_even(batch),
                }
            )
        return {
            "drafters": drafters,
            "batches": batches,
            "failure": self.failure,
            "won_seconds": self.controller.balance,
            "elapsed_seconds": self.controller.elapsed,
        }
