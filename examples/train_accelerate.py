"""Train a causal model of transformers under accelerate (DDP here), two micro-batches a step.

torchrun --nproc-per-node 2 examples/train_accelerate.py     # or accelerate launch; on GPUs over NCCL, else on the CPU over gloo

Ranks form a mesh: REPLICAS rings side by side, each with sequences of its own.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss
from ringattn.training.data import shard_batch
from ringattn.training.loss import Reduction, count_tokens, mean_loss

VOCAB, SEQ_LEN, STEPS, REPLICAS, MICRO = 64, 509, 4, 1, 2

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=MICRO)
ranks, device = accelerator.num_processes, accelerator.device
mesh = init_device_mesh(device.type, (REPLICAS, ranks // REPLICAS), mesh_dim_names=("data", "ring"))
layout = ra.zigzag(SEQ_LEN, mesh["ring"].size())  # ring: which rank holds which positions

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
attach(model, layout=layout, group=mesh["ring"])  # ring
run = CausalLMLoss(model)  # ring: prepare this, not the model
optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, weight_decay=0.0)
run, optimizer = accelerator.prepare(run, optimizer)  # ring: not the data loader, which would deal sequences to ranks


def micro_batch(number: int) -> dict[str, torch.Tensor]:
    sequence = number * REPLICAS + mesh.get_local_rank("data")  # the ranks of a ring share one, replicas see others
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * sequence) % VOCAB  # your data, (b, s)
    labels = tokens.where(torch.arange(SEQ_LEN) >= 100 + 50 * (number % 2), -100)  # a prompt is read but not learned
    batch = shard_batch(dict(input_ids=tokens, labels=labels), layout, mesh.get_local_rank("ring"))  # ring
    return {name: x.to(device) for name, x in batch.items()}


for step in range(STEPS):
    batches, mean = [micro_batch(step * MICRO + i) for i in range(MICRO)], 0.0
    tokens = count_tokens(*(batch["shift_labels"] for batch in batches))  # ring: of all micro-batches and ranks
    for batch in batches:
        with accelerator.accumulate(run):
            # ring: DDP divides by the ranks, and accelerator.backward by the micro-batches
            loss = mean_loss(run(**batch), batch["shift_labels"], reduction=Reduction(ranks * MICRO), tokens=tokens)
            accelerator.backward(loss.loss)
            mean += loss.mean.item()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {mean:.6f}")
dist.destroy_process_group()
