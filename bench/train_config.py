"""Settings of `longtail train`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

from longtail.bench.engines import EngineName, check_engine
from longtail.bench.strategy_specs import BUDGET_SHARE, samples_for, strategy_for
from longtail.partial_rollout.strategies import Strategy
from longtail.sampling_params import SamplingParams
from longtail.trainer_adapter.corrections import correction
from longtail.trainer_adapter.losses import PolicyLoss, policy_loss
from longtail.trainer_adapter.trainer import TrainConfig

ASSUMED_SHARE_OF_CAP = 0.35
"""Mean length over the cap, for a token budget that nobody has stated."""
FRESH = 4
"""Batches of prompts that wait, not begun, when an iteration starts: enough for any strategy that ships."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Checked at construction, but for what needs the model."""

    model: str = "smollm2-135m"
    task: str = "add"
    grader: str | None = None
    """package.module.function, in place of the task's own."""
    strategy: str = "sync"
    token_budget: int | None = None
    """Output tokens of an iteration under token-budget; None: BUDGET_SHARE of an assumed length."""
    loss: str = "grpo"
    """Name, with settings behind it: "dapo:clip_high=0.3"."""
    correction: str = "none"
    """Likewise: "tis:cap=2"."""
    steps: int = 15
    """Iterations, each with an update at its end."""
    prompts: int = 8
    """Groups of a batch: what an iteration hands over, at least on average."""
    group_size: int = 8
    slots: int | None = None
    """Samples that run at once; None: as many as a batch has."""
    kv_cache_bytes: int = 2 << 30
    """Of the engine."""
    max_tokens: int | None = None
    """Cap on a response; None: the task's."""
    temperature: float = 1.0
    seed: int = 0
    threads: int | None = None
    """CPU threads; None: as many as torch takes. The bits of a run depend on it."""
    engine: EngineName = "native"
    """Or "vllm"."""
    numerics: Literal["exact", "fast"] | None = None
    """Of the native engine, where None is "exact". vLLM's are its own."""
    policy: Literal["exact", "transformers"] | None = None
    """exact: log-probabilities that are the rollout's, bit for bit; transformers: the model's own forward pass. None:
    exact where the engine is native and numerics exact."""
    drafter: str | None = None
    learning_rate: float = 1e-5
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 8192
    updates: int = 1
    kl_coef: float = 0.0
    lora: int = 0
    """Rank of adapters; 0: the model itself is trained."""
    freeze: str | None = None
    """Parameters whose names match this regular expression are not trained."""
    gradient_checkpointing: bool = False
    max_staleness: int | None = None
    """No token older than so many versions is trained on: an iteration waits for groups that would become so."""
    zero_variance: Literal["train", "leave_out"] = "train"
    last_segment_only: bool = False
    eval_every: int = 5
    """Steps between evaluations; 0: never."""
    eval_prompts: int = 48
    eval_samples: int = 4
    """Of each held-out prompt at the sampling temperature; one more is greedy."""
    checkpoint_every: int = 5
    keep: int = 2
    """Checkpoints that stay."""
    export: bool = True
    """Write the model at the end, as `from_pretrained` reads it."""

    def __post_init__(self) -> None:
        for name, low in (
            ("steps", 1),
            ("prompts", 1),
            ("group_size", 1),
            ("kv_cache_bytes", 1),
            ("checkpoint_every", 1),
            ("keep", 1),
            ("lora", 0),
            ("eval_every", 0),
            ("eval_prompts", 1),
            ("eval_samples", 1),
        ):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        for name in ("slots", "max_tokens", "threads", "token_budget"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.temperature == 0:
            raise ValueError("temperature must be above 0: greedy decoding has no distribution to train")
        if self.policy not in (None, "exact", "transformers"):
            raise ValueError(f'policy must be "exact" or "transformers", not {self.policy!r}')
        object.__setattr__(self, "numerics", check_engine(self.engine, numerics=self.numerics))
        if self.policy == "exact" and not self.is_exact:
            raise ValueError(
                'policy "exact" computes as the native engine does with numerics="exact"; use "transformers"'
            )
        if self.lora and self.freeze:
            raise ValueError("freeze with lora: the model is frozen, and the adapters are what is trained")
        self.make_strategy(1)
        self.make_loss(1)
        self.train_config()
        self.params(0, SamplingParams(max_tokens=self.max_tokens))

    @property
    def policy_kind(self) -> Literal["exact", "transformers"]:
        if self.policy is not None:
            return self.policy
        return "exact" if self.is_exact else "transformers"

    @property
    def is_exact(self) -> bool:
        """Whether the engine makes the same bits in every batch."""
        return self.numerics == "exact"

    @property
    def num_slots(self) -> int:
        return self.slots or self.prompts * self.group_size

    @property
    def is_reproducible(self) -> bool:
        """Whether nothing that is generated depends on time, so that a run which was killed and resumed is the one that
        was not, bit for bit. Drafts change no token, but how many a step makes, and so where a budget cuts."""
        name = self.strategy.partition(":")[0]
        return self.is_exact and (name == "sync" or (name == "token-budget" and self.drafter is None))

    def budget(self, max_tokens: int) -> int:
        share = BUDGET_SHARE * ASSUMED_SHARE_OF_CAP
        return self.token_budget or max(1, round(share * max_tokens * self.prompts * self.group_size))

    def make_strategy(self, max_tokens: int) -> Strategy:
        return strategy_for(
            self.strategy, groups=self.prompts, samples=self.group_size, budget=self.budget(max_tokens)
        )

    def make_loss(self, max_tokens: int) -> PolicyLoss:
        """A correction that weighs needs pi_prox: that of the weights at the start of the update, unless the loss says
        otherwise. Dr.GRPO's constant is the cap, unless it says otherwise."""
        name, settings = parse("loss", self.loss)
        by_name, own = parse("correction", self.correction)
        corrections = correction(by_name, **own)
        if corrections:
            settings["corrections"] = corrections
            if any(c.weighs for c in corrections):
                settings.setdefault("proximal", "recorded")
        if name == "dr_grpo":
            settings.setdefault("fixed_length", max_tokens)
        if self.kl_coef:
            settings["kl_coef"] = self.kl_coef
        return policy_loss(name, **settings)

    def train_config(self) -> TrainConfig:
        names = (
            "learning_rate",
            "warmup",
            "weight_decay",
            "max_grad_norm",
            "micro_batch_tokens",
            "updates",
            "max_staleness",
            "zero_variance",
            "last_segment_only",
        )
        return TrainConfig(**{name: getattr(self, name) for name in names})

    def params(self, index: int, base: SamplingParams) -> SamplingParams:
        """Of prompt number `index`; base has its cap and what stops it."""
        samples = samples_for(self.make_strategy(base.max_tokens or 1), self.group_size)
        seed = self.seed * 1_000_003 + index
        return dataclasses.replace(base, n=samples, temperature=self.temperature, seed=seed)


MAY_CHANGE = ("steps", "eval_every", "eval_samples", "checkpoint_every", "keep", "export")
"""Settings that a resumed run may have others of: no loss and no token depends on them. (eval_prompts is none of these:
what is held out is not trained on.)"""


def unlike(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """In what two runs' settings (`dataclasses.asdict`) differ, of those that must not."""
    names = [name for name in second if name not in MAY_CHANGE and first.get(name) != second[name]]
    return [f"{name} was {first.get(name)!r} and is {second[name]!r}" for name in names]


def parse(what: str, spec: str) -> tuple[str, dict[str, Any]]:
    """ "name" or "name:key=value,key=value", values in JSON or bare words."""
    name, _, text = spec.partition(":")
    settings: dict[str, Any] = {}
    for part in (piece.strip() for piece in text.split(",")):
        key, is_given, value = (piece.strip() for piece in part.partition("="))
        if part and not is_given:
            raise ValueError(f"{what} {spec!r}: {part!r} is no setting; write name=value")
        if part:
            settings[key] = _value(value)
    return name.strip(), settings


def _value(text: str) -> Any:
    words: dict[str, Any] = {"True": True, "False": False, "None": None}
    read: Callable[[str], Any] = json.loads
    try:
        return read(text)
    except ValueError:
        return words.get(text, text)
