"""The operators of attention under torch.compile, selective checkpointing and fake tensors."""

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import check, digest
from ringattn.device import local
from ringattn.runtime.calls import LocalCall, RingCall, compiled_call, find_call
from ringattn.runtime.context import Context
from ringattn.runtime.groups import get_context
from ringattn.runtime.op import BACKWARD, FORWARD, UNMODIFIED
from ringattn.runtime.rank_attention import RankAttention
from ringattn.scores import Score
from ringattn.transport import Alone

pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = {
    "causal": ra.causal(),
    "window": ra.sliding_window(5, 2),
    "documents": ra.documents([7, 0, 9]),
    # the plan of this one sorts rows
    "dilated": ra.dilated_window((4, 2), 3),
}


def inputs(b=2, s=23, h=4, hk=2, d=5, d_v=3, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, s, h, d), (b, s, hk, d), (b, s, hk, d_v)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for shape in shapes]


class Block(torch.nn.Module):
    """A projection, attention, a projection."""

    def __init__(self, width=8, dtype=torch.float64, **options):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width, dtype=dtype)
        self.proj = torch.nn.Linear(width, width, dtype=dtype)
        self.options = options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        return x + self.proj(ra.ring_attention(q, k, v, **self.options).flatten(2))


def make_blocks(n, **options):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(**options) for _ in range(n)))


def gradients(model, run=None):
    """Gradients of the model's parameters, for a loss of the output of `run`."""
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 2, 13, 8, dtype=torch.float64, generator=generator).to(next(model.parameters()))
    (run or model)(x).mul(weight).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPE = {"cpu": torch.float64, "cuda": torch.float32}
TOLERANCE = {"cpu": 1e-12, "cuda": 1e-5}


@pytest.fixture
def launches(monkeypatch, without_replays):
    """How many forward and backward launches this device has computed, none of which it replays."""
    counts = {"forward": 0, "backward": 0}
    for name in counts:
        original = getattr(local, name)

        def counted(*args, name=name, original=original, **options):
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(local, name, counted)
    return counts


@pytest.fixture
def compiled():
    """torch.compile that refuses graph breaks; its backend aot_eager traces forward and backward but compiles nothing."""
    torch.compiler.reset()
    yield lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.compiler.reset()


@pytest.mark.parametrize("operator", [FORWARD, BACKWARD], ids=str)
def test_compiled_cuda_graphs_leave_attention_out(operator):
    """A replay would skip the agreement of ranks, and a first call makes memory that is no output of the operator."""
    # torch before 2.8 has no such tag
    assert getattr(torch.Tag, "cudagraph_unsafe", torch.Tag.pt2_compliant_tag) in operator.tags


@pytest.mark.parametrize(
    ("mask", "heads_first"),
    [
        *(
            pytest.param(mask, False, id=name, marks=() if name == "causal" else pytest.mark.thorough)
            for name, mask in MASKS.items()
        ),
        pytest.param(MASKS["causal"], True, id="heads first", marks=pytest.mark.thorough),
    ],
)
def test_the_operators_keep_their_contract(mask, heads_first):
    """For both operators: schemas, no aliases, tracing, and the shapes, dtypes and strides of fake tensors."""
    q, k, v = inputs(s=16)
    if heads_first:
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    for modified in (False, True):
        kind, modifying = None, UNMODIFIED
        if modified:
            score = ra.score(softcap=2.0, alibi=torch.rand(4, dtype=q.dtype, requires_grad=True), dropout=0.2)
            kind, modifying = score.kind, score.tensors(q.dtype)
        run = RingCall(get_context(None), None, mask, None, kind=kind)
        torch.library.opcheck(FORWARD, (q, k, v, *modifying, run.number, 0.3, True))
        out, row_max, row_sum, agreed = FORWARD(q, k, v, *modifying, run.number, 0.3, True)
        saved = [None if x is None else x.detach() for x in (q, k, v, *modifying, out, row_max, row_sum, agreed)]
        dout, drow_sum = torch.randn_like(out), torch.randn_like(row_sum)
        for upstream in ((dout, drow_sum), (dout, None), (None, drow_sum)):
            torch.library.opcheck(BACKWARD, (*upstream, *saved, run.number, 0.3, [True] * 3))


