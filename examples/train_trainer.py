"""Train a causal model of transformers with its Trainer.

torchrun --nproc-per-node 2 examples/train_trainer.py     # on GPUs over NCCL, else on the CPU over gloo

Ranks form a mesh: REPLICAS rings side by side, each with sequences of its own.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.integrations.trainer import RingTrainer
from ringattn.training.data import shard_batch

VOCAB, SEQ_LEN, STEPS, REPLICAS = 64, 509, 4, 1

arguments = TrainingArguments(  # sets up the ranks
    "runs/trainer",
    max_steps=STEPS,
    per_device_train_batch_size=1,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    use_cpu=not torch.cuda.is_available(),
    ddp_backend=None if torch.cuda.is_available() else "gloo",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
mesh = init_device_mesh(arguments.device.type, (REPLICAS, dist.get_world_size() // REPLICAS), mesh_dim_names=("data", "ring"))
layout = ra.zigzag(SEQ_LEN, mesh["ring"].size())  # ring: which rank holds which positions


def cut(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    shards = shard_batch(default_collate(rows), layout, mesh.get_local_rank("ring"))
    return {**shards, "labels": shards["shift_labels"]}  # the Trainer counts what is called labels


class MyTrainer(RingTrainer):  # ring: not transformers' Trainer
    def get_train_dataloader(self) -> DataLoader:  # ring: deals sequences to replicas, never to the ranks of a ring
        sampler = DistributedSampler(self.train_dataset, REPLICAS, mesh.get_local_rank("data"), shuffle=False)
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, sampler=sampler, collate_fn=cut)


torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes))
attach(model, layout=layout, group=mesh["ring"])  # ring
tokens = (torch.arange(SEQ_LEN) + 5 * torch.arange(STEPS * REPLICAS)[:, None]) % VOCAB  # your data, (sequences, s)
labels = tokens.where(torch.arange(SEQ_LEN) >= 100, -100)  # a prompt is read but not learned
dataset = [dict(input_ids=row, labels=target) for row, target in zip(tokens, labels, strict=True)]
trainer = MyTrainer(model, arguments, train_dataset=dataset)
trainer.train()
for step, logged in enumerate(trainer.state.log_history[:STEPS] if trainer.is_world_process_zero() else []):
    print(f"step {step}: loss {logged['loss']:.6f}")  # of all ranks
dist.destroy_process_group()
