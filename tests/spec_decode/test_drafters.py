"""The suffix drafters: who learns from whom, what is kept, and choice by name."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tests.spec_decode.helpers import commit, draft_of, extend, make_sample

from longtail.sample import Sample
from longtail.spec_decode.choice import FirstOf, make_drafter
from longtail.spec_decode.drafter import Draft, DraftRequest, Heard
from longtail.spec_decode.suffix_drafter import SuffixConfig, SuffixDrafter, group_drafter, ngram_drafter
from longtail.spec_decode.suffix_index import Lookup
from longtail.version import PolicyVersion


def test_a_sample_learns_from_its_sibling_as_it_runs() -> None:
    drafter = group_drafter()
    leader, follower = make_sample("a/0"), make_sample("a/1")
    commit(drafter, leader, [10, 11, 12, 13])
    assert draft_of(drafter, follower).tokens == [10, 11, 12, 13]
    commit(drafter, follower, [10, 11])
    commit(drafter, leader, [14])
    assert draft_of(drafter, follower).tokens == [12, 13, 14]
    assert draft_of(drafter, follower, 2).tokens == [12, 13]
    assert draft_of(drafter, leader).tokens == []
    drafter.check_integrity()


def test_ngram_learns_from_itself_only() -> None:
    drafter = ngram_drafter()
    sample, sibling = make_sample("a/0", [5, 6, 7, 8]), make_sample("a/1", [5, 6, 7, 8])
    commit(drafter, sibling, [50, 6, 7, 60])
    commit(drafter, sample, [50])
    assert draft_of(drafter, sample).tokens == []
    commit(drafter, sample, [6])
    assert draft_of(drafter, sample).tokens == [7, 8]  # of the prompt, to its end
    commit(drafter, sample, [9, 50, 6])
    assert draft_of(drafter, sample, 6).tokens == [9, 50, 6, 9, 50, 6]  # of the output, which goes round
    drafter.forget("a/0")
    drafter.forget("a/1")
    assert drafter.num_tokens == drafter.num_bytes == 0
    drafter.check_integrity()


def test_an_earlier_epoch_of_a_prompt_is_remembered_and_another_prompt_is_not() -> None:
    drafter = group_drafter()
    drafter.learn(make_sample("epoch0/0", [1, 2, 3], [10, 11, 12], version=0))
    assert draft_of(drafter, make_sample("epoch1/0", [1, 2, 3])).tokens == [10, 11, 12]
    assert draft_of(drafter, make_sample("other/0", [7, 2, 3])).tokens == []
    drafter.check_integrity()


def test_the_later_epoch_outweighs_an_earlier_one() -> None:
    drafter = group_drafter(SuffixConfig(lookup=Lookup(decay=0.4)))
    for i in range(2):
        drafter.learn(make_sample(f"epoch0/{i}", output=[10, 11], version=0))
    drafter.learn(make_sample("epoch1/0", output=[20, 21], version=1))
    assert draft_of(drafter, make_sample("epoch2/0")).tokens == [20, 21]


def test_a_resumed_sample_is_not_learnt_twice() -> None:
    drafter = group_drafter()
    sample = make_sample("a/0")
    commit(drafter, sample, range(10, 40))
    before = drafter.num_tokens
    drafter.forget("a/0")
    again = make_sample("a/0", output=range(10, 40))  # another object, as it comes out of a store
    drafter.observe(again, 0)
    assert drafter.num_tokens == before
    extend(again, range(40, 50), version=3)
    assert draft_of(drafter, again).tokens == []  # catches up with tokens nobody told of
    assert drafter.num_tokens == before + 10
    drafter.check_integrity()


@pytest.mark.parametrize("make", [group_drafter, ngram_drafter])
def test_an_id_that_comes_again_with_other_tokens_is_another_sample(make: type) -> None:
    drafter = make()
    commit(drafter, make_sample("a/0"), [10, 11, 12, 13])
    other = make_sample("a/0", output=[10, 20])
    assert draft_of(drafter, other).tokens == []
    commit(drafter, other, [10])
    assert draft_of(drafter, other).tokens[:1] == [20]
    commit(drafter, other, [11])
    assert draft_of(drafter, other).tokens == ([12, 13] if drafter.name == "group" else [])  # the first one's stay
    drafter.check_integrity()


def test_versions_within_a_sample_are_kept() -> None:
    drafter = group_drafter()
    sample = make_sample("a/0")
    extend(sample, [10, 11], version=1)
    extend(sample, [12], version=2)
    extend(sample, [13, 14], version=5)
    drafter.observe(sample, 5)
    drafter.take_in()
    text = drafter._live["a/0"]
    tokens, versions = text.shared.index.read(text.tail)
    assert tokens.tolist() == [10, 11, 12, 13, 14]
    assert versions.tolist() == [1, 1, 2, 5, 5]


def heard(sample: Sample, start: int, stop: int) -> Heard:
    """A part of what it wrote."""
    runs = [(1, version) for version in sample.versions[start:stop]]
    return Heard(sample.id, start, sample.output_ids[start:stop], runs)


def test_siblings_elsewhere_are_heard_as_those_here() -> None:
    """Piece by piece, over two versions: drafts and their estimates are those of a drafter that has seen it all."""
    drafters = near, far = group_drafter(), group_drafter()
    writer, reader = make_sample("p/0"), make_sample("p/1")
    for version, tokens in enumerate(([7, 8, 9, 10, 11], [8, 9, 12, 7, 8, 9, 13])):
        commit(near, writer, tokens, version)
    for start, stop in ((0, 2), (2, 7), (7, 12)):
        far.hear(writer.prompt_ids, heard(writer, start, stop))
        far.check_integrity()
    for tokens in ([7], [8], [9]):
        extend(reader, tokens, 1)
        for drafter in drafters:
            drafter.observe(reader, 1)
        got, wanted = (draft_of(drafter, reader) for drafter in (far, near))
        assert got.tokens == wanted.tokens and got.tokens and got.probs == wanted.probs


def test_texts_under_one_id_are_each_kept_track_of() -> None:
    """Whose beginnings were lost, until the index is made anew and beyond."""
    rng, drafter = random.Random(0), SuffixDrafter("prompt", SuffixConfig(max_tokens_per_index=1024))
    for number in range(60):
        tokens = [rng.randrange(99) for _ in range(30)]
        drafter.hear((1, 2, 3), Heard("a", 5, tokens, [(30, PolicyVersion(number))]))
        drafter.check_integrity()


def test_what_is_heard_of_a_sample_that_comes_and_goes() -> None:
    """Its text goes on here where it came to, and there again; other tokens under its id, and parts behind a gap, are
    texts of their own. Nothing is learnt twice."""
    drafter = group_drafter()
    sample = make_sample("p/0", output=[5, 6, 7])
    drafter.hear(sample.prompt_ids, heard(sample, 0, 3))
    commit(drafter, sample, [8, 9])  # it runs here
    drafter.hear(sample.prompt_ids, heard(sample, 0, 5))
    drafter.forget("p/0")
    assert drafter.num_tokens == 3 + 5
    extend(sample, [10, 11])  # elsewhere again
    drafter.hear(sample.prompt_ids, heard(sample, 5, 7))
    assert drafter.num_tokens == 3 + 7
    drafter.check_integrity()
    extend(sample, [12, 13, 14])
    drafter.hear(sample.prompt_ids, heard(sample, 9, 10))  # what came before it was lost
    drafter.check_integrity()
    other = make_sample("p/0", output=[20, 21])
    drafter.hear(other.prompt_ids, heard(other, 0, 2))
    drafter.check_integrity()
    assert drafter.num_tokens == 3 + 7 + 1 + 2
    commit(drafter, sample, [5, 6])  # the first one comes here, with all that it has
    drafter.check_integrity()
    reader = make_sample("p/1")
    commit(drafter, reader, [20])
    assert draft_of(drafter, reader, 1).tokens == [21]
    assert not ngram_drafter().hears and drafter.hears


def test_what_is_heard_is_bounded() -> None:
    drafter = group_drafter(SuffixConfig(max_tokens_per_index=1024, max_bytes=1 << 18))
    rng = random.Random(5)
    samples = [make_sample(f"p{i % 3}/{i}", prompt=(i % 3, 1)) for i in range(12)]
    for _ in range(400):
        sample = rng.choice(samples)
        start = len(sample.output_ids)
        extend(sample, [rng.randrange(50) for _ in range(rng.randrange(1, 60))])
        drafter.hear(sample.prompt_ids, heard(sample, start, len(sample.output_ids)))
    drafter.check_integrity()
    assert 0 < drafter.num_tokens <= 3 * 1024 and drafter.num_bytes <= 1 << 18


def answered(sample: Sample, tokens: list[int]) -> None:
    """Its environment answers."""
    sample.status, sample.turn_ended = "paused", True
    sample.append_observation(tokens)


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "in-turns"])
@pytest.mark.parametrize("make", [group_drafter, ngram_drafter])
def test_an_observation_is_as_old_as_the_turn_it_answers(make: type, at_once: bool) -> None:
    """And belongs to the text of its sample: what follows it, and what it follows, is found across its borders."""
    drafter: SuffixDrafter = make()
    sample = make_sample("a/0")
    extend(sample, [10, 11], version=1)
    extend(sample, [12], version=2)
    if not at_once:
        drafter.observe(sample, 3)
        drafter.forget(sample.id)
    answered(sample, [20, 21])
    extend(sample, [13, 14], version=5)
    if not at_once:
        drafter.observe(sample, 2)
        drafter.forget(sample.id)
    answered(sample, [22])
    extend(sample, [15], version=5)
    drafter.observe(sample, 1)
    drafter.check_integrity()
    text = drafter._live["a/0"]
    tokens, versions = text.shared.index.read(text.tail)
    assert tokens.tolist() == sample.output_ids == [10, 11, 12, 20, 21, 13, 14, 22, 15]
    assert versions.tolist() == [1, 1, 2, 2, 2, 5, 5, 5, 5]
    extend(sample, [12, 20], version=5)
    drafter.observe(sample, 2)
    assert draft_of(drafter, sample).tokens[:3] == [21, 13, 14]


def random_run(drafter: SuffixDrafter, seed: int, steps: int) -> list[Draft]:
    rng = random.Random(seed)
    drafts: list[Draft] = []
    live: list[Sample] = []
    made = 0
    for step in range(steps):
        if len(live) < 6:
            live.append(make_sample(f"s{made}", [rng.randrange(4)] * 5))
            live[-1].multi_turn = made % 2 == 0
            made += 1
        sample = rng.choice(live)
        drafts.append(draft_of(drafter, sample))
        commit(drafter, sample, [rng.randrange(5) for _ in range(rng.randrange(1, 40))], step // 100)
        if sample.multi_turn and rng.random() < 0.3:
            drafter.forget(sample.id)
            answered(sample, [rng.randrange(5) for _ in range(rng.randrange(1, 40))])
        if rng.random() < 0.1:
            live.remove(sample)
            drafter.forget(sample.id)
        drafter.check_integrity()
    return drafts


def test_memory_is_bounded_and_what_is_kept_adds_up() -> None:
    config = SuffixConfig(max_tokens_per_index=1024, max_bytes=1 << 17)
    drafter = group_drafter(config)
    for part in range(6):
        random_run(drafter, part, 60)
        for sample_id in list(drafter._live):
            drafter.forget(sample_id)
        assert drafter.num_bytes <= config.max_bytes
        assert all(s.index.num_tokens <= config.max_tokens_per_index for s in drafter._shared.values())


def test_live_samples_alone_are_bounded_too() -> None:
    drafter = group_drafter(SuffixConfig(max_tokens_per_index=1024))
    samples = [make_sample(f"a/{i}") for i in range(3)]
    rng = random.Random(0)
    for _ in range(200):
        for sample in samples:
            commit(drafter, sample, [rng.randrange(1000) for _ in range(7)])
            assert drafter.num_tokens <= 1024
        drafter.check_integrity()
    commit(drafter, samples[0], samples[1].output_ids[-40:-20])
    assert draft_of(drafter, samples[0]).tokens == samples[1].output_ids[-20:-12]  # the latest tokens are there


def test_prompts_that_nobody_uses_make_room_for_others() -> None:
    """The one unused for longest goes first; one with a live sample stays."""
    drafter = group_drafter(SuffixConfig(max_bytes=1 << 18))
    live = make_sample("live", [7, 7, 7])
    commit(drafter, live, range(100, 200))
    for i in range(60):
        drafter.learn(make_sample(f"p{i}/0", [1, 2, i], range(10, 200)))
        assert drafter.num_bytes <= 1 << 18
        drafter.check_integrity()
    assert draft_of(drafter, make_sample("new", [1, 2, 59])).tokens[:2] == [10, 11]
    assert draft_of(drafter, make_sample("old", [1, 2, 0])).tokens == []
    assert draft_of(drafter, make_sample("live/1", [7, 7, 7])).tokens[:2] == [100, 101]


def test_many_live_samples_share_the_room() -> None:
    """Sixteen prompts of one live sample each: their indexes are halved in turn."""
    drafter = group_drafter(SuffixConfig(max_bytes=1 << 19))
    samples = [make_sample(f"p{i}/0", [1, 2, i]) for i in range(16)]
    rng = random.Random(0)
    for _ in range(100):
        for sample in samples:
            commit(drafter, sample, [rng.randrange(1000) for _ in range(20)])
            assert drafter.num_bytes <= 1 << 19
    drafter.check_integrity()
    assert drafter.num_tokens > 3000


def test_done_samples_of_old_versions_go_first() -> None:
    """1024 tokens are too many: 512 stay besides the prompt, the live sample's 100 and three times 120."""
    drafter = group_drafter(SuffixConfig(max_tokens_per_index=1024))
    for version in (3, 7, 0, 6, 1, 5, 2, 4):
        output = range(1000 * version + 10, 1000 * version + 130)
        drafter.learn(make_sample(f"v{version}", output=output, version=version))
    live = make_sample("live")
    commit(drafter, live, range(9000, 9100), version=8)
    drafter.take_in()
    assert set(drafter._live["live"].shared.texts) == {"live", "v7", "v6", "v5"}
    assert drafter.num_tokens == 3 + 100 + 3 * 120
    drafter.check_integrity()


