"""Tables made ahead are those that calls then ask for, so that a first call makes none. Nothing runs."""

import numpy as np
import pytest
import torch

import ringattn_kernels as rk
from ringattn_kernels import (
    attention,
    hopper,
    launches,
    plain_backward,
    plain_forward,
    split_choice,
    splits,
    table,
)
from ringattn_kernels.ahead import TensorKind
from ringattn_kernels.continued import RowPart
from tests.kernels.as_hopper import choose_as_on_hopper

CPU = torch.device("cpu")
# causal documents of 300 queries and 700 keys
TILES = [(0, 90, 0, 90, 0, 90), (90, 300, 300, 400, -310, 0), (100, 290, 450, 700, -700, 300)]
SHAPES = {
    "heads-of-128": dict(h=4, hk=2, d=128, d_v=128),
    "heads-of-64": dict(h=4, hk=4, d=64, d_v=64),
    "heads-of-96": dict(h=4, hk=2, d=96, d_v=96),
    "heads-of-256": dict(h=2, hk=1, d=256, d_v=256),
    "heads-of-192-and-128": dict(h=2, hk=2, d=192, d_v=128),
    "many-heads": dict(h=320, hk=64, d=64, d_v=64),
    "plain": dict(h=2, hk=1, d=64, d_v=64, dtype=torch.float32),
}


@pytest.fixture
def gpu_of(monkeypatch):
    """The CPU as a Hopper GPU that launches nothing."""
    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(launches, "launch", lambda kernel, table, facts, moving, make, **options: make())
    padded = hopper.statistics.PaddedStatistics
    monkeypatch.setattr(hopper.statistics, "prepare", lambda rows, *_: padded(*torch.empty(2, rows[0].shape[1] * 2, 384)))
    monkeypatch.setattr(hopper.fused, "zero_sums", lambda q, _: torch.zeros(2 * q.shape[2], 384, q.shape[3]))
    monkeypatch.setattr(hopper.fused, "finish", lambda *_: None)
    monkeypatch.setattr(attention, "merge", lambda *_: None)
    for name in ("key_kernel", "wide_key_kernel", "query_kernel"):
        monkeypatch.setattr(hopper.backward, name, Silent())
    monkeypatch.setattr(plain_forward, "forward_kernel", Silent())
    for name in ("dkdv_kernel", "dq_kernel"):
        monkeypatch.setattr(plain_backward, name, Silent())
    monkeypatch.setattr(plain_backward, "pivots", lambda row_max, row_sum, weighted: (row_max, row_sum))


