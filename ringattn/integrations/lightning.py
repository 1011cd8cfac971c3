"""Rings under Lightning (2.6): DDP over all ranks, whose loaders deal sequences to rings.

    trainer = Trainer(strategy=RingStrategy(ring_size=4), devices=8, ...)  # two rings of four ranks
    attach(self.model, group=self.trainer.strategy.ring)  # in configure_model or setup of the LightningModule

Lightning's own strategies deal different sequences to all ranks, but the ranks of a ring share one.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import check
from .imports import cannot_import

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise cannot_import(__name__, "Lightning", ["lightning"], error) from error

__all__ = ["RingStrategy"]


class RingStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` of replicas and rings. DDP averages gradients over all ranks: `mean_loss(..., reduction=averaged())`.

    Args:
        ring_size: ranks that share a sequence, which divides their number; None: all ranks are one ring.
        options: those of `DDPStrategy`.

    From `setup_environment` on, which Lightning calls before `configure_model` and `setup`, `mesh` has the axes "data" and "ring", and
    `ring` is this rank's ring, for `ring_attention` and `attach`. The samplers that Lightning puts into loaders
    (`use_distributed_sampler`) deal sequences to rings, in training and in evaluation: all ranks of a ring get the same, of which each
    takes its rows. Loaders with samplers of your own must do so themselves; `distributed_sampler_kwargs` says which replica a rank
    belongs to.

    Raises ValueError for a ring_size that is no positive integer, and on every rank for one that does not divide the ranks; and for the
    options `process_group`, `model_averaging_period` and a `ddp_comm_state` of local SGD, with which the ranks of a ring would drift apart.
    """

    def __init__(self, ring_size: int | None = None, **options: Any) -> None:
        self._ring_size = None if ring_size is None else check.integer("ring_size", ring_size, least=1)
        for name in ("process_group", "model_averaging_period"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is given, but gradients must be averaged over all ranks in each step: leave it out")
        if isinstance(options.get("ddp_comm_state"), PostLocalSGDState):
            raise ValueError(
                "ddp_comm_state is of local SGD, but gradients must be averaged over all ranks in each step: leave it out"
            )
        super().__init__(**options)
        self._mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh (replicas, ring) of all ranks, with the axes "data" and "ring"."""
        if self._mesh is None:
            raise ValueError(
                "there are no ranks yet: ask for mesh and ring in configure_model or setup, which Lightning calls later"
            )
        return self._mesh

    @property
    def ring(self) -> dist.ProcessGroup:
        """The ranks that share a sequence with this one."""
        return self.mesh["ring"].get_group()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of rings, and which of them is this rank's."""
        return {"num_replicas": self.mesh["data"].size(), "rank": self.mesh["data"].get_local_rank()}

    def setup_environment(self) -> None:
        """Make the process group, and rings of its ranks."""
        super().setup_environment()
        ranks = dist.get_world_size()
        size = ranks if self._ring_size is None else self._ring_size
        if ranks % size:
            raise ValueError(f"ring_size is {size}, which does not divide the {ranks} ranks")
        self._mesh = init_device_mesh(self.root_device.type, (ranks // size, size), mesh_dim_names=("data", "ring"))
