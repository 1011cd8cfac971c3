"""torchtitan on CPUs over gloo, for tests: import this before any other module of torchtitan, which computes on accelerators alone."""

import types

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torchtitan.tools import utils


def dense_flex_attention(q, k, v, *, block_mask, scale, **options):
    """FlexAttention's result under its own mask, because torch has no backward pass of it for CPUs."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True), None


def _device():
    module = types.ModuleType("cpu")
    vars(module).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    properties = types.SimpleNamespace(total_memory=1, name="CPU")
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.get_device_name, module.get_device_properties = lambda device=None: "CPU", lambda device=None: properties
    module.memory_stats = lambda device=None: {}
    module.reset_peak_memory_stats = module.empty_cache = lambda: None
    return module


_divide = FSDPModule.set_gradient_divide_factor


def _divide_after_the_sum(self, factor):
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums


utils.device_type, utils.device_module = "cpu", _device()
FSDPModule.set_gradient_divide_factor = _divide_after_the_sum
if not hasattr(dist, "set_timeout"):  # torchtitan 0.3.0 calls it after its first step; torch 2.13 lacks it
    dist.set_timeout = lambda timeout, group=None: None

from torchtitan.models.common import attention, decoder  # noqa: E402  after the device is known

attention.FlexAttention.compiled_flex_attn = staticmethod(dense_flex_attention)
decoder.create_attention_mask = attention.create_block_mask
