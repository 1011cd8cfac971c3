"""Ranks that share a GPU, as docs/launch.md says: over NCCL and over copy engines they give the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CALLS = """
import ringattn as ra

torch.manual_seed(rank)
q, k, v, dout = (torch.randn(1, 300, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2, 4))
torch.use_deterministic_algorithms(True, warn_only=True)
results = []
for group in (ra.process_group(), ra.symmetric()):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ra.ring_attention(*leaves, group=group)
    results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
dist.destroy_process_group()
print(f"rank {rank}: the same")
"""


@pytest.mark.gpu
def test_a_program_whose_ranks_share_a_gpu(tmp_path):
    page = (ROOT / "docs/launch.md").read_text()
    begin = page.split("### Several ranks on one GPU")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "train.py").write_text(begin + CALLS)
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    quiet = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    environment = {**os.environ, **quiet, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", tmp_path / "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": the same") == 3, done.stdout
