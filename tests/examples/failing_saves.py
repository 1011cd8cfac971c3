"""On every rank: a checkpoint, two that fail, one more, and what is read back from it. Asserts all but what the failures say."""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from finetune.checkpoint import CHANGES, load_checkpoint, save_checkpoint
from finetune.manifest import RESUMED
from finetune.ranks import CheckpointError

out, device, tokens, failures = Path(sys.argv[1]), torch.device("cpu"), torch.arange(5), []
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(7, world_size - 1)  # the last rank has no rows
fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.AdamW(model.parameters())
settings = SimpleNamespace(**dict.fromkeys((*RESUMED, *CHANGES)), out=str(out), resume=str(out / "checkpoint-000002"))
settings.ranks = world_size


def step() -> None:
    model(torch.ones(2, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def save(number: int) -> None:
    try:
        save_checkpoint(settings, model, optimizer, tokens, number, device)
    except CheckpointError as error:
        failures.append(str(error))  # under a limit of what files hold, printing would fail, too
    dist.barrier()  # rank 0 has tidied up


step()
save(1)
step()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
if rank == 1:  # the tensors are longer
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
save(2)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
if rank == 0:
    (out / "tokenizer.json").rename(out / "gone")
save(2)
assert sorted(path.name for path in out.iterdir()) == ["checkpoint-000001", "gone"]
dist.barrier()
if rank == 0:
    (out / "gone").rename(out / "tokenizer.json")
save(2)
files = {path.name for path in (out / "checkpoint-000002").glob("rank-*")}
assert files == {f"rank-0000{number}.safetensors" for number in range(world_size - 1)}
wanted = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
step()
assert load_checkpoint(settings, model, optimizer, tokens, device) == 2
for parameter, expected in zip(model.parameters(), wanted):
    assert torch.equal(parameter.full_tensor(), expected)
    assert optimizer.state[parameter]["step"] == 2
dist.destroy_process_group()
print("\n".join(failures))