def test_a_prompt_longer_than_an_index_keeps_its_end() -> None:
    drafter = group_drafter(SuffixConfig(max_tokens_per_index=1024))
    prompt = range(10, 3010)
    samples = [make_sample(f"a/{i}", prompt) for i in range(2)]
    for step in range(300):
        for sample in samples:
            commit(drafter, sample, [5000 + step])
            assert drafter.num_tokens <= 1024
    drafter.check_integrity()
    assert draft_of(drafter, make_sample("a/2", prompt), 3).tokens == [5000, 5001, 5002]


@pytest.mark.parametrize("make", [group_drafter, ngram_drafter])
def test_the_same_run_gives_the_same_drafts(make: type) -> None:
    config = SuffixConfig(max_tokens_per_index=1024, max_bytes=1 << 17)
    assert random_run(make(config), 3, 300) == random_run(make(config), 3, 300)


def test_drafts_are_not_learnt() -> None:
    """Only committed tokens count: proposing, however often, changes nothing."""
    told, asked = group_drafter(), group_drafter()
    for drafter in (told, asked):
        sample, sibling = make_sample("a/0"), make_sample("a/1")
        commit(drafter, sibling, [10, 11, 12])
        for _ in range(10 if drafter is asked else 0):
            draft_of(drafter, sample)
        commit(drafter, sample, [10, 30])
    assert told.num_tokens == asked.num_tokens
    assert draft_of(told, make_sample("a/2")) == draft_of(asked, make_sample("a/2"))


