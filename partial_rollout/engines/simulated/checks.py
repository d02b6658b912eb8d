"""What the simulated engine can run."""

from __future__ import annotations

from longtail.partial_rollout.engines.simulated.config import SimulatedConfig
from longtail.partial_rollout.engines.simulated.script import Ending, Length, Lengths, cap_of, ending_of
from longtail.sample import OBSERVATION, Sample
from longtail.version import PolicyVersion


def check_sample(sample: Sample, lengths: Lengths, config: SimulatedConfig, version: PolicyVersion) -> Ending:
    """How it ends. Raises a ValueError that names the sample, the field and the fix if the engine cannot (or need not)
    run it. (One whose last observation has used up its cap is taken: the next step finishes it.)"""
    if sample.status == "finished" or sample.status == "failed":
        raise ValueError(f"sample {sample.id} is {sample.status}; only unfinished samples can be added")
    if sample.turn_ended:
        raise ValueError(f"sample {sample.id} waits for its environment; append_observation first")
    if config.max_model_len is not None and len(sample.prompt_ids) >= config.max_model_len:
        raise ValueError(
            f"sample {sample.id}: prompt_ids has {len(sample.prompt_ids)} tokens, and max_model_len "
            f"{config.max_model_len} leaves no room for output; shorten the prompt or raise max_model_len"
        )
    last = 0
    if sample.segments:
        last, newest = sample.segments[-1].version, max(s.version for s in sample.segments)
        if newest > version:
            raise ValueError(
                f"sample {sample.id} has tokens of version {newest}, newer than the engine's {version}; "
                "update the engine's weights first, or give it version= if it has them"
            )
    length = lengths(sample)
    if not isinstance(length, Length):
        raise ValueError(f"sample {sample.id}: lengths gave {length!r}, not a Length")
    ending = ending_of(sample, length, config.max_model_len)
    if ending.emission <= len(sample.output_ids) and last != OBSERVATION:
        raise ValueError(f"sample {sample.id} has already ended ({ending.kind}); it is finished, not to be resumed")
    if config.kv_tokens is not None:
        _check_memory(sample, ending, config.kv_tokens, config.max_model_len)
    return ending


def _check_memory(sample: Sample, ending: Ending, capacity: int, max_model_len: int | None) -> None:
    longest = cap_of(sample, max_model_len) if sample.multi_turn else ending.length
    if longest is None:
        raise ValueError(f"sample {sample.id}: with kv_tokens a multi-turn sample needs max_tokens or max_model_len")
    most = len(sample.prompt_ids) + longest
    if most > capacity:
        raise ValueError(
            f"sample {sample.id} gets up to {most} tokens, and kv_tokens {capacity} does not hold them; "
            "raise kv_tokens or lower max_tokens"
        )
