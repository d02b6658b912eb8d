"""`longtail serve` as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def serving(*arguments: str, **env: str) -> Iterator[tuple[str, str]]:
    """-> where it serves the model "tiny", and what it had said by then. It has to end in order."""
    with subprocess.Popen(
        [sys.executable, "-c", "from longtail.bench.cli import main; main()", "serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", **env},
    ) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving tiny on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield found[1], "".join(lines)
        except BaseException:
            process.kill()  # else it would be waited for
            raise
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0, rest  # it returns, so that all is closed
    assert "Traceback" not in rest
