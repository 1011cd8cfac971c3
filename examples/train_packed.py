"""Train a small transformers model on packed documents, each of which sees itself only. Checks one step against dense attention.

python examples/train_packed.py
torchrun --nproc-per-node 3 examples/train_packed.py
"""

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, sum_gradients
from ringattn.training.data import pack, shard_batch
from ringattn.training.loss import mean_loss, summed

device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if "RANK" in os.environ:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
torch.manual_seed(0)  # the same weights and documents on every rank

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
).to(device)
# documents of any lengths, which count upwards
lengths = [37, 5, 61, 1, 24]
batch = pack([(torch.arange(n) + start) % 64 for n, start in zip(lengths, torch.randint(64, (len(lengths),)), strict=True)])
mask = ra.documents(lengths=lengths)
layout = ra.placed(mask, seq_len=sum(lengths), world_size=world_size)  # even work; short documents stay on one rank
print(f"rank {rank} of {world_size}: {layout.lengths[rank]} of {layout.seq_len} tokens, {layout.work(mask)[rank]} live pairs")

report = ra.verify(model, batch, layout=layout)
assert report.passed, report

attach(model, layout=layout)
run = CausalLMLoss(model)
mine = {name: value.to(device) for name, value in shard_batch(batch, layout, rank).items()}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(20):
    loss = mean_loss(run(**mine), mine["shift_labels"], reduction=summed())
    loss.loss.backward()
    sum_gradients(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 19 == 0:
        print(f"step {step}: loss {loss.mean:.3f} over {int(loss.tokens)} tokens of {world_size} ranks")
if dist.is_initialized():
    dist.destroy_process_group()
