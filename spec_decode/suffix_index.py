"""An index of the places in a set of texts that follow the same tokens as a text's end does.

A *position* is a token of a text. It is filed under the hash of the k tokens before it, for each order k of ORDERS;
positions of one hash form a chain, the one filed last first. A lookup walks the chains of the text's last k tokens,
highest order first, and checks each position against the texts, so that hashes only ever cost time:

    text A   t h e   c a t   s a t
    text B   ... t h e   c a t |?          order 4, "e c a t" -> position of A's "s"; the match is "t h e  c a t"
                              tail

The positions found, each weighted by the length of its match and its age, are laid over each other as a trie of their
continuations: the weights of a node's children are the branch probabilities.

Positions rather than counts at the nodes of a suffix tree: memory is a fixed number of bytes a token, the weights are
exact for any rule of ageing because they are formed when they are read, and no count has to be taken back when texts
are dropped. The suffix tree of the package arctic-inference 0.3.0 counts occurrences without age, touches up to 64
nodes a token and takes a removal token by token. Measured, one tree a group, on the streams of spec_index_bench.py: 286
bytes a token and 43 us for lookup and update in C++, against 40 bytes and 12 us here, the calls from Python included.
On 12 groups of SmolLM2 rollouts it accepts slightly less (spec_replay.py). Hence not that.

Texts grow in pages of PAGE tokens, interleaved in memory as they come. A page holds tokens of one policy version of
one text. A text may begin where another one ends (a response after its prompt): looking back from its first page leads
into the other, looking ahead from the other does not lead into it. No match crosses any other end of a text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from longtail.spec_decode import suffix_kernels
from longtail.spec_decode.suffix_kernels import ORDERS, PAGE, START

MOST_PER_BUCKET = 2
"""Positions for each entry of a hash table, at most. More of them cost time: chains mix more contexts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """How a draft is read from the index."""

    min_match: int = 1
    """Matches shorter than this say nothing; one of ORDERS."""
    max_positions: int = 16
    """Positions that are laid over each other: the longest matches, among equal orders the latest. Bounds the work."""
    length_factor: float = 3.0
    """How much one more matching token, up to the highest order, adds to a position's weight."""
    decay: float = 0.9
    """Factor on a position's weight for each policy version since the newest position found,"""
    least: float = 0.1
    """but age takes no more than this leaves: a long match of an earlier epoch still says more than a short one."""
    escape: float = 1.0
    """Weight of "none of these": a child's probability is weight / (weights of all children + escape)."""
    min_prob: float = 0.1
    """A path stops, and a tree leaves out, what is estimated below this (a tree: with all before it)."""

    def __post_init__(self) -> None:
        if self.min_match not in ORDERS:
            raise ValueError(f"min_match must be one of {ORDERS}, not {self.min_match}")
        if self.max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, not {self.max_positions}")
        if not self.length_factor >= 1.0:
            raise ValueError(f"length_factor must be at least 1, not {self.length_factor}")
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay must be above 0 and at most 1, not {self.decay}")
        if not 0.0 <= self.least <= 1.0:
            raise ValueError(f"least must be from 0 to 1, not {self.least}")
        if not self.escape >= 0.0:
            raise ValueError(f"escape must be at least 0, not {self.escape}")
        if not 0.0 <= self.min_prob <= 1.0:
            raise ValueError(f"min_prob must be from 0 to 1, not {self.min_prob}")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A draft: see `spec_decode.drafter.Draft`."""

    tokens: list[int]
    probs: list[float]
    parents: list[int]


class SuffixIndex:
    """A text is known to its owner by its *tail*, the position of its last token."""

    def __init__(self, lookup: Lookup | None = None, num_pages: int = 8) -> None:
        self.lookup = lookup or Lookup()
        self.num_tokens = 0
        self._num_pages = 0
        num_pages = max(num_pages, 8)
        self._tokens = np.empty(num_pages * PAGE, np.int32)
        self._older = np.empty((num_pages * PAGE, len(ORDERS)), np.int32)
        self._heads = np.full((len(ORDERS), _buckets_for(num_pages * PAGE)), -1, np.int32)
        self._pages = np.empty((num_pages, 4), np.int32)
        self._scratch(16)
        self._weigh()

    def append(self, tail: int, tokens: Sequence[int], version: int) -> int:
        """Lengthens the text that ends at `tail` (START begins one; the tail of an AGELESS text begins one after it)
        by tokens of one policy version. -> its new tail. Reads nothing else of the text."""
        if not tokens:
            return tail
        needed = self._num_pages + 1 + len(tokens) // PAGE
        if needed > len(self._pages):
            self._grow(needed)
        tail, self._num_pages = suffix_kernels.append(
            self._tokens,
            self._older,
            self._heads,
            self._pages,
            self._num_pages,
            tail,
            np.array(tokens, np.int32),
            version,
        )
        self.num_tokens += len(tokens)
        return int(tail)

    def read(self, tail: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, versions), int32, of the text that ends at `tail`, without the text that it begins after."""
        own = int(suffix_kernels.text_length(self._pages, tail))
        tokens, versions = np.empty(own, np.int32), np.empty(own, np.int32)
        suffix_kernels.read(self._tokens, self._pages, tail, tokens, versions)
        return tokens, versions

    def draft(self, tail: int, max_tokens: int, *, tree: bool = False) -> Found:
        """How the text that ends at `tail` may go on: the likeliest path, or the max_tokens likeliest nodes."""
        if max_tokens < 1 or tail == START:
            return Found([], [], [])
        if max_tokens > self._max_tokens:
            self._scratch(max_tokens)
        lookup = self.lookup
        count = suffix_kernels.draft(
            self._tokens,
            self._older,
            self._heads,
            self._pages,
            tail,
            max_tokens,
            tree,
            lookup.min_match,
            lookup.max_positions,
            lookup.length_factor,
            lookup.decay,
            lookup.least,
            lookup.escape,
            lookup.min_prob,
            self._found,
            self._nodes,
            self._weights,
            self._out,
            self._probs,
        )
        out = self._out[:, :count].tolist()
        return Found(out[0], self._probs[:count].tolist(), out[1])

    def matches(self, tail: int) -> list[tuple[int, int]]:
        """(position, length of its match) of what a draft is read from, for inspection."""
        found = np.empty((self.lookup.max_positions, 2), np.int64)
        count = suffix_kernels.find(
            self._tokens,
            self._older,
            self._heads,
            self._pages,
            tail,
            self.lookup.min_match,
            self.lookup.max_positions,
            found,
        )
        return [(int(p), int(n)) for p, n in found[:count]]

    def _scratch(self, max_tokens: int) -> None:
        nodes = self.lookup.max_positions * max_tokens + 1
        self._max_tokens = max_tokens
        self._found = np.empty((self.lookup.max_positions, 2), np.int64)
        self._nodes = np.empty((nodes, 4), np.int32)
        self._weights = np.empty(nodes)
        self._out = np.empty((2, max_tokens), np.int32)
        self._probs = np.empty(max_tokens)

    def _grow(self, num_pages: int) -> None:
        num_pages = max(num_pages, len(self._pages) * 3 // 2)
        positions = num_pages * PAGE
        if positions >= 2**31:
            raise ValueError(f"SuffixIndex: {positions} tokens in one index; keep fewer texts (max_tokens_per_index)")
        self._tokens = _longer(self._tokens, positions)
        self._older = _longer(self._older, positions)
        self._pages = _longer(self._pages, num_pages)
        if positions > MOST_PER_BUCKET * self._heads.shape[1]:
            heads = np.full((len(ORDERS), _buckets_for(positions)), -1, np.int32)
            suffix_kernels.refile(self._tokens, self._older, self._heads, self._pages, heads)
            self._heads = heads
        self._weigh()

    def _weigh(self) -> None:
        arrays = (self._tokens, self._older, self._heads, self._pages)
        self.num_bytes = sum(array.nbytes for array in arrays)
        """Without the scratch memory of a lookup, which does not grow with the texts."""


def _buckets_for(positions: int) -> int:
    return 1 << (positions - 1).bit_length()


@functools.cache
def compile_all() -> None:
    """Compiles what a lookup and an update take, or loads it from the disk: once a process, and not in a step."""
    index = SuffixIndex()
    tail = index.append(START, [1, 2, 3] * 100, 0)
    index.draft(tail, 2)
    index.draft(tail, 2, tree=True)


def _longer(array: np.ndarray, length: int) -> np.ndarray:
    longer = np.empty((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