def test_trees() -> None:
    drafter = group_drafter(SuffixConfig(tree=True, lookup=Lookup(min_prob=0.0)))
    for i, output in enumerate(([10, 11], [10, 12], [20])):
        drafter.learn(make_sample(f"a/{i}", output=output))
    draft = draft_of(drafter, make_sample("a/9"))
    assert draft.parents is not None
    assert (draft.tokens, draft.parents) == ([10, 20, 12, 11], [-1, -1, 0, 0])
    cut = draft.cut(2)
    assert (cut.tokens, cut.parents) == ([10, 20], [-1, -1])
    assert draft.probs is not None and cut.probs == draft.probs[:2]
    first, second, third, fourth = draft.probs
    likeliest = [([20], second), ([10, 12], first * third), ([10, 11], first * fourth)]
    assert draft.paths() == sorted(likeliest, key=lambda path: -path[1])


def test_candidate_paths_by_hand() -> None:
    tree = Draft([7, 8, 9, 1], "x", [0.5, 0.25, 0.5, 0.75], [-1, -1, 0, 2])
    assert tree.paths() == [([8], 0.25), ([7, 9, 1], 0.1875)]
    assert Draft([7, 8, 9], "x", parents=[-1, -1, 0]).paths() == [([8], None), ([7, 9], None)]
    assert Draft([7, 8], "x", [0.5, 0.5]).paths() == [([7, 8], 0.25)]
    assert Draft([], "x").paths() == []


