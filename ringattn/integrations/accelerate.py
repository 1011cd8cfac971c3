"""accelerate's `ParallelismConfig` with rings: prepared loaders give the ranks of a ring the same batch, and no mask is dropped.

    parallel = RingParallelismConfig(ring_size=4)
    accelerator = Accelerator(parallelism_config=parallel)
    attach(model, group=parallel.ring)

accelerate's own `cp_size` attaches hooks that take each attention mask away, and needs FSDP. This config leaves `cp_size` at 1, so none
of that happens. Its mesh alone has an axis "cp", by which accelerate's loaders know the ranks of a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import check
from .imports import cannot_import

try:
    from accelerate.parallelism_config import ParallelismConfig
except ImportError as error:
    raise cannot_import(__name__, "accelerate 1.12 or later", ["accelerate"], error) from error

_RING = "cp"  # the axis of the mesh by whose name accelerate's loaders deal
_OTHERS = {"tp_size": "tensor parallelism", "cp_size": "torch's context parallelism", "sp_size": "DeepSpeed's Ulysses"}


@dataclass(repr=False)
class RingParallelismConfig(ParallelismConfig):
    """Rings of `ring_size` consecutive ranks, for `Accelerator(parallelism_config=...)` and transformers' `TrainingArguments`.

    Args, beside those of accelerate's:
        ring_size: ranks of a ring; it divides the ranks of the job.

    `dp_shard_size` and `dp_replicate_size` count ranks as they do without rings: leave both out for DDP over all ranks; for FSDP2 over
    all ranks give their number as `dp_shard_size`, which `ring_size` then divides. A loader that accelerate prepares gives all ranks of a
    ring the same whole batch, and each ring another one: cut it with `shard_batch`. The batch size counts sequences a ring.

    Raises ValueError if `tp_size`, `cp_size` or `sp_size` is above 1, and when the mesh is made if the sizes do not fit the ranks.
    """

    ring_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ring_size = check.integer("ring_size", self.ring_size, least=1)
        replicated, sharded = self._held
        for name, what in _OTHERS.items():
            if (getattr(self, name, None) or 1) > 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but {what} does not go with a ring: leave {name} at 1")
        if replicated > 1 and sharded == 1:
            raise ValueError(
                f"dp_replicate_size is {replicated} and dp_shard_size 1: for DDP leave both out, because the ranks that are "
                "no ring's are replicas"
            )
        if sharded > 1 and self.ring_size == 1:
            raise ValueError(
                f"ring_size is 1 and dp_shard_size {self.dp_shard_size}: without rings use accelerate's ParallelismConfig"
            )
        if sharded > 1 and sharded % self.ring_size:
            raise ValueError(
                f"dp_shard_size is {sharded}, but must be a multiple of ring_size {self.ring_size}: parameters are "
                "sharded over all ranks of a ring"
            )

    @property
    def ring(self) -> Any:
        """The ranks of this rank's ring, for `attach(model, group=...)`; None without other ranks.

        Raises ValueError before an Accelerator has made the mesh.
        """
        if self.device_mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "the ring is not known before the mesh: make the Accelerator first, or call get_device_mesh(device_type), such as 'cuda'"
            )
        return None if self.device_mesh is None else self.device_mesh[_RING]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh: (dp_replicate, cp) for DDP, or accelerate's own for FSDP2 over data and ring; a collective. None without ranks."""
        if not dist.is_initialized():
            return None
        ranks, (replicated, sharded) = dist.get_world_size(), self._held
        held = sharded * replicated if sharded > 1 else ranks
        if ranks % self.ring_size or held != ranks:
            raise ValueError(
                f"ring_size is {self.ring_size}, dp_shard_size {sharded} and dp_replicate_size {replicated}, but "
                f"there are {ranks} ranks: ring_size must divide them, and the others' product must be all of them, or 1 for DDP"
            )
        if sharded == 1:
            shape = ranks // self.ring_size, self.ring_size
            return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", _RING))
        over_rings = ParallelismConfig(
            dp_replicate_size=replicated,
            dp_shard_size=sharded // self.ring_size,
            cp_size=self.ring_size,
            tp_size=1,
            sp_size=1,
        )
        return over_rings.build_device_mesh(device_type)

    @property
    def _held(self) -> tuple[int, int]:
        """How many replicas accelerate counts, and over how many ranks each is sharded."""
        return self.dp_replicate_size or 1, self.dp_shard_size or 1
