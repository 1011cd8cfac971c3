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
from ringattn_kernels import compiled, config, direct, hopper, launches, plain_backward, plain_forward, splits
from ringattn_kernels.hopper import descriptors, forward_config, statistics
from ringattn_kernels.modifiers import Bias, Dropout, Modifiers
from tests.kernels import dense

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
        self.tables = {name: rk.TileTable(np.array(tiles), 300, 700, np.zeros((len(tiles), 2))) for name, tiles in TILES.items()}

    def warmup(self, kernel, *, grid, **given):
        self.compiled += 1
        arguments = {name: given.pop(name) for name in kernel.arg_names}
        return Compiled(self, (kernel.fn, found_by(kernel, arguments), given, self.number), kernel.arg_names)


class Compiled:
    def __init__(self, device, variant, names):
        self.device, self.variant, self.names = device, variant, names

    def __getitem__(self, grid):
        return lambda *values: self.device.launched.append((self.variant, grid, dict(zip(self.names, values, strict=True))))


class Form(direct.Form):
    """A compiled kernel of the device, for direct launches."""

    def __init__(self, compiled, names, arguments):
        self.launcher, self.function, self.sizes, self.head = None, 1, (128, 0), [None] * (direct.FIRST - 3)
        self.early, self.plain, self.order, self._describers = False, True, [], {}
        place = direct.FIRST
        for name, x in zip(names, arguments, strict=True):
            described = direct.describes(x)
            self.order.append((name, place, {} if described else None))
            place += 1 + (2 * len(x.shape) if described else 0)
        self.kinds = ()


@pytest.fixture(params=["triton", "direct"])
def device(monkeypatch, request):
    """A device on which every launch is compared with the one that Triton would make. Direct launches are told as if hooks asked."""
    device, launch = Device(), launches.launch
    if request.param == "direct":
        monkeypatch.setattr(compiled, "form_of", Form)
        monkeypatch.setattr(direct, "_of_descriptor", lambda *_: [None])
        monkeypatch.setattr(launches, "hooked", lambda: True)

    def compared(kernel, table, facts, moving, make, **options):
        launch(kernel, table, facts, moving, make, **options)
        programs, expected = make()
        if programs:
            variant, grid, arguments = device.launched.pop()
            assert variant == (kernel.fn, found_by(kernel, expected), options, device.number)
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
    for module in (plain_forward, plain_backward):
        monkeypatch.setattr(module, "architecture", lambda device: "sm_90")
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


def score_of(parts, h, seed, edges, heads):
    """What happens to scores, with tensors of its own. Another seed makes no other kind of launch."""
    slopes, values = torch.empty(1 if "one" in parts else 2, h), torch.empty(h, len(edges) + 1)
    found = Modifiers(
        30.0 + seed if "softcap" in parts else None,
        slopes if "alibi" in parts else None,
        Bias(edges, values) if "bias" in parts else None,
        Dropout(0.25, (5 << 40) + seed, 7 + seed, heads) if "dropout" in parts else None,
    )
    return found if parts else None


def inputs_of(heads, d, dtype, q, kv, alike, score, seed=0, edges=(-9, 9), all_heads=8):
    """q, k, v, dout and what happens to scores."""
    h, hk = heads
    q, dout = (make(2, 300, h, d, dtype=dtype, **q or {}) for _ in range(2))
    k, v = (make(2, 700, hk, d, dtype=dtype, **kv or {}) for _ in range(2))
    return q, k, k if alike else v, dout, score_of(score, h, seed, edges, all_heads)


def plainly_forward(
    device, heads=(4, 2), d=64, dtype=torch.bfloat16, q=None, kv=None, out=None, before=None, final=True, scale=0.1, alike=False,
    tiles="some", splits=1, sinks=False, how=None, score="softcap", **of_score,
):  # fmt: skip
    q, k, v, _, modifiers = inputs_of(heads, d, dtype, q, kv, alike, score, **of_score)
    statistics = torch.empty(2, 2, heads[0], 300).unbind()
    state = None if before is None else (make(2, 300, heads[0], d, dtype=torch.float32, **before), *statistics)
    out = state[0] if state and not final else make(2, 300, heads[0], d, dtype=dtype if final else torch.float32, **out or {})
    how = how or config.launch_for("forward", "sm_90", d, dtype)
    options = dict(modifiers=modifiers, sinks=torch.empty(heads[0]) if sinks else None)
    touched_only = state is not None and not final
    plain_forward.launch(q, k, v, device.tables[tiles], out, *statistics, scale, state, touched_only, splits, how, **options)
    return [weakref.ref(x) for x in (q, k, v, out)]


SCORES = [
    dict(score=""),
    dict(score="alibi"),
    dict(score="one slope, alibi"),
    dict(score="bias"),
    dict(score="bias", edges=(-9, 10)),
    dict(score="softcap and alibi"),
]
PLAIN_FORWARD = [
    dict(heads=(6, 2)),
    dict(dtype=torch.float16),
    dict(dtype=torch.float32),
    dict(d=128),
    dict(d=72),
    dict(q=dict(rows_first=True)),
    dict(kv=dict(gap=8)),
    dict(kv=dict(offset=1)),
    dict(out=dict(offset=1)),
    dict(final=False),
    dict(before={}),
    dict(before={}, final=False),
    dict(splits=2),
    dict(scale=-0.1),
    dict(sinks=True),
    dict(how=config.BlockConfig(64, 64, 4, 2)),
    dict(tiles="none"),
    dict(tiles="all"),
    dict(score="dropout"),
    dict(score="dropout", all_heads=9),
    *SCORES,
]


