"""Prompts with verifiable answers: procedural tasks of `reasoning-gym` (offline, Apache-2.0), mixed and graded.

`reasoning_gym` is imported when the first task is made (about 1.5 s), so importing this module is cheap.

How an answer is read out of a free-form response: `trainer_adapter.rewards.answers`. The score is the dataset's own
`score_answer`, with one exception: some verifiers pay partial credit because the expected digits occur in the answer
(13 for 3, -5 for 5) or because any number was given. A number that is not the expected number, and that its verifier
does not accept in full, scores 0.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import math
import re
from typing import Any

from longtail.trainer_adapter.rewards.answers import are_different_numbers, extract_answer
from longtail.trainer_adapter.rewards.gym import ReasoningGymGrader


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One prompt and what its verifier needs."""

    id: str
    """`dataset-seed-index`; unique within one `load_tasks`, the same for the same (dataset, seed, index)."""
    dataset: str
    question: str
    """What the model is asked, the instruction on the answer's form included."""
    entry: dict[str, Any]
    """reasoning-gym's record: question, answer, metadata."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one response."""

    reward: float
    """In [0, 1]."""
    answer: str
    """What was taken as the answer."""
    failure: str = ""
    """Why the verifier gave no verdict (the reward is 0 then); empty if it did."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Recipe:
    """How this project uses a dataset: settings of reasoning-gym, and a line under each question."""

    instruction: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


RECIPES = {
    "gsm_symbolic": _Recipe("Think step by step, then give the final answer."),
    "chain_sum": _Recipe(
        "Reply with only the number.", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    ),
    "basic_arithmetic": _Recipe(
        "Reply with only the number.", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    ),
}
"""Datasets without an entry are used as reasoning-gym ships them."""

NAMED_MIXES = {
    "mixed": "gsm_symbolic=3,chain_sum=1",
    "gsm": "gsm_symbolic=1",
    "arithmetic": "chain_sum=1",
}
"""`mixed`, the default: word problems thought through aloud (long, heavy-tailed) among one-digit sums (short, and
small models solve some, so that rewards differ within a group)."""


def load_tasks(mix: str, count: int, seed: int) -> list[Task]:
    """`count` tasks of a mix, interleaved by weight; a pure function of its arguments, a prefix of any larger count.

    `mix` is a name of NAMED_MIXES or `dataset=weight,dataset=weight` with whole weights (a bare dataset weighs 1).
    Raises ValueError for an unknown dataset (with close matches) or a malformed mix.
    """
    if count < 0:
        raise ValueError(f"tasks: count must be at least 0, not {count}")
    weights = parse_mix(mix)
    order = _interleave(weights, count)
    datasets = {name: _dataset(name, _dataset_seed(name, seed), order.count(name)) for name in set(order)}
    position = dict.fromkeys(weights, 0)
    tasks = []
    for name in order:
        index = position[name]
        position[name] += 1
        entry = datasets[name][index]
        tasks.append(Task(f"{name}-{seed}-{index}", name, _ask(name, entry["question"]), entry))
    return tasks


def parse_mix(mix: str) -> dict[str, int]:
    """`gsm_symbolic=3,chain_sum=1` (or a mix's name) -> weights in order of mention."""
    weights: dict[str, int] = {}
    for part in NAMED_MIXES.get(mix.strip(), mix).split(","):
        name, _, weight = (piece.strip() for piece in part.partition("="))
        if not name or not re.fullmatch(r"[1-9]\d*", weight or "1"):
            raise ValueError(f"tasks: {part!r} in {mix!r} is not `dataset=weight` with a whole weight above 0")
        if name in weights:
            raise ValueError(f"tasks: {name} occurs twice in {mix!r}; give it one weight")
        weights[name] = int(weight or "1")
    _check_known(list(weights))
    return weights


def prompt_ids(task: Task, tokenizer: Any) -> list[int]:
    """The task as one user turn in the tokenizer's chat template, up to where the assistant starts to speak; the bare
    question and a newline if the tokenizer has no template."""
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": task.question}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(task.question + "\n")["input_ids"])


def grade(task: Task, text: str) -> float:
    """Reward of a response, in [0, 1]. Never raises; `verdict` also says what was read and what went wrong."""
    return verdict(task, text).reward


grade_request = ReasoningGymGrader()
"""As a grader with a name and a version: the group's task is the `Task`. Scores as `grade` does; a verifier that gives
no finite score leaves the sample without a reward."""


def verdict(task: Task, text: str) -> Grade:
    """Grades a response with its dataset's verifier. A verifier's exception becomes reward 0 and `failure`."""
    answer = ""
    try:
        expected = task.entry["answer"]
        answer = extract_answer(text, expected)
        score = float(_verifier(task.dataset).score_answer(answer, task.entry))
    except Exception as error:  # a verifier is foreign code fed with free text: whatever it raises is a verdict of 0
        return Grade(0.0, answer, f"{task.dataset} verifier: {type(error).__name__}: {error}")
    if not math.isfinite(score):
        return Grade(0.0, answer, f"{task.dataset} verifier: the score is {score}")
    if score < 1.0 and are_different_numbers(answer, expected):
        score = 0.0
    return Grade(min(max(score, 0.0), 1.0), answer)


def _interleave(weights: dict[str, int], count: int) -> list[str]:
    """Smooth weighted round robin: a=3, b=1 gives a a b a a a b a ..."""
    total = sum(weights.values())
    credit = dict.fromkeys(weights, 0)
    order = []
    for _ in range(count):
        for name, weight in weights.items():
            credit[name] += weight
        name = max(credit, key=credit.__getitem__)
        credit[name] -= total
        order.append(name)
    return order


def _ask(name: str, question: str) -> str:
    instruction = RECIPES[name].instruction if name in RECIPES else ""
    return f"{question}\n{instruction}" if instruction else question


def _dataset_seed(name: str, seed: int) -> int:
    """A hash: reasoning-gym seeds item i with seed + i, so neighbouring seeds would share their items."""
    return int.from_bytes(hashlib.blake2b(f"{name}:{seed}".encode(), digest_size=4).digest(), "little")


def _dataset(name: str, seed: int, size: int) -> Any:
    import reasoning_gym

    config = RECIPES[name].config if name in RECIPES else {}
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)


@functools.cache
def _verifier(name: str) -> Any:
    """A dataset for the sake of its `score_answer`, which reads the entry, not the dataset's items."""
    return _dataset(name, seed=0, size=1)


def _check_known(names: list[str]) -> None:
    from reasoning_gym.factory import DATASETS

    for name in names:
        if name not in DATASETS:
            close = difflib.get_close_matches(name, [*DATASETS, *NAMED_MIXES], n=3, cutoff=0.5)
            hint = f"did you mean {', '.join(close)}?" if close else f"named mixes: {', '.join(NAMED_MIXES)}"
            raise ValueError(
                f"tasks: no dataset or mix {name!r}; {hint} All {len(DATASETS)} datasets of reasoning-gym work."
            )
