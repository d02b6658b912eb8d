"""longtail's drafters inside vLLM, as its custom proposer class; and vLLM's own methods by our names.

    end of vLLM's step t: tokens are known -> Proposer.propose -> what became of the drafts verified in t
                                                               -> drafts for step t + 1, 0 to k of each row

vLLM fixes the most drafts of a row (k) when an engine is made; how many a row gets, and whether any, is the
controller's decision of each step. Who drafts can change between steps (`Proposer.use`).

A row is known by its request in the runner's records: its prompt tells its group, `extra_args["longtail"]` where its
response begins if it is a resumed one. vLLM draws a token that does not depend on a draft of one
token without a distribution of its own, so drafts are judged by the tokens that come, verified or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from longtail.sample import Sample
from longtail.sampling_params import SamplingParams
from longtail.spec_decode.choice import make_drafter
from longtail.spec_decode.controller import Controller, ControllerConfig
from longtail.spec_decode.drafter import Draft, Drafter
from longtail.spec_decode.metrics import Counts
from longtail.spec_decode.speculation import Speculation
from longtail.spec_decode.step_cost import StepCost
from longtail.version import PolicyVersion

PROPOSER = f"{__name__}.Proposer"
KEY = "longtail"
"""Of a request's `extra_args`: num_prompt_tokens and params of the whole response."""
OWN = ("vllm-ngram", "suffix", "model:DIR", "eagle:DIR", "eagle3:DIR", "mtp", "mtp:DIR")
"""vLLM's methods, by the names that they have here."""


def is_vllms_own(choice: str) -> bool:
    """Whether the name is that of a method of vLLM; else it is one of longtail's drafters."""
    kind = choice.partition(":")[0]
    return kind in {name.partition(":")[0] for name in OWN}


def speculative_config(choice: str | None, max_drafts: int = 8) -> dict[str, Any]:
    """vLLM's `speculative_config` for a drafter by name. None, and each of longtail's ("group", "group>ngram"): the
    proposer, which takes any of them at any moment; vLLM's own methods (OWN) are fixed for the engine's life and draft
    by their own rules. max_drafts: of a row, at the most. ValueError for an unknown name."""
    if isinstance(max_drafts, bool) or not isinstance(max_drafts, int) or max_drafts < 1:
        raise ValueError(f"max_drafts must be an integer of at least 1, not {max_drafts!r}")
    fields: dict[str, Any] = {"num_speculative_tokens": max_drafts}
    if choice is None or not is_vllms_own(choice):
        if choice is not None:
            _check_own_name(choice)
        return fields | {"method": "custom_class", "model": PROPOSER}
    kind, _, where = choice.partition(":")
    if ">" in choice:
        raise ValueError(f"drafter: {choice!r} joins a method of vLLM with another drafter; vLLM runs one of its own")
    if kind in ("model", "eagle", "eagle3") and not where:
        raise ValueError(f'drafter: {choice!r} names no model; write "{kind}:" and a directory or hub id')
    if kind in ("vllm-ngram", "suffix") and where:
        raise ValueError(f"drafter: {choice!r}: {kind} takes no model; write {kind!r}")
    if kind == "vllm-ngram":
        return fields | {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 8}
    if kind == "suffix":
        return fields | {"method": "suffix"}
    if kind == "mtp":
        return fields | {"method": "mtp"} | ({"model": where} if where else {})
    return fields | {"method": "draft_model" if kind == "model" else kind, "model": where}


def _check_own_name(choice: str) -> None:
    for name in choice.split(">"):
        kind = name.strip().partition(":")[0]
        if kind == "self":
            raise ValueError(f"drafter: {name!r} runs layers of the native engine's model; vLLM has no such method")
        if is_vllms_own(name.strip()):
            raise ValueError(f"drafter: {choice!r} joins {name.strip()!r}, a method of vLLM, with another drafter")
    make_drafter(choice)


def runner_of(engine: Any) -> Any:
    """The model runner of vLLM's LLM or LLMEngine that runs in this process. RuntimeError if it runs in another one."""
    try:
        return engine.collective_rpc(_runner)[0]
    except Exception as error:
        raise RuntimeError(
            "the model runner is not in this process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported, or "
            f"call Proposer.attach(worker.model_runner) there ({error!r})"
        ) from error


def _runner(worker: Any) -> Any:
    return worker.model_runner


