"""Launches made ready once: each is what Triton would have launched, with the arguments of its own call. Nothing runs."""

import itertools
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, create_function_from_signature

import ringattn_kernels as rk
from ringattn_kernels import compiled, hopper, launches, splits
from ringattn_kernels.hopper import descriptors, forward_config, statistics

BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def found_by(kernel, arguments):
    """The key by which Triton finds a compiled kernel."""
    return create_function_from_signature(kernel.signature, kernel.params, BACKEND)(**arguments)[1]


class Device:
    """A device that keeps what is launched on it."""

    def __init__(self):
        self.number = 0
        self.compiled = 0  # how often Triton was asked for a kernel
        self.ready = 0  # how many launches were made ready
        self.launched = []
        self.tables = {name: rk.TileTable(np.array(tiles), 300, 700) for name, tiles in TILES.items()}

    def warmup(self, kernel, *, grid, num_warps, maxnreg, **arguments):
        self.compiled += 1
        return Compiled(self, (kernel.fn, found_by(kernel, arguments), num_warps, maxnreg, self.number), kernel.arg_names)


class Compiled:
    def __init__(self, device, variant, names):
        self.device, self.variant, self.names = device, variant, names

    def __getitem__(self, grid):
        return lambda *values: self.device.launched.append((self.variant, grid, dict(zip(self.names, values, strict=True))))


@pytest.fixture
def device(monkeypatch):
    """A device on which every launch is compared with the one that Triton would make."""
    device, launch = Device(), launches.launch

    def compared(kernel, table, facts, moving, make, *, num_warps, maxnreg=None):
        launch(kernel, table, facts, moving, make, num_warps=num_warps, maxnreg=maxnreg)
        programs, expected = make()
        if programs:
            variant, grid, arguments = device.launched.pop()
            assert variant == (kernel.fn, found_by(kernel, expected), num_warps, maxnreg, device.number)
            assert grid == (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
            for name, x in expected.items():
                assert same(arguments[name], x), name
        assert not device.launched

    monkeypatch.setattr(JITFunction, "warmup", lambda kernel, **options: device.warmup(kernel, **options))
    monkeypatch.setattr(launches, "launch", compared)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: device.number))
    monkeypatch.setattr(launches, "driver", driver)
    monkeypatch.setattr(compiled, "driver", driver)
    find = compiled.compiled_for

    def found(*options):
        device.ready += 1
        return find(*options)

    monkeypatch.setattr(launches, "compiled_for", found)
    launches._place.cache_clear()
    compiled._place.cache_clear()
    padded = statistics.PaddedStatistics
    monkeypatch.setattr(statistics, "prepare", lambda rows, *_: padded(*torch.empty(2, rows[0].shape[1] * 2, 384)))
    for module in (hopper.forward, hopper.fused):
        monkeypatch.setattr(module, "work_counter", lambda device: torch.zeros(3, dtype=torch.int32))
    return device


def same(x, y):
    if isinstance(x, TensorDescriptor):
        return x.base is y.base and {**vars(x), "base": None} == {**vars(y), "base": None}
    return x is y if isinstance(x, torch.Tensor) else (x, type(x)) == (y, type(y))


# some of the pairs of 300 queries and 700 keys, all, or none
TILES = {"some": [(5, 140, 100, 150, -300, 300)], "all": [(0, 300, 0, 700, -700, 300)], "none": []}


