"""What an audit asks an engine to do: prompts, and sampling parameters that together touch every rule of sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from longtail.bench.spec_audit_engine import AuditedEngine, Completion
from longtail.bench.spec_audit_reference import OutcomeTree, Reference, Tokens, outcome_tree
from longtail.sampling_params import SamplingParams

DEPTH = 3
"""Output tokens of an outcome: the first is never drafted, the second and third are."""
OUTCOME_TOKENS = DEPTH + 1
"""Output tokens of a sample that is an outcome: with one more, the third may be a draft, an engine's own token after a
rejected draft, or the bonus token after an accepted one."""

OUTCOME_CASES: dict[str, dict[str, Any]] = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1": {},
    "temperature 1.5": {"temperature": 1.5},
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "top-p 0.8": {"temperature": 1.2, "top_p": 0.8},
    "stop ids, min_tokens": {"min_tokens": 2, "ignore_eos": False},
}
"""All with top-k 3. The last one gets two stop ids that are likely to come. (It does not ignore EOS: vLLM keeps EOS
from coming before min_tokens even where it is ignored, longtail does not.)"""
MOST_OUTCOMES = 8192
"""Of a tree without top-k, where an engine does not take one: vocabulary ** DEPTH."""

STREAM_CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "temperature 1": {},
    "temperature 0.5, top-k 3": {"temperature": 0.5, "top_k": 3},
    "temperature 2, top-k 8": {"temperature": 2.0, "top_k": 8},
    "top-p, min-p": {"top_p": 0.7, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "EOS": {"ignore_eos": False},
    "stop ids, min_tokens": {"ignore_eos": False, "min_tokens": 9},
    "cap 5": {"max_tokens": 5},
    "cap 1": {"max_tokens": 1},
}


@dataclasses.dataclass(frozen=True, slots=True)
class StreamCase:
    """One request of the comparison sample by sample."""

    name: str
    prompt: Tokens
    params: SamplingParams
    seed: int

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0


def prompt_of(rng: np.random.Generator, vocab: int, length: int) -> Tokens:
    """Arbitrary tokens with a repeated phrase, so that an n-gram drafter has something to say."""
    low = min(3, vocab - 1)
    phrase = rng.integers(low, vocab, max(length // 3, 1)).tolist()
    rest = rng.integers(low, vocab, max(length - 2 * len(phrase), 0)).tolist()
    return tuple([*phrase, *rest, *phrase][:length])


def stream_cases(
    engine: AuditedEngine, tokens: int, each: int, seed: int, only_greedy: bool = False
) -> list[StreamCase]:
    """`each` requests a case, of up to `tokens` output tokens; their prompts have many lengths."""
    rng = np.random.default_rng([seed, 1])
    some = tuple(rng.choice(np.arange(3, engine.vocab_size), max(engine.vocab_size // 8, 1), replace=False).tolist())
    made = []
    for name, fields in STREAM_CASES.items():
        params = {"max_tokens": tokens, "ignore_eos": True} | fields
        if name.startswith("stop ids"):
            params["stop_token_ids"] = some
        for refused in engine.refuses:
            params.pop(refused, None)
        if only_greedy and params.get("temperature") != 0.0:
            continue
        params["min_tokens"] = min(params.get("min_tokens", 0), tokens)
        for _ in range(each):
            prompt = prompt_of(rng, engine.vocab_size, int(rng.integers(4, 40)))
            made.append(StreamCase(name, prompt, SamplingParams(**params), int(rng.integers(2**63))))
    return made


def stop_string_cases(
    cases: Sequence[StreamCase], plain: Sequence[Completion], decode: Callable[[Sequence[int]], str]
) -> list[StreamCase]:
    """Requests that end at strings: those of `cases` with a stop string taken out of the text that they were seen to
    make, once with min_tokens beyond its first occurrence."""
    made = []
    for case, seen in zip(cases, plain, strict=True):
        if case.name not in ("temperature 1", "temperature 0.5, top-k 3") or len(seen.tokens) < 8:
            continue
        for width, late in ((1, False), (2, False), (2, True)):
            at = len(seen.tokens) // 2
            text = decode(seen.tokens[at - width : at])
            if not text.strip("\ufffd "):
                continue
            least = min(at + 2, case.params.max_tokens or at) if late else 0
            params = dataclasses.replace(case.params, stop=(text,), min_tokens=least)
            made.append(dataclasses.replace(case, name="stop strings", params=params))
    return made


@dataclasses.dataclass(slots=True)
class OutcomeCase:
    name: str
    params: SamplingParams
    tree: OutcomeTree


def outcome_cases(
    engine: AuditedEngine,
    reference: Reference,
    tolerance: float,
    seed: int,
    names: Sequence[str],
    draws: Callable[[OutcomeCase], int],
    enough: Callable[[int], bool],
) -> list[OutcomeCase]:
    """For each name the case that needs the fewest samples, of up to 24 prompts whose outcomes do not hang on a
    rounding error: each margin is above 20 tolerances. draws: samples that a case needs; enough: whether to look no
    further for the case of this index. RuntimeError if no prompt of 200 will do."""
    rng = np.random.default_rng([seed, 2])
    made = []
    for i, name in enumerate(names):
        if not _can_be_asked(engine, name):
            continue
        clear: list[OutcomeCase] = []
        for attempt in range(200):
            if len(clear) == 24 or (clear and enough(i)):
                break
            prompt = prompt_of(rng, engine.vocab_size, 7 + attempt % 5)
            fields = {"top_k": 3, "max_tokens": OUTCOME_TOKENS, "ignore_eos": True} | OUTCOME_CASES[name]
            params = SamplingParams(**{k: v for k, v in fields.items() if k not in engine.refuses})
            if name.startswith("stop ids"):
                params = dataclasses.replace(params, stop_token_ids=_likely_ends(engine, reference, prompt, params))
            tree = outcome_tree(reference, prompt, params, engine.eos, DEPTH)
            # An outcome needs choices: a peaked tree would test nothing.
            if tree.margin > 20.0 * tolerance and len(tree.outcomes) >= 9 and max(tree.outcomes.values()) < 0.6:
                clear.append(OutcomeCase(name, params, tree))
        if not clear:
            raise RuntimeError(
                f"outcome cases: no prompt for {name!r} among 200 whose outcomes are clear by 20 x tolerance "
                f"{tolerance:g}; lower the tolerance"
            )
        made.append(min(clear, key=draws))
    return made


def _can_be_asked(engine: AuditedEngine, name: str) -> bool:
    """Whether the engine takes what makes this case, and its outcomes can be counted."""
    countable = "top_k" not in engine.refuses or engine.vocab_size**DEPTH <= MOST_OUTCOMES
    return countable and not any(field in engine.refuses for field in OUTCOME_CASES[name])


def _likely_ends(
    engine: AuditedEngine, reference: Reference, prompt: Tokens, params: SamplingParams
) -> tuple[int, ...]:
    """Two tokens: the one that comes most often as the most likely token in second or third place, so that a drafter
    that is often right drafts it, and the one that comes most often there besides."""
    tree = outcome_tree(reference, prompt, params, engine.eos, DEPTH)
    best: dict[int, float] = {}
    mass: dict[int, float] = {}
    for outcome, p in tree.outcomes.items():
        for i, token in enumerate(outcome[1:], 1):
            mass[token] = mass.get(token, 0.0) + p
            here = tree.children[outcome[:i]]
            if token == max(here, key=here.__getitem__):
                best[token] = best.get(token, 0.0) + p
    first = max(best, key=best.__getitem__)
    return first, max((t for t in mass if t != first), key=mass.__getitem__)
