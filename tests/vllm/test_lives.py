"""`kill -9` of a rollout on vLLM; what comes after is another process. Nothing is lost, and nothing that was saved is
computed again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.kv_helpers import save_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def program(name: str | Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_is_killed_and_another_goes_on(tmp_path: Path) -> None:
    model, store = save_model(tmp_path / "model"), tmp_path / "store"
    killed = program("lives.py", store, model, 3)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-5000:]
    found = last_line(program("lives.py", store, model, 0))
    left = found["left"]
    assert len(left) == 7 and all(saved for _, saved in left.values())
    assert all(6 <= tokens <= 9 for tokens, _ in left.values()) and any(tokens > 6 for tokens, _ in left.values())
    assert found["damages"] == [] and [detail for _, detail in found["restores"]] == [""] * 7
    # Saved were all tokens at the pause but the last of each; what came until the kill was not.
    prompts = {"a": 70, "b": 32, "c": 5}
    known = {name: prompts[name[0]] + tokens - 1 for name, (tokens, _) in left.items()}
    saved = {name: prompts[name[0]] + 5 for name in left}
    assert found["recomputed"] == sum(known[name] - saved[name] for name in left) <= 3 * 7
    assert found["restored"] + found["cached"] + found["recomputed"] == sum(known.values())
    assert found["restored"] >= 5 * 7  # siblings share what the first of them has brought of their prompt
    assert all(kinds == ["computed", "restored"] for kinds in found["kinds"].values()), found["kinds"]
    assert found["generated"] == found["trained"] == 3 * 40 + 2 * 33 + 2 * 25


def test_ten_kills(tmp_path: Path) -> None:
    found = last_line(program("kill_worker.py", tmp_path, 10, 2))
    assert found["kills"] >= 10 and found["groups delivered"] >= 9
    assert not [event for event in found if event.startswith("refused")]


@pytest.mark.slow
def test_sixty_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = last_line(program("kill_worker.py", tmp_path, 60, 1))
    with capsys.disabled():
        print(f"\n{', '.join(f'{name}: {number}' for name, number in found.items())}")
    assert found["kills"] >= 60
    inside = found["kills inside the database"], found["kills inside saved KV"]
    assert min(*inside, found["kills"] - sum(inside)) >= 8
    for event in ("samples resumable", "samples finished", "stores with pending tokens", "groups delivered"):
        assert found[event] >= 10, found
    assert min(found["resumed from KV on disk"], found["files found"], found["files removed at opening"]) >= 8
    assert not [event for event in found if event.startswith("refused")]
