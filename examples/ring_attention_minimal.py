"""Causal attention over 1000 tokens, split over the ranks, checked against dense attention.

python examples/ring_attention_minimal.py
torchrun --nproc-per-node 4 examples/ring_attention_minimal.py
"""

import os

import torch
import torch.distributed as dist

import ringattn as ra

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1000, 8, 64).unbind()  # (b, s, h, d), the same on every rank
layout = ra.zigzag(seq_len=1000, world_size=world_size)
shards = [ra.shard(x, layout, rank) for x in (q, k, v)]  # (b, s_local, h, d)
out = ra.ring_attention(*shards, layout=layout, mask=ra.causal())

error = (out - ra.shard(ra.reference.attention(q, k, v, mask=ra.causal()), layout, rank)).abs().max().item()
print(f"rank {rank} of {world_size}: {out.shape[1]} of 1000 tokens, largest difference from dense attention {error:.1e}")
if dist.is_initialized():
    dist.destroy_process_group()
