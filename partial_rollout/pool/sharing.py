"""What samples wrote is told to the engines that hold siblings of theirs: a group index of drafts across engines.

    engine 0 --reply: tokens of its samples--> pool: texts by prompt --with a step: what is new to it--> engine 1

Nobody is asked and nobody waits: what an engine appends comes with its replies, which have every token anyway, and what
it pulls goes with a step that it is told to do in any case, every `PoolConfig.share_drafts` steps. An engine is told of
prompts of which it holds a sample, and of no text twice. What is lost on the way (an engine that dies, a drafter that
is new) costs acceptance and never a token.
"""

from __future__ import annotations

import dataclasses
import pickle
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from longtail.events import Event
from longtail.partial_rollout.pool.crew import Crew
from longtail.partial_rollout.pool.member import Member
from longtail.sample import OBSERVATION, Sample
from longtail.spec_decode.drafter import Heard
from longtail.version import PolicyVersion

MOST_TOKENS = 8192
"""Of a message; what is more goes with the next one."""
KEPT_TOKENS = 1 << 22
"""Of all texts (4 bytes each). Beyond it those go that grew last the longest ago, but none of a sample in the pool."""

News = Sequence[tuple[str, Sequence[Heard]]]
"""(a sample that the engine holds, what others of its prompt wrote)."""


class _Prompt:
    __slots__ = ("ids", "texts")

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self.texts: dict[str, _Text] = {}


class _Text:
    """A sample's output, as far as the pool knows it."""

    __slots__ = ("known", "prompt", "runs", "sample_id", "tokens")

    def __init__(self, sample_id: str, prompt: _Prompt) -> None:
        self.sample_id, self.prompt = sample_id, prompt
        self.tokens = array("i")
        self.runs: list[tuple[int, PolicyVersion]] = []
        """(where it ends, version of its tokens), one after the other."""
        self.known: dict[Member, int] = {}
        """Tokens that an engine has made, was given with the sample, or was told."""

    def extend(self, sample: Sample) -> int:
        """Up to what the sample has. -> tokens that are new."""
        before, length = len(self.tokens), len(sample.output_ids)
        if length == before:
            return 0
        self.tokens.extend(sample.output_ids[before:])
        for segment in sample.segments:
            if segment.end <= before:
                continue
            if segment.version == OBSERVATION and self.runs:  # as old as the turn that it answers
                self.runs[-1] = (segment.end, self.runs[-1][1])
            else:
                self.runs.append((segment.end, segment.version))
        return length - before

    def part(self, start: int, most: int) -> Heard:
        end = min(start + most, len(self.tokens))
        runs, at = [], start
        for stop, version in self.runs:
            if stop > at and at < end:
                runs.append((min(stop, end) - at, version))
                at = min(stop, end)
        return Heard(self.sample_id, start, self.tokens[start:end].tolist(), runs)


class Message(NamedTuple):
    message: bytes
    """`News`, pickled."""
    event: Event


@dataclasses.dataclass(slots=True)
class Traffic:
    messages: int = 0
    tokens: int = 0
    bytes: int = 0