# ---- choice by name


class Fixed:
    """Says the same of every sample whose last token is not in `silent`."""

    def __init__(self, name: str, tokens: list[int], silent: tuple[int, ...] = ()) -> None:
        self.name, self.tokens, self.silent = name, tokens, silent
        self.seen: list[str] = []
        self.asked: list[str] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += [r.sample.id for r in requests]
        return [
            Draft([] if r.sample.prompt_ids[-1] in self.silent else self.tokens[: r.max_tokens], self.name)
            for r in requests
        ]

    def observe(self, sample: Sample, num_new: int) -> None:
        self.seen.append(sample.id)

    def forget(self, sample_id: str) -> None:
        self.seen.remove(sample_id)


def test_the_first_that_has_something_to_say_is_heard() -> None:
    first, second, third = Fixed("x", [1, 2], silent=(7, 8)), Fixed("y", [3], silent=(8,)), Fixed("z", [4])
    drafter = make_drafter("x > y>z", {"x": first, "y": second, "z": third})
    assert drafter.name == "x>y>z"
    samples = [make_sample(name, [last]) for name, last in (("a", 1), ("b", 7), ("c", 8), ("d", 8))]
    drafts = drafter.propose([DraftRequest(s, 0 if s.id == "d" else 2) for s in samples])
    assert [(d.tokens, d.drafter) for d in drafts] == [([1, 2], "x"), ([3], "y"), ([4], "z"), ([], "x")]
    assert (second.asked, third.asked) == (["b", "c"], ["c"])
    drafter.observe(samples[0], 1)
    assert first.seen == second.seen == third.seen == ["a"]
    drafter.forget("a")
    assert first.seen == second.seen == third.seen == []


def test_choice_by_name() -> None:
    assert make_drafter("group").name == "group"
    assert make_drafter("group>ngram").name == "group>ngram"
    assert make_drafter("group", {"group": group_drafter(SuffixConfig(tree=True))}).config.tree  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("", "lacks a name"),
        ("group>", "lacks a name"),
        ("grup", "did you mean 'group'"),
        ("mtp", "There are group, ngram"),
        ("group>group", "names one drafter twice"),
    ],
)
def test_a_bad_choice_is_named(choice: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_drafter(choice)


def test_a_composition_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        FirstOf([])


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_index"):
        SuffixConfig(max_tokens_per_index=10)
    with pytest.raises(ValueError, match="max_bytes"):
        SuffixConfig(max_bytes=2000)
    with pytest.raises(ValueError, match="scope"):
        SuffixDrafter("all")  # type: ignore[arg-type]
