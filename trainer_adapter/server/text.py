"""Between text and token ids, for clients that want text. Tokens come and go as they are: nothing is re-tokenised."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from longtail.trainer_adapter.server.fields import BadRequest


class Text:
    """tokenizer: of `transformers`; None: there is no text, and whoever asks for it is told so."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._decoder = tokenizer
        # Encoding takes time, and a tokenizer must not be used by two threads at once.
        self._encoder = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "longtail-tokenizer")

    def __bool__(self) -> bool:
        return self._decoder is not None

    async def encode(self, text: str, field: str, *, special: bool = True) -> tuple[int, ...]:
        """BadRequest if nothing comes of it."""
        self._needed(field)
        ids = await self._run(lambda: self._encoder.encode(text, add_special_tokens=special))
        if not ids:
            raise BadRequest(f"{field} is empty", field)
        return tuple(ids)

    async def chat(self, messages: list[dict[str, Any]], field: str, options: Mapping[str, Any]) -> tuple[int, ...]:
        """By the model's chat template. BadRequest if it has none, or will not have these messages."""
        self._needed(field)

        def render() -> list[int]:
            text = self._encoder.apply_chat_template(messages, tokenize=False, **options)
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False)
            return ids

        try:
            ids = await self._run(render)
        except Exception as error:  # a template may raise anything
            raise BadRequest(f"{field}: the model's chat template refuses them: {error}", field) from error
        if not ids:
            raise BadRequest(f"{field}: the model's chat template makes nothing of them", field)
        return tuple(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Without a tokenizer: no text."""
        if self._decoder is None:
            return ""
        text: str = self._decoder.decode(list(token_ids), skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str:
        """Of one token, for the fields of log-probabilities."""
        return f"token_id:{token_id}" if self._decoder is None else self.decode([token_id], skip_special=False)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _needed(self, field: str) -> None:
        if self._decoder is None:
            raise BadRequest(f"{field}: this model has no tokenizer; send token ids", field)

    async def _run(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class TextStream:
    """The text of tokens that come bit by bit: what has been given stays, so that a character of several tokens comes
    with the last of them."""

    def __init__(self, text: Text, skip_special: bool) -> None:
        self._text, self._skip = text, skip_special
        self._ids: list[int] = []
        self._start = 0
        """From here on, tokens are decoded again: the text of a token may depend on the one before,"""
        self._read = 0
        """of which the text was given up to here."""

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """-> the text that is sure by now; at the end, all that is left."""
        if not self._text:
            return ""
        self._ids += token_ids
        before = self._text.decode(self._ids[self._start : self._read], skip_special=self._skip)
        text = self._text.decode(self._ids[self._start :], skip_special=self._skip)
        if text.endswith("\ufffd") and not last:
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(before) :]


class TrimmedStream:
    """The same without the stop string that ends a sample: text is held back while it may be the beginning of one, or
    one that the sample has just come to. stop: none are held back, and none is cut off, if there are none."""

    def __init__(self, text: Text, skip_special: bool, stop: Sequence[str] = ()) -> None:
        self._stream, self._stop = TextStream(text, skip_special), stop
        self._held = ""
        self._last = 0
        """Where the last token begins in it: a stop string that ends before has ended nothing (min_tokens)."""
        self.length = 0
        """Characters of all tokens, those that are held back too."""

    def push(self, token_ids: Sequence[int]) -> str:
        """-> the text that is sure by now."""
        given = ""
        for token in token_ids:
            self._add(self._stream.push([token]))
            sure = min((self._before(stop) for stop in self._stop), default=len(self._held))
            given += self._held[:sure]
            self._held = self._held[sure:]
            self._last = max(self._last - sure, 0)
        return given

    def end(self, stop_reason: str | int | None) -> str:
        """-> what is left of the text."""
        rest = self._stream.push((), last=True)
        if rest:
            self._add(rest)
        return cut(self._held, stop_reason, self._last) if self._stop else self._held

    def _add(self, text: str) -> None:
        self._last = len(self._held)
        self._held += text
        self.length += len(text)

    def _before(self, stop: str) -> int:
        """Characters held back before one that may be this stop string's."""
        at = self._held.find(stop, max(self._last - len(stop) + 1, 0))
        if at >= 0:
            return at
        most = min(len(stop) - 1, len(self._held))
        return len(self._held) - next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)


def cut(text: str, stop_reason: str | int | None, last: int) -> str:
    """Without the stop string that ended it, and what its last token had behind that. last: where that token begins."""
    if isinstance(stop_reason, str) and (at := text.find(stop_reason, max(last - len(stop_reason) + 1, 0))) >= 0:
        return text[:at]
    return text


def trimmed(text: Text, token_ids: Sequence[int], stop_reason: str | int | None, *, skip_special: bool) -> str:
    """The text of a sample that has ended, without the stop string that ended it."""
    whole = text.decode(token_ids, skip_special=skip_special)
    if not isinstance(stop_reason, str):
        return whole
    return cut(whole, stop_reason, len(text.decode(token_ids[:-1], skip_special=skip_special).rstrip("\ufffd")))
