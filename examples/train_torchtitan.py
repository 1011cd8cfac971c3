"""Train torchtitan's debug Llama under its trainer, with attention around a ring of all ranks.

torchrun --nproc-per-node 2 examples/train_torchtitan.py     # on GPUs: torchtitan has no other devices
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.models import llama3
from torchtitan.tools.logging import init_logger

from ringattn.integrations.torchtitan import RingTitanTrainer

ROWS, SEQ_LEN, STEPS = 2, 256, 10


class Counting(BaseDataLoader, BaseTokenizer):
    """Your data and tokenizer: rows that count upwards, each in two documents, of which the second has positions of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config, BaseTokenizer.Config):
        pass

    def __init__(self, config, **options):
        self.first = ROWS * options.get("dp_rank", 0)

    def __iter__(self):
        positions = torch.cat([torch.arange(100), torch.arange(SEQ_LEN - 100)]).repeat(ROWS, 1)
        while True:
            tokens = (7 * (self.first + torch.arange(ROWS))[:, None] + torch.arange(SEQ_LEN + 1)) % 64
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    state_dict = load_state_dict = encode = decode = get_vocab_size = lambda self, *given: {}


if not hasattr(dist, "set_timeout"):  # torchtitan 0.3.0 calls it after its first step; torch 2.13 lacks it
    dist.set_timeout = lambda timeout, group=None: None
init_logger()
config = RingTitanTrainer.Config(
    model_spec=llama3.model_registry("debugmodel"),
    loss=CrossEntropyLoss.Config(global_vocab_size=2048),
    optimizer=default_adamw(lr=1e-3),
    tokenizer=Counting.Config(),
    dataloader=Counting.Config(),
    training=TrainingConfig(local_batch_size=ROWS, seq_len=SEQ_LEN, steps=STEPS, disable_cuda_graphs=True),  # ring
    parallelism=ParallelismConfig(
        data_parallel_shard_degree=1, context_parallel_degree=int(os.environ["WORLD_SIZE"]), spmd_backend="full_dtensor"
    ),
    override=OverrideConfig(imports=["ringattn.integrations.torchtitan.ring_attention_override"]),  # ring
)
config.build().train()
