"""Pretrain a small language model on one long sequence a replica, with DeepSpeed around a ring.

    torchrun --nproc-per-node 4 examples/deepspeed_pretrain.py --ring 2 --zero 3

Ranks form a grid: `--ring` of them share a sequence, and world size / ring replicas see different ones. The text is made up: each token
follows from the one before it, so that the loss falls from log(vocabulary) towards zero.
"""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.integrations.deepspeed import DeepSpeedParallel
from ringattn.training.loss import mean_loss

VOCAB = 32


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, layout: ra.Layout, ring: dist.ProcessGroup) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(ra.ring_attention(q, k, v, layout=layout, group=ring).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """The summed loss of this rank's tokens."""

    def __init__(self, seq_len: int, width: int, layers: int, layout: ra.Layout, ring: dist.ProcessGroup) -> None:
        super().__init__()
        self.layout, self.ring = layout, ring
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, width // 16) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, self.layout, self.ring)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten(), reduction="sum")


def make_text(seq_len: int, seed: int) -> torch.Tensor:
    """(1, seq_len + 1) tokens, each but the first of its run of 16 following from the one before it."""
    starts = torch.randint(VOCAB, (seq_len // 16 + 1, 1), generator=torch.Generator().manual_seed(seed))
    return ((starts + 5 * torch.arange(16)) % VOCAB).flatten()[: seq_len + 1][None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ring", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--zero", type=int, default=3, choices=range(4))
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    if options.ring < 1 or ranks % options.ring:
        parser.error(f"--ring is {options.ring}, but must divide the {ranks} ranks of the job")
    if options.width < 16 or options.width % 16:
        parser.error(f"--width is {options.width}, but must be a multiple of 16, the size of a head")

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else DeepSpeed compiles it at the start
    deepspeed.init_distributed("nccl" if cuda else "gloo", verbose=False)
    replicas = dist.get_world_size() // options.ring
    mesh = init_device_mesh(device.type, (replicas, options.ring), mesh_dim_names=("data", "ring"))
    parallel = DeepSpeedParallel(mesh)
    rank, replica = dist.get_rank(parallel.ring), dist.get_rank(parallel.data)
    layout = ra.zigzag(options.seq_len, options.ring)

    torch.manual_seed(0)
    model = Model(options.seq_len, options.width, options.layers, layout, parallel.ring)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": cuda},
        "zero_optimization": {"stage": options.zero},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=parallel)
    positions = layout.positions(rank)[None].to(device)
    for step in range(options.steps):
        text = make_text(options.seq_len, seed=step * replicas + replica)
        # shifted first, then cut
        ids, labels = (ra.shard(x, layout, rank).to(device) for x in (text[:, :-1], text[:, 1:]))
        part = mean_loss(engine(ids, positions, labels), labels, reduction=parallel.reduction(engine))
        engine.backward(part.loss)
        engine.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {part.mean.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
