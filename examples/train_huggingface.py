"""Train a causal model of Hugging Face transformers in a loop of your own. What differs from a script for one GPU is marked "ring".

torchrun --nproc-per-node 2 examples/train_huggingface.py     # on GPUs over NCCL, else on the CPU over gloo
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, sum_gradients
from ringattn.training.data import shard_batch
from ringattn.training.loss import mean_loss, summed

VOCAB, SEQ_LEN, STEPS = 64, 509, 4  # lengths need not divide by the ranks

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
rank = dist.get_rank()
layout = ra.zigzag(SEQ_LEN, dist.get_world_size())  # ring: which rank holds which positions

torch.manual_seed(0)  # ring: the same weights on every rank
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).to(device)  # or from_pretrained(...)
attach(model, layout=layout)  # ring
summed_loss = CausalLMLoss(model)  # ring: of this rank's tokens; logits never exist whole
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
for step in range(STEPS):
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * step) % VOCAB  # your data, (b, s): the same on every rank of a ring
    labels = tokens.where(torch.arange(SEQ_LEN) >= 100, -100)  # a prompt is read but not learned
    batch = shard_batch(dict(input_ids=tokens, labels=labels), layout, rank)  # ring: labels shifted, positions global
    batch = {name: x.to(device) for name, x in batch.items()}
    loss = mean_loss(summed_loss(**batch), batch["shift_labels"], reduction=summed())  # ring: exact over all ranks
    loss.loss.backward()
    sum_gradients(model.parameters())  # ring
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
dist.destroy_process_group()
