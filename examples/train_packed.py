"""Train a small transformers model on packed documents, others in every step; the next are cut and planned while a step runs.

python examples/train_packed.py
torchrun --nproc-per-node 3 examples/train_packed.py
"""

import functools
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, sum_gradients
from ringattn.training.data import ShardedBatches, pack
from ringattn.training.loss import mean_loss, summed

device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if "RANK" in os.environ:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
torch.manual_seed(0)  # the same weights on every rank
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(device)


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Your data: documents of any lengths, here of tokens that count upwards. They are the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        lengths, starts = torch.randint(1, 50, (5,), generator=draw), torch.randint(64, (5,), generator=draw)
        yield pack([(torch.arange(n) + start) % 64 for n, start in zip(lengths.tolist(), starts)])


report = ra.verify(model, next(batches(1)))
assert report.passed, report

attach(model)  # each batch brings its layout
run, optimizer = CausalLMLoss(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
placed = functools.partial(ra.placed, world_size=world_size)  # even work; short documents stay on one rank
zigzag = functools.partial(ra.zigzag, world_size=world_size)  # of batches without documents
like = tuple(torch.empty(1, 1, heads, 8, device=device) for heads in (4, 2, 2))  # q, k and v of a layer
loader = ShardedBatches(batches(30), zigzag, rank, of_documents=placed, prepare=functools.partial(ra.prepare, like=like))
for step, (layout, batch) in enumerate(loader):
    batch = {name: value.to(device) for name, value in batch.items()}
    loss = mean_loss(run(**batch, layout=layout), batch["shift_labels"], reduction=summed())
    loss.loss.backward()
    sum_gradients(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step in (0, 29):
        print(f"step {step}: loss {loss.mean:.3f} over {int(loss.tokens)} tokens of {world_size} ranks")
if dist.is_initialized():
    dist.destroy_process_group()
