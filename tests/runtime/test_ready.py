"""Calls like an earlier one: what the long way computes, by its recording; whatever differs goes the long way. No GPU is needed."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import attention as entrance
from ringattn.device import local
from ringattn.runtime import ready
from ringattn.runtime.groups import get_context
from ringattn.transport import Alone, SilentTransport
from ringattn_kernels import direct, recordings

TOKENS, HEADS, DIM = 64, 2, 8
done: list[str] = []


class Silent(SilentTransport):
    """Other ranks that say what this one says, unless `other` is set: what rank 1 then says instead of it."""

    recorded_with = ()
    other = None
    records = 0

    def all_gather_control(self, record, patience=None):
        self.records += 1
        return [record, self.other(record)] if self.other is not None else super().all_gather_control(record, patience)


class Again(recordings.Recording):
    """A recording that computes once more what it saw, from tensors at other addresses. `done` is what all of them did."""

    def __init__(self, inputs, work):
        self.work, self.inputs = work, [(x.shape, x.stride(), x.dtype) for x in inputs]
        self.contiguous = True

    def __call__(self, addresses, agreed=None, words=()):
        done.append("began")
        if agreed is not None:
            agreed()
        done.append("moved")
        found = []
        for address, (shape, stride, dtype) in zip(addresses, self.inputs, strict=True):
            size = 1 + sum((n - 1) * step for n, step in zip(shape, stride))
            memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
            found.append(torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride))
        return tuple(x.contiguous() for x in self.work(*found))


@pytest.fixture
def device(monkeypatch):
    """A CPU whose passes are replayed like a GPU's. device.long counts the calls that went the long way."""
    device = SimpleNamespace(number=0, stream=7, long=0, capturing=False)
    active = SimpleNamespace(get_current_device=lambda: device.number, get_current_stream=lambda _: device.stream)
    for module in (recordings, direct):
        monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(recordings, "_is_capturing", lambda: device.capturing)
    monkeypatch.setattr(recordings, "_record", lambda inputs, _, work, **__: (work(*inputs), Again(inputs, work)))
    monkeypatch.setattr(local, "replayed", recordings.replay)
    monkeypatch.setattr(local, "recorded", recordings.recorded)
    monkeypatch.setattr(local, "state_of_replays", recordings.state)

    def counted(original):
        def run(*options):
            device.long += 1
            return original(*options)

        return run

    monkeypatch.setattr(entrance, "attention", counted(entrance.attention))
    monkeypatch.setattr(ready, "gradients_of", counted(ready.gradients_of))
    return device


def inputs(generator=None, heads=HEADS, tokens=TOKENS, dtype=torch.float32, dim=DIM):
    made = (torch.randn(1, tokens, n, dim, dtype=dtype, generator=generator) for n in (heads, 1, 1))
    q, k, v = (x.requires_grad_() for x in made)
    return q, k, v


def warm(group, **options):
    """Calls until both passes are ready."""
    for _ in range(4):
        q, k, v = inputs()
        out = ra.ring_attention(q, k, v, group=group, **options)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))


@pytest.mark.parametrize(
    "options", [{}, {"mask": ra.sliding_window(9, 0)}, {"softmax_scale": 0.3}], ids=["causal", "window", "scale"]
)
def test_a_ready_call_is_what_the_long_way_computes(options, device):
    group = Alone()
    warm(group, **options)
    for seed in range(3):
        q, k, v = inputs(torch.Generator().manual_seed(seed))
        dout = torch.randn(q.shape)
        device.long = 0
        out, stats = ra.ring_attention(q, k, v, group=group, return_stats=True, **options)
        found = out, stats.row_max, stats.row_sum, *torch.autograd.grad(out, (q, k, v), dout)
        assert device.long == 0
        with torch.no_grad():
            device.long = 0
            assert torch.equal(ra.ring_attention(q, k, v, group=group, **options), out)
            assert device.long == (seed == 0)  # the recording is there, whoever needs gradients
        plain, stats = ra.ring_attention(q, k, v, group=Alone(), return_stats=True, **options)
        wanted = plain, stats.row_max, stats.row_sum, *torch.autograd.grad(plain, (q, k, v), dout)
        assert all(map(torch.equal, found, wanted))
        # with a gradient of the statistics
        out, stats = ra.ring_attention(q, k, v, group=group, return_stats=True, **options)
        plain, plain_stats = ra.ring_attention(q, k, v, group=Alone(), return_stats=True, **options)
        found, wanted = (torch.autograd.grad((x.sum() + y.lse.sum()), (q, k, v)) for x, y in ((out, stats), (plain, plain_stats)))
        assert all(map(torch.equal, found, wanted))


