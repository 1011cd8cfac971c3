"""Train Megatron-core's GPT with context parallelism, its attention around a ring: `ring_spec(spec)`. What differs is marked "ring".

torchrun --nproc-per-node 2 examples/train_megatron.py     # on GPUs over NCCL, else on the CPU over gloo
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import ringattn as ra
from ringattn.integrations.megatron import ring_spec
from ringattn.training.causal_lm import shift_labels, sum_gradients
from ringattn.training.loss import mean_loss, summed

VOCAB, SEQ_LEN, STEPS = 64, 480, 4  # Megatron's context parallelism divides lengths by twice the ranks

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
if device.type == "cuda":
    model_parallel_cuda_manual_seed(0)
ring = parallel_state.get_context_parallel_group()
layout = ra.zigzag(SEQ_LEN, ring.size())  # Megatron's own cuts
positions = layout.positions(ring.rank())[None].to(device)

torch.manual_seed(0)  # the same weights on every rank
config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, context_parallel_size=ring.size(),
    use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False,
)  # fmt: skip
spec = ring_spec(get_gpt_layer_local_spec())  # ring: instead of get_gpt_layer_local_spec()
sizes = dict(vocab_size=VOCAB, max_sequence_length=SEQ_LEN, position_embedding_type="learned_absolute")
model = GPTModel(config, transformer_layer_spec=spec, **sizes).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens = (torch.arange(SEQ_LEN)[None] + 5 * step) % VOCAB  # your data, (b, s): the same on every rank of a ring
    ids, labels = (ra.shard(x, layout, ring.rank()).to(device) for x in (tokens, shift_labels(tokens)))
    losses = model(ids, positions, None, labels=labels.clamp_min(0))  # (b, s_local), one a token
    loss = mean_loss(losses[labels >= 0].sum(), labels, group=ring, reduction=summed())
    loss.loss.backward()
    sum_gradients(model.parameters(), ring)
    optimizer.step()
    optimizer.zero_grad()
    if ring.rank() == 0:
        print(f"step {step}: loss {loss.mean.item():.6f}")
parallel_state.destroy_model_parallel()
dist.destroy_process_group()