def proposer_of(runner: Any, version: int = 0, eos_token_ids: Sequence[int] = ()) -> Proposer | None:
    """The runner's proposer, attached to it; None if it has another drafter or none. version: of the weights;
    eos_token_ids: where requests are told to ignore them, because who makes them looks for them himself."""
    proposer = getattr(runner, "drafter", None)
    if not isinstance(proposer, Proposer):
        return None
    proposer.version, proposer.eos_token_ids = PolicyVersion(version), frozenset(eos_token_ids)
    proposer.attach(runner)
    return proposer


def attach(engine: Any) -> Proposer:
    """The proposer of an LLM or LLMEngine that was made with `speculative_config` of None or of one of ours."""
    proposer = proposer_of(runner_of(engine))
    if proposer is None:
        raise ValueError(f"the engine was not made for longtail's drafters; {_HOW}")
    return proposer


_HOW = "make it with speculative_config=drafters.speculative_config(None), or VllmEngine with drafter=\"group\""


class Drafting:
    """What an engine has of a proposer: for `VllmEngine`."""

    proposer: Any
    """`Proposer`: longtail's drafters inside vLLM, or `RemoteProposer`, where that is in another process; None where
    the engine was made for none of them."""
    _lock: threading.RLock
    eos_token_ids: tuple[int, ...]
    drafts_by_itself: bool
    """Whether a method of vLLM drafts, for the engine's life."""

    def _start_drafting(self, proposer: Any, settings: Any) -> None:
        """proposer: None where no worker is in the process of vLLM's core; settings: `VllmSettings`."""
        self.proposer = proposer
        self.drafts_by_itself = self.proposer is None and (settings.drafter or settings.speculative) is not None
        if settings.drafter is None or is_vllms_own(settings.drafter):
            return
        if self.proposer is None:
            raise ValueError(
                f"drafter: {settings.drafter!r} drafts in the core's process, and vLLM's workers have processes of "
                f"their own here (tensor_parallel_size above 1); use a method of vLLM: {', '.join(OWN)}"
            )
        self.proposer.use(settings.drafter)

    @property
    def speculation(self) -> Any:
        """`Speculation`: what drafts, and what came of it (`report()`, which is all that there is of it where the core
        has a process of its own); None while none of longtail's drafters does."""
        return None if self.proposer is None else self.proposer.speculation

    def use_drafter(
        self, drafter: str | Drafter | None, controller: Controller | ControllerConfig | None = None
    ) -> None:
        """As the native engine's, with longtail's drafters. ValueError if the engine was made without one, or for a
        method of vLLM."""
        with self._lock:
            if self.proposer is not None:
                self.proposer.use(drafter, controller)
            elif drafter is not None:
                raise ValueError(f"drafter: this engine was not made for longtail's drafters; {_HOW}")

    def drafted(self, request_id: str) -> Counts:
        """What drafting did for a request that leaves."""
        did: Counts = Counts() if self.proposer is None else self.proposer.leave(request_id)
        return did


