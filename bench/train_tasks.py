"""What `longtail train` trains on: an endless stream of prompts, some that are held out, and a grader.

    add            a two-digit and a one-digit number, three examples before them; one line of at most six tokens
    a mix          of `bench/tasks.py`: "arithmetic", "gsm", "gsm_symbolic=3,chain_sum=1"
    FILE.jsonl     lines {"prompt": text} or {"prompt_ids": [...]}, with anything else that a grader of your own needs

Prompt number i is a function of (task, seed, i) and never one of those held out. Its task is what JSON can say, so that
a store on disk gives it back as it was.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from longtail.bench import tasks
from longtail.partial_rollout.grading import Grader, GradeRequest
from longtail.trainer_adapter.rewards import make_grader

HELD_OUT_SEED = 99


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    task: Any
    """For the grader; JSON."""


class Prompts(Protocol):
    grader: Grader
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    """Unless the user says otherwise."""

    def train(self, index: int) -> Prompt: ...

    def held_out(self) -> list[Prompt]: ...


def load_prompts(
    task: str, tokenizer: Any, *, seed: int = 0, held_out: int = 48, grader: str | Grader | None = None
) -> Prompts:
    """tokenizer: None for a file of token ids. grader: one made, or what `make_grader` takes; None:
    the task's own.

    ValueError: an unknown task, one that needs a tokenizer, or a file without a grader."""
    own: Grader | None = make_grader(grader) if isinstance(grader, str) else grader
    if task.endswith(".jsonl"):
        if not Path(task).is_file():
            raise ValueError(f"task: {task} cannot be read: there is no such file")
        if own is None:
            raise ValueError(f"grader: {task} brings none; give --grader math, or package.module.function")
        return FilePrompts(Path(task), tokenizer, own, held_out)
    if task != "add":
        tasks.parse_mix(task)  # an unknown name is said first
    if tokenizer is None:
        raise ValueError(f"task {task!r} needs a tokenizer, and the model has none; give a .jsonl file of prompt_ids")
    if task == "add":
        return AdditionPrompts(tokenizer, seed, held_out, own or grade_addition)
    return GymPrompts(task, tokenizer, seed, held_out, own or grade_gym)


class _Stream:
    """Items of an iterator by their number, in whatever order they are asked for."""

    def __init__(self, items: Iterator[Prompt]) -> None:
        self._items, self._known = items, list[Prompt]()

    def __getitem__(self, index: int) -> Prompt:
        while len(self._known) <= index:
            self._known.append(next(self._items))
        return self._known[index]


# ---- addition

EXAMPLES = "13+4=17\n28+7=35\n51+6=57\n"


class AdditionPrompts:
    """Few-shot addition that a small model half knows: 90 x 9 problems, of which `held_out` are kept for evaluation."""

    max_tokens = 6

    def __init__(self, tokenizer: Any, seed: int, held_out: int, grader: Grader) -> None:
        if not 1 <= held_out <= 400:
            raise ValueError(f"held_out must be 1 to 400 of the 810 problems, not {held_out}")
        self.grader = grader
        self._tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = (int(tokenizer("\n", add_special_tokens=False)["input_ids"][-1]),)
        kept = random.Random(HELD_OUT_SEED)
        self._held_out = [_problem(kept) for _ in range(held_out)]
        self._stream = _Stream(self._problems(seed))

    def _problems(self, seed: int) -> Iterator[Prompt]:
        numbers, kept = random.Random(seed), set(self._held_out)
        while True:
            if (problem := _problem(numbers)) not in kept:
                yield self._prompt(*problem)

    def _prompt(self, a: int, b: int) -> Prompt:
        ids = self._tokenizer(f"{EXAMPLES}{a}+{b}=", add_special_tokens=False)["input_ids"]
        return Prompt([int(i) for i in ids], {"problem": f"{a}+{b}", "answer": a + b})

    def train(self, index: int) -> Prompt:
        return self._stream[index]

    def held_out(self) -> list[Prompt]:
        return [self._prompt(*problem) for problem in self._held_out]


def _problem(numbers: random.Random) -> tuple[int, int]:
    return numbers.randint(10, 99), numbers.randint(1, 9)


def grade_addition(request: GradeRequest) -> float:
    """1 if the first number in the text is the sum."""
    found = re.search(r"-?[0-9]+", request.text)
    return float(found is not None and len(found[0]) < 100 and int(found[0]) == request.task["answer"])


# ---- reasoning-gym


class GymPrompts:
    """A mix of procedural tasks, without the questions of those held out."""

    max_tokens = 512
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, mix: str, tokenizer: Any, seed: int, held_out: int, grader: Grader) -> None:
        self.grader = grader
        self._mix, self._seed, self._tokenizer = mix, seed, tokenizer
        self._held_out = tasks.load_tasks(mix, held_out, HELD_OUT_SEED + seed)
        self._stream = _Stream(self._tasks())

    def _tasks(self) -> Iterator[Prompt]:
        kept = {task.question for task in self._held_out}
        start, size = 0, 64
        while True:
            for task in tasks.load_tasks(self._mix, start + size, self._seed)[start:]:
                if task.question not in kept:
                    yield self._prompt(task)
            start, size = start + size, 2 * size

    def _prompt(self, task: tasks.Task) -> Prompt:
        try:
            plain = json.loads(json.dumps(dataclasses.asdict(task), default=_fraction))
        except TypeError as error:
            raise ValueError(f"task {task.id}: its record cannot be kept in a store ({error})") from error
        return Prompt(tasks.prompt_ids(task, self._tokenizer), plain)

    def train(self, index: int) -> Prompt:
        return self._stream[index]

    def held_out(self) -> list[Prompt]:
        return [self._prompt(task) for task in self._held_out]


def _fraction(value: Any) -> str:
    """How gsm_symbolic's variables were drawn, which no verifier reads."""
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def grade_gym(request: GradeRequest) -> float:
    """By the dataset's own verifier."""
    return tasks.grade(tasks.Task(**request.task), request.text)


# ---- files


class FilePrompts:
    """Lines of a file, the last `held_out` of them for evaluation, the others again and again in their order."""

    max_tokens = 512
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, path: Path, tokenizer: Any, grader: Grader, held_out: int) -> None:
        self.grader = grader
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ValueError(f"task: {path} cannot be read ({error})") from error
        found = [_line(path, n, line, tokenizer) for n, line in enumerate(lines) if line.strip()]
        if len(found) <= held_out:
            raise ValueError(f"task: {path} has {len(found)} prompts, of which {held_out} are held out; give more")
        cut = len(found) - held_out
        self._train, self._held_out = found[:cut], found[cut:]

    def train(self, index: int) -> Prompt:
        return self._train[index % len(self._train)]

    def held_out(self) -> list[Prompt]:
        return self._held_out


def _line(path: Path, number: int, line: str, tokenizer: Any) -> Prompt:
    where = f"task: {path}, line {number + 1}"
    try:
        values = json.loads(line)
        prompt = values["prompt_ids"] if "prompt_ids" in values else values["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where} is no JSON object with prompt or prompt_ids ({error!r})") from error
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"{where} has text, and the model has no tokenizer; give prompt_ids")
        prompt = tokenizer(prompt)["input_ids"]
    if not prompt or not all(isinstance(i, int) and i >= 0 for i in prompt):
        raise ValueError(f"{where}: the prompt must be text or a list of token ids, and not empty")
    return Prompt(list(prompt), values)
