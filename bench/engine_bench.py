"""The native engine's decode and prefill speed against `transformers` and vLLM, pair by pair in one process.

Contestants are the native engine (one per numerics), `generate`, `transformers`' continuous batching, and vLLM with its
own sampler, driven step by step (its threads are those of OMP_NUM_THREADS); same model, float32, same threads, same
prompts, temperature 0.7, EOS ignored, same number of new tokens. Every one stamps each token when it is there, so all
rates come from one rule:

    start |<-- prefill -->| all have their first token |<-- decode -->| last token

Every contestant may take all prompts of a batch in one forward pass; the decode part is then pure decoding of the full
batch. Within a repeat they run one after the other, in an order that rotates from repeat to repeat, and a ratio is
taken within a repeat only: what slows the machine down for a while hits both sides. What is not the same: the native
engine also returns log-probabilities, and its noise is counter-based (a Gumbel value per token of the vocabulary).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.analysis import nearest_rank
from longtail.bench.engines import check_engine
from longtail.bench.machine import describe
from longtail.bench.models import resolve_model
from longtail.errors import LongtailError
from longtail.sample import Group, Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from longtail.events import Event
    from longtail.partial_rollout.engines.native.engine import NativeEngine

PEERS = ("generate", "continuous")
ALL_PEERS = (*PEERS, "vllm")
NUMERICS = ("exact", "fast")
TEMPERATURE = 0.7
FEW_TOKENS = 4
"""Output of a warm-up run, and of the sample that is paused and resumed twice."""
KV_CACHE_BYTES = 1 << 30


class BenchFailed(LongtailError):
    """A contestant did not do the work that was to be timed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchConfig:
    """Checked at construction."""

    model: str | Path
    """A name that `longtail model` knows, a directory or a hub id."""
    batches: tuple[int, ...] = (1, 4, 16, 32)
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
        for name in ("prompt_tokens", "decode_tokens", "repeats", "threads", "prefill_tokens", "snapshot_tokens"):
            if getattr(self, name) < (low := 2 if name == "decode_tokens" else 1):
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches must be one or more positive numbers, not {self.batches}")
        for name, known in (("peers", ALL_PEERS), ("numerics", NUMERICS)):
            chosen = getattr(self, name)
            if set(chosen) - set(known) or len(set(chosen)) < len(chosen) or not (chosen or name == "peers"):
                raise ValueError(f"{name} must be some of {', '.join(known)}, each once, not {', '.join(chosen)}")
        if "vllm" in self.peers:
            check_engine("vllm")

    @property
    def longest(self) -> int:
        """Room for every sequence of the run."""
        return max(self.prompt_tokens, self.prefill_tokens, self.snapshot_tokens) + max(self.decode_tokens, FEW_TOKENS)

    @property
    def prompt_budget(self) -> int:
        """Tokens of a forward pass that takes every prompt at once."""
        return max(max(self.batches) * self.prompt_tokens, self.prefill_tokens)


@dataclasses.dataclass(slots=True)
class Run:
    start: float
    stamps: list[list[float]]
    """Per sequence, when each of its new tokens was there."""
    events: list[Event] = dataclasses.field(default_factory=list)
    """Of an engine that tells them."""

    @property
    def decode_start(self) -> float:
        return max(times[0] for times in self.stamps)

    @property
    def decode_rate(self) -> float:
        """Tokens per second from the moment all sequences have their first."""
        begin = self.decode_start
        end = max(times[-1] for times in self.stamps)
        return sum(t > begin for times in self.stamps for t in times) / (end - begin)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 by nearest rank: the value of rank ceil(p / 100 x n) in ascending order."""
    found = {f"p{p}": nearest_rank(values, p) for p in (20, 50, 80)}
    return {name: value for name, value in found.items() if value is not None}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Quantiles of ours[i] / theirs[i]; i is the repeat."""
    return quantiles([a / b for a, b in zip(ours, theirs, strict=True)])


