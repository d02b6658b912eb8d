"""The tokenizer, for those samples that have stop strings: loaded when the first one asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtail.partial_rollout.engines.native.sampler import Decode
from longtail.sample import Sample


class StopText:
    """tokenizer: None: the one in `source`, a directory or hub id (None: there is none)."""

    def __init__(self, tokenizer: Any, source: str | Path | None) -> None:
        self._tokenizer, self._source = tokenizer, source

    def decode_of(self, sample: Sample) -> Decode | None:
        """How to decode a sample's tokens; None if it has no stop strings. ValueError if there is no tokenizer."""
        return self._decode() if sample.params.stop else None

    def _decode(self) -> Decode:
        if self._tokenizer is None:
            if self._source is None:
                raise ValueError("stop strings need a tokenizer; pass tokenizer= to the engine or use stop_token_ids")
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._source)
            except (OSError, ValueError, ImportError) as error:
                raise ValueError(
                    f"stop strings need a tokenizer, and {self._source} has none ({error}); pass tokenizer= to the "
                    "engine or use stop_token_ids"
                ) from error
        decode: Decode = self._tokenizer.decode
        return decode
