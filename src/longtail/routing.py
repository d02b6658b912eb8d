"""Which experts of a mixture-of-experts model computed each token of a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ID_BYTES = 2


class RoutedExperts:
    """The experts of a sample's first positions, one row a position, from 0 on: int16 [positions, layers, top_k].

        prompt_ids   p0 p1 p2 p3 | output_ids  t0 t1 t2
        rows          0  1  2  3                4  5

    A row is the routing of the pass that computed its position, the pass whose logits gave the log-probability of the
    token after it. The last token of a sample is no input of any pass, so that a sample of n tokens has n - 1 rows.
    `np.asarray(routed)` is a copy; layers: the mixture layers, in the model's order; experts of a token stand in the
    order in which its router named them.
    """

    __slots__ = ("data", "layers", "top_k")

    def __init__(self, layers: int, top_k: int, data: bytes = b"") -> None:
        """data: whole rows of int16. ValueError if they are not."""
        if layers < 1 or top_k < 1 or len(data) % (layers * top_k * ID_BYTES):
            raise ValueError(f"routed_experts: {len(data)} bytes are no rows of {layers} layers of {top_k} experts")
        self.layers, self.top_k = layers, top_k
        self.data = bytearray(data)

    @property
    def row_bytes(self) -> int:
        return self.layers * self.top_k * ID_BYTES

    def __len__(self) -> int:
        """Positions."""
        return len(self.data) // self.row_bytes

    def extend(self, rows: bytes | bytearray) -> None:
        """rows: of the next positions. ValueError if they are no whole rows."""
        if len(rows) % self.row_bytes:
            raise ValueError(f"routed_experts: {len(rows)} bytes are no rows of {self.row_bytes}")
        self.data += rows

    def truncate(self, positions: int) -> None:
        """Forgets the rows of later positions."""
        del self.data[positions * self.row_bytes :]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import numpy as np

        array = np.frombuffer(bytes(self.data), np.int16).reshape(-1, self.layers, self.top_k)
        return array if dtype is None else array.astype(dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return (self.layers, self.top_k, self.data) == (other.layers, other.top_k, other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RoutedExperts({len(self)} positions, layers={self.layers}, top_k={self.top_k})"