def step_shares(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Of the time of the decode steps: what was spent outside the forward pass, and (part of that) on sampling."""
    outside, sampling = [], []
    for run in runs:
        steps = [e for e in run.events if e.kind == "step" and e.time >= run.decode_start]
        if total := sum(step.duration for step in steps):
            outside.append(1 - sum(step.model_seconds for step in steps) / total)
            sampling.append(sum(step.sample_seconds for step in steps) / total)
    return {"outside_forward": quantiles(outside), "sampling": quantiles(sampling)} if outside else {}


def check_run(name: str, run: Run, batch: int, new_tokens: int) -> None:
    counts = [len(times) for times in run.stamps]
    if counts != [new_tokens] * batch:
        raise BenchFailed(f"{name} was to make {new_tokens} tokens for each of {batch} prompts and made {counts}")


Contestant = Callable[[list[list[int]], int], Run]  # prompts, and how many new tokens each is to get


def run_engine(engine: Any, prompts: list[list[int]], new_tokens: int) -> Run:
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=new_tokens, ignore_eos=True)
    samples = [Group.from_prompt(str(i), prompt, params).samples[0] for i, prompt in enumerate(prompts)]
    run = Run(0.0, [[] for _ in samples])
    pairs = list(zip(samples, run.stamps, strict=True))
    engine.listener = run.events.append
    run.start = time.perf_counter()
    engine.add(samples)
    while engine.has_work:
        engine.step()
        now = time.perf_counter()
        for sample, times in pairs:
            if len(sample.output_ids) > len(times):
                times.append(now)
    return run


def run_generate(model: Any, prompts: list[list[int]], new_tokens: int) -> Run:
    import torch

    ids = torch.tensor(prompts)
    clock: list[float] = []
    never = torch.zeros(len(prompts), dtype=torch.bool)

    def stamp(input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        clock.append(time.perf_counter())  # a stopping criterion is called once a step, after its tokens are chosen
        return never

    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "stopping_criteria": [stamp]}
    start = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(ids, **settings).shape[1] - ids.shape[1]
    if made != len(clock):
        raise BenchFailed(f"generate made {made} tokens in {len(clock)} steps")
    return Run(start, [clock] * len(prompts))


def run_continuous(manager: Any, prompts: list[list[int]], new_tokens: int) -> Run:
    with manager.pause():  # all requests are there before the first step
        start = time.perf_counter()
        ids = manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
    done: dict[str, Any] = {}
    while len(done) < len(ids):
        result = manager.get_result(timeout=1.0)
        if result is None and not manager.is_running():
            raise BenchFailed(f"continuous batching ended with {len(done)} of {len(ids)} results")
        if result is not None and result.is_finished():
            if result.error is not None or len(result.generated_tokens) != len(result.timestamps):
                raise BenchFailed(f"continuous batching failed: {result.error or 'a token without its time'}")
            done[result.request_id] = result
    return Run(start, [done[i].timestamps for i in ids])


@contextlib.contextmanager
def continuous_batching(model: Any, config: EngineBenchConfig) -> Iterator[Any]:
    """A running manager. On a CPU it has the attentions "sdpa" and "paged|eager", both masked attention of every query
    to the KV of all sequences. Measured, they decode about equally fast, and sdpa prefills faster."""
    import torch
    from transformers import ContinuousBatchingConfig

    most, page = max(config.batches), ContinuousBatchingConfig.page_size  # smaller pages measured slower
    settings = ContinuousBatchingConfig(
        num_blocks=most * -(-(config.prompt_tokens + config.decode_tokens) // page) + config.prefill_tokens // page + 3,
        max_batch_tokens=config.prompt_budget,
        max_requests_per_batch=most,
        auto_switch_to_flash=False,
    )
    sampling = copy.deepcopy(model.generation_config)
    sampling.eos_token_id = -1  # no EOS, in the words of this API
    with torch.inference_mode():  # the manager's thread runs in the mode of the one that starts it
        manager = model.init_continuous_batching(sampling, settings)
        manager.start()
    try:
        yield manager
    finally:
        manager.stop()
        manager.destroy()


def load_model(config: EngineBenchConfig) -> Any:
    """The peers' model: float32, sdpa, and a generation config without EOS and truncation."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = resolve_model(str(config.model))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32", attn_implementation="sdpa").eval()
    positions = model.config.get_text_config().max_position_embeddings
    if config.longest > positions:
        raise ValueError(f"the run needs sequences of {config.longest} tokens, the model has {positions} positions")
    model.generation_config = GenerationConfig(do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0)
    return model


def native_engine(config: EngineBenchConfig, model: Any, numerics: str, **settings: Any) -> NativeEngine:
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    settings |= {"threads": config.threads, "max_num_seqs": max(config.batches), "kv_cache_bytes": KV_CACHE_BYTES}
    settings |= {"max_num_batched_tokens": config.prompt_budget, "max_model_len": config.longest}
    return NativeEngine(model, numerics=numerics, **settings)


def vllm_engine(config: EngineBenchConfig) -> Any:
    from longtail.partial_rollout.engines.vllm import VllmEngine

    return VllmEngine(
        resolve_model(str(config.model)),
        sampling="vllm",
        dtype="float32",
        max_num_seqs=max(config.batches),
        max_num_batched_tokens=config.prompt_budget,
        max_model_len=config.longest,
        kv_cache_bytes=KV_CACHE_BYTES,
    )


def run(config: EngineBenchConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """Runs everything; JSON-ready. `progress` gets a line now and then."""
    import torch

    torch.set_num_threads(config.threads)
    progress(f"loading {config.model}")
    model = load_model(config)
    rows = comparisons(config, model, progress)
    gc.collect()
    for numerics in config.numerics:
        progress(f"snapshot, {numerics}")
        rows.append(snapshot_row(config, model, numerics))
    machine, settings = describe(), dataclasses.asdict(config) | {"model": str(config.model)}
    versions = {name: machine[name] for name in ("torch", "transformers", "longtail", "numba")}
    return {"settings": settings, "machine": machine, "versions": versions, "rows": rows}


def comparisons(config: EngineBenchConfig, model: Any, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    contestants: dict[str, Contestant] = {}
    for numerics in config.numerics:
        contestants[f"native {numerics}"] = partial(run_engine, native_engine(config, model, numerics))
    if "generate" in config.peers:
        contestants["generate"] = partial(run_generate, model)
    rows = []
    with contextlib.ExitStack() as stack:
        if "continuous" in config.peers:
            contestants["continuous"] = partial(run_continuous, stack.enter_context(continuous_batching(model, config)))
        if "vllm" in config.peers:
            vllm = vllm_engine(config)
            stack.callback(vllm.close)
            contestants["vllm"] = partial(run_engine, vllm)
        for batch in config.batches:
            progress(f"decode, batch {batch}")
            runs = timed_runs(config, model, contestants, batch, config.prompt_tokens, config.decode_tokens)
            for row in comparison_rows("decode", batch, {n: [r.decode_rate for r in done] for n, done in runs.items()}):
                own = row["contestant"] not in ALL_PEERS
                rows.append(row | (step_shares(runs[row["contestant"]]) if own else {}))
        progress(f"prefill, {config.prefill_tokens} tokens")
        runs = timed_runs(config, model, contestants, 1, config.prefill_tokens, 1)
        prefill = {n: [config.prefill_tokens / (r.decode_start - r.start) for r in done] for n, done in runs.items()}
    return rows + comparison_rows("prefill", 1, prefill)


def timed_runs(
    config: EngineBenchConfig, model: Any, contestants: dict[str, Contestant], batch: int, length: int, new_tokens: int
) -> dict[str, list[Run]]:
    """-> per contestant, one run a repeat. The first round warms up: compiled kernels, matmul plans of these shapes."""
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    names = list(contestants)
    for repeat in range(config.repeats + 1):
        count = new_tokens if repeat else min(new_tokens, FEW_TOKENS)
        prompts = random_prompts(model, batch, length, seed=hash((batch, length, new_tokens, repeat)))
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            runs[name].append(contestants[name](prompts, count))
            check_run(name, runs[name][-1], batch, count)
    return {name: done[1:] for name, done in runs.items()}


def comparison_rows(measure: str, batch: int, rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """rates: tokens per second of each contestant, one a repeat. Native rows have a ratio to each peer that ran."""
    rows: list[dict[str, Any]] = []
    for name, values in rates.items():
        row = {"measure": measure, "batch": batch, "contestant": name, "per_repeat": values}
        row["tokens_per_second"] = quantiles(values)
        if name not in ALL_PEERS:
            row["ratios"] = {peer: ratios(values, rates[peer]) for peer in ALL_PEERS if peer in rates}
        rows.append(row)
    return rows


def snapshot_row(config: EngineBenchConfig, model: Any, numerics: str) -> dict[str, Any]:
    """Pausing and resuming with a snapshot in host memory, against computing the KV again. The engine has no prefix
    cache, which would find the KV that is to be restored or computed."""
    engine = native_engine(config, model, numerics, enable_prefix_caching=False)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=FEW_TOKENS, ignore_eos=True)
    prompt = random_prompts(model, 1, config.snapshot_tokens, seed=0)[0]
    rounds = []
    for repeat in range(config.repeats + 1):  # the first round warms up
        sample = Group.from_prompt("snapshot", prompt, params).samples[0]
        engine.add([sample])
        next_token(engine, sample)
        first = repeat % 2 == 0  # neither is always the one that has a token more to restore or compute
        rounds.append(pause_and_resume(engine, sample, first) | pause_and_resume(engine, sample, not first))
        engine.abort([sample.id])
    seconds = {
        name: [times[name] for times in rounds[1:]] for name in ("save", "restore", "step", "resume", "recompute")
    }
    return {
        "measure": "snapshot",
        "contestant": f"native {numerics}",
        "tokens": config.snapshot_tokens,
        "milliseconds": {name: quantiles([1e3 * s for s in values]) for name, values in seconds.items()},
        "ratios": {name: ratios(seconds[name], seconds["recompute"]) for name in ("save", "restore", "resume")},
    }


def pause_and_resume(engine: NativeEngine, sample: Sample, snapshot: bool) -> dict[str, float]:
    """Seconds. resume and recompute: from `pause` to the next token; save, restore and step are parts of resume."""
    gc.collect()
    events: list[Event] = []
    engine.listener = events.append
    start = time.perf_counter()
    engine.pause([sample.id], snapshot=snapshot)
    engine.add([sample])
    next_token(engine, sample)
    total = time.perf_counter() - start
    if not snapshot:
        return {"recompute": total}
    last = {event.kind: event for event in events}
    if "restore" not in last or last["restore"].num_tokens < len(sample.prompt_ids):
        raise BenchFailed("the native engine computed KV again that it should have restored from the snapshot")
    step = last["step"].model_seconds + last["step"].sample_seconds
    return {"save": last["save"].duration, "restore": last["restore"].duration, "step": step, "resume": total}


def next_token(engine: NativeEngine, sample: Sample) -> None:
    known = len(sample.output_ids)
    while len(sample.output_ids) == known:
        engine.step()


def random_prompts(model: Any, count: int, length: int, seed: int) -> list[list[int]]:
    """New ones for every seed: seeds are never used twice, so that no prefix cache helps."""
    import torch

    shape, generator = (count, length), torch.Generator().manual_seed(seed % 2**63)
    return torch.randint(model.config.get_text_config().vocab_size, shape, generator=generator).tolist()


def table(result: dict[str, Any]) -> Table:
    """Medians over the repeats (spreads are in the JSON). Snapshot: save, restore and the decode step are parts of
    resume."""
    from rich.table import Table

    peers, about = result["settings"]["peers"], result["machine"]
    out = Table(title="float32, medians; ratios pair by pair", title_justify="left")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    out.caption = f"{about['cpu']}, {about['threads']} threads; {versions}"
    for header in ("measure", "contestant", "tokens/s", *(f"x {p}" for p in peers), "outside forward"):
        left = header in ("measure", "contestant")
        out.add_column(header, justify="left" if left else "right", no_wrap=left)
    last = None
    for row in result["rows"]:
        kind = f"{row['measure']} " + (f"{row['tokens']}" if "tokens" in row else f"B{row['batch']}")
        if kind != last:
            out.add_section()
        cells = [_median(row.get("tokens_per_second"), ".0f")]
        cells += [_median(row.get("ratios", {}).get(peer), ".2f") for peer in peers]
        cells.append(_median(row.get("outside_forward"), ".1%"))
        out.add_row("" if kind == last else kind, row["contestant"], *cells)
        for name, values in row.get("milliseconds", {}).items():
            share = f"{row['ratios'][name]['p50']:.1%}" if name in row["ratios"] else ""
            out.add_row("", f"  {name}", f"{_median(values, '.1f')} ms", share)
        last = kind
    return out


def _median(values: dict[str, float] | None, form: str) -> str:
    return f"{values['p50']:{form}}" if values else ""
