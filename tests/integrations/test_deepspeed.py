"""DeepSpeed around a ring: steps give the parameters of one process, for each ZeRO stage, mesh and number of accumulated batches."""

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.integrations.deepspeed import DeepSpeedParallel, RingAttention
from ringattn.training.loss import count_tokens, mean_loss

# `make test` installs it, except on a GPU host without network
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

N, VOCAB, WIDTH, LR, CLIP = 24, 17, 8, 0.5, 0.4
IGNORE = -100
IN_FP32 = dict(parameters_within=dict(rtol=5e-6, atol=5e-7), loss_within=2e-6)
IN_BF16 = dict(parameters_within=dict(rtol=2e-2, atol=1e-2), loss_within=1e-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.options = {}

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        return x + self.proj(ra.ring_attention(q, k, v, **self.options).flatten(2))


class ScoredBlock(nn.Module):
    """Attention with a softcap, learned slopes, table and sinks, and dropout: the reference's or, with `options`, RingAttention's."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        parameters = [nn.Parameter(torch.rand(shape)) for shape in ((2,), (2, 8), (2,))]
        bias = ra.relative_bias(parameters[1], ra.t5_buckets(8, 12, bidirectional=False))
        self.score = ra.score(softcap=1.5, alibi=parameters[0], bias=bias, sinks=parameters[2], dropout=0.3, seed=5)
        self.learned = nn.ParameterDict(self.score.given)
        self.attention, self.options = None, {}

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        if not self.options:
            return x + self.proj(ra.reference.attention(q, k, v, score=self.score).flatten(2))
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))  # as Megatron has them
        return x + self.proj(self.attention(q, k, v, 1).transpose(0, 1).flatten(2))


class Model(nn.Module):
    """A tiny language model that returns its summed loss."""

    def __init__(self, checkpoint=None, block=Block):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.checkpoint = checkpoint or (lambda block, x: block(x))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = self.checkpoint(block, x)
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def batch(replica, micro):
    """A sequence whose quarters have 6, 2, 5 and, in odd replicas, no valid tokens."""
    ids = torch.randint(VOCAB, (1, N), generator=torch.Generator().manual_seed(10 * micro + replica))
    labels = ids.roll(-1, 1)
    labels[:, 6:10] = IGNORE
    labels[:, 12] = IGNORE
    labels[:, -1 if replica % 2 == 0 else -6 :] = IGNORE
    return ids, labels


def parameters_of_one_process(replicas, accumulation, steps, block=Block):
    """What every rank must have after each step of plain SGD on the mean over all tokens."""
    model = Model(block=block)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    found = []
    for step in range(steps):
        batches = [batch(replica, step * accumulation + micro) for replica in range(replicas) for micro in range(accumulation)]
        tokens = sum(int((labels != IGNORE).sum()) for _, labels in batches)
        loss = sum(model(*one) for one in batches) / tokens
        loss.backward()
        # DeepSpeed adds 1e-6 to the norm over all ranks, as torch does
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def start(parallel, stage, accumulation, dtype, checkpoint=None, scatter=True, device="cpu", kind=Block):
    import deepspeed

    model = Model(checkpoint, kind).to(device)
    for block in model.blocks:
        block.options = dict(group=parallel.ring, layout=ra.contiguous(N, dist.get_world_size(parallel.ring)))
        if kind is ScoredBlock:
            block.attention = RingAttention(parallel, score=block.score)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "reduce_scatter": scatter},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    # with sequence parallelism DeepSpeed sums gradients in fp32, its default for seq_parallel_communication_data_type
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), LR), config=config, mpu=parallel)
    return engine


def run_step(engine, parallel, step):
    """Take one optimiser step; returns the mean loss over all its tokens."""
    accumulation = engine.gradient_accumulation_steps()
    layout = engine.module.blocks[0].options["layout"]
    mine = []
    for micro in range(accumulation):
        whole = batch(dist.get_rank(parallel.data), step * accumulation + micro)
        mine.append([ra.shard(x, layout, dist.get_rank(parallel.ring)).to(engine.device) for x in whole])
    tokens = count_tokens(*(labels for _, labels in mine))
    total = 0.0
    for ids, labels in mine:
        part = mean_loss(engine(ids, labels), labels, reduction=parallel.reduction(engine), tokens=tokens)
        engine.backward(part.loss)
        engine.step()
        total += part.mean.item()
    return total


def whole_parameters(engine, stage):
    import deepspeed

    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=stage == 3):
        return {name: p.detach().float().cpu().clone() for name, p in named.items()}


def prepare(group, ring, device):
    """Set DeepSpeed up without its launcher and without compiled operators; returns its groups."""
    # DeepSpeed takes it for the GPU's number, and ranks may share one
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device()) if device == "cuda" else "0"
    os.environ["DS_ACCELERATOR"] = device
    import deepspeed

    if device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    return DeepSpeedParallel(init_device_mesh(device, (group.size() // ring, ring), mesh_dim_names=("data", "ring")))


def trained(group, ring, stage, accumulation, dtype, checkpointing, scatter=True, device="cpu", kind=Block):
    parallel = prepare(group, ring, device)
    replicas = group.size() // ring
    checkpoint = None
    if checkpointing:
        import deepspeed

        deepspeed.init_distributed(dist.get_backend(group), verbose=False)
        deepspeed.checkpointing.configure(parallel, partition_activations=False)
        checkpoint = deepspeed.checkpointing.checkpoint
    engine = start(parallel, stage, accumulation, dtype, checkpoint, scatter, device, kind)
    assert engine.train_batch_size() == replicas * accumulation
    found = [(run_step(engine, parallel, step), whole_parameters(engine, stage)) for step in range(2)]
    engine.destroy()
    return found


def of_a_file(group, ring, stage, device="cpu"):
    """With the configuration in launch/jobs/deepspeed: the losses of two steps, the optimiser, and the learning rates."""
    parallel = prepare(group, ring, device)
    import deepspeed

    config = json.loads((Path(__file__).parents[2] / "launch" / "jobs" / "deepspeed" / f"zero{stage}.json").read_text())
    config["zero_force_ds_cpu_optimizer"] = False
    model = Model().to(device)
    for block in model.blocks:
        block.options = dict(group=parallel.ring, layout=ra.contiguous(N, ring))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=parallel)
    losses, rates = [], []
    for step in range(2):
        losses.append(run_step(engine, parallel, step))
        rates += engine.get_lr()
    optimizer = type(engine.basic_optimizer)
    engine.destroy()
    return losses, f"{optimizer.__module__}.{optimizer.__name__}", rates


def assert_configured(found, replicas):
    """Steps are so small that the losses are those of one process with constant weights."""
    wanted = [sum(Model()(*batch(r, step)).item() for r in range(replicas)) for step in range(2)]
    counts = [sum(int((batch(r, step)[1] != IGNORE).sum()) for r in range(replicas)) for step in range(2)]
    for losses, optimizer, (first, second) in found:
        assert losses == pytest.approx([loss / count for loss, count in zip(wanted, counts, strict=True)], rel=1e-2)
        # not DeepSpeed's own, which would be compiled at its first use
        assert optimizer == "torch.optim.adamw.AdamW"
        assert first < second


def resumed(group, ring, stage, folder, device="cpu"):
    """Loss and parameters after a second step: without interruption, and from a checkpoint of the first step."""
    parallel = prepare(group, ring, device)
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)
    engine = start(parallel, stage, 1, torch.float32, device=device)
    run_step(engine, parallel, 0)
    engine.save_checkpoint(folder, tag=f"zero{stage}")
    straight = run_step(engine, parallel, 1), whole_parameters(engine, stage)
    engine.destroy()
    engine = start(parallel, stage, 1, torch.float32, device=device)
    engine.load_checkpoint(folder, tag=f"zero{stage}")
    again = run_step(engine, parallel, 1), whole_parameters(engine, stage)
    engine.destroy()
    torch.use_deterministic_algorithms(False)
    return straight, again


@pytest.fixture(scope="module")
def pools(gloo):
    """One job per world size, because DeepSpeed needs all ranks of a job; it must not compile operators."""
    made = {}
    os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")

    def pool(size):
        if size not in made:
            made[size] = type(gloo)("gloo", size, imports=("deepspeed", "torch._inductor.compile_fx"))
        return made[size]

    yield pool
    for ranks in made.values():
        ranks.close()
    del os.environ["DS_BUILD_OPS"], os.environ["DS_ACCELERATOR"]


def assert_steps(found, wanted, parameters_within, loss_within):
    """Check each rank's loss and parameters after each step."""
    for ranks_steps in found:
        for (loss, parameters), (wanted_loss, wanted_parameters) in zip(ranks_steps, wanted, strict=True):
            assert loss == pytest.approx(wanted_loss, rel=loss_within)
            assert parameters.keys() == wanted_parameters.keys()
            for name, x in parameters.items():
                torch.testing.assert_close(x, wanted_parameters[name], **parameters_within, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("ring", "replicas", "stage", "accumulation", "checkpointing", "scatter"),
    [
        pytest.param(2, 2, 0, 1, False, True, marks=pytest.mark.thorough),
        pytest.param(2, 2, 1, 2, False, True, marks=pytest.mark.thorough),
        (2, 2, 2, 1, True, True),
        pytest.param(2, 2, 2, 2, False, False, marks=pytest.mark.thorough),
        (2, 2, 3, 2, False, True),
        pytest.param(2, 2, 3, 1, False, False, marks=pytest.mark.thorough),
        (4, 1, 0, 2, True, True),
        pytest.param(4, 1, 1, 1, False, True, marks=pytest.mark.thorough),
        pytest.param(4, 1, 2, 2, False, True, marks=pytest.mark.thorough),
        pytest.param(4, 1, 3, 1, True, True, marks=pytest.mark.thorough),
        pytest.param(4, 1, 3, 2, False, False, marks=pytest.mark.thorough),
        (1, 4, 3, 2, False, True),
        pytest.param(1, 1, 1, 1, False, True, marks=pytest.mark.thorough),
    ],
    ids=lambda x: str(x),
)
def test_steps_equal_those_of_one_process(pools, ring, replicas, stage, accumulation, checkpointing, scatter):
    wanted = parameters_of_one_process(replicas, accumulation, 2)
    found = pools(ring * replicas).run(
        ring * replicas, trained, ring, stage, accumulation, torch.float32, checkpointing, scatter, timeout=120
    )
    assert_steps(found, wanted, **IN_FP32)


@pytest.mark.parametrize(("ring", "stage", "checkpointing"), [(4, 1, False), (2, 3, True)])
@pytest.mark.some(1)
def test_steps_with_scores_equal_those_of_one_process(pools, ring, stage, checkpointing):
    """Learned slopes, tables and sinks are trained, and the same pairs dropped, under ZeRO and DeepSpeed's checkpointing."""
    wanted = parameters_of_one_process(4 // ring, 1, 2, ScoredBlock)
    found = pools(4).run(4, trained, ring, stage, 1, torch.float32, checkpointing, True, "cpu", ScoredBlock, timeout=120)
    assert_steps(found, wanted, **IN_FP32)


def calls_of_ring_attention(group):
    """What a RingAttention says to calls that it refuses, on this rank; and whether dropout is on in training alone."""
    parallel = object.__new__(DeepSpeedParallel)
    parallel.ring = group
    attention = RingAttention(parallel, mask=ra.full(), score=ra.score(dropout=0.5, sinks=torch.zeros(2)))
    q, told = torch.randn(1, 6, 2, 4, generator=torch.Generator().manual_seed(group.rank())), []
    calls = (dict(batch_dim_idx=2), dict(rotary_pos_emb=q), dict(attention_mask=q), dict(score=1.0))
    for n, options in enumerate(calls):
        with pytest.raises(ValueError) as caught:
            # the last ones on one rank alone
            attention(q, q, q, **(options if n < 2 or group.rank() else {}))
        told.append(str(caught.value))
    torch.manual_seed(0)
    dropped = attention(q, q, q), attention(q, q, q, 0, None, None, attention_mask=None)
    attention.eval()
    kept = ra.ring_attention(
        q, q, q, layout=ra.contiguous(12, 2), mask=ra.full(), group=group, score=ra.score(sinks=torch.zeros(2))
    )
    assert torch.equal(attention(q, q, q), kept)
    assert torch.equal(attention(*[q.transpose(0, 1)] * 3, 1), kept.transpose(0, 1))
    return told, not torch.equal(*dropped) and not torch.equal(dropped[0], kept)


def test_calls_of_ring_attention_are_honoured_or_refused(gloo):
    for told, drops in gloo.run(2, calls_of_ring_attention):
        assert drops
        for text, wanted in zip(
            told, ("batch_dim_idx is 2", "rotary_pos_emb is given", "attention_mask would go", "score would go")
        ):
            assert wanted in text
    with pytest.raises(ValueError, match="parallel is None, but must be a DeepSpeedParallel"):
        RingAttention(None)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.some(1)
def test_steps_in_bfloat16(pools, stage):
    """Up to bf16's rounding of parameters and activations."""
    wanted = parameters_of_one_process(2, 1, 2)
    assert_steps(pools(4).run(4, trained, 2, stage, 1, torch.bfloat16, False, timeout=120), wanted, **IN_BF16)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.some(1)
def test_a_checkpoint_resumes_bit_for_bit(pools, stage, tmp_path):
    for (loss, parameters), (loss_again, parameters_again) in pools(4).run(4, resumed, 2, stage, str(tmp_path), timeout=120):
        assert loss == loss_again
        assert all(torch.equal(x, parameters_again[name]) for name, x in parameters.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.some(2)
def test_the_configurations_for_launchers_train(pools, stage):
    assert_configured(pools(4).run(4, of_a_file, 2, stage, timeout=120), 2)


def rings_of(count):
    """(ring, replicas) on all GPUs: two rings of half of them each if their number is even, otherwise one ring."""
    return (count, 1) if count % 2 else (count // 2, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stage", "accumulation", "dtype"),
    [(1, 1, torch.float32), (3, 2, torch.float32), (1, 1, torch.bfloat16), (3, 1, torch.bfloat16)],
    ids=str,
)
def test_steps_on_gpus_equal_those_of_one_process(nccl, stage, accumulation, dtype):
    ring, replicas = rings_of(nccl.size)
    wanted = parameters_of_one_process(replicas, accumulation, 2)
    found = nccl.run(ring * replicas, trained, ring, stage, accumulation, dtype, False, True, "cuda", timeout=120)
    assert_steps(found, wanted, **(IN_FP32 if dtype == torch.float32 else IN_BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_the_configurations_for_launchers_train_on_gpus(nccl, stage):
    ring, replicas = rings_of(nccl.size)
    assert_configured(nccl.run(ring * replicas, of_a_file, ring, stage, "cuda", timeout=120), replicas)


@pytest.mark.gpu
def test_a_checkpoint_on_gpus_resumes_bit_for_bit(nccl, tmp_path):
    ring, replicas = rings_of(nccl.size)
    for straight, again in nccl.run(ring * replicas, resumed, ring, 3, str(tmp_path), "cuda", timeout=120):
        assert straight[0] == again[0]
        assert all(torch.equal(x, again[1][name]) for name, x in straight[1].items())


def other_meshes(group):
    messages = []
    for shape, names in (((4,), ("ring",)), ((2, 2), ("data", "sequence")), ((1, 2, 2), ("pipe", "data", "ring"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(ValueError) as caught:
            DeepSpeedParallel(mesh)
        messages.append(str(caught.value))
    return messages


def test_other_meshes_are_refused(pools):
    for messages in pools(4).run(4, other_meshes):
        assert [message.split(":")[0] for message in messages] == [
            f"mesh has the axes {names}, but must have ('data', 'ring')"
            for names in (("ring",), ("data", "sequence"), ("pipe", "data", "ring"))
        ]


def test_an_engine_without_the_ring_is_refused():
    """Without it, DeepSpeed would average over all ranks in every stage."""
    parallel = object.__new__(DeepSpeedParallel)
    with pytest.raises(ValueError, match=r"initialize it with deepspeed\.initialize\(\.\.\., mpu=parallel\)"):
        parallel.reduction(SimpleNamespace(mpu=None))
