"""The native engine's decode and prefill speed against `transformers`, pair by pair in one process.

Contestants are the native engine (one per numerics), `generate`, and `transformers`' continuous batching; same model,
float32, same threads, same prompts, temperature 0.7, EOS ignored, same number of new tokens. Every one stamps each token
when it is there, so all rates come from one rule:

    start            all have their first token                    last token
      |<------- prefill ------->|<------------- decode ------------->|

Every contestant may take all prompts of a batch in one forward pass; the decode part is then pure decoding of the full
batch. Within a repeat they run one after the other, in an order that rotates from repeat to repeat, and a ratio is
taken within a repeat only: what slows the machine down for a while hits both sides. What is not the same: the native
engine also returns log-probabilities, and its noise is counter-based (a Gumbel value per token of the vocabulary).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longtail.errors import LongtailError
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.events import Event
    from longtail.partial_rollout.engines.native.engine import NativeEngine

PEERS = ("generate", "continuous")
NUMERICS = ("exact", "fast")
TEMPERATURE = 0.7
WARMUP_TOKENS = 4
RESULT_TIMEOUT = 600.0
PAGE_SIZE = 256
"""Tokens of a page of continuous batching (its default; smaller ones measured slower on the CPU)."""
PEER_NAMES = {"generate": "generate", "continuous": "continuous batching"}


class BenchFailed(LongtailError):
    """A contestant did not do the work that was to be timed; its speed would mean nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchConfig:
    """Checked at construction."""

    model: str | Path
    """A directory or hub id, for `from_pretrained`."""
    batches: tuple[int, ...] = (1, 4, 16, 32)
    """Sequences at once."""
    prompt_tokens: int = 64
    decode_tokens: int = 48
    """New tokens of each sequence; the first belongs to the prefill."""
    repeats: int = 3
    threads: int = 2
    peers: tuple[str, ...] = PEERS
    numerics: tuple[str, ...] = NUMERICS
    prefill_tokens: int = 512
    """Length of the one prompt of the prefill measurement."""
    snapshot_tokens: int = 1024
    """KV tokens of the sample that is paused and resumed."""

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "repeats", "threads", "prefill_tokens", "snapshot_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.decode_tokens < 2:
            raise ValueError(f"decode_tokens must be at least 2 (the first is prefill), not {self.decode_tokens}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches must be one or more positive numbers, not {self.batches}")
        for name, known in (("peers", PEERS), ("numerics", NUMERICS)):
            chosen = getattr(self, name)
            if set(chosen) - set(known) or len(set(chosen)) < len(chosen):
                raise ValueError(f"{name} must be some of {', '.join(known)}, each once, not {', '.join(chosen)}")
        if not self.numerics:
            raise ValueError("numerics must name at least one of exact, fast: there is nothing to compare otherwise")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of the run."""
        return max(self.prompt_tokens + self.decode_tokens, self.prefill_tokens + WARMUP_TOKENS)

    @property
    def prompt_budget(self) -> int:
        """Tokens of a forward pass that takes every prompt at once."""
        return max(max(self.batches) * self.prompt_tokens, self.prefill_tokens)


# ---- what a run says


@dataclasses.dataclass(slots=True)
class Run:
    start: float
    stamps: list[list[float]]
    """Per sequence, when each of its new tokens was there."""
    steps: list[Event] = dataclasses.field(default_factory=list)
    """Native only: the forward passes."""

    @property
    def decode_start(self) -> float:
        return max(times[0] for times in self.stamps)

    @property
    def prefill_seconds(self) -> float:
        return self.decode_start - self.start

    @property
    def decode_rate(self) -> float:
        """Tokens per second from the moment all sequences have their first."""
        begin = self.decode_start
        end = max(times[-1] for times in self.stamps)
        return sum(t > begin for times in self.stamps for t in times) / (end - begin)

    @property
    def shares(self) -> dict[str, float]:
        """Of the time of decode steps, what was spent outside the forward pass; `sampling` is a part of `outside`."""
        steps = [step for step in self.steps if step.time >= self.decode_start]
        total = sum(step.duration for step in steps)
        model = sum(step.model_seconds for step in steps)
        sampling = sum(step.sample_seconds for step in steps)
        return {"outside": 1 - model / total, "sampling": sampling / total}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 by nearest rank: the value of rank ceil(p / 100 x n) in ascending order."""
    ordered = sorted(values)
    return {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] for p in (20, 50, 80)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Quantiles of ours[i] / theirs[i]; i is the repeat."""
    return quantiles([a / b for a, b in zip(ours, theirs, strict=True)])


def check_run(name: str, run: Run, sequences: int, new_tokens: int) -> None:
    counts = [len(times) for times in run.stamps]
    if counts != [new_tokens] * sequences:
        raise BenchFailed(f"{name} was to make {new_tokens} tokens for each of {sequences} sequences and made {counts}")


# ---- contestants


class Contestant(Protocol):
    name: str

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        """Generates exactly new_tokens for each prompt."""
        ...

    def close(self) -> None: ...


class Native:
    def __init__(self, engine: NativeEngine, name: str) -> None:
        self.engine, self.name = engine, name
        self.runs = 0

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        self.runs += 1
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=new_tokens, ignore_eos=True)
        samples = [Group.from_prompt(f"{self.runs}.{i}", p, params).samples[0] for i, p in enumerate(prompts)]
        run = Run(0.0, [[] for _ in samples])
        pairs = list(zip(samples, run.stamps, strict=True))
        with listening(self.engine, "step") as run.steps:
            run.start = time.perf_counter()
            self.engine.add(samples)
            while self.engine.has_work:
                self.engine.step()
                now = time.perf_counter()
                for sample, times in pairs:
                    if len(sample.output_ids) > len(times):
                        times.append(now)
        return run

    def close(self) -> None:
        self.engine.check_integrity()


class Generate:
    name = "generate"

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        import torch

        ids = torch.tensor(prompts)
        clock: list[float] = []
        never = torch.zeros(len(prompts), dtype=torch.bool)

        def stamp(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            clock.append(time.perf_counter())  # called once a step, after the step's tokens are chosen
            return never

        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, stopping_criteria=[stamp]
            )
        if out.shape[1] - ids.shape[1] != len(clock):
            raise BenchFailed(f"generate made {out.shape[1] - ids.shape[1]} tokens in {len(clock)} steps")
        return Run(start, [clock] * len(prompts))

    def close(self) -> None:
        pass


class Continuous:
    """`transformers`' continuous batching. On a CPU it has two attentions, "sdpa" and "paged|eager": both masked
    attention of every query to the KV of all sequences. They decode equally fast, sdpa prefills faster."""

    name = "continuous"

    def __init__(self, model: Any, config: EngineBenchConfig) -> None:
        import torch
        from transformers import ContinuousBatchingConfig

        most = max(config.batches)
        settings = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=(most + 1) * (-(-config.longest // PAGE_SIZE) + 1),
            max_batch_tokens=config.prompt_budget,
            max_requests_per_batch=most,
            auto_switch_to_flash=False,
        )
        with torch.inference_mode():  # the manager's thread runs in the mode of the one that starts it
            self.manager = model.init_continuous_batching(
                generation_config=model.generation_config, continuous_batching_config=settings
            )
            self.manager.start()

    def run(self, prompts: list[list[int]], new_tokens: int) -> Run:
        start = time.perf_counter()
        with self.manager.pause():  # all requests are there before the first step
            ids = self.manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            result = self.manager.get_result(timeout=1.0)
            if result is None and (not self.manager.is_running() or time.perf_counter() > start + RESULT_TIMEOUT):
                raise BenchFailed(f"continuous batching returned {len(done)} of {len(ids)} results")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise BenchFailed(f"continuous batching failed: {result.error}")
                done[result.request_id] = result
        for result in done.values():
            if len(result.generated_tokens) != len(result.timestamps):
                raise BenchFailed("continuous batching stamped another number of tokens than it returned")
        return Run(start, [done[i].timestamps for i in ids])

    def close(self) -> None:
        self.manager.stop()
        self.manager.destroy()


@contextlib.contextmanager
def listening(engine: NativeEngine, *kinds: str) -> Iterator[list[Event]]:
    events: list[Event] = []
    before = engine.listener
    engine.listener = lambda event: events.append(event) if event.kind in kinds else None
    try:
        yield events
    finally:
        engine.listener = before


def load_model(config: EngineBenchConfig) -> Any:
    """The peers' model: float32, sdpa, its generation config ours (no EOS, no truncation)."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype="float32", attn_implementation="sdpa").eval()
    positions = model.config.get_text_config().max_position_embeddings
    needed = max(config.longest, config.snapshot_tokens + 2 * config.repeats + 2)
    if needed > positions:
        raise ValueError(f"the run needs sequences of {needed} tokens, and the model has {positions} positions")
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    return model


