"""The layouts and masks that the tests of this folder draw."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st


@st.composite
def _cases(draw, layout_strategy, mask_strategy):
    seq_len = draw(st.integers(0, 30))
    world_size = draw(st.integers(1, 8))
    mask, _ = draw(mask_strategy(seq_len))
    return draw(layout_strategy(seq_len, world_size)), mask


@pytest.fixture(scope="session")
def cases(layout_strategy, mask_strategy):
    """Draws (layout, mask)."""
    return _cases(layout_strategy, mask_strategy)
