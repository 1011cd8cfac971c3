"""Checkpointed layers whose inputs and attention's results stay in host memory until the backward pass."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringattn as ra
from ringattn.device import local
from ringattn.training import offload

pytestmark = pytest.mark.usefixtures("one_thread")

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
WIDTH = 8


class Layer(nn.Module):
    """Attention with dropout, and an argument that all layers share."""

    def __init__(self, width=WIDTH, group=None, **options):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.options = dict(options, group=group)

    def forward(self, x, positions=None, *, shared=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        x = x + self.dropout(self.proj(ra.ring_attention(q, k, v, **self.options).flatten(2)))
        x = x if positions is None else x + positions[..., None]
        return x if shared is None else x * shared


class Model(nn.Module):
    def __init__(self, count=3, width=WIDTH, **options):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, **options) for _ in range(count))

    def forward(self, x, share=False):
        positions, x = torch.arange(x.shape[1], device=x.device).to(x) / 100, self.embed(x)
        shared = x.sigmoid() if share else None
        for layer in self.layers:
            x = layer(x, positions, shared=shared)
        return x


def build(device="cpu", **options):
    torch.manual_seed(0)
    return Model(**options).to(device)


def sequence(s=13, width=WIDTH, device="cpu"):
    return torch.randn(2, s, width, generator=torch.Generator().manual_seed(1)).to(device)


def step(model, x=None, **options):
    """The output and all gradients, with the same dropout in every call."""
    torch.manual_seed(2)
    x = sequence(device=next(model.parameters()).device) if x is None else x
    out = model(x, **options)
    out.square().sum().backward()
    found = [out.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


def same(got, wanted):
    return all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


@pytest.fixture
def forwards(monkeypatch, without_replays):
    """A list with one entry for each forward pass of attention that this device has computed; it replays none."""
    calls, forward = [], local.forward
    monkeypatch.setattr(local, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    return calls


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def parked(monkeypatch):
    """The sizes of the tensors copied to host memory."""
    sizes, park = [], offload.HostMemory.park
    monkeypatch.setattr(offload.HostMemory, "park", lambda self, x, place: sizes.append(x.numel()) or park(self, x, place))
    return sizes


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_losses_and_gradients_are_the_same_to_the_bit(device, share, forwards, deterministic):
    model = build(device, mask=ra.causal())
    wanted = step(copy.deepcopy(model), share=share)
    for count in range(4):
        ra.checkpoint_layers(model.layers, offload=count)
        for _ in range(3):
            forwards.clear()
            assert same(step(model, share=share), wanted)
            assert len(forwards) == 3
    assert list(copy.deepcopy(model).state_dict()) == list(build().state_dict())
    assert same(step(copy.deepcopy(model), share=share), wanted)


def test_inputs_and_attentions_results_of_the_first_layers_are_parked(parked):
    """Positions are not, because they have no gradient. A shared tensor is parked once, and without gradients nothing is."""
    model, rows = build(), 2 * 13
    a_layers = [rows * WIDTH, rows * WIDTH, rows * 2, rows * 2]  # input, out, row_max, row_sum
    for count in range(4):
        ra.checkpoint_layers(model.layers, offload=count)
        parked.clear()
        step(model)
        assert parked == a_layers * count
    parked.clear()
    step(model, share=True)
    assert parked == [rows * WIDTH] + a_layers * 3
    parked.clear()
    with torch.no_grad():
        model(sequence())
    assert not parked


def test_a_backward_pass_may_run_twice_and_two_forward_passes_before_it():
    model = build()
    wanted = [2 * x for x in step(model)[1:]]
    ra.checkpoint_layers(model.layers, offload=3)
    torch.manual_seed(2)
    loss = model(sequence()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)
    model.zero_grad()
    losses = []
    for _ in range(2):
        torch.manual_seed(2)
        losses.append(model(sequence()).square().sum())
    sum(losses).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)


def test_the_backward_pass_uses_the_copies(monkeypatch):
    """Except for the last layer's tensors, which are still on the device, so that their copies are not used."""
    model = build()
    wanted = step(model)
    ra.checkpoint_layers(model.layers, offload=3)
    found = []
    park = offload.HostMemory.park
    monkeypatch.setattr(offload.HostMemory, "park", lambda self, x, place: found.append(park(self, x, place)) or found[-1])
    torch.manual_seed(2)
    out = model(sequence())
    assert len(found) == 3 * 4
    for x in found[-4:]:
        x._host.fill_(torch.nan)
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    assert same([p.grad for p in model.parameters()], wanted[1:])
    for x in found[:4]:
        x._host.fill_(torch.nan)
    model.zero_grad()
    loss.backward()
    assert model.layers[0].qkv.weight.grad.isnan().all()


