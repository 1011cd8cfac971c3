"""Rows that are done with the first launch of a pass leave there; all others have the bits that they have without that."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringattn_kernels as rk
from ringattn_kernels import continued, dispatch
from ringattn_kernels.continued import RowPart, continued_part
from ringattn_kernels.hopper import forward_config
from tests.kernels import dense

on_gpu = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
BLOCKS = sorted({how.block for found in (*forward_config.CONFIGS.values(), *forward_config.ROOMY.values()) for how in found})


def rows_of(part, count):
    """Which of `count` rows a part holds."""
    held = np.zeros(count, dtype=bool)
    for begin, end in part.ranges:
        held[begin:end] = True
    return held if part.inside else ~held


@pytest.fixture
def worth_it(monkeypatch):
    """Launches that are worth it however few rows they have."""
    monkeypatch.setattr(continued, "_WORTH", 1)


@given(
    rows=st.integers(1, 3000),
    later=st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 900)), max_size=6),
    heads=st.integers(1, 64),
)
def test_whole_blocks_go_on_or_are_done(rows, later, heads):
    later = np.array([(a % rows, min(rows, a % rows + n)) for a, n in later], dtype=np.int64).reshape(-1, 2)
    q = torch.empty(2, rows, heads, 128, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continued, "_WORTH", 0)
        part = continued_part(later, q, q)
    assert part is not None
    held = rows_of(part, rows)
    assert (held != rows_of(part.others, rows)).all()
    for begin, end in later:
        assert held[begin:end].all()
    for block in BLOCKS:
        firsts = np.arange(0, rows, block)
        assert all(held[row : row + block].all() or not held[row : row + block].any() for row in firsts)
        np.testing.assert_array_equal(part.of(firsts), held[firsts])
        np.testing.assert_array_equal(part.others.of(firsts), ~held[firsts])
        touched = {row // block for a, b in later for row in range(a, b)}
        # no more than the blocks of either size that later launches touch, and their neighbours up to the next common multiple
        assert not held.any() or touched
    done = int((~held).sum())
    usual = continued_part(later, q, q)
    assert usual == (part if 4 * 2 * done * heads * 128 >= 32 << 20 else None)


def test_a_gap_of_common_multiples_is_done():
    q = torch.empty(1, 4000, 64, 128, device="meta")
    assert continued_part(np.array([(400, 500), (2000, 2001)]), q, q) == RowPart(((384, 768), (1920, 2304)))
    assert continued_part(np.array([(0, 4000)]), q, q) is None


def launched(kernel):
    """Arguments of the launches since the last look, and the first rows of their works."""
    found = [(arguments, sorted({int(row) for row in arguments["works_ptr"][:, 1]})) for _, arguments in kernel.calls]
    kernel.calls.clear()
    return found


def test_blocks_are_shared_out_among_launches(recorded, worth_it):
    """Three launches: documents, then keys that few rows see, then keys that other few rows see."""
    rows, scale = 6000, 0.1
    q = torch.empty(1, rows, 64, 128, dtype=torch.bfloat16)
    keys = [torch.empty(1, n, 8, 128, dtype=torch.bfloat16) for n in (rows, 2000, 3000)]
    tables = [
        rk.TileTable(np.array(tiles), rows, len(k[0]))
        for k, tiles in zip(
            keys, (dense.documents(*[500] * 12), [(600, 1100, 0, 2000, -2000, 6000)], [(900, 1200, 0, 3000, -3000, 6000)])
        )
    ]
    later = np.concatenate([table.tiles[:, :2] for table in tables[1:]])
    part = rk.continued_rows(q, keys[0], keys[0], tables[0], later, scale)
    assert part == RowPart(((384, 1536),))
    given = rk.ContinuedRows(part, torch.empty_like(q))
    state = rk.forward(q, keys[0], keys[0], tables[0], softmax_scale=scale, final=False, continued=given)
    (goes_on, on_rows), (done, done_rows) = launched(recorded[0])
    block = on_rows[1] - on_rows[0]
    assert (
        block in BLOCKS and on_rows == list(range(384, 1536, block)) and sorted(on_rows + done_rows) == list(range(0, rows, block))
    )
    assert goes_on["out_ptr"] is state[0] and state[0].dtype == torch.float32
    assert done["out_ptr"] is given.out and not done["HAS_STATE"]
    assert all(x["row_max_ptr"] is state[1] and x["row_sum_ptr"] is state[2] for x in (goes_on, done))

    state = rk.forward(q, keys[1], keys[1], tables[1], softmax_scale=scale, state=state, final=False, continued=given)
    ((middle, _),) = launched(recorded[0])
    merges = [arguments for _, arguments in recorded[1].calls]
    assert {middle["out_ptr"].dtype} == {torch.float32} and all(x["out_ptr"] is state[0] for x in merges)

    for splits_of_last in (1, 3):
        recorded[1].calls.clear()
        out, *_ = rk.forward(
            q, keys[2], keys[2], tables[2], softmax_scale=scale, state=state, continued=given, splits=splits_of_last
        )
        assert out is given.out
        ((last, last_rows),) = launched(recorded[0])
        merged = [arguments for _, arguments in recorded[1].calls]
        if splits_of_last == 1:
            # also blocks without a pair in this launch: their state leaves now
            assert last["HAS_STATE"] and last["out_ptr"] is out and last_rows[0] == 384
            assert len(last_rows) * (last_rows[1] - last_rows[0]) == 1536 - 384 and not merged
        else:
            assert merged[0]["HAS_STATE"] and merged[0]["out_ptr"] is out
            blocks = merged[0]["blocks_ptr"]
            assert sorted(blocks[:, 0].tolist()) == list(range(384, 1536, merged[0]["BLOCK_Q"]))


def test_all_rows_go_on_where_others_would_not_be_worth_it_or_other_kernels_run(recorded, monkeypatch):
    q = torch.empty(1, 6000, 64, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 6000, 8, 128, dtype=torch.bfloat16)
    table, later = rk.TileTable(np.array(dense.causal(6000)), 6000, 6000), np.array([(0, 100)])
    assert rk.continued_rows(q, k, k, table, later, 0.1) is not None
    assert rk.continued_rows(q[:, :, :4], k[:, :, :4], k[:, :, :4], table, later, 0.1) is None
    # few queries of many keys are split
    few = rk.TileTable(np.array(dense.full(800, 6000)), 800, 6000)
    assert rk.continued_rows(q[:, :800], k, k, few, np.array([(0, 100)]), 0.1) is None
    monkeypatch.setattr(continued, "_WORTH", 1)
    assert rk.continued_rows(q[:, :800, :8], k, k, few, np.array([(0, 100)]), 0.1) is None
    monkeypatch.setattr(dispatch, "architecture", lambda device: "sm_80")
    assert rk.continued_rows(q, k, k, rk.TileTable(table.tiles, 6000, 6000), later, 0.1) is None


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("splits_of_last", [None, 1, 3])
@pytest.mark.parametrize(("heads", "d"), [((8, 2), 128), ((4, 4), 64), ((4, 2), 96), ((2, 1), 256)], ids=str)
def test_done_rows_are_those_of_a_lone_launch_and_others_keep_their_bits(heads, d, splits_of_last, worth_it):
    rows, scale = 3000, d**-0.5
    generator = torch.Generator("cuda").manual_seed(0)

    def random(n, h):
        return torch.randn(2, n, h, d, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, keys, values = random(rows, heads[0]), *([random(n, heads[1]) for n in (rows, 700, 900)] for _ in range(2))
    tiles = (
        [*dense.documents(*[500] * 5), (2500, 2600, 2500, 2600, 0, 100)],  # rows without a pair
        [(600, 700, 0, 700, -700, 3000), (1000, 1001, 3, 4, -700, 3000)],
        [(650, 1200, 0, 900, -900, 3000)],
    )
    tables = [rk.TileTable(np.array(table), rows, k.shape[1]) for table, k in zip(tiles, keys)]
    later = np.concatenate([table.tiles[:, :2] for table in tables[1:]])

    sinks = torch.randn(heads[0], generator=generator, device="cuda")

    def attend(given):
        state = None
        for number, (table, k, v) in enumerate(zip(tables, keys, values)):
            last = number == 2
            options = dict(state=state, final=last, continued=given, splits=splits_of_last if last else 1, sinks=sinks)
            state = rk.forward(q, k, v, table, softmax_scale=scale, **options)
        return state

    wanted = attend(None)
    part = continued_part(later, q, values[0])
    nan = torch.full_like(q, float("nan"))
    found = attend(rk.ContinuedRows(part, nan))
    alone = rk.forward(q, keys[0], values[0], tables[0], softmax_scale=scale, splits=1, sinks=sinks)
    held = torch.from_numpy(rows_of(part, rows)).cuda()
    assert 0 < held.sum() < rows
    for x, y, z, dim in zip(found, wanted, alone, (1, 2, 2)):
        index, done = held.nonzero()[:, 0], (~held).nonzero()[:, 0]
        assert torch.equal(x.index_select(dim, index), y.index_select(dim, index))
        assert torch.equal(x.index_select(dim, done), z.index_select(dim, done))