class Silent:
    """A kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda **arguments: None


def tensors(h, hk, d, d_v, dtype=torch.bfloat16):
    """q, k, v and dout of two batches, with the rows of k and v first in memory."""
    q, dout = (torch.empty(2, 300, h, n, dtype=dtype) for n in (d, d_v))
    k, v = (torch.empty(700, 2, hk, n, dtype=dtype).transpose(0, 1) for n in (d, d_v))
    return q, k, v, dout


def kinds(*given):
    return [TensorKind(tuple(x.shape), x.dtype, x.device, x.stride()) for x in given]


def made_late(monkeypatch):
    def fail(arrays, device):
        raise AssertionError("a table was made in the call")

    for module in (table, splits, hopper.forward, hopper.turns):
        monkeypatch.setattr(module, "on_device", fail)
    monkeypatch.setattr(split_choice, "tables", lambda: fail(None, None))


def run_forward(q, k, v, tiles, first, final, part=None):
    state, out = None, torch.empty(*q.shape[:3], v.shape[3])
    if not first:
        state = out, *torch.empty(2, 2, q.shape[2], 300).unbind()
    continued = None if part is None else rk.ContinuedRows(part, torch.empty_like(out))
    rk.forward(q, k, v, tiles, softmax_scale=0.1, state=state, final=final, continued=continued)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("first", "final"), [(True, True), (True, False), (False, False), (False, True)])
def test_a_forward_finds_its_tables(name, first, final, gpu_of, monkeypatch):
    q, k, v, _ = tensors(**SHAPES[name])
    tiles, other = (rk.TileTable(np.array(TILES), 300, 700) for _ in range(2))
    rk.prepare_forward(*kinds(q, k, v), tiles, softmax_scale=0.1, first=first, final=final)
    made_late(monkeypatch)
    run_forward(q, k, v, tiles, first, final)
    with pytest.raises(AssertionError, match="a table was made in the call"):
        run_forward(q, k, v, other, first, final)


# heads of 96 split blocks, as the first launch of such a pass never does
@pytest.mark.parametrize(
    ("name", "first", "final"),
    [("many-heads", *passes) for passes in ((True, False), (False, False), (False, True))] + [("heads-of-96", False, True)],
)
def test_a_forward_whose_rows_do_not_all_go_on_finds_its_tables(name, first, final, gpu_of, monkeypatch):
    q, k, v, _ = tensors(**SHAPES[name])
    part = RowPart(((0, 192),))
    tiles, other = (rk.TileTable(np.array(TILES), 300, 700) for _ in range(2))
    rk.prepare_forward(*kinds(q, k, v), tiles, softmax_scale=0.1, first=first, final=final, part=part)
    made_late(monkeypatch)
    run_forward(q, k, v, tiles, first, final, part)
    with pytest.raises(AssertionError, match="a table was made in the call"):
        run_forward(q, k, v, other, first, final, part)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ordered", [False, True], ids=["any-order", "ordered"])
def test_a_backward_finds_its_tables(name, ordered, gpu_of, monkeypatch):
    q, k, v, dout = tensors(**SHAPES[name])
    queries = rk.Queries(q, dout, *torch.empty(3, 2, q.shape[2], 300).unbind())
    tiles, other = (rk.TileTable(np.array(TILES), 300, 700) for _ in range(2))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ordered)

    def run(tiles):
        dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
        rk.backward(queries, k, v, tiles, softmax_scale=0.1, dq=dq, dk=dk, dv=dv, add=False)

    rk.prepare_backward(*kinds(q, k, v, dout), tiles, softmax_scale=0.1)
    made_late(monkeypatch)
    run(tiles)
    with pytest.raises(AssertionError, match="a table was made in the call"):
        run(other)


@pytest.mark.parametrize("ordered", [False, True], ids=["any-order", "ordered"])
def test_the_tables_of_a_launch_are_uploaded_at_once(ordered, gpu_of, monkeypatch):
    """Those of a forward that splits no block, and those of a backward."""
    uploads, on_device = [], table.on_device

    def noted(arrays, device):
        uploads.append(len(arrays))
        return on_device(arrays, device)

    for module in (table, splits, hopper.forward, hopper.turns):
        monkeypatch.setattr(module, "on_device", noted)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ordered)
    q, k, v, dout = tensors(**SHAPES["many-heads"])
    tiles = rk.TileTable(np.array(TILES), 300, 700)
    run_forward(q, k, v, tiles, True, True)
    assert len(uploads) == 1
    queries = rk.Queries(q, dout, *torch.empty(3, 2, q.shape[2], 300).unbind())
    dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
    rk.backward(queries, k, v, tiles, softmax_scale=0.1, dq=dq, dk=dk, dv=dv, add=False)
    assert len(uploads) == 2


def test_kinds_answer_as_tensors_do():
    x = torch.empty(2, 3, 4, 8, dtype=torch.float16)
    kind = TensorKind((2, 3, 4, 8), torch.float16, CPU)
    assert (kind.shape, kind.stride(), kind.dtype, kind.device) == (x.shape, x.stride(), x.dtype, x.device)
    assert (kind.numel(), kind.element_size(), kind.stride(1)) == (x.numel(), x.element_size(), x.stride(1))
    assert table.kind(kind) == table.kind(x)


def test_nothing_to_do_makes_nothing(gpu_of, monkeypatch):
    made_late(monkeypatch)
    empty = rk.TileTable(np.empty((0, 6)), 300, 700)
    q, k, v, dout = kinds(*tensors(**SHAPES["heads-of-128"]))
    rk.prepare_backward(q, k, v, dout, empty, softmax_scale=0.1)
    rk.prepare_forward(TensorKind((2, 0, 4, 128), q.dtype, CPU), k, v, empty, softmax_scale=0.1, first=True, final=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tables_are_copied_while_the_gpu_computes():
    """The host does not wait, and kernels that come after find the arrays."""
    generator = np.random.default_rng(0)
    arrays = [generator.integers(0, 1 << 30, shape).astype(np.int32) for shape in ((5, 4), (0, 2), (1000, 8), (3,))]
    table.on_device(arrays, torch.device("cuda"))  # makes the page-locked memory
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    done.record()
    tensors = table.on_device(arrays, torch.device("cuda"))
    assert not done.query()
    for x, wanted in zip(tensors, arrays):
        assert x.data_ptr() % 512 == 0 or not x.numel()
        assert np.array_equal(x.cpu().numpy(), wanted)
