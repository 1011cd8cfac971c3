"""Ring attention under DeepSpeed: data parallel x ring, with any ZeRO stage.

    mesh = init_device_mesh("cuda", (replicas, ring), mesh_dim_names=("data", "ring"))
    parallel = DeepSpeedParallel(mesh)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=parallel, model_parameters=model.parameters())
    ...
    out = ringattn.ring_attention(q, k, v, layout=layout, group=parallel.ring)  # in the model

DeepSpeed asks an `mpu` object for its process groups. With this one it shards optimiser states, gradients and parameters over all
ranks, and counts batches by replica: `train_batch_size` is the batch size of all replicas, however many ranks share a sequence.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import check
from ..training.loss import Reduction
from ..training.loss import deepspeed as divided_by

Group = dist.ProcessGroup


class DeepSpeedParallel:
    """The `mpu` of `deepspeed.initialize` for a 2-D mesh of replicas and ring. DeepSpeed calls its methods.

    mesh: a DeviceMesh of all ranks of the job, with the two axes named here. Pass the attribute `ring` as `ring_attention`'s group.

    Raises ValueError for a mesh that has other axes than these two, or has not all ranks.
    """

    def __init__(self, mesh: DeviceMesh, *, data_axis: str = "data", ring_axis: str = "ring") -> None:
        check.instance("mesh", mesh, DeviceMesh, "make one with init_device_mesh")
        for name, axis in (("data_axis", data_axis), ("ring_axis", ring_axis)):
            check.instance(name, axis, str, "give the name of an axis")
        names = mesh.mesh_dim_names or ()
        if set(names) != {data_axis, ring_axis} or len(names) != 2:
            raise ValueError(
                f"mesh has the axes {names}, but must have {(data_axis, ring_axis)}: make one with init_device_mesh(device, "
                f"(replicas, ring), mesh_dim_names={(data_axis, ring_axis)}), or name its axes in data_axis and ring_axis"
            )
        if mesh.size() != dist.get_world_size():
            raise ValueError(f"mesh has {mesh.size()} ranks, but the job has {dist.get_world_size()}: DeepSpeed needs all of them")
        self.ring = mesh[ring_axis].get_group()
        self.data = mesh[data_axis].get_group()
        world = dist.group.WORLD
        assert world is not None
        self.everyone: Group = world
        # DeepSpeed sums norms over model-parallel groups: here each rank is alone in its group
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(alone, dist.ProcessGroup)
        self.alone: Group = alone

    def reduction(self, engine: Any) -> Reduction:
        """How the engine reduces gradients, for `mean_loss`: it sums them over all ranks, and divides by the steps of accumulation and

        - in ZeRO stages 0 to 2, and in stage 3 with `"reduce_scatter": false`, by the number of replicas;
        - otherwise in stage 3, by the number of all ranks: there DeepSpeed averages over the ranks of a ring too.

        Raises ValueError for an engine that was initialized without this object.
        """
        if engine.mpu is not self:
            raise ValueError("the engine does not know this ring: initialize it with deepspeed.initialize(..., mpu=parallel)")
        by_all = engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()
        ranks = dist.get_world_size(self.everyone if by_all else self.data)
        return divided_by(ranks, engine.gradient_accumulation_steps())

    def get_sequence_parallel_group(self) -> Group:
        return self.ring

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self.ring)

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self.ring)

    # With this name DeepSpeed asks only for the sequence's groups. A get_data_parallel_group must not exist: with one, ZeRO-3 would
    # leave out the ranks of a ring when it sums gradients
    initialize_sequence_parallel = None

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.data)

    def get_sequence_data_parallel_group(self) -> Group:
        return self.everyone

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self.everyone)

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self.everyone)

    def get_model_parallel_group(self) -> Group:
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