def scored(part, seed, batch=1):
    """A score of that kind with tensors of its own, and those of them that are learned."""
    generator = torch.Generator().manual_seed(100 + seed)
    slopes, sinks = (torch.rand(shape, generator=generator) for shape in ((batch, HEADS), (HEADS,)))
    if part == "softcap":
        return ra.score(softcap=3.0), []
    if part == "alibi":
        return ra.score(alibi=slopes), []
    if part == "one slope for each head":
        return ra.score(alibi=slopes[0]), []
    if part == "learned alibi":
        return ra.score(alibi=slopes.requires_grad_()), [slopes]
    if part == "sinks":
        return ra.score(sinks=sinks), []
    if part == "learned sinks":
        return ra.score(sinks=sinks.requires_grad_()), [sinks]
    # as a model in low precision holds them, and behind another part
    sinks = sinks.bfloat16().requires_grad_()
    slopes = slopes.requires_grad_(part == "all learned")
    return ra.score(softcap=3.0, alibi=slopes, sinks=sinks), [slopes, sinks] if part == "all learned" else [sinks]


def scored_step(part, seed, group, **options):
    """out and its statistics, and all gradients."""
    leaves = inputs(torch.Generator().manual_seed(seed))
    score, learned = scored(part, seed)
    out, stats = ra.ring_attention(*leaves, group=group, return_stats=True, score=score, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return [x.detach() for x in (out, stats.row_max, stats.row_sum, *torch.autograd.grad(out, (*leaves, *learned), dout))]


PARTS = (
    "softcap", "alibi", "one slope for each head", "learned alibi", "sinks", "learned sinks", "all but slopes learned", "all learned",
)  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_modified_scores_are_replayed_with_the_tensors_of_each_call(part, device):
    group = Alone()
    for seed in range(4):
        scored_step(part, seed, group)
    for seed in range(3):
        device.long = 0
        found = scored_step(part, seed, group)
        assert device.long == 0
        wanted = scored_step(part, seed, Alone())
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    # with a gradient of the statistics, and with none of out
    for of_out in (True, False):
        both = []
        for where in (group, Alone()):
            leaves, (score, learned) = inputs(torch.Generator().manual_seed(7)), scored(part, 7)
            out, stats = ra.ring_attention(*leaves, group=where, return_stats=True, score=score)
            both.append(torch.autograd.grad(out.sum() * of_out + stats.lse.sum(), (*leaves, *learned)))
        assert all(map(torch.equal, *both))


def test_modified_scores_are_replayed_behind_a_checkpoint(device):
    group = Alone()
    for seed in range(6):
        q, k, v = inputs(torch.Generator().manual_seed(seed))
        both = []
        for where in (group, Alone()):
            score, learned = scored("all learned", seed)
            out = checkpoint(ra.ring_attention, q, k, v, group=where, score=score, use_reentrant=False)
            both.append(torch.autograd.grad(out.sin().sum(), (q, k, v, *learned)))
        assert all(map(torch.equal, *both))


def test_ranks_agree_on_what_happens_to_scores(device):
    group, options = Silent(0, 2), dict(layout=ra.contiguous(2 * TOKENS, 2), name="layer")
    for seed in range(4):
        scored_step("all learned", seed, group, **options)
    group.records = device.long = 0
    scored_step("all learned", 5, group, **options)
    assert (group.records, device.long) == (2, 0)
    # another rank holds other shards of the same call
    group.other = lambda record: record[:1] + (TOKENS // 2).to_bytes(8, "little") + record[9:]
    del options["layout"]
    for seed in range(4):
        group.other, other = None, group.other
        scored_step("all learned", seed, group, **options)
        group.other = other
    with pytest.raises(ValueError, match=f"q has {TOKENS} tokens on rank 0, but the default layout"):
        scored_step("all learned", 5, group, **options)


OTHER_SCORES = {
    "none": ({}, 1),
    "another softcap": (dict(softcap=4.0, sinks=torch.ones(HEADS)), 1),
    "no softcap": (dict(sinks=torch.ones(HEADS)), 1),
    "no sinks": (dict(softcap=3.0), 1),
    "slopes": (dict(softcap=3.0, sinks=torch.ones(HEADS), alibi=torch.ones(HEADS)), 1),
    "learned": (dict(softcap=3.0, sinks=torch.ones(HEADS, requires_grad=True)), 1),
    "dropout": (dict(softcap=3.0, sinks=torch.ones(HEADS), dropout=0.5, seed=3), 1),
    "a bias": (dict(softcap=3.0, sinks=torch.ones(HEADS), bias=ra.relative_bias(torch.ones(HEADS, 3), ra.buckets([-3, 0]))), 1),
    "the same": (dict(softcap=3.0, sinks=torch.zeros(HEADS)), 0),
    "the same in another dtype": (dict(softcap=3.0, sinks=torch.zeros(HEADS, dtype=torch.float64)), 0),
}


@pytest.mark.parametrize("name", OTHER_SCORES)
def test_another_score_goes_the_long_way(name, device):
    group = Alone()
    warm(group, score=ra.score(softcap=3.0, sinks=torch.ones(HEADS)))
    options, long = OTHER_SCORES[name]
    score = ra.score(**options) if options else None
    q, k, v = inputs()
    for _ in range(2 if name == "dropout" else 1):
        device.long = 0
        out = ra.ring_attention(q, k, v, group=group, score=score)
        assert device.long == long
        assert torch.equal(out, ra.ring_attention(q, k, v, group=Alone(), score=score))
    for wrong, error in ((ra.score(softcap=3.0, sinks=torch.ones(3)), r"sinks has shape \(3,\)"), ("sinks", "score is 'sinks'")):
        with pytest.raises(ValueError, match=error):
            ra.ring_attention(q, k, v, group=group, score=wrong)
    with pytest.raises(ValueError, match="q is"):
        ra.ring_attention(q.tolist(), k, v, group=group, score=ra.score(softcap=3.0, sinks=torch.ones(HEADS)))


def test_where_calls_come_again_a_new_one_is_ready_after_its_first(device):
    group = Alone()
    warm(group)
    for window in (5, 6, 7):
        long = []
        for _ in range(3):
            q, k, v = inputs()
            device.long = 0
            out = ra.ring_attention(q, k, v, group=group, mask=ra.sliding_window(window, 0))
            torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            long.append(device.long)
        assert long == [1, 0, 0]
    # where each call is another one, recording them would cost more than it saves
    for window in range(8, 20):
        q, k, v = inputs()
        torch.autograd.grad(ra.ring_attention(q, k, v, group=group, mask=ra.sliding_window(window, 0)).sum(), (q, k, v))
    kept = [any(isinstance(x, Again) for x in one.replays.values()) for one in get_context(group)._attentions.values()]
    assert kept[-12:] == [True] * 4 + [False] * 8


def negating(x):
    """x as a view of memory that holds -x, as the imaginary part of a conjugate is."""
    return torch._neg_view(-x.detach())


def test_a_gradient_that_is_a_negating_view_is_read_by_its_values(device):
    group = Alone()
    warm(group)
    q, k, v = inputs()
    dout = torch.randn(q.shape)
    wanted = torch.autograd.grad(ra.ring_attention(q, k, v, group=group), (q, k, v), dout)
    for _ in range(3):
        found = torch.autograd.grad(ra.ring_attention(q, k, v, group=group), (q, k, v), negating(dout))
        assert all(map(torch.equal, found, wanted))


def strided(x):
    return torch.empty(*x.shape[:3], 2 * x.shape[3])[..., : x.shape[3]].copy_(x.detach()).requires_grad_()


def shifted(x):
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x.detach()).requires_grad_()


OTHERS = {
    "shape": lambda device: (inputs(heads=4), {}),
    "tokens": lambda device: (inputs(tokens=32), {}),
    "dtype": lambda device: (inputs(dtype=torch.float64), {}),
    "strides": lambda device: ([strided(x) for x in inputs()], {}),
    "alignment": lambda device: ([shifted(x) for x in inputs()], {}),
    "requires_grad": lambda device: ([x.detach() for x in inputs()], {}),
    "one tensor twice": lambda device: ((lambda q, k, v: (q, k, k))(*inputs()), {}),
    "class": lambda device: ([torch.nn.Parameter(x.detach()) for x in inputs()], {}),
    "mask": lambda device: (inputs(), {"mask": ra.sliding_window(5, 0)}),
    "layout": lambda device: (inputs(), {"layout": ra.contiguous(TOKENS, 1)}),
    "schedule": lambda device: (inputs(), {"schedule": ra.gather()}),
    "scale": lambda device: (inputs(), {"softmax_scale": 0.5}),
    "score": lambda device: (inputs(), {"score": ra.score(softcap=3.0)}),
    "stream": lambda device: (setattr(device, "stream", 8), (inputs(), {}))[1],
    "device": lambda device: (setattr(device, "number", 1), (inputs(), {}))[1],
    "captured": lambda device: (setattr(device, "capturing", True), (inputs(), {}))[1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_differs_goes_the_long_way(name, device):
    group = Alone()
    warm(group)
    (q, k, v), options = OTHERS[name](device)
    device.long = 0
    out = ra.ring_attention(q, k, v, group=group, **options)
    assert device.long == 1
    device.capturing = False
    assert torch.equal(out, ra.ring_attention(q, k, v, group=Alone(), **options))


def test_torch_sees_an_operator_where_it_watches(device):
    group, seen = Alone(), []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    warm(group)
    with Mode():
        out = ra.ring_attention(*inputs(), group=group)
        out.backward(torch.ones_like(out))
    assert {"ringattn.forward.default", "ringattn.backward.default"} <= set(seen)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda q, k, v: dict(q=q[0]), "q has 3 dimensions"),
        (lambda q, k, v: dict(q=q.tolist()), "q is"),
        (lambda q, k, v: dict(k=k.half()), "k has dtype"),
        (lambda q, k, v: dict(v=v.to_sparse()), "v "),
        (lambda q, k, v: dict(k=negating(k)), r"k is a view of its negated values, .* pass k\.resolve_neg\(\)"),
        (lambda q, k, v: dict(layout=0), "layout is 0"),
        (lambda q, k, v: dict(mask="causal"), "mask is 'causal'"),
        (lambda q, k, v: dict(schedule=ra.ring), "schedule is"),
        (lambda q, k, v: dict(name=1), "name is 1"),
        (lambda q, k, v: dict(softmax_scale="1"), "softmax_scale is"),
        (lambda q, k, v: dict(softmax_scale=float("nan")), "softmax_scale is nan"),
        (lambda q, k, v: dict(return_stats=1), "return_stats is 1"),
        (lambda q, k, v: dict(q_offset=3), "q_offset"),
    ],
)
def test_bad_input_has_its_error(change, error, device):
    group = Alone()
    warm(group)
    q, k, v = inputs()
    with pytest.raises(ValueError, match=error):
        ra.ring_attention(**{"q": q, "k": k, "v": v, "group": group, **change(q, k, v)})


