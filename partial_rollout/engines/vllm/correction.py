"""Faults of vLLM that make drafting wrong or crash, and what corrects them where they are present.

    sampling constraints    vLLM #55005. Without Triton on a CPU, the function that gives each draft position its
                            sample's temperature, top-k and top-p writes into a copy: the rejection sampler then reads
                            uninitialised memory. In a batch with temperatures above 0, samples with drafts do not
                            follow the model, greedy ones neither; with top-k the process may crash.
    top-k of no rows        The same sampler fails (max of an empty tensor) in a step that carries no drafts.
    min_tokens of bonus     The token behind a sample's accepted drafts is kept from being a stop id as if the drafts
    tokens                  were not there: for up to k tokens more than min_tokens. On any platform (model runner V1).
    numba is there          Also without Triton: where numba has been imported, no worker starts. vLLM looks for kernels
                            in the `vars()` of all there is, and of llvmlite's wrappers that is no dict.

Whether a fault is present is found by running the function in question, never by a version number, so that a vLLM
without the fault is left alone. `correct` says once, by a warning, what it has corrected. `VllmEngine` calls it; in
vLLM's own processes it runs as its plugin (engines/vllm_plugin.py; LONGTAIL_VLLM_CORRECTIONS=0 turns that off).
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any


class VllmCorrected(UserWarning):
    """A fault of the installed vLLM was found and corrected in this process."""


class VllmNotProbed(UserWarning):
    """The installed vLLM is built in another way, so that a fault could be looked for in vain."""


CONSTRAINTS, TOP_K, MIN_TOKENS = "sampling constraints (#55005)", "top-k of no rows", "min_tokens of bonus tokens"
NUMBA = "numba is there"
STARTING = (NUMBA,)
"""Faults that keep an engine from starting, and have no part in what it generates."""


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    name: str
    what: str
    """What the fault does, for the warning."""
    present: Callable[[], bool]
    """Runs the function in question. ImportError, AttributeError or TypeError where vLLM is built in another way."""
    apply: Callable[[], Callable[[], None]]
    """-> what takes it back."""


def correct(names: Container[str] | None = None) -> list[str]:
    """Corrects in this process the faults that the installed vLLM has (names: only these). -> the names of those that
    this call has corrected. Where a fault cannot be looked for, a warning says so (`VllmNotProbed`)."""
    done = []
    for correction in CORRECTIONS:
        if names is not None and correction.name not in names:
            continue
        try:
            found = correction.present()
        except (ImportError, AttributeError, TypeError) as error:
            warnings.warn(
                VllmNotProbed(
                    f"vLLM could not be searched for the fault {correction.name!r} ({error!r}); run `longtail spec "
                    "audit --engine vllm` before drafts are trusted"
                ),
                stacklevel=2,
            )
            continue
        if not found:
            continue
        _undo[correction.name] = correction.apply()
        if correction.present():
            raise RuntimeError(f"the fault {correction.name!r} of vLLM is still there after its correction")
        done.append(correction.name)
        if correction.name not in _said:
            _said.add(correction.name)
            said = f"vLLM has the fault {correction.name!r}, which is corrected: {correction.what}"
            warnings.warn(VllmCorrected(said), stacklevel=2)
    return done


def undo() -> None:
    """vLLM as it was, in this process."""
    while _undo:
        _undo.popitem()[1]()


def faults() -> list[str]:
    """Names of the faults that are present as vLLM now is in this process. Errors as `Correction.present`."""
    return [correction.name for correction in CORRECTIONS if correction.present()]


# -- sampling constraints (vLLM #55005) -------------------------------------------------------------------------------


def _no_kernels_of_its_own() -> bool:
    """Whether vLLM runs on a CPU without Triton, the one place that uses the functions corrected here."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return bool(current_platform.is_cpu()) and not HAS_TRITON


def expand(
    output: Any, input_val: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None
) -> None:
    """Fills output, any dtype [tokens], with the value of each row, input_val [rows], as often as the row has tokens;
    `replace_from` becomes `replace_to`. cu_num_tokens: int [rows], tokens up to and with each row."""
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts))


def _expand_in_use() -> Any:
    """What fills the constraints in this process: registered already, or to be registered when a worker starts."""
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    kernel = rejection_sampler.expand_kernel
    return kernel if isinstance(kernel, KernelOverride) else cpu_triton_utils._expand_kernel_impl


def _expands_wrongly() -> bool:
    if not _no_kernels_of_its_own():
        return False
    import torch

    fill = _expand_in_use()
    ends = torch.tensor([2, 2, 3], dtype=torch.int32)
    for dtype, values, want in (
        (torch.float32, [0.7, 9.0, 0.0], [0.7, 0.7, 1.0]),
        (torch.int32, [3, 9, 0], [3, 3, 1]),
    ):
        output = torch.full((3,), -1, dtype=dtype)
        fill(output, torch.tensor(values, dtype=dtype), ends, 0, 1, 128)
        if not torch.equal(output, torch.tensor(want, dtype=dtype)):
            return True
    return False


