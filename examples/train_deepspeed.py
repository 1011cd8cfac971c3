"""Train a causal model of transformers under DeepSpeed's ZeRO-3.

torchrun --nproc-per-node 2 examples/train_deepspeed.py     # or deepspeed; on GPUs over NCCL, else on the CPU over gloo

Ranks form a mesh: REPLICAS rings side by side, each with a sequence of its own.
"""

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.deepspeed import DeepSpeedParallel
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss
from ringattn.training.data import shard_batch
from ringattn.training.loss import mean_loss

VOCAB, SEQ_LEN, STEPS, REPLICAS = 64, 509, 4, 1
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,  # sequences a replica
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler
}
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
else:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile it at the start
deepspeed.init_distributed(dist.get_backend(), verbose=False)  # takes the group that is there
mesh = init_device_mesh(device.type, (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("data", "ring"))
parallel = DeepSpeedParallel(mesh)  # ring: tells DeepSpeed which ranks share a sequence
layout = ra.zigzag(SEQ_LEN, mesh["ring"].size())

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
attach(model, layout=layout, group=parallel.ring)  # ring
run = CausalLMLoss(model)  # ring: initialize with this, not the model
optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, weight_decay=0.0)
engine, *_ = deepspeed.initialize(model=run, optimizer=optimizer, config=CONFIG, mpu=parallel)
for step in range(STEPS):
    sequence = step * REPLICAS + mesh.get_local_rank("data")  # the ranks of a ring share one, replicas see others
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * sequence) % VOCAB  # your data, (b, s)
    labels = tokens.where(torch.arange(SEQ_LEN) >= 100, -100)  # a prompt is read but not learned
    batch = shard_batch(dict(input_ids=tokens, labels=labels), layout, mesh.get_local_rank("ring"))  # ring
    batch = {name: x.to(device) for name, x in batch.items()}
    loss = mean_loss(engine(**batch), batch["shift_labels"], reduction=parallel.reduction(engine))  # ring
    engine.backward(loss.loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
dist.destroy_process_group()
