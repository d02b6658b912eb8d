"""vLLM under audit (`longtail spec audit --engine vllm`), in this process.

    counter    `VllmEngine` as it is by default: longtail's sampler in vLLM's workers, drafts verified by match
    vllm       vLLM's LLMEngine with its own samplers, drafts verified by rejection: corrected, or as it is installed

longtail's drafters and the audit's own go through vLLM's custom proposer class, and change between batches; vLLM's own
methods (vllm-ngram, suffix, model:DIR, eagle:DIR, mtp) are fixed for an engine's life, so that each gets an engine.
Needs the vLLM of `make test-vllm`, or another one that the vLLM engine supports.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longtail.bench.spec_audit_engine import (
    Completion,
    DraftChoice,
    EngineUnderAudit,
    Recorder,
    Verification,
)
from longtail.bench.spec_audit_reference import Tokens
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.drafter import Drafter

TINY = {True: {"head_dim": 32}, False: {"head_dim": 32, "vocab_size": 16}}
"""The tiny model, by whether vLLM is corrected: vLLM's attention on a CPU takes no smaller heads, and without top-k the
outcomes of a small vocabulary can be counted."""


OWN_DRAFTS = 3
"""Of a method of vLLM, a step: it is fixed for an engine's life, whatever length an audit asks for."""


@dataclasses.dataclass(frozen=True, slots=True)
class VllmSize:
    """Of the engine under audit. A pass takes all prompts whole (up to 64 tokens each): where a seeded sample's prompt
    is computed in chunks, vLLM on a CPU fails ("CPU Generator does not use offset")."""

    slots: int = 128
    max_model_len: int = 512
    max_drafts: int = 8
    """Of a sample and step, at the most: what an audit asks for must not be longer."""