class Proposer:
    """What vLLM makes for `method="custom_class"`, and calls at the end of each step. It drafts nothing until it is
    attached to its runner and told with what (`use`)."""

    def __init__(self, vllm_config: Any) -> None:
        self.max_drafts: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.vocab_size: int = vllm_config.model_config.get_vocab_size()
        self.speculation: Speculation | None = None
        """What drafts, and what came of it (`report()`); None while drafting is off."""
        self.version = PolicyVersion(0)
        """Of the weights that make the tokens."""
        self.eos_token_ids: frozenset[int] = frozenset()
        """See `proposer_of`."""
        self.seconds = 0.0
        """That the drafts of the last step took."""
        self.refilled = True
        """Whether others wait for the slots that become free: see `Engine.step`."""
        self._runner: Any = None
        self._cost = StepCost()
        self._samples: dict[str, Sample] = {}  # by request: its tokens as the runner knows them
        self._asked: list[tuple[str, Sample, Draft]] = []  # what the speculation was asked for in the last step
        self._counts: dict[str, Counts] = {}  # of requests that have left
        self._pass: Any = None  # what the scheduler has put into the present pass
        self._start = 0.0

    # -- what vLLM calls ----------------------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **kwargs: Any
    ) -> list[list[int]]:
        """sampled_token_ids: of this step, for each row of the runner's batch, empty where its prompt is not through;
        num_tokens_no_spec: int [rows], known tokens; token_ids_cpu: int [rows, max_model_len]. -> drafts of each row"""
        out: list[list[int]] = [[] for _ in sampled_token_ids]
        self.seconds = 0.0
        if self.speculation is None or self._runner is None:
            return out
        end = time.perf_counter()
        ids = self._runner.input_batch.req_ids
        rows = [i for i, tokens in enumerate(sampled_token_ids) if tokens]
        live = self._take_in({ids[i]: token_ids_cpu[i, : int(num_tokens_no_spec[i])] for i in rows}, end)
        where = {ids[i]: i for i in rows}
        samples = [self._samples[request] for request in live]
        rooms = [self._room(sample) for sample in samples]
        drafts = self.speculation.draft(
            samples,
            [min(room, self.max_drafts) for room in rooms],
            context=sum(sample.num_tokens for sample in samples),
            refilled=self.refilled,
            left=[room + 1 for room in rooms],
        )
        self._asked = list(zip(live, samples, drafts, strict=True))
        for request, draft in zip(live, drafts, strict=True):
            out[where[request]] = draft.tokens
        self.seconds = time.perf_counter() - end
        return out

    # -- what the engine calls ----------------------------------------------------------------------------------------

    def attach(self, runner: Any) -> None:
        """runner: vLLM's model runner, whose records tell whose tokens a row has, and whose passes are timed."""
        if self._runner is runner:
            return
        if self._runner is not None:
            raise ValueError("the proposer is attached to another runner; each runner makes a proposer of its own")
        self._runner = runner
        # Near the model's length vLLM would draft token 0 for every row of the batch; rooms are kept here row by row.
        runner.effective_drafter_max_model_len = self.max_model_len + self.max_drafts
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens:
                self._pass, self._start = scheduler_output, time.perf_counter()
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def use(self, drafter: str | Drafter | None, controller: Controller | ControllerConfig | None = None) -> None:
        """Drafts from the next step on with one of longtail's drafters by name or an object; None: no drafts. It begins
        with new acceptance and counts, and knows what steps cost from before. ValueError for an unknown name, and for a
        controller that wants more drafts than the engine was made for."""
        self._asked.clear()
        self._samples.clear()
        self._counts.clear()
        if drafter is None:
            self.speculation = None
            return
        if isinstance(drafter, str):
            _check_own_name(drafter)
            drafter = make_drafter(drafter)
        if controller is None:
            controller = ControllerConfig(max_drafts=self.max_drafts)
        config = controller if isinstance(controller, ControllerConfig) else controller.config
        if config.max_drafts > self.max_drafts:
            raise ValueError(
                f"controller: max_drafts {config.max_drafts} is above the {self.max_drafts} that the engine was made "
                "for; lower it, or make the engine with a larger num_speculative_tokens"
            )
        self.speculation = Speculation(drafter, cost=self._cost, controller=controller, vocab_size=self.vocab_size)

    def weights_updated(self, version: int) -> None:
        """Tokens are made by other weights from the next step on."""
        self.version = PolicyVersion(version)
        if self.speculation is not None:
            self.speculation.weights_updated(version)

    def leave(self, request_id: str) -> Counts:
        """The request is done, or its sample leaves the engine. -> what drafting did for it; asked once."""
        self._forget(request_id)
        return self._counts.pop(request_id, Counts())

    @property
    def total(self) -> Counts:
        """Of all requests since `use`."""
        return Counts() if self.speculation is None else self.speculation.total

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _take_in(self, known: Mapping[str, Any], end: float) -> list[str]:
        """Brings the samples up to the runner's tokens and settles the drafts of this pass. known: tokens of each
        request that has got some. -> requests that go on"""
        assert self.speculation is not None
        live: list[str] = []
        came: dict[str, tuple[int, int]] = {}  # tokens drawn, and those up to the end of the sample
        for request, tokens in known.items():
            record = self._runner.requests[request]
            sample = self._samples.get(request)
            if sample is None:
                sample = self._samples[request] = _sample_of(request, record, self.version)
                self.speculation.enter(sample.id)
            new = tokens[sample.num_tokens :].tolist()
            kept, goes_on = _until_end(new, sample, record, self.eos_token_ids)
            sample.extend(kept, [0.0] * len(kept), self.version, "vllm", "computed")
            came[request] = len(new), len(kept)
            if goes_on:
                live.append(request)
        self._settle(came, end)
        for gone in self._samples.keys() - self._runner.input_batch.req_id_to_index.keys():
            self._forget(gone)
        return live

    def _settle(self, came: Mapping[str, tuple[int, int]], end: float) -> None:
        """Tells the speculation what became of its drafts, and of every token that others may learn from."""
        assert self.speculation is not None
        scheduled = self._pass.scheduled_spec_decode_tokens
        drafts = [draft.cut(len(scheduled.get(request, ()))) for request, _, draft in self._asked]
        drawn = [came.get(request, (0, 0)) for request, _, _ in self._asked]
        samples = [sample for _, sample, _ in self._asked]
        if any(emitted for _, emitted in drawn):
            rows = len(samples) + sum(map(len, drafts))
            self.speculation.done(
                samples,
                drafts,
                [max(min(new - 1, len(draft), kept), 0) for (new, kept), draft in zip(drawn, drafts, strict=True)],
                [kept for _, kept in drawn],
                end - self._start,
                context=sum(sample.num_tokens for sample in samples),
                prefill=max(self._pass.total_num_scheduled_tokens - rows, 0),
            )
            gone = {sample.id for request, sample, _ in self._asked if request not in self._samples}
            for sample_id in gone - {sample.id for sample in self._samples.values()}:  # left after it was asked for
                self.speculation.forget(sample_id)
        told = {request for request, _, _ in self._asked}
        self._asked = []
        for request, (_, kept) in came.items():
            if request not in told:
                self.speculation.observe(self._samples[request], kept)

    def _room(self, sample: Sample) -> int:
        """Drafts that could all be accepted: one token more is emitted."""
        cap, left = sample.params.max_tokens, self.max_model_len - sample.num_tokens
        return max((left if cap is None else min(left, cap - len(sample.output_ids))) - 1, 0)

    def _forget(self, request: str) -> None:
        """It has left the runner's batch: done, or preempted, in which case it comes again with what it has."""
        sample = self._samples.pop(request, None)
        if sample is None or self.speculation is None:
            return
        did = self.speculation.forget(sample.id)
        if did.steps or did.draft_seconds:
            self._counts.setdefault(request, Counts()).add(did)


