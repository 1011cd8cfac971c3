"""Attention on a 2-D mesh: heads are shared out along one axis, K/V go around a ring along the other. Checked against dense attention.

torchrun --nproc-per-node 4 examples/hybrid_mesh.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
world_size = dist.get_world_size()
heads = 2 if world_size % 2 == 0 else 1  # on several hosts: the number of GPUs of one host
mesh = init_device_mesh(device, (world_size // heads, heads), mesh_dim_names=("ring", "heads"))
rank = ra.hybrid(mesh).rank  # this rank's shard: ranks are counted row by row

torch.manual_seed(0)
q = torch.randn(1, 1000, 8, 64, device=device)  # (b, s, h, d), the same on every rank
k, v = torch.randn(2, 1, 1000, 1, 64, device=device).unbind()  # one K/V head: each rank of the heads axis gets a copy
layout = ra.zigzag(seq_len=1000, world_size=world_size)  # over all ranks of the mesh
shards = [ra.shard(x, layout, rank).requires_grad_() for x in (q, k, v)]  # (b, s_local, h, d)
out = ra.ring_attention(*shards, layout=layout, mask=ra.causal(), group=mesh)
out.square().sum().backward()

error = (out - ra.shard(ra.reference.attention(q, k, v), layout, rank)).abs().max().item()
print(f"rank {rank} of {world_size}, a mesh of {tuple(mesh.shape)}: largest difference from dense attention {error:.1e}")
dist.destroy_process_group()