def native_engine(config: EngineBenchConfig, model: Any, numerics: str, **settings: Any) -> NativeEngine:
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    tokens = 2 * (max(config.batches) * (config.longest + 32) + config.snapshot_tokens)
    kv_bytes = 2 * 4 * text.num_hidden_layers * text.num_attention_heads * head_dim * tokens  # at most as many KV heads
    most = max(config.batches)
    common: dict[str, Any] = {
        "threads": config.threads,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(config.prompt_budget, most),
        "max_model_len": max(config.longest, config.snapshot_tokens + 2 * config.repeats + 2),
        "kv_cache_bytes": kv_bytes,
    }
    return NativeEngine(model, numerics=numerics, **(common | settings))


# ---- measurements


def run(config: EngineBenchConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """Runs everything; JSON-ready. `progress` gets a line now and then."""
    import torch

    torch.set_num_threads(config.threads)
    progress(f"loading {config.model}")
    model = load_model(config)
    native = {n: f"native {n}" for n in config.numerics}
    contestants: list[Contestant] = [Native(native_engine(config, model, n), name) for n, name in native.items()]
    if "generate" in config.peers:
        contestants.append(Generate(model))
    rows = []
    try:
        if "continuous" in config.peers:
            contestants.append(Continuous(model, config))
        for batch in config.batches:
            rows += compare(config, contestants, "decode", batch, progress)
        rows += compare(config, contestants, "prefill", 1, progress)
    finally:
        for contestant in contestants:
            contestant.close()
    contestants.clear()
    gc.collect()
    for numerics in config.numerics:
        progress(f"snapshot, {numerics}")
        rows.append(snapshot_row(config, native_engine(config, model, numerics, enable_prefix_caching=False), numerics))
    settings = dataclasses.asdict(config) | {"model": str(config.model), "temperature": TEMPERATURE}
    return {"settings": settings, "machine": machine(), "versions": versions(), "rows": rows}


def compare(
    config: EngineBenchConfig,
    contestants: list[Contestant],
    measure: str,
    batch: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """One row per contestant. measure: decode, of `batch` prompts; or prefill, of one long prompt."""
    decode = measure == "decode"
    length = config.prompt_tokens if decode else config.prefill_tokens
    new_tokens = config.decode_tokens if decode else 1
    runs: dict[str, list[Run]] = {c.name: [] for c in contestants}
    for repeat in range(-1, config.repeats):  # -1 warms up: compiled kernels, matmul plans of these shapes
        made = WARMUP_TOKENS if decode and repeat < 0 else new_tokens
        prompts = random_prompts(batch, length, config, seed=(repeat + 2) * 1000 + batch)
        shift = repeat % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            gc.collect()
            done = contestant.run(prompts, made)
            check_run(contestant.name, done, batch, made)
            if repeat >= 0:
                runs[contestant.name].append(done)
        progress(f"{measure}, batch {batch}: {'warmed up' if repeat < 0 else f'{repeat + 1} of {config.repeats}'}")
    return comparison_rows(measure, batch, length, runs, config.peers)


def comparison_rows(
    measure: str, batch: int, length: int, runs: dict[str, list[Run]], peers: Sequence[str]
) -> list[dict[str, Any]]:
    """runs: per contestant, one a repeat."""
    rates = {
        name: [r.decode_rate if measure == "decode" else length * batch / r.prefill_seconds for r in done]
        for name, done in runs.items()
    }
    rows = []
    for name, done in runs.items():
        row: dict[str, Any] = {"measure": measure, "batch": batch, "contestant": name}
        row["tokens_per_second"] = quantiles(rates[name])
        row["per_repeat"] = rates[name]
        if name not in PEERS:
            row["ratios"] = {peer: ratios(rates[name], rates[peer]) for peer in peers}
        if done[0].steps and measure == "decode":
            shares = [r.shares for r in done]
            row["outside_forward"] = quantiles([s["outside"] for s in shares])
            row["sampling"] = quantiles([s["sampling"] for s in shares])
        rows.append(row)
    return rows


def snapshot_row(config: EngineBenchConfig, engine: NativeEngine, numerics: str) -> dict[str, Any]:
    """What pausing and resuming costs with a snapshot in host memory, and with the KV computed again.

    Resuming is timed from `add` to the next token. The engine has no prefix cache, which would find the KV that is to
    be restored or computed."""
    tokens = config.snapshot_tokens
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=2 * config.repeats + 5, ignore_eos=True)
    prompt = random_prompts(1, tokens, config, seed=7)[0]
    seconds: dict[str, list[float]] = {k: [] for k in ("save", "restore", "with_snapshot", "step", "recompute")}
    for repeat in range(-1, config.repeats):
        sample = Group.from_prompt(f"snapshot{repeat}", prompt, params).samples[0]
        engine.add([sample])
        next_token(engine, sample)
        for snapshot in (True, False) if repeat % 2 else (False, True):
            # A token more or less of KV in the second half does not matter; both orders occur.
            with listening(engine, "save", "restore", "step") as events:
                begin = time.perf_counter()
                engine.pause([sample.id], snapshot=snapshot)
                paused = time.perf_counter()
                engine.add([sample])
                next_token(engine, sample)
                end = time.perf_counter()
            if repeat < 0:
                continue
            if snapshot:
                saved, restored = ([e for e in events if e.kind == k] for k in ("save", "restore"))
                if len(saved) != 1 or len(restored) != 1 or restored[0].num_tokens < tokens:
                    raise BenchFailed(f"native {numerics} did not restore the snapshot: {restored}")
                seconds["save"].append(saved[0].duration)
                seconds["restore"].append(restored[0].duration)
                seconds["with_snapshot"].append(end - begin)
                seconds["step"].append(sum(e.model_seconds + e.sample_seconds for e in events if e.kind == "step"))
            else:
                seconds["recompute"].append(end - paused)
        engine.abort([sample.id])
    again = seconds["recompute"]
    return {
        "measure": "snapshot",
        "contestant": f"native {numerics}",
        "tokens": tokens,
        "milliseconds": {k: quantiles([1e3 * s for s in values]) for k, values in seconds.items()},
        "ratios": {k: ratios(seconds[k], again) for k in ("save", "restore", "with_snapshot")},
    }


def next_token(engine: NativeEngine, sample: Sample) -> None:
    known = len(sample.output_ids)
    while len(sample.output_ids) == known:
        engine.step()


def random_prompts(count: int, length: int, config: EngineBenchConfig, seed: int) -> list[list[int]]:
    """Distinct, and new in every repeat, so that no prefix cache helps."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary(config), (count, length), generator=generator).tolist()


def vocabulary(config: EngineBenchConfig) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(config.model).get_text_config().vocab_size)


# ---- the report


def machine() -> dict[str, Any]:
    import numba
    import torch

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "numba_threads": numba.get_num_threads(),
        "env": {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")},
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    import numba
    import torch
    import transformers

    import longtail

    return {m.__name__: m.__version__ for m in (torch, transformers, longtail, numba)}


def table(result: dict[str, Any]) -> Table:
    """p50 (p20-p80) over the repeats."""
    from rich.table import Table

    peers = result["settings"]["peers"]
    about, of = result["machine"], result["versions"]
    title = f"{result['settings']['model']}, float32, {about['threads']} threads, {about['cpu']}"
    caption = "p50 (p20-p80); " + ", ".join(f"{k} {v}" for k, v in of.items())
    out = Table(title=title, caption=caption)
    out.add_column("measure")
    out.add_column("contestant")
    for header in ("tokens/s", *(f"x {PEER_NAMES[p]}" for p in peers), "outside forward", "sampling"):
        out.add_column(header, justify="right")
    previous = None
    for row in (r for r in result["rows"] if r["measure"] != "snapshot"):
        kind = f"decode, batch {row['batch']}" if row["measure"] == "decode" else "prefill, one prompt"
        if previous not in (None, kind):
            out.add_section()
        cells = [_spread(row["tokens_per_second"], ".1f")]
        cells += [_spread(row.get("ratios", {}).get(p), ".2f") for p in peers]
        cells += [_spread(row.get(k), ".1%") for k in ("outside_forward", "sampling")]
        out.add_row("" if kind == previous else kind, row["contestant"], *cells)
        previous = kind
    for row in (r for r in result["rows"] if r["measure"] == "snapshot"):
        out.add_section()
        out.add_row(f"snapshot, {row['tokens']} tokens", row["contestant"], *[""] * (3 + len(peers)))
        for key, label in SNAPSHOT_LABELS.items():
            ratio = f"{row['ratios'][key]['p50']:.3f} of re-prefill" if key in row["ratios"] else ""
            out.add_row("", label, f"{_spread(row['milliseconds'][key], '.2f')} ms", ratio, *[""] * (len(peers) + 1))
    return out


SNAPSHOT_LABELS = {
    "save": "save",
    "restore": "restore",
    "with_snapshot": "pause, add, next token",
    "step": "of that, the decode step",
    "recompute": "re-prefill, next token",
}


def _spread(values: dict[str, float] | None, form: str) -> str:
    if values is None:
        return ""
    return f"{values['p50']:{form}} ({values['p20']:{form}}-{values['p80']:{form}})"
