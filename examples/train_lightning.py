"""Train a causal model of transformers with Lightning's Trainer, under DDP. What differs from a script for one GPU is marked "ring".

torchrun --nproc-per-node 2 examples/train_lightning.py     # on GPUs over NCCL, else on the CPU over gloo

It needs lightning. Lightning deals the sequences of a loader to rings of RING_SIZE ranks, None for one ring of all.
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.integrations.lightning import RingStrategy
from ringattn.training.causal_lm import CausalLMLoss
from ringattn.training.data import shard_batch
from ringattn.training.loss import averaged, mean_loss

VOCAB, SEQ_LEN, STEPS, RING_SIZE = 64, 509, 4, None


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        self.run = CausalLMLoss(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)))  # ring: of this rank's tokens

    def setup(self, stage: str) -> None:
        mesh = self.trainer.strategy.mesh  # ring
        self.rank, self.layout = mesh.get_local_rank("ring"), ra.zigzag(SEQ_LEN, mesh["ring"].size())
        attach(self.run.model, layout=self.layout, group=mesh["ring"])  # ring

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        labels = tokens.where(torch.arange(SEQ_LEN, device=tokens.device) >= 100, -100)  # a prompt is read but not learned
        batch = shard_batch(dict(input_ids=tokens, labels=labels), self.layout, self.rank)  # ring
        loss = mean_loss(self.run(**batch), batch["shift_labels"], reduction=averaged())  # ring: DDP takes the mean of gradients
        if self.trainer.is_global_zero:
            print(f"step {index}: loss {loss.mean.item():.6f}")
        return loss.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


rows = [(torch.arange(SEQ_LEN) + 5 * i) % VOCAB for i in range(STEPS)]  # your data
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(
    strategy=RingStrategy(RING_SIZE),  # ring
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    max_epochs=1,
    gradient_clip_val=1.0,
    **quiet,
)
trainer.fit(Module(), DataLoader(rows, batch_size=1))  # one sequence a ring
