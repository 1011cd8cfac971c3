"""Pictures: each pair has the colour of the rank that computes it; lengths that cannot be drawn are refused."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

import ringattn as ra
from ringattn.geometry import picture


def painted(mask: ra.Mask, layout: ra.Layout) -> np.ndarray:
    """The pixels of the pairs: (s, s, 3)."""
    axes = Figure().subplots()
    picture.paint(axes, mask, layout.seq_len, layout)
    return np.asarray(axes.images[0].get_array())


@pytest.mark.parametrize("make", [ra.contiguous, ra.zigzag, ra.striped])
def test_a_live_pair_has_the_colour_of_the_rank_that_holds_its_query(make):
    mask, layout = ra.sliding_window(5, 2), make(23, 3)
    pixels = painted(mask, layout)
    colours = (picture.rank_colours(3) * 255).astype(np.uint8)
    live = mask.dense(23).numpy()
    for rank in range(3):
        rows = layout.positions(rank).numpy()
        assert (pixels[rows][live[rows]] == colours[rank]).all()
    assert len(np.unique(pixels[~live], axis=0)) == 1
    assert not (pixels[~live][0] == colours).all(axis=1).any()


@pytest.mark.parametrize("world_size", [1, 4, 20])
@pytest.mark.some(1)
def test_a_picture_is_saved(tmp_path, world_size):
    path = tmp_path / "mask.png"
    figure = ra.causal().picture(str(path), seq_len=48, layout=ra.zigzag(48, world_size))
    assert isinstance(figure, Figure)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_a_layout_the_mask_is_drawn_alone():
    assert len(picture.draw(ra.prefix(4), 16).axes) == 1


def test_colours_differ_between_ranks():
    for world_size in (2, 8, 9, 32):
        assert len(np.unique(picture.rank_colours(world_size), axis=0)) == world_size


@pytest.mark.parametrize(
    ("seq_len", "layout", "message"),
    [
        (5000, None, "seq_len is 5000, but a picture holds at most 4096"),
        (16, ra.zigzag(17, 2), r"seq_len is 16, but zigzag\(seq_len=17, world_size=2\) is for 17"),
        (0, None, "seq_len is 0"),
    ],
    ids=["long", "other layout", "empty"],
)
def test_lengths_that_cannot_be_drawn_are_refused(seq_len, layout, message):
    with pytest.raises(ValueError, match=message):
        picture.draw(ra.causal(), seq_len, layout)
