"""One forward pass: from what the scheduler chose to tokens in the samples.

    draft -> reserve -> forward -> sample and verify -> commit up to the first event -> advance the KV
          -> record the routing

How drafts are verified is `verification`'s. What a rejected one leaves behind is KV at positions that count as not
computed and are written again. A state cannot be cut: where a draft was rejected, a second pass computes the tokens
that were accepted again, from the state before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from longtail.kernels.linear import RowRule
from longtail.kv_manager.manager import KVManager
from longtail.partial_rollout.engines.native.batch import ForwardBatch
from longtail.partial_rollout.engines.native.cache import Cache
from longtail.partial_rollout.engines.native.decoder import Decoder
from longtail.partial_rollout.engines.native.routing import RoutingRecorder
from longtail.partial_rollout.engines.native.sampler import Decode, End, check_end
from longtail.partial_rollout.engines.native.scheduler import Scheduled
from longtail.partial_rollout.engines.native.target import WantsHidden, hidden_takers
from longtail.partial_rollout.engines.native.verification import Verdict, Verification
from longtail.sample import Sample
from longtail.sequence import Sequence
from longtail.spec_decode.drafter import Draft
from longtail.spec_decode.speculation import Speculation
from longtail.spec_decode.step_cost import StepCost
from longtail.version import PolicyVersion


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of a sequence whose last known token was computed."""

    seq: Sequence
    emitted: int = 0
    """Tokens committed: accepted drafts, and the target's own one after them."""
    accepted: int = 0
    end: End | None = None
    failure: str | None = None

    @property
    def ends_turn(self) -> bool:
        """Whether what ended goes on when an environment has answered."""
        return self.end is not None and self.end.reason == "stop" and self.seq.sample.multi_turn


@dataclasses.dataclass(slots=True)
class PassResult:
    outcomes: list[Outcome]
    num_tokens: int
    """Rows of the pass, without padding."""
    num_prefill_tokens: int
    num_context_tokens: int
    num_draft_tokens: int
    draft_seconds: float
    model_seconds: float
    sample_seconds: float

    @property
    def num_output_tokens(self) -> int:
        return sum(outcome.emitted for outcome in self.outcomes)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(outcome.accepted for outcome in self.outcomes)


