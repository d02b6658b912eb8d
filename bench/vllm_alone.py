"""vLLM alone, driven synchronously, as a plain trainer drives it: what `longtail bench --engine vllm --alone` compares
with.

    a batch: all its samples to vLLM's LLM -> step until all have ended -> weights in place, prefix cache emptied

The same prompts, parameters and seeds as the strategies have, one request a sample, on an `LLM` with the settings that
`VllmEngine` has (slots, KV memory, block size, dtype, prefix caching), and nothing of ours around a step: no connector,
no drafts, no rollout. Graders work beside it. It runs twice: with our sampler in place of vLLM's, so that every sample
has the tokens that the strategies give it (COUNTER), and as it is installed (OWN), whose tokens are others.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longtail.events import Event, EventKind, Listener
from longtail.partial_rollout.grading import GradeRequest, GraderPool
from longtail.sample import Group, Sample
from longtail.version import PolicyVersion

COUNTER, OWN = "vllm-alone", "vllm-own-sampler"
"""Names of the runs. The first is the one to compare with: its tokens are the strategies'."""


class VllmAlone:
    """source: a directory or hub id. decode: of a sample's output, for its grader. In this process, as `VllmEngine`."""

    def __init__(self, source: str, *, slots: int, max_model_len: int, decode: Callable[[Any], str]) -> None:
        from longtail.partial_rollout.engines.vllm.config import VllmSettings
        from longtail.partial_rollout.engines.vllm.core import engine_args, eos_of, set_defaults
        from longtail.partial_rollout.engines.vllm.correction import correct
        from longtail.partial_rollout.engines.vllm.drafters import runner_of

        set_defaults(by_counter=True)
        correct()
        from vllm import LLM
        from vllm.platforms import current_platform

        settings = VllmSettings(max_num_seqs=slots, max_model_len=max_model_len)
        args = engine_args(source, settings, {}, is_cpu=current_platform.is_cpu())
        for name in ("async_scheduling", "weight_transfer_config"):  # as vLLM chooses
            del args[name]
        self.llm = LLM(**args)
        self.decode, self.max_model_len = decode, max_model_len
        self.eos = eos_of(self.llm.llm_engine.vllm_config.model_config)
        self._runner = runner_of(self.llm)
        self._own_sampler = self._runner.sampler
        self.by_counter = False

    def sample_by_counter(self, by_counter: bool) -> None:
        """From here on, with our sampler, or with vLLM's."""
        from longtail.partial_rollout.engines.vllm.sampling import CounterSampler

        self._runner.sampler = CounterSampler(self._runner, self.eos, False) if by_counter else self._own_sampler
        self.by_counter = by_counter

    def update_weights(self, weights: Mapping[str, Any]) -> None:
        import torch

        with torch.inference_mode():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self.llm.reset_prefix_cache()

    def warm_up(self, samples: Sequence[Sample], weights: Mapping[str, Any]) -> None:
        """Leaves nothing in the prefix cache."""
        self._generate(samples, 0, lambda *args, **fields: None, None)
        self.update_weights(weights)

    def run(
        self,
        groups: Sequence[Group],
        batch: int,
        weights: Mapping[str, Any],
        graders: GraderPool,
        listen: Listener,
        settings: Mapping[str, Any],
    ) -> None:
        """Fills the samples. batch: prompts between two updates; settings: what `run_start` tells."""
        iteration = -1

        def tell(kind: EventKind, time: float | None = None, **fields: Any) -> None:
            listen(Event(kind, now() if time is None else time, iteration=iteration, **fields))

        now = time.perf_counter
        listen(Event("run_start", now(), detail=json.dumps(dict(settings))))
        for sample in (sample for group in groups for sample in group.samples):
            tell("submit", sample=sample.id, group=sample.group_id, num_tokens=len(sample.prompt_ids))
        for first in range(0, len(groups), batch):
            iteration += 1
            tell("iteration_start", value=float(iteration))
            if iteration:
                start = now()
                self.update_weights(weights)
                tell("update", start, duration=now() - start, value=float(iteration))
            taken = groups[first : first + batch]
            tasks = {group.id: group.task for group in taken}

            def grade(sample: Sample, tasks: Mapping[str, Any] = tasks) -> None:
                graders.submit(GradeRequest.of(sample, tasks[sample.group_id], self.decode(sample.output_ids)))

            self._generate([sample for group in taken for sample in group.samples], iteration, tell, grade)
            while graders.num_pending:
                for made in graders.wait():
                    value = float("nan") if made.reward is None else made.reward
                    tell("grade", sample=made.sample_id, value=value, detail=made.grader)
            for group in taken:
                tokens = sum(len(sample.output_ids) for sample in group.samples)
                detail = json.dumps({"staleness": {"0": tokens}})  # nothing is trained on later than it is made
                tell("hand_over", group=group.id, num_seqs=len(group.samples), num_tokens=tokens, detail=detail)
            tokens = sum(len(sample.output_ids) for group in taken for sample in group.samples)
            tell("iteration_end", num_seqs=len(taken), num_tokens=tokens)
        listen(Event("run_end", now()))

    def close(self) -> None:
        """Gives back what vLLM holds of the process, so that another engine can start in it."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def _generate(
        self,
        samples: Sequence[Sample],
        version: int,
        tell: Callable[..., None],
        ended: Callable[[Sample], None] | None,
    ) -> None:
        """Steps until all have ended. What is told is read off vLLM's records between its steps."""
        engine: Any = self.llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        by_id = {sample.id: sample for sample in samples}
        going = {}
        for sample in samples:
            prompt = {"prompt_token_ids": list(sample.prompt_ids)}
            inside = engine.add_request(sample.id, prompt, self._params(sample))
            going[sample.id] = scheduler.requests[inside]
        cached = {name: request.prefill_stats for name, request in going.items()}
        counted = dict.fromkeys(going, (0, 0))  # computed, generated
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = engine.step()
            took = time.perf_counter() - start
            counts = {"num_seqs": 0, "num_tokens": 0, "num_context_tokens": 0, "num_output_tokens": 0}
            decoding = 0
            for name, request in going.items():
                before, generated = counted[name]
                computed, made = request.num_computed_tokens, request.num_output_tokens
                if computed == 0:
                    continue
                about = {"sample": name, "group": by_id[name].group_id}
                if before == 0:
                    before = cached[name].num_cached_tokens
                    tell("admit", start, num_tokens=before, value=float(request.num_tokens - made), **about)
                if made and not generated:
                    tell("first_token", **about)
                counted[name] = computed, made
                decoding += generated > 0
                counts["num_seqs"] += 1
                counts["num_tokens"] += computed - before
                counts["num_context_tokens"] += computed
                counts["num_output_tokens"] += made - generated
            prefill = max(counts["num_tokens"] - decoding, 0)
            tell("step", start, duration=took, model_seconds=took, num_prefill_tokens=prefill, **counts)
            for output in outputs:
                sample = by_id[output.request_id]
                del going[sample.id]
                _take(sample, output.outputs[0], version)
                about = {"sample": sample.id, "group": sample.group_id}
                tell("finish", num_tokens=len(sample.output_ids), detail=sample.finish_reason, **about)
                if ended is not None:
                    ended(sample)

    def _params(self, sample: Sample) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from longtail.partial_rollout.engines.vllm.sampling import KEY, row_state

        p = sample.params
        return SamplingParams(
            temperature=p.temperature,
            max_tokens=p.max_tokens,
            seed=sample.seed & (2**63 - 1),
            stop_token_ids=list(self.eos),
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={KEY: row_state(sample)} if self.by_counter else None,
        )


def _take(sample: Sample, made: Any, version: int) -> None:
    tokens = list(made.token_ids)
    logprobs = [at[token].logprob for token, at in zip(tokens, made.logprobs, strict=True)]
    sample.extend(tokens, logprobs, PolicyVersion(version), "vllm", "computed")
    sample.status, sample.finish_reason = "finished", made.finish_reason