def _sample_of(request: str, record: Any, version: PolicyVersion) -> Sample:
    """A request's sample as drafters know it, with the output that it came with. record: vLLM's CachedRequestState."""
    tokens = list(record.prompt_token_ids)
    state = (record.sampling_params.extra_args or {}).get(KEY)
    if state is None:
        name, start, params = request, len(tokens), _params_of(record.sampling_params)
    else:
        start, params = state["num_prompt_tokens"], SamplingParams.from_dict(state["params"])
        name = state.get("id", request)
    before = tokens[start:]
    return Sample(
        id=name,
        group_id=name,
        index=0,
        prompt_ids=tuple(tokens[:start]),
        params=params,
        seed=0,
        output_ids=before,
        logprobs=[0.0] * len(before),
        versions=[version] * len(before),
    )


def _params_of(params: Any) -> SamplingParams:
    """What drafting looks at in vLLM's parameters: how a sample can end."""
    return SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        stop=tuple(params.stop or ()),
    )


def _until_end(new: list[int], sample: Sample, record: Any, eos: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens up to the first that ends the sample, and whether it goes on. The runner's records hold those behind
    it too, until the scheduler takes the request out. (A stop string is found later; what is drafted until then is lost
    and does no harm.)"""
    own = sample.params
    stops = record.sampling_params.all_stop_token_ids.union(own.stop_token_ids, () if own.ignore_eos else eos)
    made = len(sample.output_ids)
    left = len(new) if own.max_tokens is None else max(own.max_tokens - made, 0)
    for i, token in enumerate(new[:left]):
        if token in stops and made + i + 1 >= own.min_tokens:
            return new[: i + 1], False
    return new[:left], own.max_tokens is None or len(new) < left


def counts_of(metrics: Any) -> Counts:
    """What one of vLLM's own methods did for a sample. metrics: `CompletionOutput.spec_decode_metrics` of an engine
    that was made with per_request_spec_decode_metrics="summary"; None: nothing was drafted."""
    if metrics is None:
        return Counts()
    steps = sum(metrics.histogram)
    accepted = sum(n * times for n, times in enumerate(metrics.histogram))
    return Counts(steps=steps, drafted=metrics.num_draft_tokens, accepted=accepted, emitted=accepted + steps)