class Stepper:
    """Owns nothing but the wiring. decode_of: how to decode a sample's tokens for its stop strings, if it has any;
    max_rows: tokens of a pass; cost: of steps, to be measured."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVManager,
        rule: RowRule,
        verify: Verification,
        *,
        engine: str,
        max_model_len: int,
        max_rows: int,
        cost: StepCost,
        decode_of: Callable[[Sample], Decode | None],
        clock: Callable[[], float],
    ) -> None:
        self.decoder, self.kv, self.rule, self.verify = decoder, kv, rule, verify
        self.engine, self.max_model_len, self.max_rows = engine, max_model_len, max_rows
        self.cost, self.decode_of, self.now = cost, decode_of, clock
        self.routing = RoutingRecorder(kv, decoder.spec.routing_group)
        self.speculation: Speculation | None = None
        self._cache = Cache.of(kv)
        self._draft_seconds = 0.0

    def run(
        self,
        scheduled: list[Scheduled],
        version: PolicyVersion,
        settle: Callable[[Outcome], None],
        *,
        refilled: bool = False,
    ) -> PassResult:
        """settle: told of each outcome when its tokens are in the sample and their KV counts. refilled: others wait for
        the slots."""
        start = self.now()
        sampled = [item for item in scheduled if item.num_tokens == item.seq.num_uncomputed_tokens]
        decoding = [item for item in sampled if item.seq.sample.output_ids]
        known = sum(item.num_tokens for item in scheduled)
        prefill = known - len(decoding)
        context = sum(item.seq.num_computed_tokens + item.num_tokens for item in scheduled)
        drafts = self._draft(decoding, known, prefill, refilled)
        rows: list[int] = []
        first = 0
        for item in scheduled:
            first += item.num_tokens + len(item.drafts)
            if item.num_tokens == item.seq.num_uncomputed_tokens:
                rows += range(first - 1 - len(item.drafts), first)
        batch = ForwardBatch.build(scheduled, self.kv, self.decoder.spec, self.rule, rows)
        model_start = self.now()
        takers = [] if self.speculation is None else hidden_takers(self.speculation.drafter)
        hidden = self.decoder.hidden(batch, self._cache) if takers else None
        if hidden is None:
            logits = self.decoder.forward(batch, self._cache)
        else:
            logits = self.decoder.logits(hidden[batch.logits_rows])
        starts = [item.seq.num_computed_tokens for item in scheduled]
        model_end = self.now()
        outcomes = [Outcome(item.seq) for item in sampled]
        verdicts = self.verify(logits, sampled) if sampled else []
        sample_end = self.now()
        for item in scheduled:
            if item.num_tokens < item.seq.num_uncomputed_tokens:
                self._advance(item.seq, item.num_tokens)
        behind = []
        for item, outcome, verdict in zip(sampled, outcomes, verdicts, strict=True):
            # One sequence after the other, so that an interrupt leaves each as it was or done with.
            self._commit(outcome, verdict, version)
            count = item.num_tokens + outcome.emitted - 1  # the last known token is always left to compute
            lives_on = outcome.failure is None and (outcome.end is None or outcome.ends_turn)
            if self.kv.states is not None and count < item.num_tokens + len(item.drafts) and lives_on:
                self.routing.record(item.seq, item.seq.num_computed_tokens + count)
                behind.append(Scheduled(item.seq, count))
            else:
                self._advance(item.seq, count)
            settle(outcome)
        redo_start = self.now()
        if behind:
            batch = ForwardBatch.build(behind, self.kv, self.decoder.spec, self.rule, [])
            self.decoder.forward(batch, self._cache)
            for item in behind:
                self._advance(item.seq, item.num_tokens)
        model_seconds = model_end - model_start + self.now() - redo_start
        if hidden is not None:
            self._tell(takers, scheduled, starts, hidden)
        self._judge(decoding, drafts, outcomes, self.now() - start, prefill)
        return PassResult(
            outcomes,
            num_tokens=first + sum(item.num_tokens for item in behind),
            num_prefill_tokens=prefill,
            num_context_tokens=context,
            num_draft_tokens=sum(len(item.drafts) for item in scheduled),
            draft_seconds=self._draft_seconds,
            model_seconds=model_seconds,
            sample_seconds=sample_end - model_end,
        )

    def _advance(self, seq: Sequence, num_tokens: int) -> None:
        self.kv.advance(seq, num_tokens)
        self.routing.record(seq, seq.num_computed_tokens)

    # -- drafts -------------------------------------------------------------------------------------------------------

    def _draft(self, decoding: list[Scheduled], rows: int, prefill: int, refilled: bool) -> list[Draft]:
        """Gives the decoding sequences their drafts, cut to what has room."""
        start, self._draft_seconds = self.now(), 0.0
        if self.speculation is None or not decoding:
            return []
        samples = [item.seq.sample for item in decoding]
        rooms = [self._room(s) for s in samples]
        left = self.max_rows - rows
        drafts = self.speculation.draft(
            samples,
            [min(room, left) for room in rooms],
            context=self._context(decoding),
            prefill=prefill,
            refilled=refilled or prefill > 0,  # what is being prefilled decodes next
            left=[room + 1 for room in rooms],
        )
        for i, (item, draft) in enumerate(zip(decoding, drafts, strict=True)):
            size = min(len(draft), left)
            while size and not self.kv.reserve(item.seq, item.seq.num_tokens + size):  # nobody is preempted for drafts
                size -= 1
            drafts[i] = draft.cut(size)
            item.drafts, item.distributions = drafts[i].tokens, drafts[i].distributions
            left -= size
        self._draft_seconds = self.now() - start
        return drafts

    def _room(self, sample: Sample) -> int:
        """Drafts that could all be accepted: one token more is emitted."""
        cap = sample.params.max_tokens
        left = self.max_model_len - sample.num_tokens
        return max((left if cap is None else min(left, cap - len(sample.output_ids))) - 1, 0)

    def _context(self, decoding: list[Scheduled]) -> int:
        return sum(item.seq.num_tokens for item in decoding)

    def _tell(
        self, takers: list[WantsHidden], scheduled: list[Scheduled], starts: list[int], hidden: torch.Tensor
    ) -> None:
        """The hidden states of the rows that count, to the drafters that want them."""
        row = 0
        for item, start in zip(scheduled, starts, strict=True):
            count = item.seq.num_computed_tokens - start  # of a sample that is done it is below 0
            if count > 0:
                for taker in takers:
                    taker.take_hidden(item.seq.sample, start, hidden[row : row + count])
            row += item.num_tokens + len(item.drafts)

    def _judge(
        self, decoding: list[Scheduled], drafts: list[Draft], outcomes: list[Outcome], seconds: float, prefill: int
    ) -> None:
        """Tells the speculation what became of its drafts, and of every token that others may learn from. What steps
        cost is measured without one, too."""
        if prefill and not decoding:
            self.cost.record_prompts(prefill, seconds)
        if self.speculation is None:
            if decoding and seconds > 0.0:  # known to the drafter that may come
                self.cost.record(len(decoding), seconds, context=self._context(decoding), prefill=prefill)
            return
        by_sequence = {id(outcome.seq): outcome for outcome in outcomes}
        if decoding:
            own = [by_sequence.pop(id(item.seq)) for item in decoding]
            self.speculation.done(
                [item.seq.sample for item in decoding],
                drafts,
                [outcome.accepted for outcome in own],
                [outcome.emitted for outcome in own],
                seconds - self._draft_seconds,
                context=self._context(decoding),
                prefill=prefill,
            )
        for outcome in by_sequence.values():
            if outcome.emitted:
                self.speculation.observe(outcome.seq.sample, outcome.emitted)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _commit(self, outcome: Outcome, verdict: Verdict, version: PolicyVersion) -> None:
        eos, longest = self.decoder.spec.eos_token_ids, self.max_model_len
        commit(outcome, verdict, version, self.engine, lambda s: check_end(s, eos, longest, self.decode_of(s)))


def commit(
    outcome: Outcome, verdict: Verdict, version: PolicyVersion, engine: str, end_of: Callable[[Sample], End | None]
) -> None:
    """Appends tokens up to the first event in order of position: the end of the sample, or a fault."""
    seq, sample = outcome.seq, outcome.seq.sample
    for i, (token, logprob) in enumerate(zip(verdict.tokens, verdict.logprobs, strict=True)):
        position = len(sample.output_ids)
        if verdict.fault is not None and i == verdict.accepted:
            outcome.failure = f"sampling output token {position}: the logits have {verdict.fault}"
            break
        sample.append(token, logprob, version, engine, seq.kv)
        seq.token_ids.append(token)
        outcome.emitted += 1
        try:
            outcome.end = end_of(sample)
        except Exception as error:  # a tokenizer may raise anything; only this sample is the worse for it
            outcome.failure = f"decoding output token {position} for stop strings: {error!r}"
            break
        if outcome.end is not None:
            break
    outcome.accepted = min(verdict.accepted, outcome.emitted)
