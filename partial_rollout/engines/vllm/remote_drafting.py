"""longtail's drafters where vLLM's core has a process of its own: they draft there, and are told of it from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longtail.spec_decode.controller import Controller, ControllerConfig
from longtail.spec_decode.drafter import Drafter
from longtail.spec_decode.metrics import Counts

if TYPE_CHECKING:
    from longtail.partial_rollout.engines.vllm.process_core import ProcessCore


class RemoteSpeculation:
    """A `Speculation` of the core's process."""

    def __init__(self, core: ProcessCore) -> None:
        self._core = core

    def report(self) -> dict[str, Any]:
        """As `Speculation.report`."""
        report: dict[str, Any] = self._core.call("drafting")
        return report


class RemoteProposer:
    """What the engine needs of a `Proposer`."""

    def __init__(self, core: ProcessCore) -> None:
        self._core = core
        self.speculation: RemoteSpeculation | None = None
        self._refilled = True

    @property
    def refilled(self) -> bool:
        """Whether others wait for the slots that become free: see `Engine.step`."""
        return self._refilled

    @refilled.setter
    def refilled(self, refilled: bool) -> None:
        if refilled != self._refilled:
            self._refilled = refilled
            self._core.post("refilled", refilled)

    def use(self, drafter: str | Drafter | None, controller: Controller | ControllerConfig | None = None) -> None:
        """As `Proposer.use`, by name; a controller goes as a copy."""
        if not (drafter is None or isinstance(drafter, str)):
            raise ValueError(
                f"drafter: a {type(drafter).__name__} cannot go to the process of vLLM's core; give its name, or make "
                'the engine with core="local"'
            )
        self._core.call("use_drafter", (drafter, controller))
        self.speculation = None if drafter is None else RemoteSpeculation(self._core)

    def weights_updated(self, version: int) -> None:
        self._core.call("drafts_updated", version)

    def leave(self, request_id: str) -> Counts:
        """The core's process hears of it by itself, and tells nothing of single samples."""
        return Counts()
