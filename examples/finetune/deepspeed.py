"""`finetune_long_document.py --wrapper deepspeed`: all ranks are one ring, and ZeRO shards over all of them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringattn.integrations.deepspeed import DeepSpeedParallel
from ringattn.training.causal_lm import CausalLMLoss

from .model import draw_weights
from .settings import DTYPES, Settings
from .trainer import Trainer, make_optimizer


class DeepSpeedTrainer(Trainer):
    """In bf16 the weights are bf16, beside an fp32 copy that the optimizer steps; there is no autocast."""

    def __init__(self, settings: Settings, model: CausalLMLoss, device: torch.device) -> None:
        self.settings, self.model, self.device = settings, model, device
        deepspeed = prepare(settings, device)
        parallel = DeepSpeedParallel(init_device_mesh(settings.device, (1, settings.ranks), mesh_dim_names=("data", "ring")))
        config = make_config(settings)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        if settings.shape and settings.zero == 3:
            # one module at a time: draw its weights whole, then keep this rank's part
            for name, module in model.named_modules():
                if any(True for _ in module.parameters(recurse=False)):
                    draw_weights(module, settings.seed, device, name)
                    # Init keeps an existing module's dtype, whatever the config says
                    module.to(DTYPES[settings.dtype])
                    deepspeed.zero.Init(module=module, config_dict_or_path=config, mpu=parallel)
        elif settings.shape:
            draw_weights(model, settings.seed, device)
        model.to(device)
        self.run, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model, settings), config=config, mpu=parallel
        )
        # older versions round buffers to bf16 too, in which rotary frequencies cannot tell long positions apart
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name].to(device)
        self.reduction = parallel.reduction(self.run)

    def step(self, batch: dict[str, torch.Tensor], rate: float) -> tuple[float, float]:
        loss = self.loss(batch)
        self.run.backward(loss.loss)
        norm = None
        if self.settings.zero == 0 and self.settings.dtype == "float32":
            # the engine clips but does not report the norm here; every rank holds the whole gradient
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.run.step()
        return loss.mean.item(), float(self.run.get_global_grad_norm() if norm is None else norm)


def make_config(settings: Settings) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": settings.clip,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_optimization": {"stage": settings.zero},
        "zero_force_ds_cpu_optimizer": False,
    }


def prepare(settings: Settings, device: torch.device) -> Any:
    """Import `deepspeed` for this device, in the process group that torch has set up."""
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    # without this DeepSpeed takes any GPU that it sees
    os.environ.setdefault("DS_ACCELERATOR", settings.device)
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    if settings.device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile it at the start
    deepspeed.init_distributed(dist.get_backend(), verbose=False)
    return deepspeed
