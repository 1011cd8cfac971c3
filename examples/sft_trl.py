"""Fine-tune a causal model with trl's SFTTrainer on packed documents, each of which sees itself only.

torchrun --nproc-per-node 2 examples/sft_trl.py     # on GPUs over NCCL, else on the CPU over gloo

Ranks form a mesh: REPLICAS rings side by side, each with documents of its own.
"""

import string

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from ringattn.integrations.huggingface import attach
from ringattn.integrations.trl import RingSFTTrainer

STEPS, SEQ_LEN, REPLICAS = 4, 512, 1

arguments = SFTConfig(  # sets up the ranks
    "runs/sft_trl",
    packing=True,
    max_length=SEQ_LEN,
    max_steps=STEPS,
    per_device_train_batch_size=1,  # packed rows a ring
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    lr_scheduler_type="constant",
    bf16=torch.cuda.is_available(),
    use_cpu=not torch.cuda.is_available(),
    ddp_backend=None if torch.cuda.is_available() else "gloo",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
mesh = init_device_mesh(arguments.device.type, (REPLICAS, arguments.world_size // REPLICAS), mesh_dim_names=("data", "ring"))

alphabet = Tokenizer(models.WordLevel({name: i for i, name in enumerate(["<pad>", "<eos>", *string.ascii_lowercase])}))
alphabet.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=alphabet, pad_token="<pad>", eos_token="<eos>")  # yours
lengths = [40 + 37 * i % 300 for i in range(2 * STEPS * REPLICAS * 4)]
texts = ["".join(string.ascii_lowercase[(i + 3 * j) % 26] for j in range(length)) for i, length in enumerate(lengths)]  # your data

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
attach(model, group=mesh["ring"])  # ring: without a layout, as packed rows have lengths of their own
trainer = RingSFTTrainer(  # ring: not SFTTrainer
    model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
)
trainer.train()
for step, logged in enumerate(trainer.state.log_history[:STEPS] if trainer.is_world_process_zero() else []):
    print(f"step {step}: loss {logged['loss']:.6f}")  # of all tokens of all ranks
dist.destroy_process_group()
