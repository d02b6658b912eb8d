"""An index of the places in a set of texts that follow the same tokens as a text's end does.

A *position* is a token of a text. It is filed under the hash of the k tokens before it, for each order k of ORDERS;
positions of one hash form a chain, the one filed last first. A lookup walks the chains of the text's last k tokens,
highest order first, and checks each position against the texts, so that hashes only ever cost time:

    text A   t h e   c a t   s a t
    text B   ... t h e   c a t |?          order 3, "c a t" -> position of A's "s"; the match is "t h e  c a t"
                              tail

The positions found, each weighted by the length of its match and its age, are laid over each other as a trie of their
continuations: the weights of a node's children are the branch probabilities.

Positions rather than counts at the nodes of a suffix tree: memory is a fixed number of bytes a token, the weights are
exact for any rule of ageing because they are formed when they are read, and no count has to be taken back when texts
are dropped. (The suffix tree of the package arctic-inference 0.3 counts occurrences without age, touches up to 64 nodes
a token, takes a removal token by token, and comes as a source distribution that builds with torch; hence not that.)

Texts grow in pages of PAGE tokens, interleaved in memory as they come. A page holds tokens of one policy version of
one text. A text may begin where another one ends (a response after its prompt): looking back from its first page leads
into the other, looking ahead from the other does not lead into it. No match crosses any other end of a text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from longtail.kernels._numba import jit

PAGE = 32
ORDERS = (1, 2, 4, 8)
LONGEST = 32
"""Tokens of a match that are looked at."""
MOST_PER_BUCKET = 2
"""Positions for each entry of a hash table, at most. More of them cost time: chains mix more contexts."""
START = -1
"""Position before a text's first token."""
AGELESS = -1
"""Version of a prompt: it never ages."""

