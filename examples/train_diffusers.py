"""Train a video transformer of diffusers (Wan) on clips that all ranks share. What differs from a script for one GPU is marked "ring".

torchrun --nproc-per-node 2 examples/train_diffusers.py     # on GPUs over NCCL, else on the CPU over gloo

It needs diffusers. All ranks draw the same noise, cut the clip's tokens, and get the whole output.
"""

import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import nn

import ringattn as ra
from ringattn.integrations.diffusers import attach

FRAMES, HEIGHT, WIDTH, STEPS = 7, 6, 10, 4  # 7 frames of 3 x 5 tokens: 105, which need not divide by the ranks
PATCHES = dict(patch_size=(1, 2, 2), in_channels=4, out_channels=4)

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.manual_seed(0)  # ring: the same weights, noise and timesteps on every rank
sizes = dict(num_attention_heads=2, attention_head_dim=12, text_dim=8, freq_dim=16, ffn_dim=48, num_layers=2)
model = WanTransformer3DModel(**PATCHES, **sizes, rope_max_seq_len=32).to(device)
frames = torch.arange(FRAMES)
near = (frames[:, None] - frames).abs() <= 2  # each frame sees two before and two after it
attach(model, mask=ra.block_sparse(near, HEIGHT * WIDTH // 4))  # ring
run = nn.parallel.DistributedDataParallel(model)  # ring: it takes the mean of the ranks' gradients
optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
x = torch.linspace(0, 3, FRAMES * HEIGHT * WIDTH * 4).sin().view(1, 4, FRAMES, HEIGHT, WIDTH)  # your latents, (b, c, frames, h, w)
text = torch.ones(1, 5, 8)
for step in range(STEPS):
    noise, time = torch.randn(x.shape), torch.rand(1)
    mixed = (1 - time) * x + time * noise
    velocity = run(mixed.to(device), 1000 * time.to(device), text.to(device), return_dict=False)[0]
    loss = nn.functional.mse_loss(velocity, (noise - x).to(device))  # of the whole clip
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}")
dist.destroy_process_group()
