"""Text and chat messages of a pair -> token ids, so that the context of a response is what the policy reads when it
writes one, and every token that it would not write itself is out of the mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Content = str | tuple[int, ...] | list[dict[str, Any]]
"""Text, token ids, or messages."""
Mask = tuple[bool, ...] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """By name: prompt, chosen, rejected."""

    ids: dict[str, tuple[int, ...]]
    masks: dict[str, Mask]
    """Of chosen and rejected. None: every token is the policy's."""


def encode(contents: Mapping[str, Content], tokenizer: Any) -> Encoded:
    """contents: prompt, chosen and rejected, all of one kind.

    Token ids stay what they are. Text: a response is what the tokens of prompt and response have beyond those of the
    prompt, and EOS. Messages: through the chat template; the tokens of assistants' turns, up to the turn's EOS where it
    has one, are the policy's, all others are not.

    ValueError `field: what is wrong; the fix`."""
    kinds = {name: {tuple: "token ids", str: "text", list: "messages"}[type(value)] for name, value in contents.items()}
    if len(set(kinds.values())) > 1:
        said = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise ValueError(f"prompt: {said}; give all three in one form")
    kind = kinds["prompt"]
    if kind == "token ids":
        ids = {name: value for name, value in contents.items() if isinstance(value, tuple)}
        return Encoded(ids=ids, masks={"chosen": None, "rejected": None})
    if tokenizer is None:
        raise ValueError(f"prompt: is {kind}, which needs a tokenizer; give one (--model), or token ids")
    prompt = contents["prompt"]
    if isinstance(prompt, list):
        return _messages(prompt, contents, tokenizer)
    return _text(str(prompt), contents, tokenizer)


# ---- text


def _text(prompt: str, contents: Mapping[str, Content], tokenizer: Any) -> Encoded:
    prompt_ids = _ids(tokenizer, prompt, special=True)
    if not prompt_ids:
        raise ValueError("prompt: has no tokens; give at least one")
    found = {"prompt": prompt_ids}
    for name in ("chosen", "rejected"):
        whole = _ids(tokenizer, prompt + str(contents[name]), special=True)
        if whole[: len(prompt_ids)] != prompt_ids:
            raise ValueError(
                f"{name}: its first characters become one token with the end of the prompt, which no policy can write; "
                "move the border to where a token ends (a space belongs to the word after it), or give token ids"
            )
        found[name] = _ended(whole[len(prompt_ids) :], tokenizer)
    return Encoded(ids=found, masks={"chosen": None, "rejected": None})


def _ended(ids: tuple[int, ...], tokenizer: Any) -> tuple[int, ...]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == (end,) else (*ids, end)


def _ids(tokenizer: Any, text: str, *, special: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=special)["input_ids"])


# ---- messages


def _messages(prompt: list[dict[str, Any]], contents: Mapping[str, Content], tokenizer: Any) -> Encoded:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("prompt: is messages, and the tokenizer has no chat template; give text or token ids")
    _check_messages("prompt", prompt)
    if prompt[-1]["role"] == "assistant":
        raise ValueError("prompt: ends with a message of the assistant; the responses are to follow a user or a tool")
    ids = {"prompt": _rendered("prompt", prompt, tokenizer, ask=True)}
    masks: dict[str, Mask] = {}
    for name in ("chosen", "rejected"):
        messages = contents[name]
        assert isinstance(messages, list)
        _check_messages(name, messages)
        if messages[0]["role"] != "assistant" or messages[-1]["role"] != "assistant":
            raise ValueError(
                f"{name}: goes from {messages[0]['role']} to {messages[-1]['role']}; give what follows the prompt, "
                "which starts and ends with a message of the assistant"
            )
        ids[name], masks[name] = _response(name, prompt, messages, ids["prompt"], tokenizer)
    return Encoded(ids=ids, masks=masks)


def _response(
    name: str, prompt: list[dict[str, Any]], messages: list[dict[str, Any]], start: tuple[int, ...], tokenizer: Any
) -> tuple[tuple[int, ...], Mask]:
    """Rendered message by message, each rendering a continuation of the one before."""
    known = start
    mask: list[bool] = []
    for i, message in enumerate(messages):
        is_last = i + 1 == len(messages)
        asks = not is_last and message["role"] != "assistant" and messages[i + 1]["role"] == "assistant"
        after = _rendered(name, [*prompt, *messages[: i + 1]], tokenizer, ask=asks)
        if after[: len(known)] != known:
            raise ValueError(
                f"{name}: the chat template renders earlier messages in another way once message {i + 1} follows (some "
                "drop their reasoning); give token ids"
            )
        added = after[len(known) :]
        if message["role"] == "assistant":
            written = _up_to_end(added, tokenizer)
            mask += [True] * written + [False] * (len(added) - written)
        else:
            mask += [False] * len(added)
        known = after
    while mask and not mask[-1]:  # behind the last turn's end there is nothing more to read
        mask.pop()
    return known[len(start) : len(start) + len(mask)], None if all(mask) else tuple(mask)


def _up_to_end(ids: Sequence[int], tokenizer: Any) -> int:
    """How many tokens there are up to the last EOS; all, where there is none."""
    end = tokenizer.eos_token_id
    places = [i for i, token in enumerate(ids) if token == end]
    return places[-1] + 1 if places else len(ids)


def _rendered(name: str, messages: list[dict[str, Any]], tokenizer: Any, *, ask: bool) -> tuple[int, ...]:
    """ask: up to where the assistant starts to speak."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except Exception as error:  # a template is foreign code, and says what it does not take by raising
        raise ValueError(f"{name}: the chat template refuses the messages: {error}") from error
    return _ids(tokenizer, text, special=False)


def _check_messages(name: str, messages: list[dict[str, Any]]) -> None:
    for i, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"{name}: message {i} has no {key} that is text; write {{'role': ..., 'content': ...}}"
                )
