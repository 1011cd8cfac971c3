"""Calls of `attend_pages` that are alike launch what the first one did, with their own addresses. Nothing runs."""

from types import SimpleNamespace

import pytest
import torch
from triton.runtime.jit import JITFunction

from ringattn_kernels import PageTable, compiled, direct, launches, paged
from ringattn_kernels.modifiers import Modifiers
from ringattn_kernels.recorder import recorder
from tests.counting import calls_of


class Device:
    """A Hopper GPU that keeps the arguments of what is launched on it, by their names."""

    def __init__(self):
        self.launched = []

    def warmup(self, kernel, *, grid, num_warps, launch_pdl, **arguments):
        assert launch_pdl
        launched = self.launched

        class Launcher:
            def __call__(self, *values):
                assert values[:4] == (*grid, 7)
                named = dict(zip(kernel.arg_names, values[direct.FIRST :], strict=True))
                launched.append((kernel.fn, num_warps, named))

        options = dict(launch_cooperative_grid=False, launch_pdl=True)
        run = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0, launch=Launcher(), **options)
        source = SimpleNamespace(signature=dict.fromkeys(kernel.arg_names, "*fp32"))

        class Compiled(SimpleNamespace):
            def __getitem__(self, grid):
                def launch(*arguments):
                    raise AssertionError("launched as Triton does")

                return launch

        return Compiled(run=run, function=99, packed_metadata=(num_warps, 1, 0), src=source)

    def take(self):
        launched = self.launched.copy()
        self.launched.clear()
        return launched


@pytest.fixture
def device(monkeypatch):
    device = Device()
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7))
    monkeypatch.setattr(JITFunction, "warmup", lambda kernel, **options: device.warmup(kernel, **options))
    for module in (launches, compiled, direct, paged):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr(paged, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(paged, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(paged, "_repeated", {})
    for module in (launches, compiled):
        module._place.cache_clear()
    yield device
    for module in (launches, compiled):
        module._place.cache_clear()


def aligned(shape, dtype, offset=0):
    """A tensor `offset` numbers behind a multiple of 16 bytes."""
    count = torch.Size(shape).numel()
    x = torch.empty(count + 16 + offset, dtype=dtype)
    return x[-x.data_ptr() % 16 // x.element_size() + offset :][:count].view(shape)


def call(b=3, t=1, slopes=False, softcap=None, sinks=False, packed=False, offset=0, window=None, scale=0.3, ranks=1, width=5):
    q, k, v = aligned((b, t, 8, 64), torch.bfloat16, offset), *(aligned((9, 2, 64, 64), torch.bfloat16) for _ in range(2))
    table = PageTable(*(aligned((b,), torch.int64) for _ in range(2)), aligned((b, width), torch.int32), ranks)
    modifiers = Modifiers(softcap, aligned((1, 8), torch.float32) if slopes else None) if slopes or softcap else None
    sink = aligned((8,), torch.float32) if sinks else None
    room = aligned((b * t * 8 * 66,), torch.float32) if packed else None
    options = dict(softmax_scale=scale, window=window, modifiers=modifiers, sinks=sink, packed=room)
    tensors = dict(q_ptr=q, k_ptr=k, v_ptr=v, pages_ptr=table.pages, lengths_ptr=table.lengths, first_ptr=table.first)
    tensors |= dict(slopes_ptr=modifiers.slopes if slopes else None, sinks_ptr=sink)
    return lambda: paged.attend_pages(q, k, v, table, **options), tensors


CALLS = {
    "plain": {},
    "several tokens": dict(t=4),
    "ALiBi and a softcap": dict(slopes=True, softcap=20.0),
    "sinks": dict(sinks=True),
    "packed": dict(packed=True, ranks=2),
    "a window": dict(window=17),
    "another scale": dict(scale=0.5),
    "a wider table": dict(width=6),
    "another softcap": dict(softcap=30.0),
    "an address between multiples of 16": dict(offset=1),
}


def launched_by(device, options):
    """What a call launches, by names of arguments; tensors are replaced by theirs."""
    attend, tensors = call(**options)
    state = attend()
    names = {x.data_ptr(): name for name, x in tensors.items() if x is not None}
    names |= {x.data_ptr(): name for name, x in zip(("out_ptr", "row_max_ptr", "row_sum_ptr"), state)}
    (first, second), partial = device.take(), set()
    found = []
    for kernel, warps, arguments in (first, second):
        partial.add(arguments.pop("partial_ptr"))
        for name, x in arguments.items():
            if name.endswith("_ptr") and x is not None:
                assert names[x] == name
        found.append((kernel, warps, {name: x for name, x in arguments.items() if not name.endswith("_ptr") or x is None}))
    assert len(partial) == 1 and not partial & names.keys()
    return found


def test_a_repeated_call_launches_the_same(device):
    first = {name: launched_by(device, options) for name, options in CALLS.items()}
    # two calls are alike only in options
    assert len(paged._repeated) == len(CALLS) - 1
    for name, options in reversed(CALLS.items()):
        assert launched_by(device, options) == first[name], name
    assert len(paged._repeated) == len(CALLS) - 1


def test_a_repeated_call_costs_less(device):
    attend, _ = call()
    attend()
    repeated, _ = calls_of(attend)
    paged._repeated.clear()
    prepared, _ = calls_of(attend)
    assert repeated < 0.4 * prepared


def test_recorders_are_told_of_every_launch(device, monkeypatch):
    attend, _ = call()
    attend()
    monkeypatch.setattr(recorder, "steps", [])
    attend()
    assert len(recorder.steps) == len(device.take()) / 2 == 2


def test_hooks_are_told_of_every_launch(device, monkeypatch):
    attend, _ = call()
    attend()
    monkeypatch.setattr(paged, "hooked", lambda: True)
    monkeypatch.setattr(launches, "hooked", lambda: True)
    with pytest.raises(AssertionError, match="launched as Triton does"):
        attend()
