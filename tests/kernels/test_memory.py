"""Every kernel in each of its forms, once on small shapes, for a GPU with compute-sanitizer to look at.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 --target-processes application-only \\
        python -m pytest -m gpu tests/kernels/test_memory.py

Without torch's cache every tensor is an allocation of its own, so that an access past its end is one. Without the sanitizer the tests show
that kernels read nothing that is not there: memory holds NaN until it is written, and results are finite.
"""

import importlib
import itertools
import math
import pkgutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import triton

import ringattn_kernels as rk
from ringattn_kernels import hopper, mailbox
from ringattn_kernels import launches as kernel_launches
from ringattn_kernels.dispatch import Kernels
from ringattn_kernels.modifiers import Bias, Modifiers
from tests.kernels import dense, fuzz
from tests.kernels.as_hopper import choose_as_on_hopper
from tests.kernels.test_hopper_backward import launch_anew

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# full steps, and edges of either side; the last rows of both are in no whole block, some rows of both in no tile
Q_ROWS, K_ROWS = 301, 499
TILES = np.array([(0, 140, 0, 499, -499, 140), (140, 261, 0, 311, -30, 250), (270, 301, 320, 499, -200, -40)])


@dataclass(frozen=True)
class Form:
    """What decides which kernels run; `kernels` is for the backward, and the forward is plain if the backward is.

    modified: by ALiBi and a bias. learned: with their gradients.
    """

    d: int
    dv: int
    kernels: Kernels | None = None
    dtype: torch.dtype = BF16
    sign: int = 1
    modified: bool = False
    learned: bool = False

    def __str__(self) -> str:
        kernels = "chosen" if self.kernels is None else self.kernels.name
        name = f"{kernels}-{self.d}-{self.dv}-{str(self.dtype).removeprefix('torch.')}" + ("-negative" if self.sign < 0 else "")
        return name + ("-learned" if self.learned else "-modified" if self.modified else "")


PLAIN = [
    *(Form(d, dv, Kernels.PLAIN) for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512), (96, 40))),
    Form(128, 128, Kernels.PLAIN, FP16),
    *(Form(d, dv, Kernels.PLAIN, FP32) for d, dv in ((64, 64), (24, 40))),
    Form(64, 64, Kernels.PLAIN, sign=-1),
]
BACKWARDS = {
    Kernels.HOPPER: hopper.head_dims.IN_TWO,
    Kernels.HOPPER_ORDERED: hopper.head_dims.IN_ONE,
    Kernels.HOPPER_FUSED: hopper.head_dims.IN_ONE,
}
HOPPER = [Form(d, dv, kernels) for kernels, dims in BACKWARDS.items() for d, dv in dims]
# forwards of further head dims and another type
HOPPER += [Form(96, 40), Form(72, 88), Form(160, 192), Form(128, 128, dtype=FP16)]
HOPPER += [Form(256, 256, Kernels.HOPPER, modified=True), Form(64, 64, Kernels.HOPPER_FUSED, modified=True, learned=True)]


