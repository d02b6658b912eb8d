"""Streamed text, and what of it is held back for stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from longtail import Sample, SamplingParams
from longtail.partial_rollout.engines.native.sampler import check_end
from longtail.trainer_adapter.server.text import Text, TrimmedStream, trimmed
from longtail.version import PolicyVersion

PIECES = ("a", "b", "ab", "ba", "aab", "c", "bca", "")


class Pieces:
    """A tokenizer of which token i is a piece of text; the eighth and ninth are the halves of a character."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text, half = "", False
        for token in ids:
            if half:
                text, half = text + ("\u00e4" if token == 9 else "\ufffd"), False
                if token == 9:
                    continue
            if token == 8:
                half = True
            else:
                text += "\ufffd" if token == 9 else PIECES[token]
        return text + ("\ufffd" if half else "")


def run(tokens: Sequence[int], stop: tuple[str, ...], min_tokens: int) -> tuple[list[int], str | int | None]:
    """What the engine makes of them: all up to the first end."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=len(tokens), ignore_eos=True)
    sample = Sample(id="x", group_id="g", index=0, prompt_ids=(1,), params=params, seed=0)
    for token in tokens:
        sample.append(token, 0.0, PolicyVersion(0), "e", "computed")
        end = check_end(sample, (), 1000, Pieces().decode)
        if end is not None:
            return list(sample.output_ids), end.stop_reason
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(300))
def test_no_event_holds_a_part_of_the_stop_string(seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < 24:
        token = rng.randrange(9)
        tokens += [8, 9] if token == 8 else [token]
    stop = tuple({"".join(rng.choices("abc\u00e4", weights=(4, 4, 1, 1), k=rng.randint(1, 5))) for _ in range(2)})
    output, reason = run(tokens, stop, rng.choice((0, 0, 6)))
    text = Text(Pieces())
    try:
        want = trimmed(text, output, reason, skip_special=False)
        whole = Pieces().decode(output)
        assert whole.startswith(want)
        if isinstance(reason, str):
            assert whole.startswith(reason, len(want))
            assert len(want) + len(reason) > len(Pieces().decode(output[:-1]).rstrip("\ufffd"))
        stream, given, at = TrimmedStream(text, False, stop), "", 0
        while at < len(output):
            size = rng.randint(1, 3)
            given += stream.push(output[at : at + size])
            assert want.startswith(given), (given, want, stop)
            at += size
            # What is held is short: a stop string, and the rest of the token that may have completed it.
            assert len(Pieces().decode(output[:at]).rstrip("\ufffd")) - len(given) < max(map(len, stop)) + 3
        assert given + stream.end(reason) == want
        assert stream.length == len(whole)
    finally:
        text.close()


def test_by_hand() -> None:
    text = Text(Pieces())
    stream = TrimmedStream(text, False, ("abb", "ca"))
    # "ab" may become "abb"; "aab" after it: only its own "ab" may; "c" may become "ca"; "c" again: only the second one
    assert [stream.push([token]) for token in (2, 4, 5, 5)] == ["", "aba", "ab", "c"]
    assert stream.end(None) == "c"
    stream = TrimmedStream(text, False, ("abb",))
    assert [stream.push([2]), stream.push([3]), stream.end("abb")] == ["", "", ""]  # "a" behind it goes with it
    untouched = TrimmedStream(text, False)
    assert [untouched.push([2]), untouched.push([1]), untouched.end("abb")] == ["ab", "b", ""]
    text.close()
