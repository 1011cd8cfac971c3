"""Train a hybrid model, Qwen3-Next's kind: most layers are no attention but a gated delta rule after a short convolution.

torchrun --nproc-per-node 2 examples/hybrid_model.py     # on GPUs over NCCL, else on the CPU over gloo

Nothing differs from a model of attention alone: `attach` finds the layers, and their states pass between the ranks. FSDP2 shards the
weights. Each layer runs again in the backward pass.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss
from ringattn.training.data import shard_batch
from ringattn.training.loss import averaged, mean_loss

VOCAB, SEQ_LEN, STEPS = 64, 253, 4

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
rank = dist.get_rank()
layout = ra.contiguous(SEQ_LEN, dist.get_world_size())  # or zigzag, which shares out attention's work evenly

torch.manual_seed(0)
config = Qwen3NextConfig(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, mlp_only_layers=[0, 1, 2], hidden_act="silu",
    layer_types=["linear_attention", "linear_attention", "full_attention"], num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
model = Qwen3NextForCausalLM(config).to(device)  # or from_pretrained(...)
tokens = torch.randint(VOCAB, (1, 61), generator=torch.Generator().manual_seed(1))
report = ra.verify(model, {"input_ids": tokens})  # a step on shards against the same step of transformers in one process
if rank == 0:
    print(report)
attach(model, layout=layout)
ra.checkpoint_layers(model.model.layers)
run = CausalLMLoss(model)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(run)
optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, weight_decay=0.0)
for step in range(STEPS):
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * step) % VOCAB  # your data, (b, s): the same on every rank of a ring
    batch = shard_batch(dict(input_ids=tokens, labels=tokens), layout, rank)
    batch = {name: x.to(device) for name, x in batch.items()}
    loss = mean_loss(run(**batch), batch["shift_labels"], reduction=averaged())  # FSDP2 takes the mean of gradients
    loss.loss.backward()
    torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
dist.destroy_process_group()
