"""A run with known acceptance and known cost of a step, on a virtual clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

from tests.spec_decode.helpers import accepted, extend, make_sample

from longtail.sample import Sample
from longtail.spec_decode.drafter import Draft, DraftRequest
from longtail.spec_decode.speculation import Speculation
from longtail.spec_decode.step_cost import StepCost

Cost = Callable[[int], float]
"""Seconds of a step by rows."""
Accept = Callable[[int, int], float]
"""Acceptance of every draft token by (step, number of the sample)."""


def truth(number: int, position: int) -> int:
    """What the target samples."""
    return (number * 7919 + position * 104_729) % 1000


class Clock:
    now = 0.0
    step = 0

    def __call__(self) -> float:
        return self.now


class Coin:
    """Proposes the truth or, token by token, something else with a known chance. claims: what it says of itself; None:
    nothing. seconds: to draft for one sample."""

    name = "coin"

    def __init__(self, clock: Clock, accept: Accept, seconds: float, claims: Callable[[float], float] | None) -> None:
        self.clock, self.accept, self.seconds, self.claims = clock, accept, seconds, claims
        self.random = random.Random(1)
        self.spent = 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            number, position = int(request.sample.id), len(request.sample.output_ids)
            chance = self.accept(self.clock.step, number)
            tokens = []
            for j in range(request.max_tokens):
                miss = self.random.random() >= chance
                tokens.append(truth(number, position + j) + miss)
            probs = None if self.claims is None else [self.claims(chance)] * len(tokens)
            drafts.append(Draft(tokens, self.name, probs))
            self.clock.now += self.seconds
            self.spent += self.seconds
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        pass

    def forget(self, sample_id: str) -> None:
        pass


@dataclasses.dataclass
class Run:
    seconds: float
    """As if nothing had disturbed the machine."""
    speculation: Speculation


def simulate(
    batches: Sequence[tuple[int, int]],
    cost: Cost,
    accept: Accept,
    *,
    fixed: int | None = None,
    draft_seconds: float = 2e-5,
    claims: Callable[[float], float] | None = lambda chance: chance,
    noise: float = 0.1,
    disturb: Callable[[int], float] = lambda step: 1.0,
    seed: int = 0,
    drain: bool = False,
    known: StepCost | None = None,
) -> Run:
    """batches: (sequences, tokens for each) one after the other, each until it has made as many tokens in all, as if
    slots were refilled; drain: until each sequence has made as many, while nothing waits; known: costs of a step;
    fixed: drafts for each sequence, instead of the controller's choice. The controller sees a step's cost times noise
    and what disturbs the machine at this step."""
    clock, rng = Clock(), random.Random(seed)
    coin = Coin(clock, accept, draft_seconds, claims)
    speculation = Speculation(coin, row_multiple=4, cost=known, clock=clock)
    clean, step, made = 0.0, 0, 0
    for batch, tokens in batches:
        samples = [make_sample(str(made + i)) for i in range(batch)]
        made += batch
        total = 0
        if drain:
            for sample in samples:
                sample.params = dataclasses.replace(sample.params, ignore_eos=True)
        while samples and (drain or total < tokens * batch):
            step += 1
            clock.step = step
            room = [tokens - len(s.output_ids) - 1 if drain else 8 for s in samples]
            if fixed is None:
                drafts = speculation.draft(samples, room, refilled=not drain)
            elif fixed:
                drafts = coin.propose([DraftRequest(s, min(fixed, r)) for s, r in zip(samples, room, strict=True)])
            else:
                drafts = [Draft([], "coin") for _ in samples]
            undisturbed = cost(len(samples) + sum(map(len, drafts)))
            clean += undisturbed
            seconds = undisturbed * max(0.3, rng.gauss(1.0, noise)) * disturb(step)
            clock.now += seconds
            taken = []
            for sample, draft in zip(samples, drafts, strict=True):
                start = len(sample.output_ids)
                stream = [truth(int(sample.id), start + j) for j in range(len(draft) + 1)]
                taken.append(accepted(draft.tokens, stream))
                extend(sample, stream[: taken[-1] + 1])
            total += sum(taken) + len(samples)
            if fixed is None:
                speculation.done(samples, drafts, taken, [a + 1 for a in taken], seconds)
            samples = [s for s in samples if not drain or len(s.output_ids) < tokens]
    return Run(clean + coin.spent, speculation)


def padded(base: float, per_row: float) -> Cost:
    """Rows padded to 4, as exact numerics does."""
    return lambda rows: base + per_row * 4 * -(-rows // 4)
