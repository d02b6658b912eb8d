"""`kill -9` at random moments of a real rollout on a tiny model, also inside the database and saved KV. See
kill_worker.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("kill_worker.py")


def kill(directory: Path, kills: int, seed: int) -> dict[str, int]:
    command = [sys.executable, str(WORKER), str(directory), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ten_kills(tmp_path: Path) -> None:
    assert kill(tmp_path, 10, seed=2)["kills"] >= 10


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = kill(tmp_path, 200, seed=1)
    with capsys.disabled():
        print(f"\n{', '.join(f'{name}: {number}' for name, number in found.items())}")
    assert found["kills"] >= 200
    inside = found["kills inside the database"], found["kills inside saved KV"]
    assert min(*inside, found["kills"] - sum(inside)) >= 40
    assert found["kills in or after a hand-over"] >= 20
    assert found["tokens cut"] >= 20
    for event in ("samples resumable", "samples finished", "stores with pending tokens", "groups delivered"):
        assert found[event] >= 20, found
    assert min(found["resumed from KV on disk"], found["files found"], found["files removed at opening"]) >= 20
    assert not [event for event in found if event.startswith("refused")]