def run(form: Form, launches: int, splits: int, sums: bool, device: str) -> list[torch.Tensor]:
    """Forward and backward, in so many launches of so many splits; dq as `QuerySums` or as a tensor."""
    generator = torch.Generator().manual_seed(0)

    def tensor(rows: int, heads: int, dim: int) -> torch.Tensor:
        """(2, rows, heads, dim), heads first in memory."""
        return torch.randn(heads, 2, rows, dim, generator=generator).to(device, form.dtype).permute(1, 2, 0, 3)

    q, k, v, dout = (tensor(Q_ROWS, 4, form.d), *(tensor(K_ROWS, 2, dim) for dim in (form.d, form.dv)), tensor(Q_ROWS, 4, form.dv))
    tables = [rk.TileTable(TILES[n::launches], Q_ROWS, K_ROWS, np.zeros((len(TILES[n::launches]), 2))) for n in range(launches)]
    softmax_scale = form.sign * form.d**-0.5
    score, learned = {}, []
    if form.modified:
        slopes, values = (torch.rand(shape, generator=generator).to(device) for shape in ((2, 4), (4, 4)))
        score["modifiers"] = Modifiers(slopes=slopes, bias=Bias((-300, -20, 5), values))
    with fuzz.memory_of_nan():
        state = None
        for n, table in enumerate(tables):
            options = dict(final=n == launches - 1, kernels=form.kernels if form in PLAIN else None, splits=splits)
            with fuzz.forward_launch(launches // 2 + splits // 2 + n, form.d, form.dv):
                state = rk.forward(q, k, v, table, softmax_scale=softmax_scale, state=state, **score, **options)
        sinks = torch.zeros(4, device=device)
        out, row_max, row_sum = rk.with_sinks(*state, sinks)
        queries = rk.Queries(q, dout, row_max, row_sum, rk.delta(out, dout))
        dsinks = rk.sinks_gradient(row_max, row_sum, queries.delta, sinks)
        dtype = form.dtype if launches == 1 else FP32
        dq, dk, dv = (torch.empty_like(x, dtype=dtype) for x in (q, k, v))
        if sums:
            dq = rk.QuerySums(q, softmax_scale)
        # the other two split no block
        splits = (
            1 if form.kernels in (Kernels.HOPPER, Kernels.HOPPER_ORDERED) or (form.kernels is None and form.dv > 128) else splits
        )
        if form.learned:
            score["sums"] = dense.zero_sums(score["modifiers"])
            learned = [*score["sums"].tensors]
        for n, table in enumerate(tables):
            options = dict(dq=dq, dk=dk, dv=dv, add=n > 0, kernels=form.kernels, deterministic=False, splits=splits)
            rk.backward(queries, k, v, table, softmax_scale=softmax_scale, **score, **options)
        if launches > 1:
            # as behind the launches of a ring
            index = torch.arange(0, k.shape[1], 2, device=device)
            taken = rk.take_rows((dk.transpose(0, 1), dv.transpose(0, 1)), index)
            rk.add_rows(rk.take_rows((dk.transpose(0, 1), dv.transpose(0, 1))), taken, index)
            rk.zero(*taken)
            dk, dv = rk.rounded_pair((dk, dv), form.dtype)
        return [out, row_sum, dsinks, dq.finish(form.dtype) if sums else dq, dk, dv, *learned]


def run_all(form: Form, device: str) -> list[torch.Tensor]:
    """One launch, which overwrites, and three, which add; with whole blocks and with splits."""
    ways = itertools.product((1, 3), (1, 3), (False, True))
    return [x for launches, splits, sums in ways for x in run(form, launches, splits, sums, device)]


PAGED = [(d, dv, dtype) for d, dv in ((64, 64), (128, 128), (256, 256), (512, 512), (96, 40)) for dtype in (BF16, FP16)] + [
    (64, 40, FP32)
]


def run_paged(d: int, dv: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Attention to pages, of one rank and of two, with pages of 16 and 128 tokens, of 1 and 16 queries, plain and modified."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for page_size, tokens, modified in itertools.product((16, 128), (1, 16), (False, True)):
        columns = -(-300 // page_size)
        pool = [torch.randn(3 * columns, 2, page_size, dim, generator=generator).to(device, dtype) for dim in (d, dv)]
        q = torch.randn(3, tokens, 8, d, generator=generator).to(device, dtype)
        pages = torch.arange(3 * columns, dtype=torch.int32, device=device).view(3, columns)
        lengths = torch.tensor([300, 16, 129], device=device)
        modifiers = Modifiers(5.0, torch.rand(3, 8, generator=generator).to(device)) if modified else None
        options = dict(softmax_scale=d**-0.5, window=100 if modified else None, modifiers=modifiers)
        sinks = torch.zeros(8, device=device)
        with fuzz.memory_of_nan():
            found += rk.attend_pages(q, *pool, rk.PageTable(lengths, 0 * lengths, pages, 1), **options, sinks=sinks)
            packed = torch.empty(2, q[..., 0].numel() * (dv + 2), device=device)
            for rank in range(2):
                table = rk.PageTable(lengths, 0 * lengths + rank, pages[:, : -(-columns // 2)].contiguous(), 2)
                rk.attend_pages(q, *pool, table, **options, packed=packed[rank])
            found += rk.merge_packed(packed, q, dv, sinks)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("form", PAGED, ids=str)
def test_paged_kernels_leave_nothing_unwritten(form):
    assert all(x.isfinite().all() for x in run_paged(*form, "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("form", PLAIN, ids=str)
def test_plain_kernels_leave_nothing_unwritten(form):
    assert all(x.isfinite().all() for x in run_all(form, "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
@pytest.mark.parametrize("form", HOPPER, ids=str)
def test_kernels_for_hopper_leave_nothing_unwritten(form):
    assert all(x.isfinite().all() for x in run_all(form, "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU")
@pytest.mark.parametrize("d", [64, 96, 128])
def test_programs_that_have_heads_for_themselves_leave_nothing_unwritten(d, monkeypatch):
    monkeypatch.setattr(hopper.fused, "UNUSED", 1)
    monkeypatch.setattr(hopper.fused, "MET", {d: math.inf})
    # memory is filled in torch's deterministic mode, in which no program has heads for itself
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    table, softmax_scale = rk.TileTable(TILES, Q_ROWS, K_ROWS), d**-0.5
    q, k, v, dout = (
        torch.randn(2, rows, heads, d, device="cuda", dtype=BF16)
        for rows, heads in ((Q_ROWS, 4), (K_ROWS, 2), (K_ROWS, 2), (Q_ROWS, 4))
    )
    with fuzz.memory_of_nan():
        out, *statistics = rk.forward(q, k, v, table, softmax_scale=softmax_scale)
        queries = rk.ready_queries(q, out.to(BF16), dout, *statistics, once=True, alone=(k, v, table))
        assert queries.ready is not None and queries.ready[1] is None
        dq, dk, dv = rk.QuerySums(q, softmax_scale, BF16, queries), torch.empty_like(k), torch.empty_like(v)
        rk.backward(queries, k, v, table, softmax_scale=softmax_scale, dq=dq, dk=dk, dv=dv, add=False)
        assert all(x.isfinite().all() for x in (dq.finish(BF16), dk, dv))


def test_the_forms_launch_every_kernel_there_is(monkeypatch):
    launched = set()

    def launch(self, *args, grid, warmup, **kwargs):
        launched.add(self.fn.__name__)

    monkeypatch.setattr(triton.JITFunction, "run", launch)
    monkeypatch.setattr(kernel_launches, "launch", launch_anew)
    choose_as_on_hopper(monkeypatch)
    for form in PLAIN + HOPPER:
        run(form, launches=3, splits=3, sums=True, device="cpu")
    run_paged(*PAGED[0], "cpu")
    state = torch.empty(3, 2, 4, 8), *torch.empty(2, 3, 2, 4)
    rk.merge_rows(state, state)
    arena, turns = (torch.empty(mailbox.flag_words(n) + 64, dtype=torch.int32) for n in (2, 1))
    mailbox.all_gather(torch.empty(2, 16, dtype=torch.int32), arena, torch.empty(2, dtype=torch.int64), turns, 0)
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(rk.__path__, "ringattn_kernels.")]
    kernels = {name for module in modules for name, x in vars(module).items() if isinstance(x, triton.JITFunction)}
    assert launched == {name for name in kernels if name.endswith("_kernel")}
