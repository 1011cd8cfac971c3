"""Train torchtitan's debug Llama under its trainer, with attention around a ring of all ranks.

torchrun --nproc-per-node 2 examples/train_torchtitan.py     # on GPUs: torchtitan has no other devices
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.models import llama3

from ringattn.integrations.torchtitan import RingTitanTrainer

VOCAB, SEQ_LEN, STEPS = 2048, 256, 8


class Counting(BaseDataLoader):
    """Your data: rows that count upwards, in two documents each; positions begin anew in the second."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, local_batch_size, **options):
        self.first, self.rows = dp_rank * local_batch_size, local_batch_size

    def __iter__(self):
        positions = torch.cat([torch.arange(100), torch.arange(SEQ_LEN - 100)]).repeat(self.rows, 1)
        while True:
            tokens = (7 * (self.first + torch.arange(self.rows))[:, None] + torch.arange(SEQ_LEN + 1)) % 64
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


if not hasattr(dist, "set_timeout"):  # torchtitan 0.3.0 calls it after its first step; torch 2.13 lacks it
    dist.set_timeout = lambda timeout, group=None: None
