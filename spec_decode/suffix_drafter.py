"""Drafts from what was written before: `group` (everything known of a prompt), `ngram` (the sample alone).

Both are one drafter on a `SuffixIndex`; they differ in whose tokens share an index.

    group    one index a prompt (identity: its token ids): the prompt, the samples that run now, and those of earlier
             epochs, aged by policy version. A sample is heard by its siblings as it runs.
    ngram    one index a sample: its prompt and its own output, gone when the sample is done.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Literal

from longtail.sample import OBSERVATION, Sample
from longtail.spec_decode.drafter import Draft, DraftRequest, Heard
from longtail.spec_decode.suffix_index import Lookup, SuffixIndex, compile_all
from longtail.spec_decode.suffix_kernels import AGELESS, START
from longtail.version import PolicyVersion


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Checked at construction."""

    lookup: Lookup = dataclasses.field(default_factory=Lookup)
    max_tokens_per_index: int = 1 << 18
    """Tokens kept of one prompt (`ngram`: of one sample). Beyond it the index is made anew from half as many, and the
    last quarter as many of the prompt: whole samples that are done go first, those of the oldest version before others;
    then the beginnings of live ones."""
    max_bytes: int = 1 << 30
    """Memory of all indexes (about 40 bytes a token). Beyond it the prompts go that have no live sample, the one unused
    for longest first, down to three quarters; if that is not enough, the largest indexes are halved. What the samples
    that are live need at least is kept in any case."""
    tree: bool = False
    """Draft several paths, as a tree. Off while the verification takes one path."""

    def __post_init__(self) -> None:
        if self.max_tokens_per_index < 1024:
            raise ValueError(f"max_tokens_per_index must be at least 1024, not {self.max_tokens_per_index}")
        if self.max_bytes < 1 << 16:
            raise ValueError(f"max_bytes must be at least {1 << 16}, not {self.max_bytes}")


@dataclasses.dataclass(slots=True, eq=False)
class _Text:
    """A sample's output in an index."""

    sample_id: str
    shared: _Shared
    tail: int
    length: int = 0
    """Output tokens seen,"""
    dropped: int = 0
    """of these gone again, from the beginning."""
    live: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class _Shared:
    """An index and the texts in it, oldest first."""

    key: Hashable
    prompt: tuple[int, ...]
    index: SuffixIndex
    prompt_tail: int
    texts: dict[str, _Text] = dataclasses.field(default_factory=dict)

    @property
    def has_live(self) -> bool:
        return any(text.live for text in self.texts.values())


