"""AReaL 1.0.4's own client against our server: samples cut by a weight update come back whole and right.

Its environment is one of its own (`make test-areal` makes it and runs this); LONGTAIL_AREAL_PYTHON names its python."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import make_model, prompt
from tests.partial_rollout.service_helpers import barrier, continued, make_stepped, params, steps
from tests.trainer_adapter.server.helpers import save_model, served

from longtail import Sample
from longtail.sample import sample_seed
from longtail.version import PolicyVersion

PYTHON = os.environ.get("LONGTAIL_AREAL_PYTHON", "")
LENGTH, CUT = 24, 8

pytestmark = pytest.mark.skipif(not PYTHON, reason="LONGTAIL_AREAL_PYTHON names no python with AReaL: make test-areal")


def test_its_client(tmp_path: Path) -> None:
    """Three requests are under way when AReaL pauses, updates from disk and continues. What it calls one response is
    what an undisturbed sample would be up to the update, and what the new weights make of that from there on."""
    old, new = make_model("llama"), make_model("llama", seed=1)
    weights = save_model(new, tmp_path)
    engine = make_stepped(old)
    prompts = [prompt(1, i) for i in range(3)]
    client = [PYTHON, str(Path(__file__).with_name("areal_client.py"))]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with served(engine, steps=0) as server:
        arguments = [server.url, json.dumps(prompts), str(LENGTH), weights]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*client, *arguments], **pipes, env=environment, cwd=tmp_path) as process:
            assert process.stdin is not None and process.stdout is not None
            while server.service.stats().num_requests < 3 and process.poll() is None:
                time.sleep(0.02)
            steps(server.service, CUT)
            process.stdin.write("now\n")
            process.stdin.flush()
            while server.service.stats().version == 0 and process.poll() is None:
                time.sleep(0.02)
            engine.budget = None
            barrier(server.service)
            lines = [json.loads(line) for line in process.stdout if line.startswith("{")]
        assert process.returncode == 0
        stats = server.service.stats()
    (update,) = (line["update"] for line in lines if "update" in line)
    assert update["success"]
    answers = {line["number"]: line for line in lines if "number" in line}
    # Its update aborts once more what came back during the pause.
    assert stats.num_aborted == stats.num_resumed >= 3 and stats.num_kept == 0
    # Which request came first is not known, so that the noise of each is one of three: found by its first token.
    reference = make_stepped(old)
    for number, answer in answers.items():
        assert answer["input"] == prompts[number]
        assert (len(answer["output"]), len(answer["logprobs"]), answer["stop"]) == (LENGTH, LENGTH, "length")
        assert answer["versions"] == [0] * CUT + [1] * (LENGTH - CUT)
    check(answers, prompts, reference, make_stepped(new))


def check(answers: dict[int, Any], prompts: list[list[int]], old: Any, new: Any) -> None:
    for number, answer in answers.items():
        right = []
        for arrival in range(3):
            sample = Sample(
                id="check",
                group_id="check",
                index=0,
                prompt_ids=tuple(prompts[number]),
                params=params(max_tokens=LENGTH),
                seed=sample_seed(5, "", arrival),
                output_ids=answer["output"],
                logprobs=answer["logprobs"],
                versions=[PolicyVersion(0)] * LENGTH,
            )
            first, rest = continued(old, sample, 0, CUT), continued(new, sample, CUT, LENGTH)
            got = (answer["output"], answer["logprobs"])
            right.append((first[0] + rest[0], first[1] + rest[1]) == got)
        assert right.count(True) == 1, number
