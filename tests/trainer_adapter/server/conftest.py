"""Tiny engines, and a real tokenizer of which every token is a character."""

from __future__ import annotations

from typing import Any

import pytest
from tests.partial_rollout.conftest import VOCAB
from tests.partial_rollout.service_helpers import Stepped, make_stepped
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


@pytest.fixture(scope="session")
def characters() -> PreTrainedTokenizerFast:
    """Token 3 + i is the character 0x4E00 + i."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(0x4E00 + i): 3 + i for i in range(VOCAB - 3)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def engine(characters: Any) -> Stepped:
    return make_stepped(tokenizer=characters)


@pytest.fixture(scope="module")
def alone() -> Stepped:
    """Undisturbed: for what is to be expected."""
    return make_stepped()


@pytest.fixture(autouse=True)
def as_new(engine: Stepped) -> None:
    engine.reset_prefix_cache()
