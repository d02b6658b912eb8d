"""Our sampling inside vLLM's workers: noise by counter, parameters and counts of the whole response.

    logits of the runner's batch -> whose rows, at which output positions -> native Sampler (by match, with drafts)
                                 -> SamplerOutput

What was generated before a cut comes back to vLLM as part of the prompt, where its seeded generators, penalties and
min_tokens do not see it. Here a row's state is what it always is: (prompt_ids, output_ids, params, seed). The first
three travel with the request (`row_state`), what this request has generated is in the runner's records; the token is
argmax(processed logits + Gumbel(seed, output position, token id)), by the kernels of the native engine.

It replaces the runner's sampler and, with drafts, its rejection sampler: drafts are verified by match. vLLM does not
take custom logits processors together with drafts, and one could not return log-probabilities of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from longtail.partial_rollout.engines.native.sampler import Sampler
from longtail.partial_rollout.engines.native.verification import match
from longtail.sample import Sample
from longtail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput

KEY = "longtail"
"""Of the state of a row, among the `extra_args` of its request."""
EXTENSION = f"{__name__}.WorkerExtension"
BROKEN, EMPTY = float("nan"), float("-inf")
"""Log-probability of a row that has NaN or +inf, or no token left. Its token is 0 and means nothing."""


def row_state(sample: Sample) -> dict[str, Any]:
    """What a worker needs to know of a sample besides its tokens, as plain data."""
    return {
        "id": sample.id,
        "seed": sample.seed,
        "num_prompt_tokens": len(sample.prompt_ids),
        "params": dataclasses.asdict(sample.params),
    }


@dataclasses.dataclass(slots=True)
class Row:
    """A sample as a worker knows it. prompt and output are told apart where the sample has them, not the request."""

    prompt_ids: tuple[int, ...]
    output_ids: list[int]
    params: SamplingParams
    seed: int
    num_before: int
    """Output tokens that were there when the request came."""

    @classmethod
    def of(cls, token_ids: Sequence[int], state: Mapping[str, Any]) -> Row:
        """token_ids: the prompt of the request; state: see `row_state`."""
        n = state["num_prompt_tokens"]
        output = list(token_ids[n:])
        params = SamplingParams.from_dict(state["params"])
        return cls(tuple(token_ids[:n]), output, params, state["seed"], len(output))

    def catch_up(self, generated: Sequence[int]) -> None:
        """generated: by this request so far. (It falls where KV that a connector was to bring did not come.)"""
        known = len(self.output_ids) - self.num_before
        if len(generated) < known:
            del self.output_ids[self.num_before + len(generated) :]
        else:
            self.output_ids += generated[known:]


class CounterSampler:
    """In place of a runner's `sampler` and `rejection_sampler`."""

    def __init__(self, runner: Any, eos_token_ids: Sequence[int], raw_logprobs: bool) -> None:
        self.runner = runner
        self.sampler = Sampler(tuple(eos_token_ids), raw_logprobs)
        self.logprobs_mode = runner.sampler.logprobs_mode
        self.started = self.ended = 0.0
        """When the last call started and ended, on `time.perf_counter`."""
        self._rows: dict[str, Row] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> SamplerOutput:
        """As `Sampler.forward(logits, sampling_metadata)`, or as `RejectionSampler.forward(metadata, draft_probs,
        logits, sampling_metadata)`."""
        metadata = args[0] if len(args) == 4 else None
        logits = args[2] if len(args) == 4 else kwargs["logits"]
        self.started = time.perf_counter()
        out = self._sample(logits, metadata)
        self.ended = time.perf_counter()
        return out

    def _sample(self, logits: torch.Tensor, metadata: Any) -> SamplerOutput:
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        rows = self._present()
        drafts: list[list[int]] = [[] for _ in rows]
        if metadata is not None:
            flat = metadata.draft_token_ids.tolist()
            ends = np.cumsum(metadata.num_draft_tokens).tolist()
            padded = [flat[end - n : end] for n, end in zip(metadata.num_draft_tokens, ends, strict=True)]
            drafts = [list(itertools.takewhile(lambda token: token >= 0, own)) for own in padded]
            if drafts != padded:  # a request that comes with its KV is filled up to the shape of those with drafts
                ends = np.cumsum([len(own) + 1 for own in padded]).tolist()
                firsts = [end - len(own) - 1 for end, own in zip(ends, padded, strict=True)]
                spans = [range(first, first + len(own) + 1) for first, own in zip(firsts, drafts, strict=True)]
                logits = logits[list(itertools.chain(*spans))]
        verdicts = match(self.sampler, logits.float(), rows, drafts)
        width = 1 if metadata is None else metadata.max_spec_len + 1
        tokens = np.full((len(rows), width), -1, np.int32)
        logprobs = np.zeros((len(rows), width), np.float32)
        for i, verdict in enumerate(verdicts):
            n = len(verdict.tokens)
            tokens[i, :n], logprobs[i, :n] = verdict.tokens, verdict.logprobs
            if verdict.fault is not None:
                tokens[i, n - 1] = 0
                logprobs[i, n - 1] = EMPTY if verdict.fault.startswith("no token") else BROKEN
        device = logits.device
        chosen = torch.from_numpy(tokens).to(device)
        ids = chosen.flatten().clamp(min=0)[:, None]
        ranks = torch.zeros(len(ids), dtype=torch.int64, device=device)
        scores = torch.from_numpy(logprobs).to(device).flatten()[:, None]
        return SamplerOutput(sampled_token_ids=chosen, logprobs_tensors=LogprobsTensors(ids, scores, ranks))

    def _present(self) -> list[Row]:
        """Of the runner's batch, in its order."""
        known = self.runner.requests
        for gone in [request_id for request_id in self._rows if request_id not in known]:
            del self._rows[gone]
        rows = []
        for request_id in self.runner.input_batch.req_ids:
            request = known[request_id]
            row = self._rows.get(request_id)
            if row is None:
                state = request.sampling_params.extra_args[KEY]
                row = self._rows[request_id] = Row.of(request.prompt_token_ids, state)
            row.catch_up(request.output_token_ids)
            rows.append(row)
        return rows


class WorkerExtension:
    """Mixed into vLLM's worker class, so that the engine reaches every worker, in whichever process."""

    model_runner: Any

    def longtail_sample_by_counter(self, eos_token_ids: Sequence[int], raw_logprobs: bool) -> None:
        sampler = CounterSampler(self.model_runner, eos_token_ids, raw_logprobs)
        self.model_runner.sampler = sampler
        if hasattr(self.model_runner, "rejection_sampler"):
            self.model_runner.rejection_sampler = sampler