def test_ranks_agree_in_each_pass(device):
    group = Silent(0, 2)
    layout = ra.contiguous(2 * TOKENS, 2)
    warm(group, layout=layout, name="layer")
    q, k, v = inputs()
    group.records = device.long = 0
    out = ra.ring_attention(q, k, v, group=group, layout=layout, name="layer")
    assert (group.records, device.long) == (1, 0)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert (group.records, device.long) == (2, 0)
    out = ra.ring_attention(q, k, v, group=group, layout=layout, name="layer")
    # the other rank computes something else
    group.other = lambda record: done.append("read") or record[:9] + bytes(16) + record[25:] if len(record) < 100 else record
    done.clear()
    with pytest.raises(ValueError, match="ranks disagree"):
        ra.ring_attention(q, k, v, group=group, layout=layout, name="layer")
    assert done == ["began", "read"]
    with pytest.raises(ValueError, match="ranks disagree"):
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert done == ["began", "read"] * 2


def test_a_replay_has_the_record_of_its_line(device):
    """Calls of one kind from several lines: each record is that of the long way, but for the call's number."""
    group, records = Silent(0, 2), []
    layout = ra.contiguous(2 * TOKENS, 2)
    group.other = lambda record: records.append(record[:25] + record[33:]) or record

    def first(**options):
        return ra.ring_attention(*inputs(), group=group, layout=layout, **options)

    def second():
        one = ra.ring_attention(*inputs(), group=group, layout=layout)
        return one, ra.ring_attention(*inputs(), group=group, layout=layout)

    def named():
        return first(name="layer")

    calls = first, second, named, first
    long_way = [call() for call in calls] and records.copy()
    assert len(set(long_way)) == 4 and len(long_way) == 5
    for _ in range(3):
        first()
    for _ in range(3):
        records.clear()
        device.long = 0
        assert [call() for call in calls] and device.long == 0
        assert records == long_way


