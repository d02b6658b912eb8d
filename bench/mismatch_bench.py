"""How far a trainer's log-probabilities are from those that the rollout recorded, by what differs between the two.

Every row has a rollout and a trainer with the same weights; d = trainer - rollout, of each sampled token:

    rollout                        trainer
    exact                          ExactPolicy                      0.0, bit for bit
    exact, fast                    transformers, float32            other order of sums
    exact                          transformers, bfloat16, float16  weights and arithmetic in 16 bits
    exact, weights of 16 bits      transformers, float32            weights alone in 16 bits, in the rollout
    exact, a mixture of experts    transformers, bfloat16           with the recorded routing replayed, and without

KL is KL(rollout || trainer), estimated by k3. The mixture is a random one of two layers, whose routers are near ties
more often than a trained model's.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.bench.machine import describe
from longtail.bench.models import tokenizer_of
from longtail.sample import Group
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from longtail.trainer_adapter.batch import TrainBatch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MismatchBenchConfig:
    """Checked at construction."""

    model: str | Path
    """A directory or hub id; without a tokenizer the prompts are random tokens."""
    tasks: str = "gsm"
    prompts: int = 2
    group_size: int = 4
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("prompts", "group_size", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be above 0, not {self.temperature}: greedy samples measure little")


def run(config: MismatchBenchConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """-> {settings, machine, rows, must_hold} of plain values."""
    import torch
    from transformers import AutoModelForCausalLM

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    progress("loading")
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).eval()
    rows = [*_dense_rows(model, config, progress), *_mixture_rows(config, progress)]
    exact = [row["max_difference"] for row in rows if row["trainer"] == "exact"]
    return {
        "settings": {**dataclasses.asdict(config), "model": str(config.model)},
        "machine": describe(),
        "rows": rows,
        "must_hold": {"holds": all(x == 0.0 for x in exact), "exact": exact},
    }


def _dense_rows(model: Any, config: MismatchBenchConfig, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    import torch

    rows = []
    prompts = _prompts(config, model.config.vocab_size)
    for rollout, numerics, kind in (
        ("exact", "exact", torch.float32),
        ("fast", "fast", torch.float32),
        ("bfloat16 weights", "exact", torch.bfloat16),
        ("float16 weights", "exact", torch.float16),
    ):
        progress(f"rollout: {rollout}")
        rounded = model if kind == torch.float32 else copy.deepcopy(model).to(kind)
        engine = _engine(rounded, numerics, config)
        batch = _roll_out(engine, prompts, config)
        progress(f"trainer, of {rollout}")
        if rollout == "exact":
            exact = exact_logprobs(model, engine, batch, config.temperature)
            rows.append(_row("dense", rollout, "exact", batch, exact))
        del engine, rounded
        rows.append(_row("dense", rollout, "float32", batch, ordinary_logprobs(model, batch, config.temperature)))
        if rollout == "exact":
            for half in ("bfloat16", "float16"):
                progress(f"trainer in {half}")
                other = copy.deepcopy(model).to(getattr(torch, half))
                rows.append(_row("dense", rollout, half, batch, ordinary_logprobs(other, batch, config.temperature)))
    return rows


def _mixture_rows(config: MismatchBenchConfig, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    import torch

    from longtail.trainer_adapter.routing import packed_routing, replay_routing

    progress("mixture of experts")
    model = tiny_mixture(config.seed)
    engine = _engine(model, "exact", config, record_routing=True)
    samples: list[Any] = []
    prompts = _random_prompts(4 * config.prompts, model.config.vocab_size, config.seed)
    batch = _roll_out(engine, prompts, config, samples)
    rows = [_row("mixture", "exact", "exact", batch, exact_logprobs(model, engine, batch, config.temperature))]
    for name in ("float32", "bfloat16"):
        other = copy.deepcopy(model).to(getattr(torch, name))
        for replay in (False, True):

            def replayed(i: int, other: Any = other, replay: bool = replay) -> Any:
                return replay_routing(other, packed_routing([samples[i]])) if replay else contextlib.nullcontext()

            logprobs = ordinary_logprobs(other, batch, config.temperature, replayed)
            rows.append(_row("mixture", "exact", f"{name}, replay" if replay else name, batch, logprobs))
    return rows


def tiny_mixture(seed: int = 0) -> Any:
    """Qwen3-MoE, random: two layers, 16 experts, 4 a token."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def exact_logprobs(model: Any, engine: Any, batch: TrainBatch, temperature: float) -> torch.Tensor:
    """float32 [N], by the exact pass."""
    import torch

    from longtail.partial_rollout.engines.native.training import ExactPolicy

    assert batch.inputs is not None
    with torch.no_grad():
        return ExactPolicy(model, engine, check=False).logprobs(batch.inputs, temperature=temperature)


