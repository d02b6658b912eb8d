"""The native engine's drafters by name: those of `spec_decode/choice.py`, and those that run a model.

"self"  "self:0,2,5"  "model:DIRECTORY"  "mtp:DIRECTORY"  "group>self"
"""

from __future__ import annotations

from collections.abc import Callable

from longtail.partial_rollout.engines.native.model_drafter import ModelDrafter, SelfDrafter
from longtail.partial_rollout.engines.native.mtp import MTPDrafter
from longtail.partial_rollout.engines.native.numerics import Numerics
from longtail.partial_rollout.engines.native.target import ModelBased, Target
from longtail.spec_decode.choice import make_drafter, parts
from longtail.spec_decode.controller import Controller, ControllerConfig
from longtail.spec_decode.drafter import Drafter
from longtail.spec_decode.speculation import Speculation
from longtail.spec_decode.step_cost import StepCost


def speculate(
    choice: str | Drafter,
    target: Target,
    controller: Controller | ControllerConfig | None,
    clock: Callable[[], float],
    cost: StepCost,
) -> Speculation:
    """See `NativeEngine.use_drafter`. cost: of the engine's steps, measured with whatever drafted before."""
    return Speculation(
        _bound(choice, target),
        cost=cost,
        controller=controller,
        match=target.config.verification == "match",
        vocab_size=target.decoder.spec.vocab_size,
        clock=clock,
    )


def _bound(choice: str | Drafter, target: Target) -> Drafter:
    drafter = native_drafter(choice, target.config.numerics) if isinstance(choice, str) else choice
    for part in parts(drafter):
        if isinstance(part, ModelBased):
            part.bind(target)
    return drafter


def native_drafter(choice: str, numerics: Numerics) -> Drafter:
    """numerics: of a draft model's passes. ValueError for a name that is not known."""
    made: dict[str, Drafter] = {"self": SelfDrafter()}
    for name in (name.strip() for name in choice.split(">")):
        kind, colon, detail = name.partition(":")
        if kind == "self" and colon:
            try:
                layers = [int(part) for part in detail.split(",")]
            except ValueError as error:
                raise ValueError(
                    f'drafter: {name!r} names no layers; write for example "self:0,2,4", or "self" for the first half'
                ) from error
            made[name] = SelfDrafter(layers)
        elif kind == "model":
            if not detail:
                raise ValueError(f'drafter: {name!r} names no model; write "model:" and a directory or hub id')
            made[name] = ModelDrafter(detail, numerics=numerics)
        elif kind == "mtp":
            if not detail:
                raise ValueError(f'drafter: {name!r} names no head; write "mtp:" and the directory of a trained one')
            made[name] = MTPDrafter(detail)
    return make_drafter(choice, made)
