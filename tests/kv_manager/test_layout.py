"""How a budget of bytes becomes blocks of several groups."""

from __future__ import annotations

import pytest
import torch

from longtail.kv_manager.layout import Layout, split_blocks

FULL = Layout("kv", 2, 2, 16, 4)
WINDOWED = Layout("kv", 4, 2, 16, 4, window=20)
"""Twice the bytes a block."""


def test_bytes_of_a_block() -> None:
    """2 layers x 2 x 2 heads x 16 x 4 floats; 3 layers x 16 rows of 24 floats; a state of 77 floats."""
    layouts = [FULL, Layout("latent", 3, 1, 16, 24), Layout("state", 5, 1, 0, 77)]
    assert [layout.block_bytes for layout in layouts] == [2048, 4608, 308]
    for layout in layouts:
        blocks = layout.allocate(3)
        assert (blocks.nbytes, blocks.dtype) == (3 * layout.block_bytes, torch.float32)
        assert not blocks.any()


def test_one_group_gets_all() -> None:
    assert split_blocks(2048 * 30, (FULL,), 100, 8, 512) == [30]
    assert split_blocks(2048 * 31 - 1, (FULL,), 100, 8, 512) == [30]
    assert split_blocks(2048 * 7, (FULL,), 100, 8, 512) == [7]  # 100 tokens are 7 blocks


def test_less_than_one_sample_is_an_error_that_says_how_much_it_takes() -> None:
    with pytest.raises(ValueError, match=r"12288 bytes for blocks.*max_model_len 100 needs 7 blocks or 14336 bytes"):
        split_blocks(2048 * 6, (FULL,), 100, 8, 512)


@pytest.mark.parametrize("window", [1, 20, 300])
@pytest.mark.parametrize("max_num_seqs", [1, 8, 64])
def test_the_budget_that_the_message_names_is_enough(window: int, max_num_seqs: int) -> None:
    """And a byte less is not, whatever the mix."""
    for layouts in [(FULL,), (FULL, WINDOWED._replace(window=window)), (WINDOWED._replace(window=window),)]:
        with pytest.raises(ValueError, match="needs") as refused:
            split_blocks(1, layouts, 1000, max_num_seqs, 64)
        enough = int(str(refused.value).split(" bytes; raise")[0].split()[-1])
        counts = split_blocks(enough, layouts, 1000, max_num_seqs, 64)
        assert sum(n * layout.block_bytes for n, layout in zip(counts, layouts, strict=True)) == enough
        with pytest.raises(ValueError, match="raise kv_cache_bytes"):
            split_blocks(enough - 1, layouts, 1000, max_num_seqs, 64)


def test_a_window_gets_what_its_sequences_can_hold_and_no_more() -> None:
    """A window of 20 stands in at most 3 blocks of 16 (1 + 16 + 3): 4 sequences hold 12, a pass of 32 rows 2 more."""
    assert split_blocks(14 * 4096 + 500 * 2048, (FULL, WINDOWED), 1000, 4, 32) == [500, 14]


def test_a_short_budget_is_shared_evenly() -> None:
    """Short sequences need as many blocks in both."""
    assert split_blocks(10 * 6144 + 2047, (FULL, WINDOWED), 64, 4, 32) == [10, 10]


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 33, 100])
def test_no_window_stands_in_more_blocks_than_are_counted(window: int) -> None:
    layout = WINDOWED._replace(window=window)
    kept = max(n // 16 + 1 - layout.first_kept(n) for n in range(1000))
    [counted] = split_blocks(10**9, (layout,), 10**4, 1, 0)
    assert counted == kept


@pytest.mark.parametrize("window", [1, 2, 16, 33])
def test_what_the_next_token_sees_is_kept(window: int) -> None:
    layout = WINDOWED._replace(window=window)
    for n in range(200):  # the token at position n sees n - window + 1 .. n
        first = layout.first_kept(n)
        assert first * 16 <= max(n - window + 1, 0) < (first + 1) * 16
