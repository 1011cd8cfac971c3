"""Ring attention under DeepSpeed: data parallel x ring, with any ZeRO stage.

    mesh = init_device_mesh("cuda", (replicas, ring), mesh_dim_names=("data", "ring"))
    parallel = DeepSpeedParallel(mesh)
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=parallel, model_parameters=model.parameters())
    ...
    out = ringattn.ring_attention(q, k, v, layout=layout, group=parallel.ring)  # in the model

DeepSpeed asks an `mpu` object for its process groups. With this one it shards optimiser states, gradients and parameters over all
ranks, and counts batches by replica: `train_batch_size` is the batch size of all replicas, however many ranks share a sequence.

A model that was written for DeepSpeed's own sequence parallelism holds a `deepspeed.sequence.layer.DistributedAttention`;
`RingAttention` takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import check
from ..attention import ring_attention
from ..geometry.layout import Layout, contiguous
from ..geometry.mask import Mask
from ..runtime.agree import refusing
from ..runtime.groups import get_context
from ..scores import ScoreMod, with_dropout
from ..training.loss import Reduction
from ..training.loss import deepspeed as divided_by

__all__ = ["DeepSpeedParallel", "RingAttention"]

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


class RingAttention(nn.Module):
    """Attention around the ring, called as `deepspeed.sequence.layer.DistributedAttention` is.

    Args:
        parallel: whose ring it is.
        layout: which positions each rank holds; None for contiguous shards of one length, which DeepSpeed's own data loaders cut.
        mask, softmax_scale: as for `ring_attention`, causal and 1/sqrt(d) by default.
        score: what else happens to scores and weights, from `score(...)`: in training; after `eval()` without its dropout. Learned slopes,
            tables and sinks that are `nn.Parameter`s become this module's: ZeRO-3 gathers them for each call.

    Raises ValueError for arguments of a wrong type, and in a call, on every rank, for what ring attention does not do: further arguments,
    which DeepSpeed hands to the attention within, and `rotary_pos_emb`.

    >>> self.core_attention = RingAttention(parallel, score=ra.score(dropout=0.1))  # doctest: +SKIP
    """

    def __init__(
        self,
        parallel: DeepSpeedParallel,
        *,
        layout: Layout | None = None,
        mask: Mask | None = None,
        softmax_scale: float | None = None,
        score: ScoreMod | None = None,
    ) -> None:
        super().__init__()
        check.instance("parallel", parallel, DeepSpeedParallel, "make one with DeepSpeedParallel(mesh)")
        check.optional("layout", layout, Layout, check.BUILD_A_LAYOUT)
        check.optional("mask", mask, Mask, check.BUILD_A_MASK)
        check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)
        self.group, self.layout, self.mask, self.score = parallel.ring, layout, mask, score
        self.softmax_scale = None if softmax_scale is None else check.softmax_scale(softmax_scale, 1)
        for name, x in ({} if score is None else score.given).items():
            if isinstance(x, nn.Parameter):
                self.register_parameter(name, x)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """out (b, s_local, h, d_v) of q (b, s_local, h, d), k (b, s_local, hk, d) and v (b, s_local, hk, d_v), which are this rank's rows.

        With `batch_dim_idx=1`, all of them are (s_local, b, ...).
        """
        if torch.compiler.is_compiling():
            _check_call(batch_dim_idx, rotary_pos_emb, args, kwargs)
        else:
            with refusing(get_context(self.group).ranks):
                _check_call(batch_dim_idx, rotary_pos_emb, args, kwargs)
        # a tensor of other dimensions is refused by ring_attention
        q, k, v = (x.transpose(0, 1) if batch_dim_idx and x.dim() == 4 else x for x in (query, key, value))
        layout = self.layout
        if layout is None:
            ranks = dist.get_world_size(self.group)
            layout = contiguous(ranks * q.shape[1], ranks)
        out = ring_attention(
            q,
            k,
            v,
            layout=layout,
            mask=self.mask,
            group=self.group,
            softmax_scale=self.softmax_scale,
            score=self.score if self.score is None or self.training else with_dropout(self.score, 0.0),
        )
        return out.transpose(0, 1) if batch_dim_idx else out


def _check_call(batch_dim_idx: Any, rotary_pos_emb: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise ValueError for what a call of DistributedAttention may ask for, and ring attention does not do."""
    check.integer("batch_dim_idx", batch_dim_idx, most=1)
    if rotary_pos_emb is not None:
        raise ValueError(
            "rotary_pos_emb is given, but ring attention does not rotate: rotate q and k before, at layout.positions(rank)"
        )
    given = [name for name, x in options.items() if x is not None and x is not False]
    if given or any(x is not None for x in args):
        what = ", ".join(given) or f"{len(args)} arguments after rotary_pos_emb"
        raise ValueError(
            f"{what} would go to the attention within DistributedAttention, but around a ring there is none: a mask is RingAttention's "
            "mask=, and dropout is in score="
        )
