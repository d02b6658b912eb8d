"""`longtail serve` as a process: it says where, answers, and ends in order."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from tests.bench.serve_helpers import serving
from typer.testing import CliRunner

from longtail.bench.cli import app
from longtail.bench.models import tiny_llama


def test_a_process(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path)
    arguments = ["--model", str(model), "--port", "0", "--api-key-env", "KEY", "--model-name", "tiny"]
    arguments += ["--kv-cache-mib", "16", "--threads", "1"]
    with serving(*arguments, KEY="secret") as (url, said):
        key = {"authorization": "Bearer secret"}
        with httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
            body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
            assert http.post("/v1/completions", json=body).status_code == 401
            answer = http.post("/v1/completions", json=body, headers=key).json()
            assert len(answer["choices"][0]["token_ids"]) == 4
            info = http.get("/server_info", headers=key).json()
            assert (info["model_path"], info["max_num_seqs"]) == (str(model), 32)
    assert "no tokenizer" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engine", "sglang"], "engine must be one of native, vllm"),
        (["--engine", "vllm"], "needs vLLM, which is not installed"),
        (["--engine", "vllm", "--numerics", "fast"], "numerics: fast is the native engine's"),
        (["--engine", "vllm", "--threads", "2"], "threads: vLLM takes OMP_NUM_THREADS"),
        (["--api-key-env", "LONGTAIL_NOT_THERE"], "LONGTAIL_NOT_THERE"),
        (["--dialect", "grpc"], "dialect must be"),
        (["--model", "/nowhere/at/all"], "model:"),
    ],
)
def test_bad_options(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1 and isinstance(result.exception, ValueError)
    assert named in str(result.exception)