def backward_of(device, run, heads, d, dtype, q, kv, grads, add, scale, alike, tiles, score, of_score):
    q, k, v, dout, modifiers = inputs_of(heads, d, dtype, q, kv, alike, score, **of_score)
    h, hk = heads
    dq, dk, dv = (make(2, *sizes, d, **{"dtype": torch.float32, **(grads or {})}) for sizes in ((300, h), (700, hk), (700, hk)))
    queries = rk.Queries(q, dout, *torch.empty(3, 2, h, 300).unbind())
    outputs = dict(dq=dq, dk=dk, dv=dv, add_q=add, add_kv=add, modifiers=modifiers)
    run(queries, k, v, device.tables[tiles], scale, **outputs)
    return [weakref.ref(x) for x in (q, k, v, dout, dq, dk, dv)]


def plainly_backward(
    device, heads=(4, 2), d=64, dtype=torch.bfloat16, q=None, kv=None, grads=None, add=True, scale=0.1, alike=False, tiles="some",
    splits=1, learned=False, score="softcap", **of_score,
):  # fmt: skip
    def run(*inputs, modifiers, **outputs):
        sums = dense.zero_sums(modifiers) if learned else None
        plain_backward.backward(*inputs, **outputs, splits=splits, modifiers=modifiers, sums=sums)

    return backward_of(device, run, heads, d, dtype, q, kv, grads, add, scale, alike, tiles, score, of_score)


PLAIN_BACKWARD = [
    dict(heads=(6, 2)),
    dict(dtype=torch.float32),
    dict(d=128),
    dict(d=320),
    dict(q=dict(rows_first=True)),
    dict(kv=dict(offset=1)),
    dict(grads=dict(gap=4)),
    dict(add=False),
    dict(add=False, grads=dict(dtype=torch.bfloat16)),
    dict(splits=2),
    dict(tiles="all"),
    dict(score="dropout"),
    dict(score="alibi and bias", learned=True),
    *SCORES,
]


def backward_in_two(
    device, heads=(4, 2), d=256, dtype=torch.bfloat16, q=None, kv=None, grads=None, add=True, scale=0.1, alike=False, tiles="some",
    score="softcap", **of_score,
):  # fmt: skip
    return backward_of(device, hopper.backward.backward, heads, d, dtype, q, kv, grads, add, scale, alike, tiles, score, of_score)


IN_TWO = [
    dict(heads=(6, 2)),
    dict(dtype=torch.float16),
    dict(d=64),
    dict(d=128),
    dict(d=200),
    dict(kv=dict(gap=8)),
    dict(grads=dict(offset=1)),
    dict(add=False),
    dict(add=False, grads=dict(dtype=torch.bfloat16)),
    dict(tiles="all"),
    *SCORES,
]


@pytest.mark.parametrize(
    ("call", "kinds"),
    [
        (forward, FORWARD),
        (backward, BACKWARD),
        (plainly_forward, PLAIN_FORWARD),
        (plainly_backward, PLAIN_BACKWARD),
        (backward_in_two, IN_TWO),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_calls_that_differ_in_more_than_addresses_have_launches_of_their_own(call, kinds, device):
    for kind in kinds:
        call(device)
        call(device, **kind)
    for kind in kinds:
        call(device, **kind)


SEEDS = dict(score="softcap, alibi, bias and dropout", seed=1)


@pytest.mark.parametrize(
    ("call", "launched", "by_table", "seeds"),
    [
        (forward, 1, 1, {}),
        (backward, 1, 1, {}),
        (plainly_forward, 1, 1, SEEDS),
        (plainly_backward, 3, 2, SEEDS),  # that of pivots knows no table
        (backward_in_two, 3, 2, SEEDS | {"score": "softcap, alibi and bias"}),  # nor that of biases
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_calls_of_a_kind_share_a_launch_that_keeps_none_of_their_tensors(call, launched, by_table, seeds, device):
    same = {name: value for name, value in seeds.items() if name != "seed"}
    for options in ({"alike": True}, {}, {"scale": 0.2}, seeds, {}):
        tensors = call(device, **same | options)
        assert not any(x() is not None for x in tensors)
    assert device.ready == launched
    # a table never seen has a launch of its own, whose kernel is known
    device.tables["some"] = rk.TileTable(np.array([(0, 100, 0, 200, -300, 300)]), 300, 700, np.zeros((1, 2)))
    call(device, **same)
    assert (device.ready, device.compiled) == (launched + by_table, launched)
    device.number = 1
    call(device, **same)
    assert (device.ready, device.compiled) == (2 * launched + by_table, 2 * launched)


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
        for options in (dict(num_warps=4), dict(num_warps=8), dict(num_warps=4, launch_pdl=True)):
            launches.launch(kernel, table, tuple(options.items()), {"x_ptr": x}, lambda: (1, {"x_ptr": x}), **options)
    assert device.compiled == 6


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