def test_calls_of_several_kinds_take_turns(device, monkeypatch):
    monkeypatch.setattr(ready, "_RECENT", 8)  # fewer than there are
    group, masks = Alone(), [ra.causal(), ra.sliding_window(9), ra.full(), ra.prefix(7) & ra.causal()]
    layout = ra.contiguous(TOKENS, 1)
    kinds = [dict(mask=mask, softmax_scale=scale) for mask in masks for scale in (None, 0.25, 0.5)]
    for kind in kinds:
        warm(group, layout=layout, **kind)
    device.long = 0
    for _ in range(2):
        for kind in kinds:
            q, k, v = inputs()
            out = ra.ring_attention(q, k, v, group=group, layout=layout, **kind)
            with torch.no_grad():
                wanted = ra.ring_attention(q, k, v, group=group, layout=layout, **kind)
            assert torch.equal(out, wanted)
            # equal values that are other objects
            scale = kind["softmax_scale"] and float(str(kind["softmax_scale"]))
            again = ra.ring_attention(q, k, v, group=group, layout=ra.contiguous(TOKENS, 1), mask=kind["mask"], softmax_scale=scale)
            assert torch.equal(out, again)
    assert device.long == len(kinds)  # without gradients, in the first turn
    assert len(get_context(group).latest_ready) <= 8