def ordinary_logprobs(
    model: Any,
    batch: TrainBatch,
    temperature: float,
    around: Callable[[int], contextlib.AbstractContextManager[Any]] = lambda i: contextlib.nullcontext(),
) -> torch.Tensor:
    """float32 [N], by the model's own forward pass, a sequence at a time in its dtype, the softmax in float32.
    around(i): a context for the pass of sequence i."""
    import torch

    from longtail.kernels.logprobs import token_logprobs

    assert batch.inputs is not None
    found = []
    lengths, prompts = batch.inputs.lengths.tolist(), batch.inputs.prompt_lengths.tolist()
    for i, (ids, prompt) in enumerate(zip(batch.inputs.input_ids.split(lengths), prompts, strict=True)):
        with torch.no_grad(), around(i):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1]
        found.append(token_logprobs(logits.float(), ids[prompt:], temperature))
    return torch.cat(found)


# ---- rollouts


def _engine(model: Any, numerics: str, config: MismatchBenchConfig, **more: Any) -> Any:
    from longtail.partial_rollout.engines.native.engine import NativeEngine

    return NativeEngine(model, numerics=numerics, max_num_seqs=max(config.prompts * config.group_size, 1), **more)


def _roll_out(
    engine: Any, prompts: list[list[int]], config: MismatchBenchConfig, samples: list[Any] | None = None
) -> TrainBatch:
    """Paused once and continued from tokens. samples: is filled with them, in the batch's order."""
    from longtail.trainer_adapter.packing import pack

    params = SamplingParams(
        n=config.group_size, temperature=config.temperature, max_tokens=config.max_tokens, seed=config.seed
    )
    groups = [Group.from_prompt(str(i), ids, params) for i, ids in enumerate(prompts)]
    engine.add([sample for group in groups for sample in group.samples])
    for _ in range(config.max_tokens // 2):
        engine.step()
    engine.add(engine.pause(snapshot=False))
    while engine.has_work:
        engine.step()
    for group in groups:
        for sample in group.samples:
            sample.reward = 0.0
            if samples is not None:
                samples.append(sample)
    return pack(groups, version=engine.version)


def _prompts(config: MismatchBenchConfig, vocab: int) -> list[list[int]]:
    from longtail.bench.tasks import load_tasks, prompt_ids

    tokenizer = tokenizer_of(config.model)
    if tokenizer is None:
        return _random_prompts(config.prompts, vocab, config.seed)
    return [prompt_ids(task, tokenizer) for task in load_tasks(config.tasks, config.prompts, config.seed)]


def _random_prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count, 24), generator=generator).tolist()


def _row(model: str, rollout: str, trainer: str, batch: TrainBatch, logprobs: torch.Tensor) -> dict[str, Any]:
    from longtail.trainer_adapter.mismatch import measure

    fresh = measure(batch.replace(logprobs=logprobs)).fresh
    assert fresh is not None
    return {"model": model, "rollout": rollout, "trainer": trainer, **fresh.as_dict()}


def table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    shown = Table(title="Trainer against rollout, d = difference of log-probabilities", title_justify="left")
    for name in ("model", "rollout", "trainer"):
        shown.add_column(name)
    for name in ("tokens", "max |d|", "mean |d|", "KL"):
        shown.add_column(name, justify="right")
    for row in result["rows"]:
        shown.add_row(
            row["model"],
            row["rollout"],
            row["trainer"],
            f"{row['trained']:,}",
            *(f"{row[name]:.2g}" for name in ("max_difference", "mean_difference", "kl_k3")),
        )
    return shown