def test_host_memory_is_reused(monkeypatch):
    """Later steps reuse it. A longer sequence replaces it, and no smaller buffers stay."""
    made, buffer = [], offload.HostMemory.buffer

    def count(self, nbytes, device, free):
        before = {id(x) for x in free}
        got = buffer(self, nbytes, device, free)
        made.extend([] if id(got) in before else [len(got)])
        return got

    monkeypatch.setattr(offload.HostMemory, "buffer", count)
    model = build()
    ra.checkpoint_layers(model.layers, offload=2)
    for s, new in ((13, 8), (13, 0), (7, 0), (29, 8), (13, 0), (29, 0)):
        made.clear()
        step(model, sequence(s))
        assert len(made) == new
        if s == 29:
            free = [len(x) for xs in model.layers[0].host_memory._free.values() for x in xs]
            assert sorted(free) == sorted(2 * [2 * 29 * 8 * 4, 2 * 29 * 8 * 4, 2 * 29 * 2 * 4, 2 * 29 * 2 * 4])


def test_copies_are_waited_for(monkeypatch):
    """Copies to the host end before the next layer begins. A layer's results come back with its recomputation, and then the inputs
    of the layer before it."""
    events = []

    class Stream(torch.cpu.Stream):
        def wait_stream(self, other):
            events.append("wait" if self is main else "copy")

    main = Stream()
    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device=None: main)
    model = build()
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(f"forward {index}"))
        layer.qkv.register_full_backward_hook(lambda *_, index=index: events.append(f"backward {index}"))
    ra.checkpoint_layers(model.layers, offload=2)
    loss = model(sequence()).square().sum()
    copies = ["copy"] * 4
    assert events == ["forward 0", *copies, "forward 1", "wait", *copies, "forward 2", "wait"]
    events.clear()
    loss.backward()
    results = ["copy"] * 3
    fetched = [*results, "wait", "wait", "wait"]
    assert events == ["backward 2", "copy", "wait", *fetched, "copy", "backward 1", "wait", *fetched, "backward 0"]


class Changing(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        q = x * 2
        out = ra.ring_attention(q, q, q)
        if self.what == "input":
            x += out
            return x
        out *= 2
        return out.sin()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("what", ["input", "output"])
def test_changes_in_place_are_refused(what, layers):
    model = nn.Sequential(*(Changing(what) for _ in range(layers)))
    ra.checkpoint_layers(model, offload=1)
    x = torch.randn(1, 9, 2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="changed in place"):
        model(x * 1).sum().backward()


def test_under_compile_layers_are_checkpointed_but_not_offloaded(forwards):
    torch.compiler.reset()
    model = build()
    model.eval()
    wanted = step(model)
    ra.checkpoint_layers(model.layers, offload=0)
    compiled = copy.deepcopy(model)
    for layer in compiled.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    forwards.clear()
    torch.testing.assert_close(step(compiled), wanted)
    assert len(forwards) == 3
    ra.checkpoint_layers(compiled.layers, offload=1)
    with pytest.raises(Exception, match=r"checkpoint_layers does not work under torch\.compile if offload is above 0"):
        step(compiled)
    torch.compiler.reset()


def test_layers_that_cannot_be_checkpointed_are_named():
    layers = nn.ModuleList(Layer() for _ in range(2))
    for args, message in (
        ((Layer(),), "layers is a Layer, one module"),
        (([layers[0], 3],), "layers holds a int, but must hold modules"),
        (([layers[0], layers[0]],), "layers holds a module twice"),
        ((layers, 3), "offload is 3, but must be at most 2, the number of layers"),
        ((layers, -1), "offload is -1, but must be at least 0"),
        ((layers, 1.5), "offload is 1.5, but must be an integer"),
    ):
        with pytest.raises(ValueError, match=message):
            ra.checkpoint_layers(*args)
    assert type(layers[0]) is Layer


def test_layers_of_transformers(forwards, llama):
    model, found = llama, []
    for count in (None, 0, 1, 3):
        if count is not None:
            ra.checkpoint_layers(model.model.layers, offload=count)
        forwards.clear()
        model(input_ids=torch.arange(12)[None]).logits.square().sum().backward()
        assert len(forwards) == 3
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(same(x, found[0]) for x in found)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="checkpointed by transformers too"):
        model(input_ids=torch.arange(12)[None])