def test_equal_options_made_anew_find_the_latest_call(device, monkeypatch):
    """As in a model that writes `mask=ra.documents(...)` where it calls: what a recording is for is found once, not in each call."""
    group = Alone()

    def options():
        return dict(mask=ra.documents(lengths=[24, 40]), layout=ra.balanced(ra.full(), TOKENS, 1), schedule=ra.waves(3))

    assert all(x is not y for x, y in zip(options().values(), options().values()))
    warm(group, **options())
    q, k, v = inputs()
    ra.ring_attention(q, k, v, group=group, **options())
    found = []
    monkeypatch.setattr(ready, "_known", lambda *given: found.append(given))
    device.long = 0
    ra.ring_attention(q, k, v, group=group, **options())
    assert not found and device.long == 0
    for name, other in (("mask", ra.documents(lengths=[25, 39])), ("layout", None), ("schedule", None)):
        found.clear()
        ra.ring_attention(q, k, v, group=group, **options() | {name: other})
        assert len(found) == 1, name


def test_a_batch_never_seen_is_compared_with_the_latest_calls_alone(device, monkeypatch):
    group = Alone()
    masks = [ra.documents(lengths=[first, TOKENS - first]) for first in range(1, 8)]
    for mask in masks:
        warm(group, mask=mask)
    q, k, v = inputs()
    compared, addresses = [], ready.Known.addresses
    monkeypatch.setattr(ready.Known, "addresses", lambda self, *given: compared.append(self) or addresses(self, *given))
    for mask, count in ((masks[-1], 1), (masks[-4], 4), (masks[0], 7), (ra.documents(lengths=[9, TOKENS - 9]), 4)):
        compared.clear()
        ra.ring_attention(q, k, v, group=group, mask=mask)
        assert len(compared) == count


