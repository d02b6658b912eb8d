"""What the engine and the cache need to know of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from longtail.kv_manager.layout import Kind, Layout
from longtail.kv_manager.states import Shapes


@dataclasses.dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps of a sequence."""

    kind: Kind
    heads: int = 1
    """KV heads; latent: 1."""
    dim: int = 0
    """Channels of a KV head; latent: rank + rotated channels."""
    queries: int = 1
    """Query heads that share a KV head (latent: that share the latent, all)."""
    window: int = 0
    """Tokens that a row sees, itself included; 0: all."""
    shapes: Shapes = ()
    """Of the tensors of a state."""


@dataclasses.dataclass(frozen=True, slots=True)
class PagedSpec:
    """A group of layers that keep the same."""

    layer: LayerSpec
    layers: tuple[int, ...]

    def layout(self, block_size: int) -> Layout:
        layer = self.layer
        return Layout(layer.kind, len(self.layers), layer.heads, block_size, layer.dim, layer.window)


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    groups: tuple[PagedSpec, ...] = dataclasses.field(init=False)
    """Of the layers that keep KV or latents."""
    states: tuple[int, ...] = dataclasses.field(init=False)
    """Layers that keep a state."""
    places: dict[int, tuple[int, int]] = dataclasses.field(init=False)
    """Of a paged layer: its group, and which layer of the group it is. Of one with a state: -1, and which of those."""

    def __post_init__(self) -> None:
        members: dict[LayerSpec, list[int]] = {}
        states = []
        for i, layer in enumerate(self.layers):
            if layer.kind == "state":
                states.append(i)
            else:
                members.setdefault(layer, []).append(i)
        groups = tuple(PagedSpec(layer, tuple(layers)) for layer, layers in members.items())
        places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "states", tuple(states))
        object.__setattr__(self, "places", places | {layer: (-1, i) for i, layer in enumerate(states)})

    def subset(self, layers: Sequence[int]) -> DecoderSpec:
        """Of a model that has these layers only."""
        return dataclasses.replace(self, layers=tuple(self.layers[i] for i in layers))

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each layer."""
        return tuple(layer.window for layer in self.layers)

    def layouts(self, block_size: int) -> tuple[Layout, ...]:
        return tuple(group.layout(block_size) for group in self.groups)
