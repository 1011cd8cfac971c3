"""Train a model that calls torch's scaled_dot_product_attention: within `ring_sdpa(layout=layout)` all calls run around a ring.

torchrun --nproc-per-node 2 examples/train_sdpa.py     # on GPUs over NCCL, else on the CPU over gloo
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringattn as ra
from ringattn.integrations.sdpa import ring_sdpa
from ringattn.training.causal_lm import shift_labels, sum_gradients
from ringattn.training.loss import mean_loss, summed

VOCAB, WIDTH, HEADS, SEQ_LEN, STEPS = 64, 64, 4, 509, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (b, h, s_local, d) each
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
rank, layout = dist.get_rank(), ra.zigzag(SEQ_LEN, dist.get_world_size())  # ring
positions = layout.positions(rank)[None].to(device)  # ring: this rank's, instead of 0, 1, 2, ...
torch.manual_seed(0)  # ring: the same weights on every rank
model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * step) % VOCAB  # your data, (b, s): the same on every rank of a ring
    ids, labels = (ra.shard(x, layout, rank).to(device) for x in (tokens, shift_labels(tokens)))  # ring
    with ring_sdpa(layout=layout):  # ring: or call ringattn.integrations.sdpa.scaled_dot_product_attention in the model
        logits = model(ids, positions)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")  # ring: the sum over this rank's tokens
    loss = mean_loss(loss, labels, reduction=summed())  # ring: divided by the tokens of all ranks
    loss.loss.backward()
    sum_gradients(model.parameters())  # ring
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
dist.destroy_process_group()