def test_an_operator_of_local_tiles_keeps_its_contract():
    from ringattn.geometry.plan import make_local_plan
    from ringattn.schedule.program import local_program

    q, k, v = inputs(b=1, s=9, dtype=torch.float32)
    tiles, q_order, k_order = make_local_plan(torch.arange(9), torch.arange(9).flip(0), ra.causal(), 9)
    run = LocalCall(RankAttention(Alone(), local_program(tiles), q_order, k_order))
    torch.library.opcheck(FORWARD, (q, k, v, *UNMODIFIED, run.number, 0.3, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_tensors_without_data_have_shapes(device, dtype):
    real = inputs(dtype=dtype)
    wanted = ra.ring_attention(*real, return_stats=True)
    mode = FakeTensorMode() if device == "fake" else nullcontext()
    tensors = [mode.from_tensor(x) if device == "fake" else x.detach().to("meta").requires_grad_() for x in real]
    with mode:
        out, stats = ra.ring_attention(*tensors, return_stats=True)
        got = torch.autograd.grad(out.float().sum() + stats.lse.sum(), tensors)
    for x, y in ((out, wanted[0]), (stats.row_max, wanted[1].row_max), (stats.row_sum, wanted[1].row_sum), *zip(got, real)):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize("mask", [None, *MASKS.values()], ids=["default", *MASKS])
@pytest.mark.parametrize("layout", [None, ra.zigzag(13, 1)], ids=["no layout", "layout"])
@pytest.mark.some(2)
def test_a_compiled_model_has_no_graph_break_and_equal_gradients(mask, layout, compiled):
    mask = None if mask is MASKS["documents"] else mask  # longer than the sequence
    model = make_blocks(2, mask=mask, layout=layout)
    wanted = gradients(model)
    got = gradients(model, compiled(model))
    for name, x in got.items():
        torch.testing.assert_close(x, wanted[name], rtol=0, atol=1e-12)


def test_options_are_constants_of_a_graph():
    """Another mask, layout, schedule or scale is another graph; an equal one is not."""
    torch.compiler.reset()
    q, k, v = (x.detach() for x in inputs(s=16))
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    def attention(options):
        return ra.ring_attention(q, k, v, return_stats=True, **options)

    run = torch.compile(attention, fullgraph=True, backend=count)
    calls = [
        (1, dict(mask=ra.causal())),
        (2, dict(mask=ra.sliding_window(3))),
        (2, dict(mask=ra.causal())),
        (3, dict(layout=ra.striped(16, 1))),
        # on one rank, all named layouts are the same
        (3, dict(layout=ra.zigzag(16, 1))),
        (4, dict(schedule=ra.ring())),
        (5, dict(schedule=ra.gather())),
        (6, dict(softmax_scale=0.25)),
        (7, dict(softmax_scale=0.5)),
    ]
    for made, options in calls:
        (got, stats), (wanted, wanted_stats) = run(options), attention(options)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13)
        torch.testing.assert_close(stats.lse, wanted_stats.lse, rtol=0, atol=1e-13)
        assert len(graphs) == made, options
    torch.compiler.reset()


def test_compiled_calls_know_the_line_that_calls_or_their_name():
    q, k, v = (x.detach() for x in inputs(s=16))
    numbers = []

    def backend(graph, _):
        numbers.extend(node.args[7] for node in graph.graph.nodes if node.target is FORWARD)
        return graph

    def attention(q):
        for _ in range(2):
            q = ra.ring_attention(q, k, k) + ra.ring_attention(q, k, k, name="second")
        return ra.ring_attention(q, k, v)

    torch.compiler.reset()
    torch.compile(attention, fullgraph=True, backend=backend)(q)
    torch.compiler.reset()
    start = attention.__code__.co_firstlineno
    first, second, last = f"test_op.py:{start + 2}", "'second'", f"test_op.py:{start + 3}"
    assert [find_call(number)._label.text for number in numbers] == [first, second, first, second, last]
    assert numbers[0] == numbers[2] != numbers[4]


def test_compiled_code_refuses_forward_mode_and_torch_func():
    """It would take attention for a constant, and give derivatives of 0."""
    q, k, v = (x.detach() for x in inputs(s=16))

    def attention(q):
        return ra.ring_attention(q, k, v).sum()

    def in_forward_mode(q):
        with torch.autograd.forward_ad.dual_level():
            return ready(torch.autograd.forward_ad.make_dual(q, q))

    torch.compiler.reset()
    ready = torch.compile(attention, backend="eager")
    ready(q)
    with pytest.raises(ValueError, match=r"compiled attention is differentiated in forward mode or by torch\.func"):
        in_forward_mode(q)
    for transform in (lambda q: torch.func.jvp(attention, (q,), (q,))[1], torch.func.grad(attention)):
        with pytest.raises(
            ValueError, match=r"q is differentiated in forward mode or by torch\.func, which attention does not support"
        ):
            torch.compile(transform, backend="eager")(q)
    torch.compiler.reset()


def test_masks_and_layouts_may_be_made_in_compiled_code(compiled):
    q, k, v = (x.detach() for x in inputs(s=16))

    def attention(q):
        return ra.ring_attention(q, k, v, mask=ra.sliding_window(3), layout=ra.zigzag(q.shape[1], 1), schedule=ra.gather())

    torch.testing.assert_close(compiled(attention)(q), attention(q), rtol=0, atol=1e-13)


def test_bad_input_is_refused_when_a_graph_runs(compiled):
    q, k, v = (x.detach() for x in inputs(s=16))
    # a length that no other test gives a layout which on one rank is an equal one: a graph takes the first of these
    with pytest.raises(ValueError, match=r"q has 16 tokens, but rank 0 of layout zigzag.* holds 10007"):
        compiled(lambda: ra.ring_attention(q, k, v, layout=ra.zigzag(10007, 1)))()


def test_a_call_object_lives_until_its_backward_pass_is_done():
    q, k, v = inputs()
    out = ra.ring_attention(q, k, v)
    number = out.grad_fn.call.number
    assert find_call(number) is out.grad_fn.call
    out.sum().backward()
    del out
    with pytest.raises(ValueError, match=r"gone: call torch.compiler.reset\(\)"):
        find_call(number)


def test_the_call_object_of_a_graph_lives_as_long_as_its_group():
    layout, mask = ra.zigzag(5, 1), ra.causal()
    number = compiled_call((), layout.digest, mask.digest, None)
    assert compiled_call((), layout.digest, mask.digest, None) == number
    assert number != compiled_call((), layout.digest, ra.full().digest, None)
    del layout, mask
    assert find_call(number).layout == ra.zigzag(5, 1)
    context = Context(Alone())
    number = (1 << 61) + 1
    context.compiled[number] = RingCall(context, None, ra.causal(), None, number=number)
    assert find_call(number).context is context
    freed = weakref.ref(context)
    del context
    gc.collect()
    assert freed() is None
    with pytest.raises(ValueError, match="a process group that is gone"):
        find_call(number)


def test_equal_calls_are_checked_once():
    context = Context(Alone())
    q, k, v = inputs()

    def begin(*tensors, layout=None, mask=MASKS["causal"], scale=0.5, needs_grad=True):
        RingCall(context, layout, mask, None).begin(*tensors, Score(scale), needs_grad)

    others = (
        lambda: begin(q[:1], k[:1], v[:1]),
        lambda: begin(q, k[:, :, :1], v[:, :, :1]),
        lambda: begin(q.float(), k.float(), v.float()),
        lambda: begin(q, k, v, layout=ra.zigzag(23, 1)),
        lambda: begin(q, k, v, mask=MASKS["window"]),
        lambda: begin(q, k, v, scale=0.25),
        lambda: begin(q, k, v, needs_grad=False),
    )
    refused = (
        lambda: begin(q, k.float(), v),
        lambda: begin(q, k[:, :5], v[:, :5]),
        lambda: begin(q, k, v, layout=ra.zigzag(24, 1)),
        lambda: begin(q, k, v, scale=float("inf")),
    )
    with patch.object(check, "fit", wraps=check.fit) as fit:
        for calls, other in enumerate((lambda: begin(q, k, v), *others), 1):
            for _ in range(3):
                other()
            assert fit.call_count == calls
        for bad in refused:
            for _ in range(2):
                with pytest.raises(ValueError):
                    bad()


# selective checkpointing


def with_checkpoints(model, **options):
    def run(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False, **options)
        return x

    return run


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mask", [ra.causal(), MASKS["dilated"]], ids=repr)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.some(2)
def test_with_the_policy_attention_runs_once(device, mask, compile_it, launches, compiled):
    model = make_blocks(2, dtype=DTYPE[device], mask=mask).to(device)
    wanted = gradients(model)
    for options, forwards in (({}, 4), (dict(context_fn=ra.checkpoint_contexts), 2)):
        launches.update(forward=0, backward=0)
        run = with_checkpoints(model, **options)
        got = gradients(model, compiled(run) if compile_it else run)
        assert launches == {"forward": forwards, "backward": 2}
        for name, x in got.items():
            torch.testing.assert_close(x, wanted[name], rtol=0, atol=TOLERANCE[device])


def test_a_block_that_changes_attentions_output_in_place_is_refused():
    def block(q, k, v):
        return ra.ring_attention(q, k, v).mul_(2).sin()

    out = checkpoint(block, *inputs(), use_reentrant=False, context_fn=ra.checkpoint_contexts)
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()


def test_inputs_of_checkpointed_blocks_may_wait_in_host_memory(launches):
    model = make_blocks(2, mask=ra.causal())
    wanted = gradients(model)
    launches.update(forward=0, backward=0)

    def run(x):
        with torch.autograd.graph.save_on_cpu():
            return with_checkpoints(model, context_fn=ra.checkpoint_contexts)(x)

    for name, x in gradients(model, run).items():
        torch.testing.assert_close(x, wanted[name], rtol=0, atol=1e-13)
    assert launches == {"forward": 2, "backward": 2}


def test_transformers_checkpoints_by_the_policy(launches, llama):
    model, found = llama, []
    for options, forwards in (
        (None, 3),
        ({"use_reentrant": False}, 6),
        ({"use_reentrant": False, "context_fn": ra.checkpoint_contexts}, 3),
    ):
        if options:
            model.gradient_checkpointing_enable(options)
        launches.update(forward=0)
        model(input_ids=torch.arange(12)[None]).logits.square().sum().backward()
        assert launches["forward"] == forwards
        found.append(model.model.embed_tokens.weight.grad)
        model.zero_grad()
    assert all(torch.equal(x, found[0]) for x in found)


# digests


@pytest.mark.parametrize(
    "remake", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deep", "pickle"]
)
@pytest.mark.parametrize("make", [lambda n: ra.prefix(n), lambda n: ra.balanced(ra.full(), n, 2)], ids=["mask", "layout"])
def test_a_digest_finds_its_value_while_an_equal_one_is_alive(make, remake):
    first = make(4321)
    second = remake(first)
    third = make(4321)
    key = first.digest
    assert len(key) == 32  # 128 bits: a collision of 32 is found in a second
    assert second.digest == third.digest == key
    del first
    assert digest.find(key) == third
    del second
    assert digest.find(key) == third
    del third
    with pytest.raises(KeyError):
        digest.find(key)
