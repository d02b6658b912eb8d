"""The names of KV files. One form, so that nothing read from a disk can lead anywhere else."""

from __future__ import annotations

import re
import uuid
from typing import Any

_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
TEMPORARY = ".tmp"
"""Added to the name of a file that is being written."""


def new_part_name() -> str:
    return f"{uuid.uuid4().hex}.safetensors"


def is_part_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None
