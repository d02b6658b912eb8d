"""What outlives a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """What was written to a file, or the entries of a directory, are on the disk afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
