"""Drafters by name: "group", "ngram", or in order of preference "group>ngram"."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from longtail.sample import Sample
from longtail.spec_decode.drafter import Draft, Drafter, DraftRequest


class FirstOf:
    """For each request the draft of the first drafter that has something to say. Every drafter observes every sample.

    A draft carries the name of the drafter that made it. Raises ValueError for no drafter or two of one name.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        names = [drafter.name for drafter in drafters]
        if not names:
            raise ValueError("drafters: a composition needs at least one drafter")
        if len(set(names)) < len(names):
            raise ValueError(f"drafters: {'>'.join(names)} names one drafter twice; name each one once")
        self.drafters = list(drafters)
        self.name = ">".join(names)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self.drafters[0].propose(requests)
        for drafter in self.drafters[1:]:
            silent = [i for i, draft in enumerate(drafts) if not draft.tokens and requests[i].max_tokens > 0]
            if not silent:
                break
            for i, draft in zip(silent, drafter.propose([requests[i] for i in silent]), strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, sample: Sample, num_new: int) -> None:
        for drafter in self.drafters:
            drafter.observe(sample, num_new)

    def forget(self, sample_id: str) -> None:
        for drafter in self.drafters:
            drafter.forget(sample_id)


def parts(drafter: Drafter) -> list[Drafter]:
    """Of a composition; a drafter alone is its own."""
    return list(drafter.drafters) if isinstance(drafter, FirstOf) else [drafter]


def make_drafter(choice: str, drafters: Mapping[str, Drafter] | None = None) -> Drafter:
    """choice: names joined by ">", the preferred one first. drafters: those that are already made, by name (a draft
    model, an MTP head, or one of the built-in ones with other settings). Raises ValueError for a name that is unknown,
    missing or there twice."""
    known: dict[str, Callable[[], Drafter]] = {**_BUILT_IN, **{k: _made(d) for k, d in (drafters or {}).items()}}
    names = [name.strip() for name in choice.split(">")]
    for name in names:
        if not name:
            raise ValueError(f'drafter: {choice!r} lacks a name; write for example "group" or "group>ngram"')
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"drafter: no drafter {name!r}; {hint}There are {', '.join(sorted(known))}")
    if len(names) == 1:
        return known[names[0]]()
    return FirstOf([known[name]() for name in names])


def _made(drafter: Drafter) -> Callable[[], Drafter]:
    return lambda: drafter


def _group() -> Drafter:
    from longtail.spec_decode.suffix_drafter import group_drafter  # compiles with numba

    return group_drafter()


def _ngram() -> Drafter:
    from longtail.spec_decode.suffix_drafter import ngram_drafter

    return ngram_drafter()


_BUILT_IN: dict[str, Callable[[], Drafter]] = {"group": _group, "ngram": _ngram}
