"""Acceptance of a drafter on rollouts that are there already: match verification, replayed.

Under match verification a draft token is accepted where it equals the token that the target sampled, and the stream
does not depend on the drafts. So recorded tokens tell exactly what a drafter would have reached, without the model:
draft at a position, accept while the draft equals the record, commit that and one token more, go on behind it. Of a
tree the branch is followed that equals the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest
from longtail.version import PolicyVersion

Recorded = tuple[Sequence[int], Sequence[int]]
"""(prompt_ids, output_ids) of one sample."""


@dataclasses.dataclass(slots=True)
class Replayed:
    steps: int = 0
    """Verify steps, those without a draft counted."""
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    judged_by_position: list[int] = dataclasses.field(default_factory=list)
    accepted_by_position: list[int] = dataclasses.field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps


def replay(
    groups: Sequence[Sequence[Recorded]],
    make: Callable[[], Drafter],
    *,
    finished_siblings: int | None = None,
    max_draft: int = 8,
) -> Replayed:
    """finished_siblings: each sample is replayed alone, after that many others of its group (those behind it, going
    round) have been seen in full. None: the samples of a group run at once, a verify step each by turns, and hear each
    other as they go. A drafter of its own (`make`) for each group and, with finished siblings, each sample."""
    out = Replayed()
    for g, group in enumerate(groups):
        if finished_siblings is None:
            drafter = make()
            running = [(_sample(g, i, group), list(group[i][1])) for i in range(len(group))]
            while running:
                for sample, output in running:
                    _step(drafter, sample, output, max_draft, out)
                running = [(s, o) for s, o in running if len(s.output_ids) < len(o)]
            continue
        if not 0 <= finished_siblings < len(group):
            raise ValueError(f"finished_siblings must be from 0 to {len(group) - 1}, not {finished_siblings}")
        for i in range(len(group)):
            drafter = make()
            for j in range(1, finished_siblings + 1):
                other = (i + j) % len(group)
                sibling = _sample(g, other, group)
                _commit(drafter, sibling, list(group[other][1]))
                drafter.forget(sibling.id)
            sample, output = _sample(g, i, group), list(group[i][1])
            while len(sample.output_ids) < len(output):
                _step(drafter, sample, output, max_draft, out)
    return out


def follow(draft: Draft, tokens: Sequence[int]) -> tuple[int, bool]:
    """-> how many of the tokens the draft has, in the branch that agrees, and whether it goes on there with others."""
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    node = -1
    for taken, token in enumerate([*tokens, None]):
        children = [i for i, parent in enumerate(parents) if parent == node]
        same = [i for i in children if draft.tokens[i] == token]
        if not same:
            return taken, bool(children)
        node = same[0]
    raise AssertionError("not reached")


def _sample(g: int, i: int, group: Sequence[Recorded]) -> Sample:
    prompt = tuple(group[i][0])
    return Sample(id=f"{g}/{i}", group_id=str(g), index=i, prompt_ids=prompt, params=SamplingParams(), seed=0)


def _commit(drafter: Drafter, sample: Sample, tokens: list[int]) -> None:
    for token in tokens:
        sample.append(token, 0.0, PolicyVersion(0), "replay", "computed")
    drafter.observe(sample, len(tokens))


def _step(drafter: Drafter, sample: Sample, output: list[int], max_draft: int, out: Replayed) -> None:
    start = len(sample.output_ids)
    if start == len(output):
        return
    (draft,) = drafter.propose([DraftRequest(sample, min(max_draft, len(output) - start - 1))])
    taken, goes_on = follow(draft, output[start : start + len(draft)])
    for j in range(taken + goes_on):
        if j == len(out.judged_by_position):
            out.judged_by_position.append(0)
            out.accepted_by_position.append(0)
        out.judged_by_position[j] += 1
        out.accepted_by_position[j] += j < taken
    new = output[start : start + taken + 1]
    _commit(drafter, sample, new)
    out.steps += 1
    out.tokens += len(new)
    out.drafted += len(draft)
    out.accepted += taken
