"""Prompts of `longtail train`: the same ones for the same seed, none that is held out, tasks that JSON can say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longtail.bench.train_tasks import grade_addition, grade_gym, load_prompts
from longtail.partial_rollout.grading import GradeRequest


class Letters:
    """A tokenizer: one token a character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def text_of(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def request(task: Any, text: str) -> GradeRequest:
    return GradeRequest(
        sample_id="s", group_id="g", task=task, prompt_ids=(1,), output_ids=(1,), text=text, finish_reason="stop"
    )


def test_addition() -> None:
    prompts = load_prompts("add", Letters(), seed=1)
    assert prompts.max_tokens == 6 and prompts.stop_token_ids == (ord("\n"),)
    kept = {text_of(p.token_ids) for p in prompts.held_out()}
    found = [text_of(prompts.train(i).token_ids) for i in range(300)]
    assert found[0].startswith("13+4=17\n28+7=35\n51+6=57\n") and found[0].endswith("=")
    assert not kept & set(found)
    again = load_prompts("add", Letters(), seed=1)
    assert [text_of(again.train(i).token_ids) for i in reversed(range(300))] == found[::-1]
    assert [text_of(load_prompts("add", Letters(), seed=2).train(i).token_ids) for i in range(300)] != found
    task = prompts.train(0).task
    assert json.loads(json.dumps(task)) == task
    right = (f"{task['answer']}\n", f" is {task['answer']}, or 7")
    for text, reward in (*((text, 1.0) for text in right), ("7", 0.0), ("", 0.0), ("9" * 5000, 0.0)):
        assert grade_addition(request(task, text)) == reward


def test_reasoning_gym() -> None:
    prompts = load_prompts("arithmetic", Letters(), seed=3, held_out=20)
    kept = {p.task["question"] for p in prompts.held_out()}
    tasks = [prompts.train(i).task for i in range(150)]  # beyond the first chunk
    assert not kept & {task["question"] for task in tasks}
    assert len({task["id"] for task in tasks}) == 150
    other = load_prompts("arithmetic", Letters(), seed=3, held_out=20)
    assert other.train(149).task == tasks[149]
    task = json.loads(json.dumps(tasks[0]))
    assert task == tasks[0]
    assert grade_gym(request(task, task["entry"]["answer"])) == 1.0
    assert grade_gym(request(task, "no idea")) == 0.0


def test_variables_that_json_has_no_word_for() -> None:
    """gsm_symbolic draws some of its numbers as fractions."""
    prompts = load_prompts("gsm_symbolic=1", Letters(), seed=0, held_out=1)
    tasks = [prompts.train(i).task for i in range(64)]
    assert json.loads(json.dumps(tasks)) == tasks
    fractions = re.findall(r'"\d+/\d+"', json.dumps([task["entry"]["metadata"] for task in tasks]))
    assert fractions, "none is drawn: the test would show nothing"
    assert all(grade_gym(request(task, task["entry"]["answer"])) == 1.0 for task in tasks)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab", "answer": 1}\n\n{"prompt_ids": [4, 5]}\n{"prompt": "c"}\n')
    prompts = load_prompts(str(file), Letters(), held_out=1, grader=grade_addition)
    assert [prompts.train(i).token_ids for i in range(3)] == [[97, 98], [4, 5], [97, 98]]
    assert prompts.train(0).task == {"prompt": "ab", "answer": 1}
    assert [p.token_ids for p in prompts.held_out()] == [[99]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 is no JSON object"),
        ('{"question": "x"}', "line 1 is no JSON object"),
        ('{"prompt_ids": []}', "not empty"),
        ('{"prompt_ids": ["a"]}', "not empty"),
        ('{"prompt": "x"}', "1 are held out; give more"),
    ],
)
def test_bad_files(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match=says):
        load_prompts(str(file), Letters(), held_out=1, grader=grade_addition)
    with pytest.raises(ValueError, match="brings none"):
        load_prompts(str(file), Letters(), held_out=1)


def test_bad_tasks() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        load_prompts("add", None)
    with pytest.raises(ValueError, match=r"gone\.jsonl cannot be read"):  # before it is asked for a grader
        load_prompts("gone.jsonl", Letters())
    with pytest.raises(ValueError, match="did you mean"):
        load_prompts("chain_sums", Letters())
    with pytest.raises(ValueError, match="held_out must be 1 to 400"):
        load_prompts("add", Letters(), held_out=500)