class VllmUnderAudit:
    """model: a directory that vLLM loads, in float32. corrected: whether the faults are corrected that vLLM has (see
    partial_rollout/engines/vllm/correction.py); False: stock vLLM, whether or not longtail is its plugin.

    Stop strings are not audited: vLLM looks for them in the text, after a step's tokens are in the sample."""

    name = "vllm"
    verification: Verification = "rejection"
    exact = False
    takes_drafters = True
    decode: Callable[[Sequence[int]], str] | None = None

    def __init__(self, model: str | Path, *, corrected: bool = True, size: VllmSize | None = None) -> None:
        from transformers import AutoConfig, GenerationConfig

        from longtail.partial_rollout.engines import vllm_plugin
        from longtail.partial_rollout.engines.vllm import correction

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ[vllm_plugin.SWITCH] = "1" if corrected else "0"
        self.model, self.size = str(model), size or VllmSize()
        config = AutoConfig.from_pretrained(self.model)
        self.vocab_size = int(config.vocab_size)
        eos = config.eos_token_id
        if (Path(self.model) / "generation_config.json").exists():
            eos = GenerationConfig.from_pretrained(self.model).eos_token_id
        self.eos: Tokens = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
        self.refuses: tuple[str, ...] = ("min_p",)  # vLLM says that it does not take it with drafts
        if not corrected:
            correction.undo()
            if not set(correction.faults()) <= {*correction.STARTING, correction.MIN_TOKENS}:
                # It may crash with an index out of uninitialised memory before the audit has found anything.
                self.refuses += ("top_k", "top_p")
        correction.correct(None if corrected else correction.STARTING)
        self._kv_bytes = _kv_bytes(config, self.size)
        self._llm: Any = None
        self._method: str | None = None  # of vLLM's own; None: the proposer
        self._proposer: Any = None
        self._notes: dict[str, list[tuple[int, list[int]]]] | None = None
        self._ids = itertools.count()
        self.use(None)

    def use(self, drafter: DraftChoice | None, length: int = 0) -> None:
        from longtail.partial_rollout.engines.vllm import drafters
        from longtail.spec_decode.choice import make_drafter
        from longtail.spec_decode.controller import FixedLength

        if length > self.size.max_drafts:
            raise ValueError(f"length {length} is above the {self.size.max_drafts} drafts that the engine is made for")
        self._notes = None
        if isinstance(drafter, str) and drafters.is_vllms_own(drafter):
            self._start(drafter)
            return
        self._start(None)
        if drafter is None:
            self._proposer.use(None)
            return
        self._notes = {}
        made = make_drafter(drafter) if isinstance(drafter, str) else drafter
        self._proposer.use(Recorder(made, self._notes), FixedLength(length))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
    ) -> list[Completion]:
        engine, call = self._llm.llm_engine, next(self._ids)
        names = [f"audit-{call}-{i}" for i in range(len(prompts))]
        inside = {
            name: engine.add_request(name, {"prompt_token_ids": list(prompt)}, _vllm_params(own, seed))
            for name, prompt, own, seed in zip(names, prompts, params, seeds, strict=True)
        }
        made: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            made |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
        return [self._completion(made[name], own, inside[name]) for name, own in zip(names, params, strict=True)]

    def close(self) -> None:
        """Ends the engine and frees its memory."""
        from vllm.distributed import cleanup_dist_env_and_memory

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._proposer = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _completion(self, made: Any, params: SamplingParams, request: str) -> Completion:
        tokens = list(made.token_ids)
        if made.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"engine vllm: request {request} ended with {made.finish_reason}")
        reason = made.stop_reason
        if not params.ignore_eos and reason in self.eos and reason not in params.stop_token_ids:
            reason = None  # the second EOS of a model is a stop id to vLLM
        logprobs = [entry[token].logprob for token, entry in zip(tokens, made.logprobs, strict=True)]
        drafts = None if self._notes is None else self._notes.pop(request, [])
        return Completion(tokens, logprobs, made.finish_reason, reason, drafts)

    def _start(self, method: str | None) -> None:
        """An engine with this method of vLLM, None: with the proposer; the one that runs, if it is one."""
        if self._llm is not None and self._method == method:
            return
        if self._llm is not None:
            self.close()
        from vllm import LLM
        from vllm.platforms import current_platform

        from longtail.partial_rollout.engines.vllm import drafters

        most = self.size.max_drafts if method is None else OWN_DRAFTS
        on_cpu = {"kv_cache_memory_bytes": self._kv_bytes, "block_size": 32} if current_platform.is_cpu() else {}
        self._llm = LLM(
            model=self.model,
            dtype="float32",
            max_model_len=self.size.max_model_len,
            max_num_seqs=self.size.slots,
            max_num_batched_tokens=max(64 * self.size.slots, self.size.max_model_len),  # see VllmSize
            enforce_eager=True,
            enable_prefix_caching=False,  # two equal runs are to do equal work
            logprobs_mode="processed_logprobs",
            speculative_config=drafters.speculative_config(method, most),
            **on_cpu,
        )
        self._method = method
        self._proposer = drafters.attach(self._llm) if method is None else None


def by_counter(model: str | Path, tokenizer: Any, size: VllmSize | None = None) -> tuple[EngineUnderAudit, Any]:
    """`VllmEngine` with its own sampling. -> what is audited, and the engine, which is to be closed."""
    from transformers import AutoConfig

    from longtail.partial_rollout.engines.vllm import VllmEngine
    from longtail.spec_decode.controller import FixedLength

    size = size or VllmSize()
    engine = VllmEngine(
        model,
        tokenizer=tokenizer,
        drafter="ngram",
        max_drafts=size.max_drafts,
        dtype="float32",
        max_num_seqs=size.slots,
        max_num_batched_tokens=max(64 * size.slots, size.max_model_len),
        max_model_len=size.max_model_len,
        kv_cache_bytes=_kv_bytes(AutoConfig.from_pretrained(str(model)), size),
        enable_prefix_caching=False,
    )

    def use(drafter: Drafter | None, length: int) -> None:
        engine.use_drafter(drafter, FixedLength(length) if drafter is not None else None)

    use(None, 0)
    audited = EngineUnderAudit(
        engine,
        use,
        vocab_size=engine.vocab_size,
        eos=tuple(engine.eos_token_ids),
        exact=False,
        decode=None if tokenizer is None else tokenizer.decode,
    )
    return audited, engine


def _kv_bytes(config: Any, size: VllmSize) -> int:
    """Room for all slots at their full length, up to 2 GiB."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * head_dim * 4
    return min((size.slots + 1) * size.max_model_len * token, 2 << 30)


def _vllm_params(params: SamplingParams, seed: int) -> Any:
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=seed,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