class SuffixDrafter:
    """scope: whose tokens share an index: those of a prompt (`group`) or of a sample (`ngram`)."""

    def __init__(self, scope: Literal["prompt", "sample"], config: SuffixConfig | None = None) -> None:
        if scope not in ("prompt", "sample"):
            raise ValueError(f'scope must be "prompt" or "sample", not {scope!r}')
        self.scope = scope
        self.name = "group" if scope == "prompt" else "ngram"
        self.config = config or SuffixConfig()
        compile_all()
        self._behind: dict[str, Sample] = {}  # observed, and not taken in before a draft is asked for
        self._live: dict[str, _Text] = {}
        self._shared: dict[Hashable, _Shared] = {}  # the one used last stands last
        self._num_tokens = self._num_bytes = 0
        self._renamed = itertools.count(1)

    @property
    def num_tokens(self) -> int:
        """Tokens kept, prompts counted once an index."""
        self.take_in()
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """The memory of all indexes."""
        self.take_in()
        return self._num_bytes

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        if self.scope == "prompt":  # siblings are heard
            self.take_in()
        for request in requests:
            if request.max_tokens < 1:
                drafts.append(Draft([], self.name))
                continue
            self._behind.pop(request.sample.id, None)
            text = self._catch_up(request.sample)
            found = text.shared.index.draft(text.tail, request.max_tokens, tree=self.config.tree)
            parents = found.parents if self.config.tree else None
            drafts.append(Draft(found.tokens, self.name, found.probs, parents))
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        before = self._behind.get(sample.id)
        if before is not None and before is not sample:  # an id that is used again
            self._catch_up(before)
        self._behind[sample.id] = sample

    def take_in(self) -> None:
        """Brings the indexes up to what was observed. Done by itself when there is a draft to make; together, it takes
        a fraction of the time that it takes token by token."""
        for sample in self._behind.values():
            self._catch_up(sample)
        self._behind.clear()

    def forget(self, sample_id: str) -> None:
        behind = self._behind.pop(sample_id, None)
        if behind is not None and self.scope == "prompt":
            self._catch_up(behind)
        text = self._live.pop(sample_id, None)
        if text is None:
            return
        text.live = False
        if self.scope == "sample":
            self._drop(text.shared)

    def learn(self, sample: Sample) -> None:
        """Takes in a sample that does not run: of an earlier epoch, out of a store."""
        self._catch_up(sample)
        self.forget(sample.id)

    @property
    def hears(self) -> bool:
        """Whether it can draft from what siblings wrote elsewhere."""
        return self.scope == "prompt"

    def hear(self, prompt_ids: tuple[int, ...], heard: Heard) -> None:
        """Takes in what a sample of this prompt wrote elsewhere. Where a part before it is missing, the text begins
        anew."""
        if heard.sample_id in self._live or heard.sample_id in self._behind:  # it has come here, with its tokens
            return
        shared = self._shared_by(prompt_ids, prompt_ids)
        text = shared.texts.get(heard.sample_id)
        if text is None or text.length != heard.start:
            tail = START if heard.start else shared.prompt_tail
            text = self._new_text(heard.sample_id, shared, tail, heard.start)
        self._extend(text, heard.tokens, heard.runs)

    def _catch_up(self, sample: Sample) -> _Text:
        """Brings the index up to the tokens that the sample has."""
        text = self._live.get(sample.id)
        if text is None or len(sample.output_ids) < text.length:
            text = self._attach(sample)
        start, end = text.length, len(sample.output_ids)
        if start == end:
            return text
        versions, runs = sample.versions, []
        while start < end:
            version = _version(versions, start)
            stop = next((i for i in range(start + 1, end) if _version(versions, i) != version), end)
            runs.append((stop - start, version))
            start = stop
        return self._extend(text, sample.output_ids[text.length :], runs)

    def _extend(self, text: _Text, tokens: Sequence[int], runs: Sequence[tuple[int, PolicyVersion]]) -> _Text:
        index, start = text.shared.index, 0
        self._count(index, -1)
        for count, version in runs:
            text.tail = index.append(text.tail, tokens[start : start + count], version)
            start += count
        text.length += start
        self._count(index, 1)
        if index.num_tokens > self.config.max_tokens_per_index:
            self._shrink(text.shared)
        if self._num_bytes > self.config.max_bytes:
            self._make_room()
        return text

    def _count(self, index: SuffixIndex, sign: int) -> None:
        self._num_tokens += sign * index.num_tokens
        self._num_bytes += sign * index.num_bytes

    def _attach(self, sample: Sample) -> _Text:
        key: Hashable = sample.prompt_ids if self.scope == "prompt" else sample.id
        shared = self._shared.get(key)
        text = shared.texts.get(sample.id) if shared is not None else None
        again = text is not None and sample.prompt_ids == text.shared.prompt and _begins_with(sample, text)
        if shared is not None and self.scope == "sample" and not again:  # an id that is used again
            self._count(shared.index, -1)
            del self._shared[key]
            text = None
        shared = self._shared_by(key, sample.prompt_ids)
        if text is None or not again:
            text = self._new_text(sample.id, shared, shared.prompt_tail)
        text.live = True
        self._live[sample.id] = text
        return text

    def _shared_by(self, key: Hashable, prompt_ids: tuple[int, ...]) -> _Shared:
        """Made if need be. It is the one used last from now on."""
        shared = self._shared.pop(key, None)
        if shared is None:
            index = SuffixIndex(self.config.lookup)
            tail = index.append(START, prompt_ids, AGELESS)
            shared = _Shared(key, prompt_ids, index, tail)
            self._count(index, 1)
        self._shared[key] = shared
        return shared

    def _new_text(self, sample_id: str, shared: _Shared, tail: int, start: int = 0) -> _Text:
        """start: output tokens before it that nobody here knows. An id that comes again with other tokens is another
        sample: the text of the first stays, without its id."""
        before = shared.texts.pop(sample_id, None)
        if before is not None:
            before.live = False
            shared.texts[f"{sample_id} #{next(self._renamed)}"] = before
        text = shared.texts[sample_id] = _Text(sample_id, shared, tail, length=start, dropped=start, live=False)
        return text

    # ---- bounded memory

    def _shrink(self, shared: _Shared) -> None:
        """Makes the index anew with at most half of what it may hold."""
        old = shared.index
        room = min(self.config.max_tokens_per_index, old.num_tokens) // 2
        contents = {text: old.read(text.tail) for text in shared.texts.values() if text.tail != shared.prompt_tail}
        kept: dict[_Text, int] = {}
        live = [text for text in contents if text.live]
        for text in live:
            kept[text] = min(len(contents[text][0]), max(room // len(live), 1))
        room -= sum(kept.values())
        done = [text for text in contents if not text.live]
        newest = {text: int(contents[text][1][-1]) for text in done}
        for text in sorted(done, key=lambda t: newest[t])[::-1]:  # of equal version the one that came last first
            if len(contents[text][0]) > room:
                break
            kept[text] = len(contents[text][0])
            room -= kept[text]
        # A prompt that alone fills an index is kept at its end, where responses begin.
        prompt = shared.prompt[-(self.config.max_tokens_per_index // 4) :]
        index = SuffixIndex(self.config.lookup, (len(prompt) + sum(kept.values())) // PAGE_ROOM)
        shared.prompt_tail = index.append(START, prompt, AGELESS)
        for name, text in list(shared.texts.items()):
            if text not in contents:
                text.tail = shared.prompt_tail
                continue
            if text not in kept:
                del shared.texts[name]
                continue
            tokens, versions = (part[-kept[text] :].tolist() for part in contents[text])
            text.dropped = text.length - len(tokens)
            tail = shared.prompt_tail if text.dropped == 0 else START
            start = 0
            while start < len(tokens):
                stop = start + versions[start:].count(versions[start])
                tail = index.append(tail, tokens[start:stop], versions[start])
                start = stop
            text.tail = tail
        self._count(old, -1)
        self._count(index, 1)
        shared.index = index

    def _make_room(self) -> None:
        for shared in list(self._shared.values()):
            if self._num_bytes <= self.config.max_bytes * 3 // 4:
                return
            if not shared.has_live:
                self._drop(shared)
        for shared in sorted(self._shared.values(), key=lambda shared: -shared.index.num_bytes):
            if self._num_bytes <= self.config.max_bytes:
                return
            self._shrink(shared)

    def _drop(self, shared: _Shared) -> None:
        self._shared.pop(shared.key)
        self._count(shared.index, -1)

    def check_integrity(self) -> None:
        """AssertionError if the counts or the texts do not add up."""
        self.take_in()
        total = total_bytes = 0
        for key, shared in self._shared.items():
            assert shared.key == key
            total += shared.index.num_tokens
            total_bytes += shared.index.num_bytes
            own = len(shared.index.read(shared.prompt_tail)[0])
            for text in shared.texts.values():
                assert text.shared is shared and (not text.live or self._live.get(text.sample_id) is text), key
                count = 0 if text.tail == shared.prompt_tail else len(shared.index.read(text.tail)[0])
                assert count == text.length - text.dropped, (text.sample_id, count, text.length, text.dropped)
                own += count
            assert own == shared.index.num_tokens, (key, own, shared.index.num_tokens)
        assert (total, total_bytes) == (self._num_tokens, self._num_bytes)
        assert all(text.live and text.shared.key in self._shared for text in self._live.values())


PAGE_ROOM = 16
"""Tokens a page when an index is made anew: texts end in the middle of pages."""


def _version(versions: Sequence[PolicyVersion], position: int) -> PolicyVersion:
    """Of an output token; an observation is as old as the turn that it answers."""
    while versions[position] == OBSERVATION:
        position -= 1
    return versions[position]


def _begins_with(sample: Sample, text: _Text) -> bool:
    """Whether the text is a beginning of the sample's output (the part of it that is still kept)."""
    if len(sample.output_ids) < text.length:
        return False
    if text.tail == text.shared.prompt_tail:
        return True
    tokens, _ = text.shared.index.read(text.tail)
    return bool(sample.output_ids[text.dropped : text.length] == tokens.tolist())


def group_drafter(config: SuffixConfig | None = None) -> SuffixDrafter:
    """Drafts from all that is known of the prompt."""
    return SuffixDrafter("prompt", config)


def ngram_drafter(config: SuffixConfig | None = None) -> SuffixDrafter:
    """Drafts from the sample's prompt and output."""
    return SuffixDrafter("sample", config)
