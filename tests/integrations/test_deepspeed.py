"""DeepSpeed around a ring: every parameter after a step is that of one process, for each ZeRO stage, mesh and way to accumulate."""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.integrations.deepspeed import DeepSpeedParallel
from ringattn.integrations.loss import count_tokens, mean_loss

# `make test` installs it, but for a GPU host without network
pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

N, VOCAB, WIDTH, LR, CLIP = 24, 17, 8, 0.5, 0.4
IGNORE = -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.options = {}

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
        return x + self.proj(ra.ring_attention(q, k, v, **self.options).flatten(2))


class Model(nn.Module):
    """Summed loss of a tiny language model."""

    def __init__(self, checkpoint=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
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


def parameters_of_one_process(replicas, accumulation, steps):
    """After each step of plain SGD on the mean over all tokens: what every rank must have."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    found = []
    for step in range(steps):
        batches = [batch(replica, step * accumulation + micro) for replica in range(replicas) for micro in range(accumulation)]
        tokens = sum(int((labels != IGNORE).sum()) for _, labels in batches)
        loss = sum(model(*one) for one in batches) / tokens
        loss.backward()
        # the norm over all ranks, to which DeepSpeed adds 1e-6 as torch does
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), {name: p.detach().clone() for name, p in model.named_parameters()}))
    return found


def start(parallel, stage, accumulation, dtype, checkpoint=None, scatter=True):
    import deepspeed

    model = Model(checkpoint)
    for block in model.blocks:
        block.options = dict(group=parallel.ring, layout=ra.contiguous(N, dist.get_world_size(parallel.ring)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "reduce_scatter": scatter},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    # with sequence parallel DeepSpeed adds gradients in fp32, its default for seq_parallel_communication_data_type
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), LR), config=config, mpu=parallel)
    return engine


def run_step(engine, parallel, step):
    """One optimiser step; the mean loss over all its tokens."""
    accumulation = engine.gradient_accumulation_steps()
    layout = engine.module.blocks[0].options["layout"]
    mine = []
    for micro in range(accumulation):
        whole = batch(dist.get_rank(parallel.data), step * accumulation + micro)
        mine.append([ra.shard(x, layout, dist.get_rank(parallel.ring)) for x in whole])
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
        return {name: p.detach().float().clone() for name, p in named.items()}


def prepare(group):
    """DeepSpeed without its launcher and without compiling its operators."""
    os.environ["LOCAL_RANK"] = "0"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")


def trained(group, ring, stage, accumulation, dtype, checkpointing, scatter=True):
    prepare(group)
    replicas = group.size() // ring
    parallel = DeepSpeedParallel(init_device_mesh("cpu", (replicas, ring), mesh_dim_names=("data", "ring")))
    checkpoint = None
    if checkpointing:
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        deepspeed.checkpointing.configure(parallel, partition_activations=False)
        checkpoint = deepspeed.checkpointing.checkpoint
    engine = start(parallel, stage, accumulation, dtype, checkpoint, scatter)
    assert engine.train_batch_size() == replicas * accumulation
    found = [(run_step(engine, parallel, step), whole_parameters(engine, stage)) for step in range(2)]
    engine.destroy()
    return found


def resumed(group, ring, stage, folder):
    """Parameters after a second step, straight on and from a checkpoint of the first."""
    prepare(group)
    parallel = DeepSpeedParallel(init_device_mesh("cpu", (group.size() // ring, ring), mesh_dim_names=("data", "ring")))
    engine = start(parallel, stage, 1, torch.float32)
    run_step(engine, parallel, 0)
    engine.save_checkpoint(folder, tag=f"zero{stage}")
    straight = run_step(engine, parallel, 1), whole_parameters(engine, stage)
    engine.destroy()
    engine = start(parallel, stage, 1, torch.float32)
    engine.load_checkpoint(folder, tag=f"zero{stage}")
    again = run_step(engine, parallel, 1), whole_parameters(engine, stage)
    engine.destroy()
    return straight, again


@pytest.fixture(scope="module")
def pools(gloo):
    """Jobs of DeepSpeed, which needs all ranks of a job: a pool a world size. It is to compile no operators."""
    made = {}
    os.environ.update(DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")

    def pool(size):
        if size not in made:
            made[size] = type(gloo)("gloo", size, imports=("deepspeed",))
        return made[size]

    yield pool
    for ranks in made.values():
        ranks.close()
    del os.environ["DS_BUILD_OPS"], os.environ["DS_ACCELERATOR"]


@pytest.mark.parametrize(
    ("ring", "replicas", "stage", "accumulation", "checkpointing", "scatter"),
    [
        (2, 2, 0, 1, False, True),
        (2, 2, 1, 2, False, True),
        (2, 2, 2, 1, True, True),
        (2, 2, 2, 2, False, False),
        (2, 2, 3, 2, False, True),
        (2, 2, 3, 1, False, False),
        (4, 1, 0, 2, True, True),
        (4, 1, 1, 1, False, True),
        (4, 1, 2, 2, False, True),
        (4, 1, 3, 1, True, True),
        (4, 1, 3, 2, False, False),
        (1, 4, 3, 2, False, True),
        (2, 1, 3, 1, False, True),
        (2, 1, 0, 2, False, True),
        (1, 1, 1, 1, False, True),
    ],
    ids=lambda x: str(x),
)
def test_steps_are_those_of_one_process(pools, ring, replicas, stage, accumulation, checkpointing, scatter):
    wanted = parameters_of_one_process(replicas, accumulation, 2)
    found = pools(ring * replicas).run(
        ring * replicas, trained, ring, stage, accumulation, torch.float32, checkpointing, scatter, timeout=120
    )
    for ranks_steps in found:
        for (loss, parameters), (wanted_loss, wanted_parameters) in zip(ranks_steps, wanted):
            assert loss == pytest.approx(wanted_loss, rel=2e-6)
            assert parameters.keys() == wanted_parameters.keys()
            for name, x in parameters.items():
                torch.testing.assert_close(x, wanted_parameters[name], rtol=5e-6, atol=5e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_in_bfloat16(pools, stage):
    """To bf16's rounding of parameters and activations."""
    wanted = parameters_of_one_process(2, 1, 2)
    for ranks_steps in pools(4).run(4, trained, 2, stage, 1, torch.bfloat16, False, timeout=120):
        for (loss, parameters), (wanted_loss, wanted_parameters) in zip(ranks_steps, wanted):
            assert loss == pytest.approx(wanted_loss, rel=1e-2)
            for name, x in parameters.items():
                torch.testing.assert_close(x, wanted_parameters[name], rtol=2e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_resumes_bit_for_bit(pools, stage, tmp_path):
    for (loss, parameters), (loss_again, parameters_again) in pools(4).run(4, resumed, 2, stage, str(tmp_path), timeout=120):
        assert loss == loss_again
        assert all(torch.equal(x, parameters_again[name]) for name, x in parameters.items())


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
    """It would take the mean over all ranks in every stage."""
    parallel = object.__new__(DeepSpeedParallel)
    with pytest.raises(ValueError, match=r"initialize it with deepspeed\.initialize\(\.\.\., mpu=parallel\)"):
        parallel.reduction(SimpleNamespace(mpu=None))
