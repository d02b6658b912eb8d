"""The compiled part of the suffix index: see suffix_index.py.

    tokens  int32 [positions]
    older   int32 [positions, orders]: the position filed before under the same hash; -1 ends a chain
    heads   int32 [orders, buckets]: the position filed last under a hash; -1: none
    pages   int32 [pages, 4]: the columns below
    nodes   int32 [nodes, 4] with weights float64 [nodes]: scratch memory for the trie of one lookup

Every loop is bounded: by LONGEST, by max_positions, or by the tokens that come in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from longtail.kernels._numba import jit

PAGE = 32
ORDERS = (1, 2, 4, 8)
LONGEST = 32
"""Tokens of a match that are looked at."""
START = -1
"""Position before a text's first token."""
AGELESS = -1
"""Version of a prompt: it never ages."""

_ORDERS = np.array(ORDERS, dtype=np.int64)
_BEFORE, _AFTER, _USED, _VERSION = range(4)
"""Columns of `pages`: the position before its first one, the page that goes on (-1: none), tokens in it, version."""
_TOKEN, _PARENT, _CHILD, _SIBLING = range(4)
"""Columns of `nodes`; the root is node 0, -1: no child, no further sibling."""


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
def append(
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
def refile(tokens: Any, older: Any, heads: Any, pages: Any, larger: Any) -> None:
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
def text_length(pages: Any, tail: Any) -> Any:
    count = np.int64(0)
    page = tail // PAGE if tail >= 0 else np.int64(-1)
    own = page >= 0 and pages[page, _VERSION] == AGELESS
    while page >= 0 and (pages[page, _VERSION] == AGELESS) == own:
        count += pages[page, _USED]
        before = np.int64(pages[page, _BEFORE])
        page = before // PAGE if before >= 0 else np.int64(-1)
    return count


@jit()
def read(tokens: Any, pages: Any, tail: Any, out: Any, versions: Any) -> None:
    position = np.int64(tail)
    for i in range(len(out) - 1, -1, -1):
        out[i] = tokens[position]
        versions[i] = pages[position // PAGE, _VERSION]
        position = _before(pages, position)


@jit()
def find(
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
def draft(
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
    least: Any,
    escape: Any,
    min_prob: Any,
    found: Any,
    nodes: Any,
    weights: Any,
    out: Any,
    probs: Any,
) -> Any:
    """Fills out [2, max_tokens] (token, parent) and probs [max_tokens]. -> how many."""
    count = find(tokens, older, heads, pages, tail, min_match, max_positions, found)
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
            weight *= max(decay ** (newest - version), least)
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
def _likeliest_path(nodes: Any, weights: Any, max_tokens: Any, escape: Any, min_prob: Any, out: Any, probs: Any) -> Any:
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