class Sharing:
    """every: see `PoolConfig.share_drafts`."""

    def __init__(self, crew: Crew, every: int | None) -> None:
        self._crew, self._every = crew, every
        self._texts: OrderedDict[str, _Text] = OrderedDict()  # the one that grew last stands last
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._num_tokens = 0
        self._enough = 0
        """Up to so many tokens there is no use in looking for texts to drop: samples in the pool have nearly all."""
        self._steps: dict[Member, int] = {}
        """Steps until an engine is told again."""
        self.traffic = Traffic()
        """To engines, in all."""

    def _pays(self) -> bool:
        return self._every is not None and sum(m.shares_drafts for m in self._crew.alive) > 1

    def wrote(self, sample: Sample, member: Member) -> None:
        """The sample has what the engine told of it. It only grows meanwhile."""
        if not self._pays():
            return
        text = self._texts.get(sample.id)
        if text is None:
            text = self._new(sample)
        self._num_tokens += text.extend(sample)
        text.known[member] = len(text.tokens)
        self._texts.move_to_end(sample.id)
        if self._num_tokens > max(KEPT_TOKENS, self._enough):
            self._make_room()

    def entered(self, sample: Sample, member: Member) -> None:
        """The sample comes to an engine, from wherever, with whatever tokens."""
        text = self._texts.get(sample.id)
        if text is not None:
            same = text.prompt.ids == sample.prompt_ids
            if not same or text.tokens.tolist() != sample.output_ids[: len(text.tokens)]:
                self._drop(text)  # cut, or another sample
        self.wrote(sample, member)
        self._steps.pop(member, None)  # it may know nothing of this prompt

    def lost(self, member: Member) -> None:
        self._steps.pop(member, None)
        for text in self._texts.values():
            text.known.pop(member, None)

    def forget_all(self) -> None:
        """Drafters are new and know nothing, as if nothing had been written yet."""
        self._texts.clear()
        self._prompts.clear()
        self._steps.clear()
        self._num_tokens = self._enough = 0

    def news(self, member: Member, now: float) -> Message | None:
        """What an engine is told with the step that comes now; None: nothing."""
        if not member.shares_drafts or not self._pays():
            return None
        assert self._every is not None
        left = self._steps.get(member, 0)
        self._steps[member] = left - 1 if left else self._every - 1
        if left:
            return None
        room, told, seen = MOST_TOKENS, list[tuple[str, list[Heard]]](), set[int]()
        for entry in self._crew.of(member):
            own = self._texts.get(entry.sample.id)
            if own is None or id(own.prompt) in seen:
                continue
            seen.add(id(own.prompt))
            parts = []
            for text in own.prompt.texts.values():
                known = text.known.get(member, 0)
                if known < len(text.tokens) and room:
                    parts.append(text.part(known, room))
                    room -= len(parts[-1].tokens)
                    text.known[member] = known + len(parts[-1].tokens)
            if parts:
                told.append((entry.sample.id, parts))
        if not told:
            return None
        message = pickle.dumps(told)
        traffic = self.traffic
        traffic.messages, traffic.bytes = traffic.messages + 1, traffic.bytes + len(message)
        traffic.tokens += MOST_TOKENS - room
        event = Event("share", now, engine=member.name, num_tokens=MOST_TOKENS - room, value=float(len(message)))
        event.num_seqs = sum(len(parts) for _, parts in told)
        return Message(message, event)

    def _new(self, sample: Sample) -> _Text:
        prompt = self._prompts.get(sample.prompt_ids)
        if prompt is None:
            prompt = self._prompts[sample.prompt_ids] = _Prompt(sample.prompt_ids)
        text = prompt.texts[sample.id] = self._texts[sample.id] = _Text(sample.id, prompt)
        return text

    def _drop(self, text: _Text) -> None:
        del self._texts[text.sample_id], text.prompt.texts[text.sample_id]
        self._num_tokens -= len(text.tokens)
        if not text.prompt.texts:
            del self._prompts[text.prompt.ids]

    def _make_room(self) -> None:
        for text in list(self._texts.values()):
            if self._num_tokens <= KEPT_TOKENS * 3 // 4:
                self._enough = 0
                return
            if text.sample_id not in self._crew.entries:
                self._drop(text)
        self._enough = self._num_tokens + KEPT_TOKENS // 8

    def check_integrity(self, samples: Mapping[str, Sample]) -> None:
        """AssertionError unless every text is a beginning of its sample, and the counts add up."""
        assert self._num_tokens == sum(len(text.tokens) for text in self._texts.values())
        for text in self._texts.values():
            assert self._prompts[text.prompt.ids].texts[text.sample_id] is text
            assert not text.tokens or text.runs[-1][0] == len(text.tokens), text.sample_id
            sample = samples.get(text.sample_id)
            assert sample is None or text.tokens.tolist() == sample.output_ids[: len(text.tokens)], text.sample_id
            assert all(0 <= known <= len(text.tokens) for known in text.known.values()), text.sample_id