def _correct_expand() -> Callable[[], None]:
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    original = cpu_triton_utils._expand_kernel_impl

    def put(implementation: Any) -> None:
        cpu_triton_utils._expand_kernel_impl = implementation
        kernel = rejection_sampler.expand_kernel
        if isinstance(kernel, KernelOverride):  # registered: all who launch it hold this object
            kernel._impl = kernel.func = implementation

    put(expand)
    return lambda: put(original)


# -- top-k of no rows -------------------------------------------------------------------------------------------------


def _fails_without_rows() -> bool:
    if not _no_kernels_of_its_own():
        return False
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    try:
        apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError):
        return True
    return False


def _correct_top_k() -> Callable[[], None]:
    from vllm.v1.sample.ops import topk_topp_sampler

    original = topk_topp_sampler.apply_top_k_only

    def apply_top_k_only(logits: Any, k: Any) -> Any:
        """As vLLM's, which takes the largest k of the rows, also where there is no row."""
        return original(logits, k) if len(logits) else logits

    topk_topp_sampler.apply_top_k_only = apply_top_k_only

    def restore() -> None:
        topk_topp_sampler.apply_top_k_only = original

    return restore


# -- min_tokens of bonus tokens ---------------------------------------------------------------------------------------


def _bans_too_long() -> bool:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MinTokensLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    params = SamplingParams(min_tokens=2, stop_token_ids=[1], ignore_eos=True, detokenize=False)
    processor.update_state(BatchUpdate(batch_size=1, removed=[], added=[(0, params, None, [7])], moved=[]))
    metadata = types.SimpleNamespace(
        bad_words_token_ids={},
        no_penalties=True,
        output_token_ids=[[7]],
        spec_token_ids=[[3]],
        allowed_token_ids_mask=None,
        logitsprocs=types.SimpleNamespace(non_argmax_invariant=[processor]),
        thinking_budget_state_holder=None,
    )
    logits = Sampler().apply_logits_processors(torch.zeros(1, 8), metadata, True)
    return bool(torch.isinf(logits[0, 1]))  # one token is out and one is drafted: the next one may end the sample


def _correct_bans() -> Callable[[], None]:
    from vllm.v1.sample.sampler import Sampler

    original = Sampler.apply_logits_processors

    def apply_logits_processors(self: Any, logits: Any, sampling_metadata: Any, predict_bonus_token: bool) -> Any:
        """As vLLM's, with the drafts counted towards min_tokens where the token behind them is sampled."""
        drafts = sampling_metadata.spec_token_ids if predict_bonus_token else None
        with _long_enough(sampling_metadata.logitsprocs.non_argmax_invariant, drafts or []):
            return original(self, logits, sampling_metadata, predict_bonus_token)

    Sampler.apply_logits_processors = apply_logits_processors

    def restore() -> None:
        Sampler.apply_logits_processors = original

    return restore


@contextlib.contextmanager
def _long_enough(processors: Iterable[Any], drafts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Lifts the ban of stop ids from rows that have min_tokens with their drafts."""
    import torch
    from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor

    kept = []
    for processor in processors:
        if not drafts or not isinstance(processor, MinTokensLogitsProcessor):
            continue
        free = [i for i, (least, output, *_) in processor.min_toks.items() if len(output) + len(drafts[i]) >= least]
        if free:
            kept.append((processor, processor.logits_slice, processor.restore_logits_slice))
            for name in ("logits_slice", "restore_logits_slice"):
                rows, tokens = getattr(processor, name)
                banned = ~torch.isin(rows, torch.tensor(free, dtype=rows.dtype, device=rows.device))
                setattr(processor, name, (rows[banned], tokens[banned]))
    try:
        yield
    finally:
        for processor, bans, restored in kept:
            processor.logits_slice, processor.restore_logits_slice = bans, restored


# -- numba is there ---------------------------------------------------------------------------------------------------


def _stumbles_over_numba() -> bool:
    if not _no_kernels_of_its_own():
        return False
    import llvmlite.binding  # noqa: F401 - what numba brings
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels
    try:
        rebind([])  # looks everywhere, and has nothing to replace
    except AttributeError:
        return True
    return False


def _correct_llvmlite() -> Callable[[], None]:
    from llvmlite.binding import ffi

    original = ffi._lib_wrapper.__getattr__

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        """As llvmlite's, which takes any name for that of a function of its library, `__dict__` too."""
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    ffi._lib_wrapper.__getattr__ = __getattr__

    def restore() -> None:
        ffi._lib_wrapper.__getattr__ = original

    return restore


CORRECTIONS = (
    Correction(
        CONSTRAINTS,
        "without it samples drawn with drafts at temperature > 0 would not follow the model",
        _expands_wrongly,
        _correct_expand,
    ),
    Correction(
        TOP_K,
        "without it a step without drafts would crash where a sample has a top_k",
        _fails_without_rows,
        _correct_top_k,
    ),
    Correction(
        MIN_TOKENS,
        "without it samples drawn with drafts could not end where min_tokens lets them",
        _bans_too_long,
        _correct_bans,
    ),
    Correction(
        NUMBA,
        "without it no worker would start once numba has been imported",
        _stumbles_over_numba,
        _correct_llvmlite,
    ),
)
_undo: dict[str, Callable[[], None]] = {}
_said: set[str] = set()
