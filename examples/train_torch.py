"""Train a model of plain torch on sequences that all ranks share. What differs from a script for one GPU is marked "ring".

torchrun --nproc-per-node 2 examples/train_torch.py     # on GPUs over NCCL, else on the CPU over gloo
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringattn as ra
from ringattn.training.causal_lm import shift_labels, sum_gradients
from ringattn.training.loss import mean_loss, summed

VOCAB, WIDTH, HEADS, SEQ_LEN, STEPS = 64, 64, 4, 509, 4  # lengths need not divide by the ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, layout: ra.Layout) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)  # (b, s_local, h, d) each
        x = x + self.out(ra.ring_attention(q, k, v, layout=layout, mask=ra.causal()).flatten(2))  # ring
        return self.head(x)


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
rank = dist.get_rank()
layout = ra.zigzag(SEQ_LEN, dist.get_world_size())  # ring: which rank holds which positions
positions = layout.positions(rank)[None].to(device)  # ring: this rank's, instead of 0, 1, 2, ...

torch.manual_seed(0)  # ring: the same weights on every rank
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * step) % VOCAB  # your data, (b, s): the same on every rank of a ring
    labels = shift_labels(tokens)  # of the whole sequence, before it is cut
    tokens, labels = (ra.shard(x, layout, rank).to(device) for x in (tokens, labels))  # ring
    logits = model(tokens, positions, layout)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")  # ring: the sum over this rank's tokens
    loss = mean_loss(loss, labels, reduction=summed())  # ring: divided by the tokens of all ranks
    loss.loss.backward()
    sum_gradients(model.parameters())  # ring
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
dist.destroy_process_group()
