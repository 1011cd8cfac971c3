"""Strategies that several test files draw from: masks, each with an independent formula, and layouts of any spans.

Tests take the fixtures; `fuzz.py`, which also runs by itself, imports the functions.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import ringattn as ra

settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("usual", settings.get_profile("thorough"), max_examples=34)
settings.register_profile("explore", deadline=None, max_examples=1000)


def examples(count: int) -> int:
    """For `max_examples`: `count` in a thorough run, else as the profile's number is to a thorough one's."""
    return -(-count * settings().max_examples // settings.get_profile("thorough").max_examples)


def is_thorough(config) -> bool:
    """Whether the tests marked thorough run, too."""
    return config.getoption("--thorough") or torch.cuda.is_available()


def pytest_configure(config):
    """Draw the same examples in every run; `--hypothesis-profile explore` draws fresh ones."""
    if config.getoption("--hypothesis-profile", None) is None:
        settings.load_profile("thorough" if is_thorough(config) else "usual")


@pytest.fixture
def one_thread():
    """Torch computes on one thread, which suits small tensors and ranks that are threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def mask_strategy():
    """`mask_strategy(seq_len)` draws (mask, live): `live[q, k]` is a boolean matrix from the mask's definition, without regions."""
    return masks


@pytest.fixture(scope="session")
def layout_strategy():
    """`layout_strategy(seq_len, world_size)` draws layouts: the named ones, and custom spans of mixed strides in any order."""
    return layouts


def masks(seq_len: int):
    """Draws (mask, live), see `mask_strategy`."""
    pair = st.tuples(st.sampled_from("|&"), _simple_masks(seq_len), _simple_masks(seq_len)).map(_combined)
    triple = st.tuples(st.sampled_from("|&"), pair, _simple_masks(seq_len)).map(_combined)
    return st.one_of(_simple_masks(seq_len), _simple_masks(seq_len), pair, triple)


def _combined(case):
    operator, (a, live_a), (b, live_b) = case
    return (a | b, live_a | live_b) if operator == "|" else (a & b, live_a & live_b)


@st.composite
def _simple_masks(draw, seq_len: int):
    q, k = np.indices((seq_len, seq_len))
    small = st.integers(0, max(1, seq_len // 2))
    kind = draw(st.sampled_from(["full", "causal", "window", "documents", "prefix", "global", "dilated", "blocks"]))
    if kind == "full":
        return ra.full(), q == q
    if kind == "causal":
        return ra.causal(), k <= q
    if kind == "window":
        left, right = draw(small), draw(small)
        return ra.sliding_window(left, right), (q - left <= k) & (k <= q + right)
    if kind == "documents":
        bounds = sorted(draw(st.lists(st.integers(0, seq_len), max_size=6)))
        document = np.full(seq_len, -1)
        for index, (start, stop) in enumerate(zip([0, *bounds], bounds)):
            document[start:stop] = index
        is_causal = draw(st.booleans())
        live = (document[q] == document[k]) & (document[q] >= 0)
        return ra.documents([0, *bounds], causal=is_causal), live & (k <= q) if is_causal else live
    if kind == "prefix":
        n = draw(st.integers(0, seq_len))
        return ra.prefix(n), (k <= q) | ((q < n) & (k < n))
    if kind == "global":
        chosen = draw(st.lists(st.integers(0, seq_len - 1), max_size=4)) if seq_len else []
        return ra.global_tokens(chosen), np.isin(q, chosen) | np.isin(k, chosen)
    if kind == "dilated":
        left, right, dilation = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
        steps, rest = np.divmod(q - k, dilation)
        return ra.dilated_window((left, right), dilation), (rest == 0) & (-right <= steps) & (steps <= left)
    size = draw(st.integers(max(1, seq_len // 33), 9 + seq_len // 33))
    n = -(-seq_len // size)
    bits = np.frombuffer(draw(st.binary(min_size=-(-n * n // 8), max_size=-(-n * n // 8))), dtype=np.uint8)
    blocks = np.unpackbits(bits, count=n * n).astype(bool).reshape(n, n)
    return ra.block_sparse(blocks, size), blocks[q // size, k // size]


def layouts(seq_len: int, world_size: int):
    """Draws layouts, see `layout_strategy`."""
    named = [
        ra.contiguous(seq_len, world_size),
        ra.zigzag(seq_len, world_size),
        ra.striped(seq_len, world_size),
        ra.balanced(ra.causal(), seq_len, world_size),
    ]
    return st.one_of(st.sampled_from(named), _custom_layouts(seq_len, world_size), _custom_layouts(seq_len, world_size))


@st.composite
def _custom_layouts(draw, seq_len: int, world_size: int):
    """Layouts of segments: each has its own stride, each residue is cut in two, and the pieces go to ranks in any order."""
    cuts = sorted(draw(st.lists(st.integers(0, seq_len), max_size=3)))
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, seq_len]):
        stride = draw(st.integers(1, 4))
        for first in range(start, min(stop, start + stride)):
            length = len(range(first, stop, stride))
            cut = draw(st.integers(0, length))
            pieces += [ra.Span(first, cut, stride), ra.Span(first + stride * cut, length - cut, stride)]
    shards: list[list[ra.Span]] = [[] for _ in range(world_size)]
    for piece in draw(st.permutations(pieces)):
        shards[draw(st.integers(0, world_size - 1))].append(piece)
    return ra.Layout(seq_len, tuple(map(tuple, shards)))