_ORDERS = np.array(ORDERS, dtype=np.int64)
_BEFORE, _AFTER, _USED, _VERSION = range(4)  # columns of `pages`
_TOKEN, _PARENT, _CHILD, _SIBLING = range(4)  # columns of `nodes`


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
    """Factor on a position's weight for each policy version since the newest position found."""
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

    @property
    def num_bytes(self) -> int:
        """Of the index; without the scratch memory of a lookup, which does not grow with the texts."""
        return self._tokens.nbytes + self._older.nbytes + self._heads.nbytes + self._pages.nbytes

    def append(self, tail: int, tokens: Sequence[int], version: int) -> int:
        """Lengthens the text that ends at `tail` (START begins one; the tail of an AGELESS text begins one after it)
        by tokens of one policy version. -> its new tail. Reads nothing else of the text."""
        if not tokens:
            return tail
        needed = self._num_pages + 1 + len(tokens) // PAGE
        if needed > len(self._pages):
            self._grow(needed)
        tail, self._num_pages = _append(
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
        own = int(_text_length(self._pages, tail))
        tokens, versions = np.empty(own, np.int32), np.empty(own, np.int32)
        _read(self._tokens, self._pages, tail, tokens, versions)
        return tokens, versions

    def draft(self, tail: int, max_tokens: int, *, tree: bool = False) -> Found:
        """How the text that ends at `tail` may go on: the likeliest path, or the max_tokens likeliest nodes."""
        if max_tokens < 1 or tail == START:
            return Found([], [], [])
        if max_tokens > self._max_tokens:
            self._scratch(max_tokens)
        lookup = self.lookup
        count = _draft(
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
        count = _find(
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
            _refile(self._tokens, self._older, self._heads, self._pages, heads)
            self._heads = heads


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


# ---- compiled. Every loop is bounded: by LONGEST, by max_positions, or by the tokens that come in.


@jit()
def _before(pages: Any, position: Any) -> Any:
    """The position before, in the same text or the one that it begins after; START where there is none."""
    return position - 1 if position % PAGE else np.int64(pages[position // PAGE, _BEFORE])


@jit()
def _next(pages: Any, position: Any) -> Any:
    """The position after, in the same text; START where it ends."""
    page = position // PAGE
    if position % PAGE + 1 < pages[page, _USED]:
        return position + 1
    after = np.int64(pages[page, _AFTER])
    return after * PAGE if after >= 0 else np.int64(START)


@jit()
def _mix(hashed: Any, token: Any) -> Any:
    """Takes one more token, going back, into the hash of a context (64 bits that wrap)."""
    mixed = (hashed ^ (np.int64(token) + 0x51ED27)) * np.int64(0x2545F4914F6CDD1D)
    return mixed ^ (mixed >> 29)


@jit()
def _bucket(hashed: Any, table: Any) -> Any:
    return ((hashed * np.int64(0x5851F42D4C957F2D)) >> 24) & (table - 1)


@jit()
def _file(tokens: Any, older: Any, heads: Any, pages: Any, position: Any) -> None:
    """Puts a position at the head of the chain of its context, for each order that its text is long enough for."""
    hashed = np.int64(0)
    depth = 0
    before = _before(pages, position)
    for o in range(len(ORDERS)):
        while depth < _ORDERS[o] and before >= 0:
            hashed = _mix(hashed, tokens[before])
            before = _before(pages, before)
            depth += 1
        if depth < _ORDERS[o]:
            older[position, o] = -1
            continue
        bucket = _bucket(hashed, heads.shape[1])
        older[position, o] = heads[o, bucket]
        heads[o, bucket] = position


@jit()
def _append(
    tokens: Any, older: Any, heads: Any, pages: Any, num_pages: Any, tail: Any, new: Any, version: Any
) -> tuple[Any, Any]:
    """-> (new tail, pages in use)."""
    for token in new:
        page = tail // PAGE if tail >= 0 else np.int64(-1)
        if page < 0 or pages[page, _USED] == PAGE or pages[page, _VERSION] != version:
            pages[num_pages, _BEFORE] = tail
            pages[num_pages, _AFTER] = -1
            pages[num_pages, _USED] = 0
            pages[num_pages, _VERSION] = version
            if page >= 0 and (pages[page, _VERSION] != AGELESS or version == AGELESS):
                pages[page, _AFTER] = num_pages
            page = num_pages
            num_pages += 1
        tail = page * PAGE + pages[page, _USED]
        tokens[tail] = token
        pages[page, _USED] += 1
        _file(tokens, older, heads, pages, tail)
    return tail, num_pages


@jit()
def _refile(tokens: Any, older: Any, heads: Any, pages: Any, larger: Any) -> None:
    """Moves the chains to a larger table, each in its order."""
    last = np.empty(larger.shape[1], np.int32)
    for o in range(len(ORDERS)):
        last[:] = -1
        for bucket in range(heads.shape[1]):
            position = np.int64(heads[o, bucket])
            while position >= 0:
                following = np.int64(older[position, o])
                hashed = np.int64(0)
                before = _before(pages, position)
                for _ in range(_ORDERS[o]):
                    hashed = _mix(hashed, tokens[before])
                    before = _before(pages, before)
                to = _bucket(hashed, larger.shape[1])
                if last[to] < 0:
                    larger[o, to] = position
                else:
                    older[last[to], o] = position
                last[to] = position
                older[position, o] = -1
                position = following


@jit()
def _text_length(pages: Any, tail: Any) -> Any:
    count = np.int64(0)
    page = tail // PAGE if tail >= 0 else np.int64(-1)
    own = page >= 0 and pages[page, _VERSION] == AGELESS
    while page >= 0 and (pages[page, _VERSION] == AGELESS) == own:
        count += pages[page, _USED]
        before = np.int64(pages[page, _BEFORE])
        page = before // PAGE if before >= 0 else np.int64(-1)
    return count


@jit()
def _read(tokens: Any, pages: Any, tail: Any, out: Any, versions: Any) -> None:
    position = np.int64(tail)
    for i in range(len(out) - 1, -1, -1):
        out[i] = tokens[position]
        versions[i] = pages[position // PAGE, _VERSION]
        position = _before(pages, position)


@jit()
def _find(
    tokens: Any, older: Any, heads: Any, pages: Any, tail: Any, min_match: Any, max_positions: Any, found: Any
) -> Any:
    """Fills found [max_positions, 2] with (position, length of its match), highest order first. -> how many."""
    context = np.empty(LONGEST, np.int32)
    hashes = np.zeros(len(ORDERS), np.int64)
    known, o, hashed = 0, 0, np.int64(0)
    position = np.int64(tail)
    while known < LONGEST and position >= 0:
        context[known] = tokens[position]
        if o < len(ORDERS):
            hashed = _mix(hashed, tokens[position])
            if known + 1 == _ORDERS[o]:
                hashes[o] = hashed
                o += 1
        known += 1
        position = _before(pages, position)
    count = 0
    for o in range(len(ORDERS) - 1, -1, -1):
        if _ORDERS[o] > known or _ORDERS[o] < min_match:
            continue
        position = np.int64(heads[o, _bucket(hashes[o], heads.shape[1])])
        steps = 2 * max_positions  # those of other contexts with this hash, and those found with a higher order
        while position >= 0 and count < max_positions and steps > 0:
            steps -= 1
            length = 0
            before = _before(pages, position)
            while length < known and before >= 0 and tokens[before] == context[length]:
                length += 1
                before = _before(pages, before)
            if length >= _ORDERS[o] and (o + 1 == len(ORDERS) or length < _ORDERS[o + 1]):
                found[count, 0] = position
                found[count, 1] = length
                count += 1
            position = np.int64(older[position, o])
    return count


@jit()
def _draft(
    tokens: Any,
    older: Any,
    heads: Any,
    pages: Any,
    tail: Any,
    max_tokens: Any,
    tree: Any,
    min_match: Any,
    max_positions: Any,
    length_factor: Any,
    decay: Any,
    escape: Any,
    min_prob: Any,
    found: Any,
    nodes: Any,
    weights: Any,
    out: Any,
    probs: Any,
) -> Any:
    """Fills out [2, max_tokens] (token, parent) and probs [max_tokens]. -> how many."""
    count = _find(tokens, older, heads, pages, tail, min_match, max_positions, found)
    newest = np.int64(AGELESS)
    for i in range(count):
        newest = max(newest, np.int64(pages[found[i, 0] // PAGE, _VERSION]))
    weights[0] = 0.0
    nodes[0, _CHILD] = -1
    used = 1
    for i in range(count):
        first = found[i, 0]
        version = np.int64(pages[first // PAGE, _VERSION])
        weight = length_factor ** min(found[i, 1], _ORDERS[-1])
        if version != AGELESS:
            weight *= decay ** (newest - version)
        node, position = 0, first
        for _ in range(max_tokens):
            token = tokens[position]
            child = nodes[node, _CHILD]
            last = -1
            while child >= 0 and nodes[child, _TOKEN] != token:
                last = child
                child = nodes[child, _SIBLING]
            if child < 0:
                child = used
                used += 1
                nodes[child, _TOKEN] = token
                nodes[child, _PARENT] = node
                nodes[child, _CHILD] = -1
                nodes[child, _SIBLING] = -1
                weights[child] = 0.0
                if last < 0:
                    nodes[node, _CHILD] = child
                else:
                    nodes[last, _SIBLING] = child
            weights[child] += weight
            node = child
            # A text that repeats itself goes on doing so: behind its own end comes what came behind the match.
            position = first if position == tail else _next(pages, position)
            if position < 0:
                break
    if tree:
        return _likeliest_nodes(nodes, weights, used, max_tokens, escape, min_prob, out, probs)
    return _likeliest_path(nodes, weights, max_tokens, escape, min_prob, out, probs)


@jit()
def _likeliest_path(
    nodes: Any, weights: Any, max_tokens: Any, escape: Any, min_prob: Any, out: Any, probs: Any
) -> Any:
    node = 0
    for i in range(max_tokens):
        best, total = -1, escape
        child = nodes[node, _CHILD]
        while child >= 0:
            total += weights[child]
            if best < 0 or weights[child] > weights[best]:
                best = child
            child = nodes[child, _SIBLING]
        if best < 0 or weights[best] < min_prob * total:
            return i
        out[0, i] = nodes[best, _TOKEN]
        out[1, i] = i - 1
        probs[i] = weights[best] / total
        node = best
    return max_tokens


@jit()
def _likeliest_nodes(
    nodes: Any, weights: Any, used: Any, max_tokens: Any, escape: Any, min_prob: Any, out: Any, probs: Any
) -> Any:
    """The nodes with the highest probability of being reached. A parent's is never below its child's, and parents are
    made before their children, so a stable order makes every choice of the first n a tree."""
    totals = np.full(used, escape)
    for node in range(1, used):
        totals[nodes[node, _PARENT]] += weights[node]
    reached = np.ones(used)
    for node in range(1, used):
        reached[node] = reached[nodes[node, _PARENT]] * weights[node] / totals[nodes[node, _PARENT]]
    order = np.argsort(-reached[1:], kind="mergesort") + 1
    place = np.full(used, -1)
    count = 0
    for node in order:
        if count == max_tokens or reached[node] < min_prob:
            break
        parent = nodes[node, _PARENT]
        out[0, count] = nodes[node, _TOKEN]
        out[1, count] = place[parent]
        probs[count] = weights[node] / totals[parent]
        place[node] = count
        count += 1
    return count
