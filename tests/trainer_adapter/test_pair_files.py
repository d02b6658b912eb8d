"""Files of pairs: what is read is what was written, text and messages as a policy reads them, every fault by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longtail.trainer_adapter.pair_files import check_pairs, read_pairs, write_pairs
from longtail.trainer_adapter.preferences import Origin, Pair

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, but "ab" is one; roles are tokens, and <e> ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate([*alphabet, "ab"])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<u>", "<a>", "<t>", "<e>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>", chat_template=TEMPLATE)


FULL = [
    Pair(
        prompt_ids=(1, 2),
        chosen_ids=(3, 4, 5),
        rejected_ids=(6,),
        reason='reward 1 against 0.1 ("exact" ✓)',
        chosen_mask=(True, False, True),
        group="g",
        chosen=Origin(sample="g/0", reward=1.0, grader="sum@2", versions=(3, 5), finish_reason="stop"),
        rejected=Origin(sample="g/1", reward=0.1 + 0.2, versions=(0,)),
        verdicts=("A", "B"),
    ),
    Pair(prompt_ids=(1,), chosen_ids=(0,), rejected_ids=(9, 9), reason="shorter"),
]


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_what_is_read_is_what_was_written(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "deep" / name
    write_pairs(path, FULL, tokenizer)
    assert list(read_pairs(path)) == FULL
    assert [file.name for file in path.parent.iterdir()] == [name]
    write_pairs(path, FULL[1:])
    assert list(read_pairs(path, vocab_size=10)) == FULL[1:]


def test_text_for_people_is_written_and_not_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tuple(tokenizer("cab?")["input_ids"])
    pair = Pair(prompt_ids=ids, chosen_ids=ids[:1], rejected_ids=ids[1:], reason="r")
    write_pairs(tmp_path / "p.jsonl", [pair], tokenizer)
    row = json.loads((tmp_path / "p.jsonl").read_text())
    assert (row["prompt_text"], row["chosen_text"], row["rejected_text"]) == ("cab?", "c", "ab?")
    row["chosen_text"] = "edited"
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    assert read_pairs(tmp_path / "p.jsonl") == (pair,)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    write_pairs(path, FULL)
    with pytest.raises(ValueError, match="surrogates"):
        write_pairs(path, [Pair(prompt_ids=(1,), chosen_ids=(2,), rejected_ids=(3,), reason="\udc80")])
    assert list(read_pairs(path)) == FULL
    with pytest.raises(ValueError, match=r"p\.csv: pairs are written to"):
        write_pairs(tmp_path / "p.csv", FULL)


# ---- text and messages


def rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"reason": "r"} | row) + "\n" for row in rows))
    return path


def test_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A response ends with EOS, which is added where it is not there."""
    path = rows(tmp_path / "p.jsonl", {"prompt": "Is it?", "chosen": " ab", "rejected": " no<e>"})
    (pair,) = read_pairs(path, tokenizer=tokenizer)
    assert tokenizer.decode(pair.prompt_ids) == "Is it?"
    assert tokenizer.decode(pair.chosen_ids) == " ab<e>" and len(pair.chosen_ids) == 3
    assert tokenizer.decode(pair.rejected_ids) == " no<e>"
    assert pair.chosen_mask is None and pair.rejected_mask is None


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_messages(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The prompt ends where the assistant starts to speak, the response with the end of its last turn; what a tool
    wrote, and the template around it, is not trained on."""
    path = rows(
        tmp_path / "p.jsonl",
        {
            "prompt": [turn("user", "2+2?")],
            "chosen": [turn("assistant", "calc"), turn("tool", "4"), turn("assistant", "four")],
            "rejected": [turn("assistant", "5")],
        },
    )
    (pair,) = read_pairs(path, tokenizer=tokenizer)
    assert tokenizer.decode(pair.prompt_ids) == "<u>2+2?<e>\n<a>"
    assert tokenizer.decode(pair.chosen_ids) == "calc<e>\n<t>4<e>\n<a>four<e>"
    assert pair.chosen_mask is not None
    trained = [token for token, mask in zip(pair.chosen_ids, pair.chosen_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "calc<e>four<e>"
    assert (tokenizer.decode(pair.rejected_ids), pair.rejected_mask) == ("5<e>", None)


def test_messages_from_parquet(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Where a field that one message has is null in the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"prompt": [turn("user", "a")], "rejected": [turn("assistant", "b")], "reason": "r", "chosen": None}
    row["chosen"] = [turn("assistant", "c") | {"name": "me"}]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "p.parquet")
    (pair,) = read_pairs(tmp_path / "p.parquet", tokenizer=tokenizer)
    assert tokenizer.decode(pair.chosen_ids) == "c<e>"


@pytest.mark.parametrize("ids", [("prompt_ids", "chosen_ids", "rejected_ids"), ("prompt", "chosen", "rejected")])
def test_token_ids_stay_what_they_are(ids: tuple[str, ...], tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = rows(tmp_path / "p.jsonl", dict(zip(ids, ([5], [97, 98], [3]), strict=True)))
    for given in (None, tokenizer):
        (pair,) = read_pairs(path, tokenizer=given)
        assert (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids) == ((5,), (97, 98), (3,))


# ---- faults

IDS: dict[str, Any] = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
TEXT: dict[str, Any] = {"prompt": "a", "chosen": "c", "rejected": "d"}
CHAT: dict[str, Any] = {
    "prompt": [turn("user", "q")],
    "chosen": [turn("assistant", "x")],
    "rejected": [turn("assistant", "y")],
}


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": (without(IDS, "prompt_ids"), r"prompt: is missing; give prompt \(text or messages\) or prompt_ids"),
    "no rejected": (without(TEXT, "rejected"), "rejected: is missing"),
    "no reason": (IDS | {"reason": None}, r"reason: is missing.*--reason"),
    "empty reason": (IDS | {"reason": " "}, "reason: is empty"),
    "reason of another type": (IDS | {"reason": 3}, "reason: must be text, not 3"),
    "twice": (IDS | {"chosen": "c"}, "chosen: is given twice, as chosen and chosen_ids"),
    "unknown": (IDS | {"score": 1}, r"score: no such field.*--ignore"),
    "empty ids": (IDS | {"chosen_ids": []}, "chosen_ids: must be a list of token ids.*an empty list"),
    "no ids": (IDS | {"chosen_ids": [1.5]}, "chosen_ids: must be a list of token ids"),
    "true is no id": (IDS | {"chosen_ids": [True]}, "chosen_ids: must be a list of token ids"),
    "text as ids": (IDS | {"chosen_ids": "abc"}, "chosen_ids: must be a list of token ids, at least one, not text"),
    "negative": (IDS | {"rejected_ids": [-3]}, "rejected_ids: must be non-negative integers, not -3"),
    "beyond the vocabulary": (IDS | {"chosen_ids": [5, 1000]}, "chosen: token 1000 is not below 261"),
    "same": (IDS | {"rejected_ids": [2]}, "rejected_ids: is the chosen response"),
    "empty text": (TEXT | {"chosen": ""}, "chosen: must be text, .* not an empty text"),
    "a number": (TEXT | {"prompt": 7}, "prompt: must be text, .* not 7"),
    "two forms": (TEXT | {"chosen": [1]}, "prompt: prompt is text, chosen is token ids, rejected is text; give all"),
    "border in a token": (TEXT | {"chosen": "bc"}, "chosen: its first characters become one token"),
    "no role": (CHAT | {"chosen": [{"content": "x"}]}, "chosen: message 1 has no role"),
    "content that is no text": (
        CHAT | {"prompt": [{"role": "user", "content": [1]}]},
        "prompt: message 1 has no content",
    ),
    "whole conversation": (
        CHAT | {"chosen": [*CHAT["prompt"], *CHAT["chosen"]]},
        "chosen: goes from user to assistant",
    ),
    "assistant last in the prompt": (CHAT | {"prompt": [turn("assistant", "q")]}, "prompt: ends with a message of the"),
    "one verdict": (IDS | {"verdict_ab": "A"}, "verdict_ba: is missing"),
    "no verdict": (IDS | {"verdict_ab": "A", "verdict_ba": "yes"}, "verdict_ba: must be A, B, tie, not 'yes'"),
    "mask too long": (IDS | {"chosen_mask": [1, 1]}, "chosen_mask: has 2 entries for 1"),
    "mask of other things": (IDS | {"chosen_mask": [2]}, "chosen_mask: must be a list of 0 and 1"),
    "mask of text": (TEXT | {"chosen_mask": [1]}, "chosen_mask: goes with token ids only"),
    "reward of another type": (IDS | {"chosen_sample": "s", "chosen_reward": "1"}, "chosen_reward: must be a number"),
    "versions": (IDS | {"chosen_sample": "s", "chosen_versions": [-1]}, "chosen_versions: must be a list of integers"),
    "of no sample": (IDS | {"rejected_reward": 1.0}, "rejected_sample: is missing; rejected_reward is of a sample"),
    "group": (IDS | {"group": 3}, "group: must be text"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_file_line_field_and_fix(
    fault: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row, says = FAULTS[fault]
    good = {"prompt_ids": [9], "chosen_ids": [8], "rejected_ids": [7]}
    path = rows(tmp_path / "p.jsonl", good, row)
    with pytest.raises(ValueError, match=rf"p\.jsonl:2: {says}"):
        read_pairs(path, tokenizer=tokenizer)
    found = check_pairs(path, tokenizer=tokenizer)
    assert (found.rows, len(found.pairs), len(found.problems)) == (2, 1, 1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"", "the line is empty"),
        (b"{'a': 1}", r"is not JSON: .* at column 2"),
        (b"[1]", "is a list; write an object"),
        (b'{"prompt": "\xff"}', r"is not UTF-8 \(byte 13\)"),
        (b'{"reason": "a", "reason": "b"}', "reason: is given twice; keep one"),
        (b'{"chosen_reward": NaN}', "NaN is no JSON"),
        (b"[" * 100_000, "is not JSON|recursion"),
    ],
)
def test_lines_that_are_no_rows(line: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(IDS | {"reason": "r"}).encode() + b"\n" + line + b"\n")
    (problem,) = check_pairs(path).problems
    assert problem.line == 2
    with pytest.raises(ValueError, match=rf"p\.jsonl:2: .*({says})"):
        read_pairs(path)


def test_a_pair_that_comes_again(tmp_path: Path) -> None:
    swapped = IDS | {"chosen_ids": [3], "rejected_ids": [2]}
    path = rows(tmp_path / "p.jsonl", IDS, IDS | {"reason": "other"}, swapped)
    assert [str(p).rpartition("p.jsonl:")[2] for p in check_pairs(path).problems] == [
        "2: chosen: the same pair as in line 1; remove one of them",
        "3: chosen: contradicts line 1, which prefers the other response; remove one",
    ]


def test_the_same_tokens_of_other_samples_are_another_pair(tmp_path: Path) -> None:
    """Two groups of one prompt may well come to the same two answers, and a grader may contradict itself."""
    samples = [Origin(sample=f"g/{i}") for i in range(4)]
    known: dict[str, Any] = {"prompt_ids": (1,), "reason": "r"}
    pairs = [
        Pair(chosen_ids=(2,), rejected_ids=(3,), chosen=samples[0], rejected=samples[1], **known),
        Pair(chosen_ids=(2,), rejected_ids=(3,), chosen=samples[2], rejected=samples[3], **known),
        Pair(chosen_ids=(3,), rejected_ids=(2,), chosen=samples[3], rejected=samples[0], **known),
    ]
    write_pairs(tmp_path / "p.jsonl", pairs)
    assert list(read_pairs(tmp_path / "p.jsonl")) == pairs
    write_pairs(tmp_path / "p.jsonl", [pairs[0], pairs[0]])
    with pytest.raises(ValueError, match=r":2: chosen: the same pair as in line 1"):
        read_pairs(tmp_path / "p.jsonl")


def test_an_error_names_the_first_ten_problems(tmp_path: Path) -> None:
    path = rows(tmp_path / "p.jsonl", *([{"x": 1}] * 13))
    with pytest.raises(ValueError, match=r"(?s)p\.jsonl:1: x: .*p\.jsonl:10: x: .*\n\.\.\. and 3 more: longtail pairs"):
        read_pairs(path)


def test_text_needs_a_tokenizer_and_messages_a_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"p\.jsonl:1: prompt: is text, which needs a tokenizer"):
        read_pairs(rows(tmp_path / "p.jsonl", TEXT))
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(ValueError, match="prompt: is messages, and the tokenizer has no chat template"):
        read_pairs(rows(tmp_path / "p.jsonl", CHAT), tokenizer=plain)


def test_a_template_that_changes_earlier_turns(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """As those do that drop the reasoning of all turns but the last."""
    last_only = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else '' }}")
    row = CHAT | {"chosen": [turn("assistant", "x"), turn("tool", "t"), turn("assistant", "y")]}
    changing = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<e>", chat_template=last_only
    )
    with pytest.raises(
        ValueError, match=r"p\.jsonl:1: (chosen|rejected): the chat template renders earlier messages in"
    ):
        read_pairs(rows(tmp_path / "p.jsonl", row), tokenizer=changing)
    refusing = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<e>",
        chat_template="{{ raise_exception('no tools here') }}",
    )
    with pytest.raises(ValueError, match="prompt: the chat template refuses the messages: no tools here"):
        read_pairs(rows(tmp_path / "p.jsonl", CHAT), tokenizer=refusing)


def test_further_fields_are_ignored_by_name_only(tmp_path: Path) -> None:
    path = rows(tmp_path / "p.jsonl", IDS | {"score": 1, "source": "x"})
    assert len(read_pairs(path, ignore=("score", "source"))) == 1
    with pytest.raises(ValueError, match="source: no such field"):
        read_pairs(path, ignore=("score",))


def test_one_reason_for_all(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(IDS))
    assert read_pairs(path, reason="UltraFeedback")[0].reason == "UltraFeedback"


def test_files_that_are_none(tmp_path: Path) -> None:
    for name, data, says in (
        ("p.csv", b"x", r"read from \.jsonl and \.parquet"),
        ("gone.jsonl", None, "is no file"),
        ("empty.jsonl", b"", "holds no pair"),
        ("p.parquet", b"no parquet", "cannot be read as Parquet"),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ValueError, match=says):
            read_pairs(path)
