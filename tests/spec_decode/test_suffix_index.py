"""The suffix index against a brute-force search over the texts."""

from __future__ import annotations

import dataclasses
import random

import pytest

from longtail.spec_decode.suffix_index import Lookup, SuffixIndex
from longtail.spec_decode.suffix_kernels import AGELESS, LONGEST, ORDERS, PAGE, START

EVERYTHING = 100_000
"""A bound on positions that no text here reaches."""


@dataclasses.dataclass
class Oracle:
    """Remembers every position with all the tokens before it, and searches them one by one."""

    lookup: Lookup
    context: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # before the position
    token: dict[int, int] = dataclasses.field(default_factory=dict)
    version: dict[int, int] = dataclasses.field(default_factory=dict)
    after: dict[int, int] = dataclasses.field(default_factory=dict)
    order: list[int] = dataclasses.field(default_factory=list)

    def append(self, tail: int, token: int, version: int, position: int) -> None:
        self.context[position] = self.whole(tail)
        self.token[position], self.version[position] = token, version
        self.order.append(position)
        if tail != START and (self.version[tail] == AGELESS) == (version == AGELESS):
            self.after[tail] = position

    def whole(self, tail: int) -> tuple[int, ...]:
        return () if tail == START else (*self.context[tail], self.token[tail])

    def matches(self, tail: int) -> list[tuple[int, int]]:
        text = self.whole(tail)[-LONGEST:]
        lengths = {}
        for position in reversed(self.order):
            before = self.context[position]
            n = 0
            while n < min(len(text), len(before)) and text[-1 - n] == before[-1 - n]:
                n += 1
            lengths[position] = n
        bands = [(low, high - 1) for low, high in zip(ORDERS, [*ORDERS[1:], LONGEST + 1], strict=True)]
        found = []
        for low, high in reversed(bands):
            if low >= self.lookup.min_match:
                found += [(p, n) for p, n in lengths.items() if low <= n <= high]
        return found[: self.lookup.max_positions]

    def draft(self, tail: int, max_tokens: int) -> dict[tuple[int, ...], float]:
        """Weight of every continuation."""
        found = self.matches(tail)
        newest = max((self.version[p] for p, _ in found), default=AGELESS)
        weights: dict[tuple[int, ...], float] = {}
        for first, length in found:
            weight = self.lookup.length_factor ** min(length, ORDERS[-1])
            if self.version[first] != AGELESS:
                weight *= max(self.lookup.decay ** (newest - self.version[first]), self.lookup.least)
            path: tuple[int, ...] = ()
            position: int | None = first
            while position is not None and len(path) < max_tokens:
                path = (*path, self.token[position])
                weights[path] = weights.get(path, 0.0) + weight
                position = first if position == tail else self.after.get(position)
        return weights

    def probs(self, weights: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        totals: dict[tuple[int, ...], float] = {}
        for path, weight in weights.items():
            totals[path[:-1]] = totals.get(path[:-1], self.lookup.escape) + weight
        return {path: weight / totals[path[:-1]] for path, weight in weights.items()}


def grown(seed: int, lookup: Lookup, alphabet: int = 3, steps: int = 700) -> tuple[SuffixIndex, Oracle, list[int]]:
    """A prompt and five texts of a small alphabet that grow by turns, over two versions; the index grows with them."""
    rng = random.Random(seed)
    index, oracle = SuffixIndex(lookup), Oracle(lookup)

    def append(tail: int, version: int) -> int:
        token = rng.randrange(alphabet)
        position = index.append(tail, [token], version)
        oracle.append(tail, token, version, position)
        return position

    prompt = START
    for _ in range(rng.choice([1, 5, PAGE, PAGE + 3])):
        prompt = append(prompt, AGELESS)
    tails = [prompt] * 4 + [START]
    for step in range(steps):
        i = rng.randrange(len(tails))
        tails[i] = append(tails[i], step * 3 // steps)
    return index, oracle, [prompt, *tails]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("min_match", [1, 4])
def test_every_match_is_found_in_order(seed: int, min_match: int) -> None:
    index, oracle, tails = grown(seed, Lookup(max_positions=EVERYTHING, min_match=min_match), alphabet=2 + seed % 3)
    assert index.num_tokens == len(oracle.order)
    for tail in tails:
        assert index.matches(tail) == oracle.matches(tail)


@pytest.mark.parametrize("seed", range(6))
def test_a_bound_keeps_the_longest_and_latest(seed: int) -> None:
    """Up to hash collisions and to positions of longer matches, which may use up the bound on steps."""
    index, oracle, tails = grown(seed, Lookup(max_positions=8))
    full = Oracle(Lookup(max_positions=EVERYTHING), oracle.context, oracle.token, oracle.version, {}, oracle.order)
    for tail in tails:
        found, everything = index.matches(tail), full.matches(tail)
        assert len(found) <= 8
        assert found == [match for match in everything if match in found]  # true ones, in order
        assert found[:1] == everything[:1]


@pytest.mark.parametrize("seed", range(4))
def test_path_and_tree_have_the_weights_of_what_was_found(seed: int) -> None:
    lookup = Lookup(max_positions=EVERYTHING, length_factor=1.5, decay=0.5, least=0.3, escape=0.7, min_prob=0.0)
    index, oracle, tails = grown(seed, lookup, steps=400)
    for tail in tails:
        weights = oracle.draft(tail, 5)
        probs = oracle.probs(weights)

        found = index.draft(tail, 5)
        path: tuple[int, ...] = ()
        for token, prob in zip(found.tokens, found.probs, strict=True):
            siblings = [w for p, w in weights.items() if p[:-1] == path]
            path = (*path, token)
            assert weights[path] == pytest.approx(max(siblings))
            assert prob == pytest.approx(probs[path])
        assert len(path) == 5 or not any(p[:-1] == path for p in weights)

        tree = index.draft(tail, 12, tree=True)
        weights = oracle.draft(tail, 12)
        probs = oracle.probs(weights)
        paths: list[tuple[int, ...]] = []
        reached: list[float] = []
        for token, prob, parent in zip(tree.tokens, tree.probs, tree.parents, strict=True):
            assert parent < len(paths)
            before = paths[parent] if parent >= 0 else ()
            paths.append((*before, token))
            assert prob == pytest.approx(probs[paths[-1]])
            reached.append(prob * (reached[parent] if parent >= 0 else 1.0))
        assert len(set(paths)) == len(paths) == min(12, len(weights))
        every = dict.fromkeys(weights, 1.0)
        for p in every:
            for n in range(len(p)):
                every[p] *= probs[p[: n + 1]]
        assert reached == pytest.approx(sorted(every.values(), reverse=True)[:12])


def test_a_draft_by_hand() -> None:
    """Two siblings say 7 8 9 after 5 6, one says 7 1."""
    index = SuffixIndex(Lookup(length_factor=2.0, escape=1.0, min_prob=0.0))
    prompt = index.append(START, [5, 6], AGELESS)
    for text in ([7, 8, 9], [7, 8, 9], [7, 1, 9]):
        index.append(prompt, text, 0)
    found = index.draft(prompt, 3)
    assert found.tokens == [7, 8, 9]
    assert found.parents == [-1, 0, 1]
    assert found.probs == pytest.approx([12 / 13, 8 / 13, 8 / 9])  # matches of two tokens weigh 4 each
    tree = index.draft(prompt, 4, tree=True)
    assert (tree.tokens, tree.parents) == ([7, 8, 9, 1], [-1, 0, 1, 0])
    assert index.draft(prompt, 0).tokens == index.draft(START, 3).tokens == []


def test_the_newer_version_is_believed() -> None:
    index = SuffixIndex(Lookup(decay=0.4))
    prompt = index.append(START, [5, 6], AGELESS)
    for text, version in (([1], 0), ([1], 0), ([2], 1)):
        index.append(prompt, text, version)
    assert index.draft(prompt, 1).tokens == [2]  # 1 against 2 * 0.4
    index.append(prompt, [1], 0)
    assert index.draft(prompt, 1).tokens == [1]  # 1 against 3 * 0.4
    index.append(prompt, [2], 9)
    assert index.draft(prompt, 1).tokens == [2]  # 1 + 0.1 against 3 * 0.1


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    index = SuffixIndex()
    tail = index.append(START, [1, 2, 3, 1, 2, 3, 1], 0)
    assert index.draft(tail, 7).tokens == [2, 3, 1, 2, 3, 1, 2]


def test_no_match_crosses_the_end_of_a_text() -> None:
    """[1 2] of one text and [3 4] of another stand side by side in memory, and 3 does not follow 2."""
    index = SuffixIndex()
    index.append(START, [9, 1, 2], 0)
    index.append(START, [3, 4], 0)
    tail = index.append(START, [7, 1, 2], 0)
    assert index.draft(tail, 3).tokens == []
    # A response ends; another one begins after the prompt, and what it says does not follow the first.
    prompt = index.append(START, [20, 21], AGELESS)
    index.append(prompt, [22, 23], 0)
    index.append(prompt, [30, 31], 0)
    tail = index.append(START, [22, 23], 0)
    assert index.draft(tail, 3).tokens == []


def test_what_has_fewer_tokens_than_asked_for_ends() -> None:
    index = SuffixIndex(Lookup(min_prob=0.0))
    index.append(START, [1, 2, 3, 4], 0)
    tail = index.append(START, [1, 2], 0)
    assert index.draft(tail, 8).tokens == [3, 4]


def test_a_path_stops_where_it_is_unlikely() -> None:
    index = SuffixIndex(Lookup(min_prob=0.5, escape=0.0))
    for token in (7, 8, 9):
        index.append(START, [1, 2, token], 0)
    tail = index.append(START, [5, 1], 0)
    assert index.draft(tail, 4).tokens == [2]


def test_a_text_reads_back_over_pages_and_versions() -> None:
    index = SuffixIndex()
    prompt = index.append(START, list(range(40)), AGELESS)
    first = index.append(prompt, list(range(100, 150)), 0)
    other = index.append(prompt, [1], 0)
    first = index.append(first, list(range(150, 160)), 2)
    tokens, versions = index.read(first)
    assert tokens.tolist() == list(range(100, 160))
    assert versions.tolist() == [0] * 50 + [2] * 10
    assert index.read(other)[0].tolist() == [1]
    assert index.read(prompt)[0].tolist() == list(range(40))


def test_memory_is_bounded_by_the_tokens() -> None:
    index = SuffixIndex()
    tail = START
    for _ in range(200):
        tail = index.append(tail, [random.Random(0).randrange(50_000) for _ in range(500)], 0)
    assert index.num_tokens == 100_000
    # A position: its token, a link for each order, a share of its page; tables of up to two entries a position. Half
    # as much again where the index has just grown.
    assert index.num_bytes <= 100_000 * 1.5 * (4 + 4 * len(ORDERS) + 0.5 + 2 * 4 * len(ORDERS))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_match", 3),
        ("max_positions", 0),
        ("length_factor", 0.5),
        ("length_factor", float("nan")),
        ("decay", 0.0),
        ("decay", 1.5),
        ("least", -0.1),
        ("escape", -1.0),
        ("min_prob", 1.5),
    ],
)
def test_bad_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Lookup(**{field: value})  # type: ignore[arg-type]
