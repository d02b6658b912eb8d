"""Tasks: the same for the same arguments, interleaved, asked through the template, graded as a reader would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longtail.bench import tasks
from longtail.bench.tasks import Task, grade, load_tasks, parse_mix, prompt_ids, verdict
from longtail.trainer_adapter.rewards.answers import extract_answer

SMOL = Path("/scratch/models/smol")


class Characters:
    """A tokenizer whose tokens are code points."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": ([1] if add_special_tokens else []) + [ord(character) for character in text]}

    def apply_chat_template(self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"[{turn['role']}]{turn['content']}" for turn in turns) + "[assistant]"


def sum_task(question: str = "9 + 5 =", answer: str = "14") -> Task:
    return Task("chain_sum-0-0", "chain_sum", question, {"question": question, "answer": answer, "metadata": {}})


def test_tasks_are_a_function_of_mix_count_and_seed() -> None:
    first, again = load_tasks("mixed", 12, seed=5), load_tasks("mixed", 12, seed=5)
    assert first == again
    assert load_tasks("mixed", 7, seed=5) == first[:7]
    assert len({task.id for task in first}) == 12


def test_neighbouring_seeds_share_no_word_problem() -> None:
    ours, next_door = (load_tasks("gsm_symbolic", 20, seed) for seed in (0, 1))
    assert not {task.question for task in ours} & {task.question for task in next_door}


def test_weights_interleave() -> None:
    names = [task.dataset for task in load_tasks("gsm_symbolic=3,chain_sum=1", 8, seed=0)]
    assert names == ["gsm_symbolic", "gsm_symbolic", "chain_sum", "gsm_symbolic"] * 2
    assert load_tasks("mixed", 0, seed=0) == []


def test_the_instruction_is_asked() -> None:
    word_problem, _, short = load_tasks("mixed", 3, seed=0)
    assert word_problem.question.startswith(word_problem.entry["question"] + "\nThink step by step")
    assert short.question.endswith("\nReply with only the number.")


def test_an_unknown_dataset_names_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"tasks: no dataset or mix 'gsm_symbolc'; did you mean gsm_symbolic"):
        load_tasks("chain_sum=1,gsm_symbolc=2", 1, seed=0)
    with pytest.raises(ValueError, match="named mixes: mixed"):
        parse_mix("zzzzzz")


@pytest.mark.parametrize("mix", ["", "chain_sum=0", "chain_sum=-1", "chain_sum=1.5", "chain_sum=1,,gcd=1", "=3"])
def test_a_malformed_mix_is_refused(mix: str) -> None:
    with pytest.raises(ValueError, match="is not `dataset=weight`"):
        parse_mix(mix)


def test_a_dataset_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="chain_sum occurs twice"):
        parse_mix("chain_sum=1,chain_sum=2")


def test_every_named_mix_loads() -> None:
    for name in tasks.NAMED_MIXES:
        assert len(load_tasks(name, 4, seed=0)) == 4


def test_prompt_goes_through_the_template() -> None:
    ids = prompt_ids(sum_task(), Characters("a template"))
    assert "".join(map(chr, ids)) == "[user]9 + 5 =[assistant]"


def test_prompt_without_a_template_is_the_plain_question() -> None:
    ids = prompt_ids(sum_task(), Characters(None))
    assert ids[0] == 1 and "".join(map(chr, ids[1:])) == "9 + 5 =\n"


@pytest.mark.skipif(not SMOL.exists(), reason="needs the converted SmolLM2 directory")
def test_prompt_of_a_real_tokenizer_decodes_to_the_template() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOL)
    text = tokenizer.decode(prompt_ids(sum_task(), tokenizer))
    assert text.endswith("<|im_start|>user\n9 + 5 =<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3


@pytest.mark.parametrize(
    ("text", "expected", "answer"),
    [
        ("The answer is 20.", "20", "20"),
        ("first 3, then 7", "20", "7"),
        ("it costs $1,200.50 in total", "1200.5", "1200.50"),
        ("5-9=-4", "-4", "-4"),
        ("5-9", "-4", "9"),
        ("that is \u22124", "-4", "-4"),
        ("<answer>20 bananas</answer> of 132", "20", "20"),
        ("<answer>1</answer> no: <answer>2</answer>", "2", "2"),
        (r"so \boxed{12} and 99", "12", "12"),
        (r"\boxed{\frac{1}{2}} is it", "a half", r"\frac{1}{2}"),
        (r"\boxed{3", "3", "3"),
        ("4 + 4\n#### 8\nchecked 2 times", "8", "8"),
        ("no number here", "8", ""),
        ("  some words \n", "some words", "some words"),
        ("", "8", ""),
    ],
)
def test_answer_extraction(text: str, expected: str, answer: str) -> None:
    assert extract_answer(text, expected) == answer


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("14", 1.0),
        ("9 + 5 = 14.", 1.0),
        ("The answer is 14.0", 1.0),
        ("9 + 5 = 15", 0.0),
        ("114", 0.0),  # chain_sum's verifier alone gives 2/3: the digits occur
        ("-14", 0.0),  # and here too
        ("fourteen", 0.0),
        ("", 0.0),
    ],
)
def test_sums_are_right_or_wrong(text: str, reward: float) -> None:
    assert grade(sum_task(), text) == reward


def test_the_right_answer_of_every_default_task_earns_all() -> None:
    for task in load_tasks("mixed", 16, seed=3):
        answer = task.entry["answer"]
        assert grade(task, f"Let me think. 3 and 4. The answer is {answer}.") == 1.0
        assert grade(task, f"The answer is {float(answer) + 1}.") == 0.0


def test_partial_credit_of_a_verifier_stands_where_answers_are_not_numbers() -> None:
    (task,) = load_tasks("countdown", 1, seed=0)
    assert grade(task, task.entry["answer"]) == 1.0
    assert 0.0 < grade(task, "1 + 1") < 0.1


@pytest.mark.parametrize("score", [RuntimeError("boom"), float("nan"), "not a score"])
def test_a_verifier_never_raises(score: object, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def score_answer(self, answer: str, entry: dict) -> object:
            if isinstance(score, Exception):
                raise score
            return score

    monkeypatch.setattr(tasks, "_verifier", lambda name: Broken())
    result = verdict(sum_task(), "14")
    assert (result.reward, result.answer) == (0.0, "14")
    assert result.failure.startswith("chain_sum verifier: ")
    assert verdict(Task("x", "chain_sum", "?", {}), "14").failure  # an entry without an answer


def test_a_score_outside_the_unit_interval_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Generous:
        def score_answer(self, answer: str, entry: dict) -> float:
            return 3.0

    monkeypatch.setattr(tasks, "_verifier", lambda name: Generous())
    assert grade(sum_task(), "14") == 1.0


def test_import_is_light() -> None:
    code = "import sys, longtail.bench.tasks; print({'reasoning_gym', 'torch', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
