"""`ra.prepare`: a prepared batch takes the path of a seen one, on any thread, and nothing else changes."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import ringattn as ra
from ringattn.device import local
from ringattn.geometry import rows as rows_module
from ringattn.integrations.huggingface import attach
from ringattn.integrations.huggingface_attachment import LivePairs
from ringattn.runtime import context as context_module
from ringattn.runtime.context import Context
from ringattn.runtime.groups import get_context
from ringattn.training.data import ShardedBatches, pack, packed_documents
from ringattn.transport import Alone, LoopbackTransport, SilentTransport, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(tokens, world_size, first):
    mask = ra.documents(lengths=[first, 7, tokens - first - 7])
    return ra.balanced(mask, tokens, world_size), mask


def inputs(layout, rank, seed=0):
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(1, layout.seq_len, heads, 8, generator=generator) for heads in (4, 2, 2)]
    return [ra.shard(x, layout, rank).requires_grad_() for x in whole]


def step(group, layout, mask, **options):
    q, k, v = inputs(layout, group.rank)
    out = ra.ring_attention(q, k, v, layout=layout, mask=mask, group=group, **options)
    return [x.detach() for x in (out, *torch.autograd.grad(out.sin().sum(), (q, k, v)))]


def forbid(monkeypatch):
    """From now on no plan is made, and no program."""

    def late(*arguments):
        raise AssertionError("made in the call")

    monkeypatch.setattr(context_module, "make_placed_plan", late)
    monkeypatch.setattr(context_module, "make_cross_plan", late)
    monkeypatch.setattr(context_module, "compile_program", late)


@pytest.mark.parametrize("schedule", [None, ra.ring(), ra.waves(1), ra.waves(memory=1 << 20)], ids=repr)
def test_a_prepared_call_makes_no_plan(schedule, monkeypatch):
    layout, mask = batch(96, 4, 20)
    group, other = SilentTransport(1, 4), SilentTransport(1, 4)
    ra.prepare(layout, mask, like=tuple(inputs(layout, 0)), group=group, schedule=schedule)
    launches = next(iter(get_context(group)._prepared.values())).program.backward.launches
    assert all(launch.made is not None for launch in launches)
    forbid(monkeypatch)
    monkeypatch.setattr(rows_module, "on_device", None)  # no index of scattered rows is made late
    step(group, layout, mask, schedule=schedule)
    with pytest.raises(AssertionError, match="made in the call"):
        step(other, layout, mask, schedule=schedule)


def test_indices_of_scattered_rows_and_of_sorted_ones_are_made_too(monkeypatch):
    """A dilated mask sorts rows; documents far apart need rows that are scattered."""
    spread_out = ra.Layout(800, tuple(tuple(ra.Span(start, 100) for start in range(100 * rank, 800, 200)) for rank in range(2)))
    scattered = ra.documents(lengths=[90, 200, 200, 200, 110])  # of each span of rank 0, rank 1 needs the last ten rows
    for layout, mask in ((spread_out, scattered), (ra.contiguous(96, 2), ra.dilated_window(3, 5))):
        made, original = [], rows_module.on_device
        monkeypatch.setattr(
            rows_module, "on_device", lambda *given, made=made, original=original: made.append(1) or original(*given)
        )
        group = SilentTransport(0, 2)
        ra.prepare(layout, mask, like=tuple(inputs(layout, 0)), group=group)
        assert made
        before = len(made)
        step(group, layout, mask)
        assert len(made) == before
        monkeypatch.setattr(rows_module, "on_device", original)


def test_prepared_or_not_the_bits_are_the_same():
    """Some ranks prepare, on threads of their own, and some do not; the group is new."""
    cases = [batch(96, 3, first) for first in (20, 31, 50)]

    def work(transport):
        for layout, mask in cases:
            if transport.rank != 1:
                thread = threading.Thread(target=ra.prepare, args=(layout, mask), kwargs=dict(group=transport))
                thread.start()
                thread.join()
        return [step(transport, *case) for case in cases]

    def plainly(transport):
        return [step(transport, *case) for case in cases]

    for prepared, plain in zip(run_ranks(3, work), run_ranks(3, plainly)):
        for a, b in zip(prepared, plain):
            assert all(map(torch.equal, a, b))


def test_many_threads_prepare_for_one_new_group():
    group, contexts, start = SilentTransport(0, 4), [], threading.Barrier(8)

    def work(number):
        start.wait()
        for first in range(10, 30):
            ra.prepare(*batch(96, 4, first + number % 2), group=group)
        contexts.append(get_context(group))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(contexts) == 8
    assert len(set(map(id, contexts))) == 1
    assert len(contexts[0]._prepared) <= 16


def test_a_call_may_be_learned_while_a_thread_drops_old_batches(monkeypatch):
    monkeypatch.setattr(context_module, "_KEPT", 8)
    group = SilentTransport(0, 2)
    context = get_context(group)

    class Learned:
        @property
        def attention(self):
            """Read while batches are dropped, when the thread of calls keeps another one."""
            context.ready[len(context.ready),] = Learned()

    for first in range(1, 9):
        context.rank_attention(*batch(400, 2, first), None)
    context.ready[0,] = Learned()
    ra.prepare(*batch(400, 2, 9), group=group)
    assert len(context._attentions) == 7


class Connecting(SilentTransport):
    """Like an NCCL group of one host, it knows of its copy engines from the first call on."""

    engines = False

    @property
    def copy_engines(self):
        return self.engines

    def connect(self, device):
        self.engines = True


def test_what_the_first_call_finds_out_overrules_what_was_prepared():
    """Or ranks that prepare would choose another default schedule than ranks that do not."""
    layout, mask = ra.contiguous(64, 4), ra.full()
    group = Connecting(0, 4)
    ra.prepare(layout, mask, group=group)
    context = get_context(group)
    (early,) = context._prepared.values()
    step(group, layout, mask)
    (called,) = context._attentions.values()
    assert len(early.program.forward.launches) == 2  # all at once
    assert len(called.program.backward.launches) > 2
    ra.prepare(layout, mask, group=group)
    assert len(context._prepared) == 1
    assert next(iter(context._attentions.values())) is called


def test_tables_follow_the_ranks_of_a_grid(monkeypatch):
    """Launches get the heads of a rank of the heads axis, and the rows of a ring of such axes."""
    seen = []
    monkeypatch.setattr(local, "prepare", lambda program, shapes, scale, final: seen.append((program, shapes, scale, final)))
    ring, heads, everyone = SilentTransport(1, 2), SilentTransport(0, 2), SilentTransport(2, 4)
    layout, mask = batch(96, 4, 20)
    like = tuple(inputs(layout, 2))
    ra.prepare(layout, mask, like=like, group=ra.runtime.ulysses.Hybrid(ring, heads, everyone))
    ra.prepare(layout, mask, like=like, group=SilentTransport(2, 4))
    (on_grid, grid, *_), (_, alone, scale, final) = seen
    assert (grid.h, grid.hk) == (2, 1)
    assert on_grid.forward.launches[0].tiles.q_rows == sum(layout.lengths[2:])
    assert alone == local.RowShapes(1, 4, 2, 8, 8, torch.float32, torch.device("cpu"))
    assert (scale, final) == (8**-0.5, True)
    ra.prepare(layout, mask, group=SilentTransport(2, 4))
    assert len(seen) == 2


def test_scores_that_depend_on_positions_are_prepared_too(monkeypatch):
    layout, mask = batch(96, 4, 20)
    group, score = SilentTransport(1, 4), ra.score(alibi=ra.alibi_slopes(4))
    ra.prepare(layout, mask, like=tuple(inputs(layout, 1)), group=group, score=score)
    forbid(monkeypatch)
    step(group, layout, mask, score=score)
    with pytest.raises(AssertionError, match="made in the call"):
        step(group, layout, mask)


@pytest.mark.parametrize("schedule", [None, ra.ring(), ra.waves(memory=1 << 20), ra.pass_q()], ids=repr)
def test_queries_and_keys_of_their_own_layouts_are_prepared(schedule, monkeypatch):
    layout, kv_layout, group = ra.zigzag(50, 3), ra.striped(96, 3), SilentTransport(1, 3)
    q, k, v = inputs(layout, 1)[0], *inputs(kv_layout, 1)[1:]
    options = dict(layout=layout, kv_layout=kv_layout, q_offset=46, schedule=schedule, group=group)
    ra.prepare(**options, like=(q, k[:, :1], v[:, :1]))
    forbid(monkeypatch)
    monkeypatch.setattr(rows_module, "on_device", None)
    out = ra.ring_attention(q, k, v, **options)
    torch.autograd.grad(out.sum(), (q, k, v))
    with pytest.raises(AssertionError, match="made in the call"):
        ra.ring_attention(q, k, v, **options | dict(q_offset=45))


SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MODELS = {  # and what a batch's documents, or no documents, are prepared as
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL)), lambda mask: mask),
    "mistral": (
        lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)),
        lambda mask: (ra.causal() if mask is None else mask) & ra.sliding_window(8 - 1),
    ),
}


@pytest.mark.parametrize("attached", ["layout-of-call", "mask-attached"])
@pytest.mark.parametrize("name", MODELS)
def test_calls_of_attached_models_find_prepared_batches(name, attached, monkeypatch):
    make_model, prepared_as = MODELS[name]
    model, group, planned = make_model(), SilentTransport(0, 2), []
    original = context_module.make_placed_plan
    monkeypatch.setattr(
        context_module, "make_placed_plan", lambda *given: planned.append(threading.current_thread().name) or original(*given)
    )
    like = tuple(torch.empty(1, 1, heads, 8) for heads in (4, 2, 2))
    whole = dict(input_ids=torch.arange(40)[None])
    loader = [pack([torch.arange(n) for n in lengths]) for lengths in ([9, 20, 3], [5, 30], [2, 2, 25, 8])]
    batches = ShardedBatches(
        loader if attached == "mask-attached" else [*loader, whole],
        layouts=lambda tokens: ra.zigzag(tokens, 2),
        of_documents=lambda mask, tokens: ra.placed(mask, tokens, 2),
        rank=0,
        prepare=lambda layout, mask: ra.prepare(layout, prepared_as(mask), like=like, group=group),
    )
    attach(model, group=group)
    for layout, batch in batches:
        if attached == "mask-attached":  # and in the batch, too
            attach(model, layout=layout, mask=packed_documents(batch), group=group)
            model(**batch).logits.sum().backward()
        else:
            model(**batch, layout=layout).logits.sum().backward()
    assert len(planned) == len(loader) + (attached == "layout-of-call")
    assert all(thread.startswith("ringattn-batches") for thread in planned)


def test_another_attached_mask_is_prepared_in_the_order_of_calls():
    """As docs/training.md has it."""
    packed, prefix = ra.documents(lengths=[5, 9]), ra.prefix(3)
    mask = prefix & ra.documents(cu_seqlens=[0, 5, 14], causal=False)
    assert LivePairs(prefix, packed).mask_for(True, None) == mask
    assert LivePairs(prefix, packed).mask_for(True, 8) == mask & ra.sliding_window(7, None)


LAYOUT = ra.contiguous(8, 1)
Q = torch.zeros(1, 8, 2, 4)
REFUSED = {
    "layout": (lambda: ra.prepare("zigzag"), "layout is 'zigzag', but must be a Layout"),
    "mask": (lambda: ra.prepare(LAYOUT, 3), "mask is 3, but must be a Mask"),
    "schedule": (lambda: ra.prepare(LAYOUT, schedule="ring"), "schedule is 'ring', but must be a Schedule"),
    "scale": (lambda: ra.prepare(LAYOUT, softmax_scale="x"), "softmax_scale is 'x', but must be a Python number"),
    "scale that is none": (lambda: ra.prepare(LAYOUT, softmax_scale=float("nan")), "softmax_scale is nan"),
    "score": (lambda: ra.prepare(LAYOUT, score=1), "score is 1, but must be a ScoreMod"),
    "ranks": (lambda: ra.prepare(ra.zigzag(8, 2)), "is for 2 ranks, but the group has 1"),
    "length": (lambda: ra.prepare(LAYOUT, ra.documents(lengths=[9])), "needs at least 9 tokens"),
    "not-three": (lambda: ra.prepare(LAYOUT, like=(Q, Q)), "but must be \\(q, k, v\\)"),
    "a-tensor": (lambda: ra.prepare(LAYOUT, like=Q), "like is a tensor of shape \\(1, 8, 2, 4\\), but must be"),
    "not-tensors": (lambda: ra.prepare(LAYOUT, like=(Q, Q, 3)), "v is a int, but must be a torch.Tensor"),
    "shapes": (lambda: ra.prepare(LAYOUT, like=(Q, Q[:, :, :, :2], Q)), "k has head_dim 2 and q has 4"),
    "group": (lambda: ra.prepare(LAYOUT, group="world"), "group is a str"),
    "kv_layout": (lambda: ra.prepare(LAYOUT, kv_layout="zigzag"), "kv_layout is 'zigzag', but must be a Layout"),
    "ranks of keys": (lambda: ra.prepare(LAYOUT, kv_layout=ra.zigzag(8, 2)), "kv_layout .* is for 2 ranks, but the group has 1"),
    "offset alone": (lambda: ra.prepare(LAYOUT, q_offset=3), "q_offset is 3, but without kv_layout"),
    "bytes of rows": (
        lambda: ra.prepare(LAYOUT, kv_layout=ra.contiguous(9, 1)),
        "kv_layout is given without a schedule, which then follows from the bytes of q and k, but like is None",
    ),
    "memory": (lambda: ra.prepare(LAYOUT, schedule=ra.waves(memory=9)), "chooses by the bytes of k and v, but like is None"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_input_is_refused_without_communication(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()


# memory


def test_old_batches_are_dropped_by_number_and_by_bytes(monkeypatch):
    """Hundreds of new batches leave no more than the caches hold."""

    def kept(most_bytes, batches):
        monkeypatch.setattr(context_module, "_KEPT_BYTES", most_bytes)
        context = Context(Alone())
        for first in range(batches):
            layout, mask = batch(400, 1, first + 1)
            context.rank_attention(layout, mask, None)
        return context

    by_number = kept(1 << 40, 300)
    assert len(by_number._attentions) == 64
    one = max(found.nbytes for found in by_number._attentions.values())
    assert one > 0
    by_bytes = kept(20 * one, 300)
    assert 8 <= len(by_bytes._attentions) < 40
    assert set(by_bytes._sizes) <= set(by_bytes._attentions.values())
    assert sum(found.nbytes for found in by_bytes._attentions.values()) <= (20 + 8 + 1) * one
    assert len(kept(0, 300)._attentions) == 8


def test_batches_that_no_call_uses_are_dropped_by_number_and_by_bytes(monkeypatch):
    def kept(most_bytes):
        monkeypatch.setattr(context_module, "_KEPT_BYTES", most_bytes)
        group = SilentTransport(0, 2)
        like = tuple(torch.empty(1, 1, heads, 8) for heads in (4, 2, 2))
        for first in range(1, 40):
            ra.prepare(*batch(400, 2, first), like=like, group=group)
        return get_context(group)._prepared

    by_number = kept(1 << 40)
    assert len(by_number) == 16
    one = max(found.nbytes for found in by_number.values())
    by_bytes = kept(12 * one)
    assert 12 <= len(by_bytes) < 16
    least = kept(0)
    assert len(least) == 8
    assert list(least) == list(by_number)[-8:]


def test_a_prepared_call_finds_room():
    """Of 80 batches each is prepared and used: what the oldest leave is freed while a batch is prepared, in no call."""
    group, dropped = SilentTransport(0, 2), set()
    like = tuple(torch.empty(1, 1, heads, 8) for heads in (4, 2, 2))
    for first in range(1, 81):
        case = batch(400, 2, first)
        ra.prepare(*case, like=like, group=group)
        context = get_context(group)
        before = set(context._attentions)
        context.rank_attention(*case, None)
        dropped |= before - set(context._attentions)
    assert len(context._attentions) == 64 and not dropped


def test_a_call_of_a_dropped_batch_and_its_backward_still_agree(monkeypatch):
    monkeypatch.setattr(context_module, "_KEPT_BYTES", 0)

    def work(transport):
        cases = [batch(96, 2, first) for first in range(10, 30)]
        outs = [(case, inputs(case[0], transport.rank)) for case in cases]
        outs = [(leaves, ra.ring_attention(*leaves, layout=x[0], mask=x[1], group=transport)) for x, leaves in outs]
        found = [torch.autograd.grad(out.sin().sum(), leaves) for leaves, out in outs]
        return all(all(map(torch.equal, a, step(transport, *case)[1:])) for a, case in zip(found, cases))

    assert all(run_ranks(2, work))


def test_bytes_count_plans_and_all_tables():
    layout, mask = batch(4096, 4, 900)
    found = Context(LoopbackTransport(1, 4, None)).rank_attention(layout, mask, ra.gather())
    tiles, *_ = [launch.tiles for of_pass in (found.program.forward, found.program.backward) for launch in of_pass.launches]
    before = found.nbytes
    items, segments = tiles.cut("q", 128, 64)
    assert found.nbytes - before == items.nbytes + segments.nbytes
    blocks = tiles.query_blocks(128, 64, torch.device("cpu"))
    assert found.nbytes - before >= items.nbytes + segments.nbytes + blocks.segments.nbytes
    assert found.plan_bytes > 0


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("on_thread", [False, True], ids=["here", "thread"])
@pytest.mark.parametrize("ordered", [False, True], ids=["any-order", "ordered"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_prepared_call_on_a_gpu_makes_no_table(ranks, head_dim, ordered, on_thread, monkeypatch):
    import ringattn_kernels.hopper as hopper
    from ringattn_kernels import splits, table

    layout, mask = batch(6144, ranks, 1900)
    held = layout.lengths[0]
    q, k, v = (
        torch.randn(1, held, heads, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2, 2)
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ordered)

    def bits(group):
        out = ra.ring_attention(q, k, v, layout=layout, mask=mask, group=group)
        return [x.detach() for x in (out, *torch.autograd.grad(out.float().sin().sum(), (k, v)))]

    def new():
        return Alone() if ranks == 1 else SilentTransport(0, ranks)

    wanted, group = bits(new()), new()
    stream = torch.cuda.current_stream()

    def prepare():
        with torch.cuda.stream(stream):
            ra.prepare(layout, mask, like=(q[:, :1], k[:, :1], v[:, :1]), group=group)

    thread = threading.Thread(target=prepare)
    thread.start() if on_thread else prepare()
    if on_thread:
        thread.join()
    for module in (table, splits, rows_module, hopper.forward, hopper.turns):
        monkeypatch.setattr(module, "on_device", None)
    found = bits(group)
    # with silent peers K/V of other ranks are whatever memory held
    assert ranks > 1 or all(map(torch.equal, wanted, found))
