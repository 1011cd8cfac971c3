"""Train a GPT written in nanoGPT's way under DDP: `ra.replace_attention` puts its scaled_dot_product_attention around a ring.

torchrun --nproc-per-node 2 examples/train_module.py     # on GPUs over NCCL, else on the CPU over gloo
"""

import torch
import torch.distributed as dist
from torch import nn

import ringattn as ra
from ringattn.training.causal_lm import shift_labels
from ringattn.training.loss import averaged, mean_loss

VOCAB, WIDTH, HEADS, SEQ_LEN, STEPS = 64, 64, 4, 509, 4


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (b, h, s_local, d) each
        return self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.attn, self.lm_head = CausalSelfAttention(), nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(pos)
        return self.lm_head(x + self.attn(x))


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
rank, layout = dist.get_rank(), ra.zigzag(SEQ_LEN, dist.get_world_size())  # ring
positions = layout.positions(rank)[None].to(device)  # ring: nanoGPT counts from 0 in each shard
torch.manual_seed(0)
model = GPT().to(device)
ra.replace_attention(model, layout=layout)  # ring
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * step) % VOCAB  # your data, (b, s): the same on every rank of a ring
    idx, labels = (ra.shard(x, layout, rank).to(device) for x in (tokens, shift_labels(tokens)))  # ring
    loss = nn.functional.cross_entropy(model(idx, positions).flatten(0, 1), labels.flatten(), reduction="sum")
    loss = mean_loss(loss, labels, reduction=averaged())  # ring: DDP takes the mean of the ranks' gradients
    loss.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
dist.destroy_process_group()