def make(*shape, dtype=torch.bfloat16, rows_first=False, offset=0, gap=0):
    """A tensor, with its rows first in memory, `offset` elements behind an aligned address, `gap` elements between heads."""
    b, s, h, d = shape
    x = torch.empty(b * s * h * (d + gap) + 16 + offset, dtype=dtype)
    x = x[-x.data_ptr() % 16 // x.element_size() + offset :][: b * s * h * (d + gap)]
    x = x.view(s, b, h, d + gap).transpose(0, 1) if rows_first else x.view(b, s, h, d + gap)
    return x[..., :d]


def forward(
    device, heads=(4, 2), d=128, dtype=torch.bfloat16, q=None, kv=None, out=None, before=None, final=True, scale=0.1, alike=False,
    tiles="some", touched_only=False, splits=1, how=0, **options,
):  # fmt: skip
    h, hk = heads
    q, k, v = make(2, 300, h, d, dtype=dtype, **q or {}), *(make(2, 700, hk, d, dtype=dtype, **kv or {}) for _ in range(2))
    statistics = torch.empty(2, 2, h, 300).unbind()
    state = None if before is None else (make(2, 300, h, d, dtype=torch.float32, **before), *statistics)
    out = state[0] if state and not final else make(2, 300, h, d, dtype=dtype if final else torch.float32, **out or {})
    v = k if alike else v
    launch = forward_config.configs_for(d, d)[how]
    hopper.forward.launch(q, k, v, device.tables[tiles], out, *statistics, scale, state, touched_only, splits, launch, **options)
    return [weakref.ref(x) for x in (q, k, v, out)]


FORWARD = [
    dict(heads=(6, 2)),
    dict(heads=(4, 4)),
    dict(dtype=torch.float16),
    dict(d=64),
    dict(d=64, how=1),
    dict(d=96),
    dict(q=dict(rows_first=True)),
    dict(kv=dict(rows_first=True)),
    dict(kv=dict(gap=8)),
    dict(out=dict(offset=1)),
    dict(final=False),
    dict(before={}),
    dict(before=dict(offset=1)),
    dict(before={}, final=False),
    dict(before={}, final=False, touched_only=True),
    dict(splits=2),
    dict(how=1),
    dict(programs=3),
    dict(tiles="none"),
    dict(tiles="all"),
]


def backward(
    device, heads=(4, 2), d=128, dtype=torch.bfloat16, q=None, kv=None, grads=None, add=True, ordered=False, scale=0.1, alike=False,
    tiles="some", splits=1,
):  # fmt: skip
    h, hk = heads
    q, dout = (make(2, 300, h, d, dtype=dtype, **q or {}) for _ in range(2))
    k, v = (make(2, 700, hk, d, dtype=dtype, **kv or {}) for _ in range(2))
    dk, dv = (make(2 * splits, 700, hk, d, **{"dtype": torch.float32, **(grads or {})}) for _ in range(2))
    v = k if alike else v
    queries = rk.Queries(q, dout, *torch.empty(3, 2, h, 300).unbind())
    sums = torch.empty(2 * h, 384, d)
    outputs = dict(sums=sums, dk=dk, dv=dv, add=add, ordered=ordered)
    hopper.fused.backward(queries, k, v, device.tables[tiles], scale, prepared=None, **outputs)
    return [weakref.ref(x) for x in (q, k, v, dout, dk, dv, sums)]


BACKWARD = [
    dict(heads=(6, 2)),
    dict(heads=(4, 4)),
    dict(dtype=torch.float16),
    dict(d=64),
    dict(d=96),
    dict(q=dict(rows_first=True)),
    dict(kv=dict(rows_first=True)),
    dict(kv=dict(gap=8)),
    dict(grads=dict(offset=1)),
    dict(grads=dict(rows_first=True)),
    dict(grads=dict(gap=4)),
    dict(add=False),
    dict(add=False, grads=dict(dtype=torch.bfloat16)),
    dict(add=False, splits=2),
    dict(ordered=True),
    dict(ordered=True, d=96),
    dict(scale=1),
    dict(scale=2),
    dict(tiles="all"),
]


@pytest.mark.parametrize(("call", "kinds"), [(forward, FORWARD), (backward, BACKWARD)], ids=["forward", "backward"])
def test_calls_that_differ_in_more_than_addresses_have_launches_of_their_own(call, kinds, device):
    for kind in kinds:
        call(device)
        call(device, **kind)
    for kind in kinds:
        call(device, **kind)


@pytest.mark.parametrize("call", [forward, backward])
def test_calls_of_a_kind_share_a_launch_that_keeps_none_of_their_tensors(call, device):
    for options in ({"alike": True}, {}, {"scale": 0.2}, {}):
        tensors = call(device, **options)
        assert not any(x() is not None for x in tensors)
    assert device.ready == 1
    # a table never seen has a launch of its own, whose kernel is known
    device.tables["some"] = rk.TileTable(np.array([(0, 100, 0, 200, -300, 300)]), 300, 700)
    call(device)
    assert (device.ready, device.compiled) == (2, 1)
    device.number = 1
    call(device)
    assert (device.ready, device.compiled) == (3, 2)


def delta(device, rows=300, **options):
    out, dout = make(2, rows, 4, 64, **options), make(2, rows, 4, 64)
    rk.delta(out, dout)
    return [weakref.ref(x) for x in (out, dout)]


def finish(device, rows=300, dtype=torch.bfloat16, scale=0.1, **options):
    sums, dq = torch.empty(8, -(-rows // 128) * 128, 64), make(2, rows, 4, 64, dtype=dtype, **options)
    hopper.fused.finish(sums, dq, scale, dtype == torch.float32)
    return [weakref.ref(x) for x in (sums, dq)]


def partials(device, most=2, dtype=torch.float32, dims=(64, 96), **options):
    table = device.tables["all"]
    how = splits.key_splits(table, 128, 64, 4, 2, torch.device("cpu"), most)
    outputs = tuple(make(2, 700, 2, d, dtype=dtype, **options) for d in dims)
    add, found = splits.partial_gradients(how, dtype == torch.float32, *outputs)
    splits.add_partials(how, table, not add and dtype == torch.float32, found, outputs)
    return [weakref.ref(x) for x in (*outputs, *found)]


OTHERS = {
    delta: [dict(rows=299), dict(offset=1), dict(rows_first=True), dict(gap=8), dict(dtype=torch.float16)],
    finish: [dict(rows=301), dict(offset=1), dict(rows_first=True), dict(dtype=torch.float32), dict(scale=1)],
    partials: [
        dict(most=3),
        dict(dims=(64,)),
        dict(dims=(96, 64)),
        dict(offset=1),
        dict(rows_first=True),
        dict(gap=4),
        dict(dtype=torch.bfloat16),
    ],
}


@pytest.mark.parametrize("call", OTHERS, ids=lambda call: call.__name__)
def test_small_kernels_are_made_ready_once_too(call, device):
    for _ in range(2):
        assert not any(x() is not None for x in call(device))
    assert device.ready == 1
    for _ in range(2):
        for kind in OTHERS[call]:
            call(device, **kind)
    assert device.ready == 1 + len(OTHERS[call])


def test_what_few_launches_have_in_common_is_forgotten(device):
    for rows in range(1, launches._KEPT + 2):
        delta(device, rows)
    assert launches._place.cache_info().currsize == launches._KEPT


@triton.jit
def one(x_ptr):
    pass


@triton.jit
def other(x_ptr):
    pass


def test_kernels_are_told_apart(device):
    table, x = device.tables["all"], make(1, 1, 1, 16)
    for kernel in (one, other, one):
        launches.launch(kernel, table, (), {"x_ptr": x}, lambda: (1, {"x_ptr": x}), num_warps=4)


@triton.jit(do_not_specialize=["free"])
def asked(x_ptr, x_desc, number, free, scale, NAME: tl.constexpr):
    pass


def described(x, rows=16, dims=4, layout=None, padding="zero"):
    shape, block = list(x.shape)[4 - dims :], [1, rows, 1, 64][4 - dims :]
    return TensorDescriptor(
        x, shape, [*x.stride()[4 - dims : -1], 1], block, layout or descriptors.swizzled_layout(*block), padding
    )


def test_what_changes_the_kernel_that_triton_compiles_finds_another_one():
    """By every pair of values of each argument: what Triton tells apart is told apart here, and addresses and shapes are not."""
    x, odd = make(1, 64, 2, 64), make(1, 64, 2, 64, offset=1)
    tensors = [x, odd, make(1, 64, 2, 64, dtype=torch.float16), make(3, 8, 2, 32), x.float(), None]
    integers = [0, 1, 2, 16, 17, 48, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**33 + 16, 2**63, True, False, None]
    values = {
        "x_ptr": tensors,
        "x_desc": [
            described(x), described(make(1, 128, 2, 64)), described(x.half()), described(x, 32), described(x, dims=3),
            described(x, layout=descriptors.halves_layout(4)), described(x, padding="nan"), x, None,
        ],
        "number": [*integers, 0.5, 1.0],
        "free": [*integers, 0.5, 1.0],
        "scale": [0.5, 1.0, 16.0, 1, None],
        "NAME": [1, 2, "1", None, torch.bfloat16, (1, 2)],
    }  # fmt: skip
    usual = {"x_ptr": x, "x_desc": described(x), "number": 7, "free": 7, "scale": 0.5, "NAME": 1}
    for name, choices in values.items():
        kinds = [
            (found_by(asked, usual | {name: value}), compiled.specialization(asked, usual | {name: value})) for value in choices
        ]
        for (triton_has, here), (triton_has_too, here_too) in itertools.combinations(kinds, 2):
            assert here is not None
            assert triton_has == triton_has_too or here != here_too, (name, triton_has, triton_has_too)
    same = usual | {"x_ptr": make(5, 8, 2, 32), "x_desc": described(make(1, 128, 2, 64)), "number": 9, "free": 16, "scale": 2.0}
    assert compiled.specialization(asked, same) == compiled.specialization(asked, usual)


def test_arguments_that_are_not_known_go_through_triton():
    usual = {"x_ptr": None, "x_desc": None, "number": 7, "free": 7, "scale": 0.5, "NAME": 1}
    assert compiled.specialization(asked, usual | {"number": (1, 2)}) is None
    assert compiled.specialization(asked, usual | {"num_stages": 2}) is None
