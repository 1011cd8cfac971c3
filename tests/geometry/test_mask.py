"""Every mask against its definition, pair by pair; its load, reach and scales; combinations, digests, pictures and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringattn as ra
from ringattn.geometry import region
from ringattn.geometry.mask import Intersection, Load

LENGTHS = (0, 1, 2, 17, 97)


def document_of(seq_len, lengths):
    """The document of each position, -1 after the last."""
    out = np.repeat(np.arange(len(lengths)), lengths)
    return np.concatenate([out, np.full(seq_len - len(out), -1)])


def cuts(seq_len):
    """Lengths of documents that leave some padding at the end: one is empty, and up to two have one token if there is room."""
    return [seq_len // 3, 0, min(1, seq_len), min(1, seq_len // 2), seq_len // 4]


def random_blocks(seq_len, size):
    n = -(-seq_len // size)
    return np.random.default_rng(seq_len).random((n, n)) < 0.4


def documents(seq_len, causal, left, right):
    """The definition of packed documents: same document, and the window; None means no limit."""
    doc = document_of(seq_len, cuts(seq_len))

    def live(q, k):
        out = (doc[q] == doc[k]) & (doc[q] >= 0)
        if causal:
            out &= k <= q
        if left is not None:
            out &= k >= q - left
        if right is not None:
            out &= k <= q + right
        return out

    return live


# id -> (mask of a length, live(q, k) for that length)
MASKS = {
    "full": (lambda n: ra.full(), lambda n: lambda q, k: q == q),
    "causal": (lambda n: ra.causal(), lambda n: lambda q, k: k <= q),
    "window": (lambda n: ra.sliding_window(5, 2), lambda n: lambda q, k: (k >= q - 5) & (k <= q + 2)),
    "window-self-only": (lambda n: ra.sliding_window(0), lambda n: lambda q, k: q == k),
    "window-causal": (lambda n: ra.sliding_window(16), lambda n: lambda q, k: (k <= q) & (k >= q - 16)),
    "window-open-left": (lambda n: ra.sliding_window(None, 3), lambda n: lambda q, k: k <= q + 3),
    "window-open-right": (lambda n: ra.sliding_window(3, None), lambda n: lambda q, k: k >= q - 3),
    # some programs write "no limit" so
    "window-largest": (lambda n: ra.sliding_window(2**63 - 1), lambda n: lambda q, k: k <= q),
    "window-beyond-int64": (lambda n: ra.sliding_window(3, 2**64), lambda n: lambda q, k: k >= q - 3),
    "documents": (lambda n: ra.documents(lengths=cuts(n)), lambda n: documents(n, True, None, None)),
    "documents-full": (lambda n: ra.documents(lengths=cuts(n), causal=False), lambda n: documents(n, False, None, None)),
    "documents-window": (lambda n: ra.documents(lengths=cuts(n), window=4), lambda n: documents(n, True, 4, None)),
    "documents-full-window": (
        lambda n: ra.documents(lengths=cuts(n), causal=False, window=(3, 1)),
        lambda n: documents(n, False, 3, 1),
    ),
    "documents-window-largest": (
        lambda n: ra.documents(lengths=cuts(n), window=2**63 - 1),
        lambda n: documents(n, True, None, None),
    ),
    "prefix": (lambda n: ra.prefix(n // 3), lambda n: lambda q, k: (k <= q) | ((q < n // 3) & (k < n // 3))),
    "prefix-whole": (lambda n: ra.prefix(n), lambda n: lambda q, k: q == q),
    "global-first": (lambda n: ra.global_tokens(min(n, 3)), lambda n: lambda q, k: (q < 3) | (k < 3)),
    "global-positions": (
        lambda n: ra.global_tokens(torch.tensor([p for p in (9, 0, 10, 9, 60) if p < n], dtype=torch.int32)),
        lambda n: lambda q, k: np.isin(q, (0, 9, 10, 60)) | np.isin(k, (0, 9, 10, 60)),
    ),
    "dilated": (
        lambda n: ra.dilated_window((4, 1), 3),
        lambda n: lambda q, k: ((q - k) % 3 == 0) & (q - k <= 12) & (k - q <= 3),
    ),
    "dilated-largest": (lambda n: ra.dilated_window(2**62, 3), lambda n: lambda q, k: (q - k) % 3 == 0),
    "dilated-one-number": (
        lambda n: ra.dilated_window(2, 7),
        lambda n: lambda q, k: np.isin(q - k, (-14, -7, 0, 7, 14)),
    ),
    "block-sparse": (
        lambda n: ra.block_sparse(torch.from_numpy(random_blocks(n, 8)), 8),
        lambda n: lambda q, k: random_blocks(n, 8)[q // 8, k // 8],
    ),
    "block-sparse-integers": (
        lambda n: ra.block_sparse(random_blocks(n, 1).astype(int).tolist() or np.zeros((0, 0), int), 1),
        lambda n: lambda q, k: random_blocks(n, 1)[q, k],
    ),
    "longformer": (
        lambda n: ra.global_tokens(min(n, 2)) | ra.sliding_window(3, 3),
        lambda n: lambda q, k: (q < 2) | (k < 2) | (abs(q - k) <= 3),
    ),
    "longformer-decoder": (
        lambda n: (ra.global_tokens([0] if n else []) | ra.dilated_window(2, 3) | ra.sliding_window(1)) & ra.causal(),
        lambda n: lambda q, k: (k <= q) & ((k == 0) | (q == 0) | np.isin(q - k, (0, 1, 3, 6))),
    ),
    "two-dilations": (
        lambda n: ra.dilated_window(3, 2) & ra.dilated_window(3, 3),
        lambda n: lambda q, k: ((q - k) % 6 == 0) & (abs(q - k) <= 6),
    ),
    "nothing": (
        lambda n: ra.block_sparse(np.zeros((1, 1), bool), max(1, n)) if n else ra.full(),
        lambda n: lambda q, k: q != q,
    ),
}


@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_mask_is_its_definition(name, seq_len):
    make_mask, definition = MASKS[name]
    mask = make_mask(seq_len)
    wanted = definition(seq_len)(*np.indices((seq_len, seq_len)))
    dense = mask.dense(seq_len)
    assert dense.dtype == torch.bool
    assert np.array_equal(dense.numpy(), wanted)
    # regions are disjoint, so their counts add up
    assert region.count(mask.regions(seq_len)).sum() == wanted.sum()


CLAIMS = [
    ra.full(),
    ra.causal(),
    ra.prefix(20),
    ra.sliding_window(16),
    ra.sliding_window(5, 2),
    ra.sliding_window(None, 3),
    ra.dilated_window((4, 1), 3),
    ra.documents(lengths=[40, 57]),
    ra.global_tokens(4) | ra.sliding_window(3, 3),
    ra.causal() & ra.sliding_window(8),
]


@pytest.mark.parametrize("mask", CLAIMS, ids=repr)
def test_load_reach_and_scales_are_true_of_the_dense_mask(mask):
    n = 97
    dense = mask.dense(n).numpy()
    counts = dense.sum(axis=1)  # the keys that each query sees
    ends = mask.reach or 0
    if mask.load is Load.EVEN:
        assert len(set(counts[ends : n - ends])) == 1
    if mask.load is Load.GROWING:
        assert (np.diff(counts) >= 0).all()
        assert counts[-1] > counts[0]
    if mask.reach is not None:
        first, last = dense.argmax(axis=1), n - 1 - dense[:, ::-1].argmax(axis=1)
        assert (last - first)[counts > 0].max() == mask.reach
    if mask.scales and mask.reach is not None:
        assert set(mask.dense(2 * n).numpy().sum(axis=1)[ends : 2 * n - ends]) == set(counts[ends : n - ends])
    if mask.scales and mask.reach is None:
        means = [mask.dense(tokens).sum(dim=1).double().mean() for tokens in (n, 2 * n, 3 * n)]
        assert float(means[2] - means[1]) == pytest.approx(float(means[1] - means[0]))


@given(st.data())
def test_combinations_are_their_definitions(mask_strategy, data):
    seq_len = data.draw(st.sampled_from([0, 1, 2, 7, 17, 33]))
    mask, live = data.draw(mask_strategy(seq_len))
    assert np.array_equal(mask.dense(seq_len).numpy(), live)
    assert region.count(mask.regions(seq_len)).sum() == live.sum()


def test_operators_follow_set_algebra():
    n = 41
    a, b, c = ra.sliding_window(4, 4), ra.documents([10, 20, 11], causal=False), ra.dilated_window(3, 5)
    dense = [mask.dense(n) for mask in (a, b, c)]
    assert torch.equal(((a | b) & c).dense(n), (dense[0] | dense[1]) & dense[2])
    assert torch.equal((a | (b & c)).dense(n), dense[0] | (dense[1] & dense[2]))
    assert torch.equal((a | a).dense(n), dense[0])
    assert torch.equal((a & a).dense(n), dense[0])


def test_thousands_of_documents():
    generator = np.random.default_rng(0)
    lengths = generator.choice([0, 1, 1, 2, 3, 17], size=4000)
    total = int(lengths.sum())
    mask = ra.documents(lengths=lengths)
    doc = document_of(total, lengths)
    live = sum(n * (n + 1) // 2 for n in lengths.tolist())
    assert region.count(mask.regions(total)).sum() == live
    q, k = np.indices((500, 500))
    for start in (0, total // 2, total - 500):
        table = mask.regions(total)
        inside = table[(table[:, 0] < start + 500) & (table[:, 1] > start)]
        window = np.zeros((500, 500), dtype=int)
        for q_start, q_stop, k_start, k_stop, lo, hi, _ in inside - np.array([start] * 4 + [0] * 3):
            window += (q_start <= q) & (q < q_stop) & (k_start <= k) & (k < k_stop) & (lo <= q - k) & (q - k <= hi)
        part = doc[start : start + 500]
        assert np.array_equal(window, (part[q] == part[k]) & (k <= q))


def test_thousands_of_one_token_documents_see_themselves():
    assert torch.equal(ra.documents([1] * 2000).dense(2000), torch.eye(2000, dtype=torch.bool))


@pytest.mark.parametrize("window", [None, 3, (2, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_bounds_and_lengths_are_the_same_documents(causal, window):
    same = [
        ra.documents([0, 4, 4, 9], causal=causal, window=window),
        ra.documents([4, 0, 5], causal=causal, window=window),
        ra.documents(lengths=[4, 0, 5], causal=causal, window=window),
        ra.documents(torch.tensor([0, 4, 4, 9], dtype=torch.int32), causal=causal, window=window),
        ra.documents(cu_seqlens=np.array([0, 4, 4, 9]), causal=causal, window=window),
    ]
    assert len({mask.digest for mask in same}) == 1
    assert len(set(same)) == 1


def test_padding_after_the_last_document_is_dead():
    dense = ra.documents([3, 2]).dense(9)
    assert not dense[5:].any()
    assert not dense[:, 5:].any()


DOCUMENTS = ra.documents([3, 4])
SPELLINGS = {
    "itself": [ra.prefix(3), ra.prefix(3) & ra.prefix(3), ra.prefix(3) | ra.prefix(3)],
    "full": [ra.full(), ra.full() & ra.full(), ra.sliding_window(None, None)],
    "causal": [ra.causal(), ra.full() & ra.causal(), ra.sliding_window(None), ra.causal() & ra.sliding_window(None, 5)],
    "window": [ra.sliding_window(2), ra.sliding_window(2, None) & ra.causal(), ra.sliding_window(2, 9) & ra.sliding_window(7, 0)],
    "documents": [
        DOCUMENTS,
        DOCUMENTS & DOCUMENTS,
        ra.causal() & DOCUMENTS,
        DOCUMENTS & ra.documents([3, 4], causal=False),
        ra.documents([3, 4], causal=False) & ra.causal(),
        ra.documents([3, 4], causal=False, window=(None, 0)),
        ra.documents([3, 4], window=(None, 5)) & ra.full(),
    ],
    "documents-window": [
        ra.documents([3, 4], window=2),
        ra.documents([3, 4], window=(2, 0)),
        DOCUMENTS & ra.sliding_window(2),
        ra.sliding_window(2, None) & DOCUMENTS,
        ra.causal() & ra.documents([3, 4], causal=False) & ra.sliding_window(2, 7),
        DOCUMENTS & ra.documents([3, 4], causal=False, window=2),
    ],
    "documents-both-sides": [
        ra.documents([3, 4], causal=False, window=(2, 1)),
        ra.documents([3, 4], causal=False) & ra.sliding_window(2, 1),
    ],
}


@pytest.mark.parametrize("spellings", SPELLINGS.values(), ids=SPELLINGS)
def test_equal_masks_have_equal_digests(spellings):
    assert len({mask.digest for mask in spellings}) == 1
    assert len({repr(mask) for mask in spellings}) == 1


@pytest.mark.parametrize("b", [ra.documents([4, 3], causal=False), ra.prefix(2), ra.documents([3, 4], kv_lengths=[5, 1])], ids=repr)
def test_other_combinations_stay_apart(b):
    assert len({mask.digest for mask in (DOCUMENTS, b, DOCUMENTS & b, b & DOCUMENTS)}) == 4


SIDES = st.one_of(st.none(), st.integers(0, 5))
BANDS = st.one_of(
    st.sampled_from([ra.full(), ra.causal()]),
    st.builds(ra.sliding_window, SIDES, SIDES),
    st.builds(ra.documents, st.sampled_from([[3, 0, 5], [2, 7]]), st.booleans(), st.tuples(SIDES, SIDES)),
)


@given(BANDS, BANDS, st.integers(9, 12))
def test_what_is_written_as_one_mask_is_live_in_both(a, b, n):
    both, apart = a & b, Intersection(a, b)
    assert torch.equal(both.dense(n), a.dense(n) & b.dense(n))
    assert both.min_length == apart.min_length
    regions = [sorted(mask.regions(n).tolist()) for mask in (both, apart)]
    assert regions[0] == regions[1]


DIFFERENT = {
    "full": ra.full(),
    "causal": ra.causal(),
    "window": ra.sliding_window(3, 1),
    "window-other": ra.sliding_window(1, 3),
    "window-open": ra.sliding_window(None, 1),
    "documents": ra.documents([3, 4]),
    "documents-other": ra.documents([4, 3]),
    "documents-full": ra.documents([3, 4], causal=False),
    "documents-window": ra.documents([3, 4], window=2),
    "prefix": ra.prefix(3),
    "global": ra.global_tokens(3),
    "global-other": ra.global_tokens([0, 2]),
    "dilated": ra.dilated_window(3, 2),
    "dilated-other": ra.dilated_window((3, 2), 2),
    "blocks": ra.block_sparse([[1, 0], [0, 1]], 4),
    "blocks-other": ra.block_sparse([[1, 1], [0, 1]], 4),
    "blocks-size": ra.block_sparse([[1, 0], [0, 1]], 8),
    "union": ra.causal() | ra.prefix(3),
    "intersection": ra.causal() & ra.prefix(3),
}


def test_different_masks_have_different_digests():
    assert len({mask.digest for mask in DIFFERENT.values()}) == len(DIFFERENT)
    assert len(set(DIFFERENT.values())) == len(DIFFERENT)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_mask_built_again_is_equal(name):
    mask = DIFFERENT[name]
    again = eval(repr(mask), vars(ra)) if "<" not in repr(mask) else mask
    assert again == mask
    assert hash(again) == hash(mask)
    assert mask != repr(mask)


def test_global_tokens_of_positions_in_any_order_are_equal():
    assert ra.global_tokens([2, 0, 1, 1]) == ra.global_tokens(3) == ra.global_tokens(range(3))


@pytest.mark.parametrize("seq_len", [0, 1, 17, 97, 200])
def test_bigbird(seq_len):
    size, window, first, random = 4, 3, 2, 3
    mask = ra.bigbird(seq_len, size, window_blocks=window, global_blocks=first, random_blocks=random, seed=5)
    dense = mask.dense(seq_len).numpy()
    n = -(-seq_len // size)
    q, k = np.indices((n, n))
    blocks = dense[::size, ::size]
    assert np.array_equal(dense, np.kron(blocks, np.ones((size, size), bool))[:seq_len, :seq_len])
    fixed = (abs(q - k) <= window // 2) | (q < first) | (k < first)
    assert blocks[fixed].all()
    for row in range(first, n):
        assert (blocks[row] & ~fixed[row]).sum() == min(random, (~fixed[row]).sum())


def test_bigbird_draws_the_same_blocks_from_a_seed():
    draws = [ra.bigbird(4096, 64, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


@pytest.mark.parametrize("layout", [None, ra.zigzag(32, 4), ra.striped(32, 11)], ids=["alone", "zigzag", "striped"])
def test_picture_is_a_png(tmp_path, layout):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    path = tmp_path / "mask.png"
    (ra.causal() & ra.sliding_window(9)).picture(str(path), seq_len=32, layout=layout)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width > 500
    assert height > 500


def test_picture_refuses_another_length():
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    with pytest.raises(ValueError, match="seq_len is 64, but zigzag"):
        ra.causal().picture(layout=ra.zigzag(32, 4))
    with pytest.raises(ValueError, match="seq_len is 0"):
        ra.causal().picture(seq_len=0)
    with pytest.raises(ValueError, match="at most 4096"):
        ra.causal().picture(seq_len=5000)


REFUSED = {
    "negative-window": (lambda: ra.sliding_window(-1), "left is -1, but must be at least 0"),
    "negative-right": (lambda: ra.sliding_window(1, -2), "right is -2, but must be at least 0"),
    "fractional-window": (lambda: ra.sliding_window(1.5), "left is 1.5, but must be an integer"),
    "bool-window": (lambda: ra.sliding_window(True), "left is True, but must be an integer"),
    "dilation-0": (lambda: ra.dilated_window(3, 0), "dilation is 0, but must be at least 1"),
    "dilated-negative": (lambda: ra.dilated_window((3, -1), 2), "window is -1, but must be at least 0"),
    "documents-nothing": (lambda: ra.documents(), "got neither"),
    "documents-both": (lambda: ra.documents([0, 3], lengths=[3]), "got both"),
    "documents-empty": (lambda: ra.documents([]), "cu_seqlens is empty"),
    "lengths-empty": (lambda: ra.documents(lengths=[]), "lengths is empty"),
    "documents-decreasing": (lambda: ra.documents([0, 5, 3]), "decreases from 5 to 3 at index 2"),
    "documents-negative": (lambda: ra.documents([3, -2]), "negative length -2"),
    "documents-float": (lambda: ra.documents([0.0, 3.0]), "dtype float64, but must hold integers"),
    "documents-2d": (lambda: ra.documents(torch.zeros(2, 2, dtype=torch.int64)), r"shape \(2, 2\), but must be one-dimensional"),
    "documents-window": (lambda: ra.documents([3], window=-1), "window is -1, but must be at least 0"),
    "documents-causal": (lambda: ra.documents([3], causal=1), "causal is 1, but must be a bool"),
    "prefix-negative": (lambda: ra.prefix(-1), "n is -1, but must be at least 0"),
    "prefix-float": (lambda: ra.prefix(2.0), "n is 2.0, but must be an integer"),
    "global-negative": (lambda: ra.global_tokens([3, -1]), "negative position -1"),
    "global-negative-count": (lambda: ra.global_tokens(-1), "n_or_positions is -1, but must be at least 0"),
    "global-bool": (lambda: ra.global_tokens(True), "n_or_positions is True"),
    "global-float": (lambda: ra.global_tokens([0.5]), "must hold integers"),
    "blocks-not-square": (lambda: ra.block_sparse(torch.ones(2, 3, dtype=torch.bool), 4), r"shape \(2, 3\), but must be a square"),
    "blocks-1d": (lambda: ra.block_sparse([True], 4), r"shape \(1,\), but must be a square"),
    "blocks-values": (lambda: ra.block_sparse([[2]], 4), "must be bool, or integers of 0 and 1"),
    "blocks-float": (lambda: ra.block_sparse([[1.0]], 4), "dtype float64, but must be bool"),
    "blocks-size-0": (lambda: ra.block_sparse([[True]], 0), "block_size is 0, but must be at least 1"),
    "bigbird-even": (lambda: ra.bigbird(64, 8, window_blocks=2), "window_blocks is 2, but must be odd"),
    "bigbird-negative": (lambda: ra.bigbird(64, 8, random_blocks=-1), "random_blocks is -1, but must be at least 0"),
    "bigbird-global": (lambda: ra.bigbird(64, 8, global_blocks=-1), "global_blocks is -1, but must be at least 0"),
    "bigbird-length": (lambda: ra.bigbird(-64, 8), "seq_len is -64, but must be at least 0"),
    "or-tensor": (lambda: ra.causal() | torch.ones(3, 3), "masks combine with masks only, but got a Tensor"),
    "and-none": (lambda: ra.causal() & None, "masks combine with masks only, but got a NoneType"),
    "longer-documents": (
        lambda: ra.documents([5, 6]).regions(10),
        "needs at least 11 tokens and is longer than the sequence of 10",
    ),
    "longer-prefix": (lambda: ra.prefix(4).regions(3), "needs at least 4 tokens"),
    "longer-global": (lambda: ra.global_tokens([7]).regions(7), "needs at least 8 tokens"),
    "longer-union": (lambda: (ra.causal() | ra.prefix(4)).regions(3), "needs at least 4 tokens"),
    "blocks-short": (lambda: ra.block_sparse([[1, 0], [0, 1]], 4).regions(9), "covers at most 8 tokens, but the sequence has 9"),
    "blocks-long": (lambda: ra.block_sparse([[1, 0], [0, 1]], 4).regions(4), "needs at least 5 tokens"),
    "intersection-short": (lambda: (ra.causal() & ra.block_sparse([[1]], 4)).dense(5), "covers at most 4 tokens"),
    "negative-length": (lambda: ra.causal().regions(-1), "seq_len is -1, but must be at least 0"),
    "fractional-length": (lambda: ra.causal().dense(4.0), "seq_len is 4.0, but must be an integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal(name):
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        build()