def wrapped_steps(group, device, width, wrapper, first):
    """Whether a rank's second step is the same with two of three layers in host memory; `first`: set so before the model is wrapped."""
    found = []
    layout = ra.zigzag(26, group.size())
    torch.use_deterministic_algorithms(True, warn_only=True)
    for count in (0, 2):
        model = build(device, width=width, group=group, mask=ra.causal(), layout=layout)
        layers = model.layers
        if first:
            ra.checkpoint_layers(layers, offload=count)
        if wrapper == "fsdp2":
            mesh = DeviceMesh.from_group(group, device)
            for module in (*layers, model):
                fully_shard(module, mesh=mesh)
        elif wrapper == "ddp":
            model = DistributedDataParallel(model, process_group=group)
        if not first:
            ra.checkpoint_layers(layers, offload=count)
        x = ra.shard(sequence(26, width), layout, group.rank()).to(device)
        for _ in range(2):
            with torch.autocast(device, torch.bfloat16):
                got = step(model, x)
        found.append([x.to_local() if hasattr(x, "to_local") else x for x in got])
    torch.use_deterministic_algorithms(False)
    return same(*found)


@pytest.mark.parametrize("first", [False, True], ids=["wrapped before", "wrapped after"])
@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp2"])
@pytest.mark.some(3)
def test_wrapped_models_give_the_same_bits(gloo, wrapper, first):
    assert gloo.run(2, wrapped_steps, "cpu", WIDTH, wrapper, first) == [True, True]


# GPU tests


@pytest.mark.gpu
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_models_give_the_same_bits_on_gpus(nccl, wrapper):
    ranks = min(2, nccl.size)
    assert nccl.run(ranks, wrapped_steps, "cuda", 128, wrapper, False) == [True] * ranks


@pytest.mark.gpu
def test_the_gpu_waits_for_copies_and_copies_for_the_gpu(monkeypatch, deterministic):
    """The bits stay the same if every copy starts late."""
    model = build("cuda", width=128)
    wanted = step(model, sequence(2048, 128, "cuda"))
    ra.checkpoint_layers(model.layers, offload=3)
    copy_now = offload.HostMemory.copy

    def copy_late(self, target, source, device):
        if device in self._streams:
            with torch.cuda.stream(self._streams[device]):
                torch.cuda._sleep(20_000_000)
        copy_now(self, target, source, device)

    monkeypatch.setattr(offload.HostMemory, "copy", copy_late)
    for _ in range(2):
        assert same(step(model, sequence(2048, 128, "cuda")), wanted)


@pytest.mark.gpu
def test_device_memory_falls_by_what_is_offloaded():
    """The peak of a step whose host is ahead of its GPU. Host memory holds exactly the bytes of the tensors."""
    count, s, width = 6, 12_345, 256
    model = build("cuda", count=count, width=width, mask=ra.causal()).bfloat16()
    x = sequence(s, width, "cuda").bfloat16()
    an_input, stats = x.numel() * 2, 2 * s * 2 * 4 * 2
    peaks = {}
    for offloaded in (0, 3, 6):
        ra.checkpoint_layers(model.layers, offload=offloaded)
        for _ in range(2):
            # the first step compiles kernels and locks memory
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda._sleep(1_000_000_000)
            step(model, x)
            ahead = not torch.cuda.current_stream().query()
            torch.cuda.synchronize()
        peaks[offloaded] = torch.cuda.max_memory_allocated()
        assert ahead
    assert peaks[0] - peaks[3] == pytest.approx(3 * (2 * an_input + stats), rel=0.05)
    # the last layer's tensors are still on the device when needed, and the input of the layer before comes early
    assert peaks[0] - peaks[6] >= 0.95 * (5 * (2 * an_input + stats) - an_input)
    free = [len(x) for xs in model.layers[0].host_memory._free.values() for x in xs]
    assert sum(free) == count * (2 * an_input + stats)