def test_each_outstanding_call_keeps_its_place(device):
    group = Silent(0, 2)
    warm(group)
    first, outs = get_context(group).ranks.order.latest + 1, []
    for _ in range(70):
        q, k, v = inputs()
        outs.append((ra.ring_attention(q, k, v, group=group), (q, k, v)))
    places = [out.grad_fn.saved_tensors[-1].tolist()[1] for out, _ in outs]
    assert places == list(range(first, first + 70))
    records = []
    group.other = lambda record: records.append(int.from_bytes(record[25:33], "little")) or record
    device.long = 0
    for out, leaves in reversed(outs):
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert records == places[::-1] and device.long == 0


def test_threads_that_called_at_once_are_refused_in_both_passes(device):
    group = Silent(0, 2)
    warm(group)
    out = ra.ring_attention(*inputs(), group=group)
    get_context(group).ranks.order.two_threads = True
    with pytest.raises(ValueError, match="two threads called with this group at once"):
        ra.ring_attention(*inputs(), group=group)
    with pytest.raises(ValueError, match="two threads called with this group at once"):
        out.sum().backward()


def test_transforms_are_refused_and_forward_mode_goes_the_long_way(device):
    group = Alone()
    warm(group)
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(ValueError, match=r"in forward mode or by torch\.func"):
        torch.func.grad(lambda q: ra.ring_attention(q, k, v, group=group).sum())(q)
    with torch.no_grad():
        for _ in range(3):
            ra.ring_attention(q, k, v, group=group)
    device.long = 0
    with torch.autograd.forward_ad.dual_level():
        ra.ring_attention(q, k, v, group=group)
    assert device.long == 1
    ra.ring_attention(q, k, v, group=group)
    assert device.long == 1


def test_other_shards_on_another_rank_are_found(device):
    """With the default layout, this rank's shapes do not tell what the other ranks hold."""
    group = Silent(0, 2)
    warm(group)
    group.other = lambda record: record[:1] + (TOKENS // 2).to_bytes(8, "little") + record[9:]
    with pytest.raises(ValueError, match=f"q has {TOKENS} tokens on rank 0, but the default layout"):
        ra.ring_attention(*inputs(), group=group)
    assert get_context(group).ranks.order.latest == 5


def test_a_checkpoint_may_compute_a_call_by_either_way(device):
    group = Alone()

    def attend(q, k, v):
        return ra.ring_attention(q, k, v, group=group)

    for _ in range(6):
        q, k, v = inputs()
        out = checkpoint(attend, q, k, v, use_reentrant=False)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), dout)
        wanted = torch.autograd.grad(ra.ring_attention(q, k, v, group=Alone()), (q, k, v), dout)
        assert all(map(torch.equal, found, wanted))


def test_a_second_derivative_is_refused(device):
    group = Alone()
    warm(group)
    q, k, v = inputs()
    out = ra.ring_attention(q, k, v, group=group)
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_what_a_rank_no_longer_keeps_is_not_ready(device):
    group = Alone()
    warm(group)
    context = get_context(group)
    (kept,) = {x.attention for x in context.ready.values()}
    layouts = [ra.contiguous(tokens, 1) for tokens in range(100, 230)]
    for layout in layouts[:60]:
        context.rank_attention(layout, ra.causal(), None)
    # a call that is replayed counts as a use
    device.long = 0
    ra.ring_attention(*inputs(), group=group)
    assert device.long == 0
    for layout in layouts[60:120]:
        context.rank_attention(layout, ra.causal(), None)
    assert any(x.attention is kept for x in context.ready.values())
    for layout in layouts[120:]:
        context.rank_attention(layout, ra.causal(), None)
    assert not context.ready
    ra.ring_attention(*inputs(), group=group)
    assert device.long == 1
