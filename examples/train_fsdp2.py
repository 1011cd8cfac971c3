"""Train a causal model of transformers under FSDP2, which shards weights, gradients and optimizer states over all ranks.

torchrun --nproc-per-node 2 examples/train_fsdp2.py     # on GPUs over NCCL, else on the CPU over gloo

Ranks form a mesh: REPLICAS rings side by side, each with a sequence of its own.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss
from ringattn.training.data import shard_batch
from ringattn.training.loss import averaged, mean_loss

VOCAB, SEQ_LEN, STEPS, REPLICAS = 64, 509, 4, 1

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("data", "ring"))
everyone = init_device_mesh(device.type, (dist.get_world_size(),))
layout = ra.zigzag(SEQ_LEN, mesh["ring"].size())

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).to(device)
attach(model, layout=layout, group=mesh["ring"])  # ring
run = CausalLMLoss(model)  # ring: wrap this, not the model, so that the output embedding is whole where it is used
for layer in model.model.layers:
    fully_shard(layer, mesh=everyone)  # ring: over all ranks, not the data axis alone, or ranks of a ring would drift apart
fully_shard(run, mesh=everyone)
optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, weight_decay=0.0)
for step in range(STEPS):
    sequence = step * REPLICAS + mesh.get_local_rank("data")  # the ranks of a ring share one, replicas see others
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * sequence) % VOCAB  # your data, (b, s)
    labels = tokens.where(torch.arange(SEQ_LEN) >= 100, -100)  # a prompt is read but not learned
    batch = shard_batch(dict(input_ids=tokens, labels=labels), layout, mesh.get_local_rank("ring"))  # ring
    batch = {name: x.to(device) for name, x in batch.items()}
    loss = mean_loss(run(**batch), batch["shift_labels"], reduction=averaged())  # ring: FSDP2 takes the mean of gradients
    loss.loss.backward()
    torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
dist.destroy_process_group()
