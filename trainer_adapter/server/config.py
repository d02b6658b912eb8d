"""Settings of the server."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import os
from typing import Literal

Dialect = Literal["sglang", "vllm", "both"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Checked at construction."""

    host: str = "127.0.0.1"
    """To bind to. Whoever reaches it can generate and, through a directory on this machine (`weights_roots`), change
    the weights."""
    port: int = 8000
    """0: any free one."""
    dialect: Dialect = "both"
    api_key: str | None = dataclasses.field(default=None, repr=False)
    """Asked for as `Authorization: Bearer KEY` by everything but /health; None: nobody is asked."""
    model_name: str = "longtail"
    """As /v1/models has it; a request may name it, or no model."""
    weights_roots: tuple[str, ...] = ()
    """Directories in which, or below which, weights may be read for an update, links followed. Without any: all that
    this process can read on a loopback address, where whoever asks is on this machine; nothing on another one. "/":
    anything."""
    request_templates: bool = False
    """Whether a chat request may bring its own template: a program, which may never end, and which all who send text
    wait for."""
    max_body_bytes: int = 32 << 20
    """Of a request."""
    body_seconds: float = 60.0
    """For a client to send a request,"""
    send_seconds: float = 120.0
    """and to take in what it is sent, before it counts as gone."""
    max_samples: int = 2048
    """That are generated or queued at once, over all requests; what goes beyond them is refused, to be sent again."""
    max_samples_per_request: int = 512
    """Prompts times `n`."""
    grace_seconds: float = 30.0
    """Before the end, for requests to be finished; then they end as an abort ends them."""

    def __post_init__(self) -> None:
        if self.dialect not in ("sglang", "vllm", "both"):
            raise ValueError(f"dialect must be sglang, vllm or both, not {self.dialect!r}")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1, None),
            ("max_samples", 1, None),
            ("max_samples_per_request", 1, None),
        ):
            value = getattr(self, name)
            wrong = isinstance(value, bool) or not isinstance(value, int) or value < low
            if wrong or (high is not None and value > high):
                upper = "" if high is None else f" and at most {high}"
                raise ValueError(f"{name} must be an integer of at least {low}{upper}, not {value!r}")
        for name in ("body_seconds", "send_seconds", "grace_seconds"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise ValueError(f"{name} must be a number of seconds of at least 0, not {seconds!r}")
        if isinstance(self.weights_roots, str) or not all(isinstance(root, str) for root in self.weights_roots):
            raise ValueError(f"weights_roots must be a tuple of directories, not {self.weights_roots!r}")
        for root in self.weights_roots:
            if not os.path.isdir(root):
                raise ValueError(f"weights_roots: {root!r} is no directory; make it first, or leave it out")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key is empty; give a key, or None to ask for none")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may stand for any address
            return False

    @property
    def readable(self) -> tuple[str, ...]:
        """The directories in which weights may be read."""
        return self.weights_roots or (("/",) if self.is_loopback else ())
