"""Ring attention in diffusers (0.42): image and video transformers over sequences of any length, in generation and in training.

    attach(pipe.transformer, group=ring)
    noise = pipe.transformer(latents, timestep, text).sample  # whole inputs and outputs, on every rank

A model of diffusers has a plan for context parallelism: which inputs are cut to shards of the sequence, and which output is assembled.
`attach` follows this plan without padding, and makes "ringattn" the attention of the model, as one of diffusers' attention backends.
Joint sequences of text and image, whose parts are both cut, need nothing more.

Each option that diffusers passes to its backends is either honoured or refused by name.

Shapes: b batch, s_local rows of this rank, sk_local keys of this rank, h query heads, hk key/value heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import check
from ..geometry.layout import Layout
from ..geometry.mask import Mask
from ..runtime.agree import refusing
from ..runtime.groups import Group, get_context, hybrid
from ..schedule.schedules import Schedule
from ..scores import ScoreMod
from .diffusers_ring import NO_WINDOW, DiffusersRing, hook_plan

__all__ = ["attach", "detach", "register"]

_NAME = "ringattn"  # of the backend, and of the attribute of an attached model


def register() -> Any:
    """Make "ringattn" known to diffusers as an attention backend that supports context parallelism. `attach` calls it.

    Returns the backend's name, which diffusers' `attention_backend` takes: `with attention_backend(register()):`. A model whose
    `enable_parallelism` was called with a `ContextParallelConfig` then runs full attention around that ring, in training too; its
    sequences are cut by diffusers, without padding if `ring_anything` is True.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    for name in _AttentionBackendRegistry.list_backends():
        if name.value == _NAME:
            return name
    # diffusers asks for one of its own names, of which it has a fixed list: this is a further one, which is not in the list
    name: Any = str.__new__(AttentionBackendName, _NAME)
    name._name_, name._value_ = _NAME.upper(), _NAME
    _AttentionBackendRegistry.register(name, supports_context_parallel=True)(_attend)
    return name


def attach(
    model: nn.Module,
    *,
    group: Group | None = None,
    mask: Mask | None = None,
    score: ScoreMod | None = None,
    schedule: Schedule | None = None,
    layouts: Callable[[int], Layout] | None = None,
    joined: Iterable[str] = (),
    plan: Mapping[str, Any] | None = None,
) -> None:
    """Run a diffusers model's attention around a ring, from the next forward on. Call it again to change the options.

    Args:
        model: a `ModelMixin` whose attention goes through `dispatch_attention_fn`: the transformer of a pipeline, `pipe.transformer`.
        group: the ranks of the ring: a ProcessGroup, a DeviceMesh, a hybrid, or None for the default group.
        mask: which pairs are live in the model's attention to its own tokens, over their positions; None for all.
        score: what else happens to scores and weights around the ring, from `score(...)`.
        schedule: how keys and values move, as for `ring_attention`.
        layouts: returns the layout for a number of tokens; by default `contiguous` over the group.
        joined: names of the inputs of the plan that attention has in one sequence, in order, such as Flux's
            `("encoder_hidden_states", "hidden_states")`: their tokens have the positions 0, 1, 2, ... . Needed with a mask if the plan
            cuts several inputs of tokens. Without it ranks swap their numbers of rows in each call of attention.
        plan: diffusers' plan for context parallelism, if not the model's own `_cp_plan`.

    Call the model with whole inputs, the same on every rank: noise and timesteps, too. Every rank gets the whole output. If each makes
    the same loss of it, **the mean over the ranks of the gradients** is the gradient: that is what DDP and FSDP take.

    A model on which `enable_parallelism` was called keeps its ranks and the cuts of diffusers, and takes only `score` and `schedule`. Its
    gradients are to be summed over the ranks, as diffusers assembles outputs.

    Raises ValueError for arguments of a wrong type, for a model without a plan, and if an attention module is not run by a backend.
    A call raises it, on every rank, for an `attn_mask` around the ring, for options that are not honoured and for bad input. Attention to
    whole keys of other tokens, such as Wan's to its text, stays on each rank, and has no ring.
    """
    from diffusers.models.modeling_utils import ModelMixin

    check.instance("model", model, ModelMixin, "pass the transformer of a pipeline, such as pipe.transformer")
    get_context(group)
    check.optional("mask", mask, Mask, check.BUILD_A_MASK)
    check.optional("score", score, ScoreMod, check.BUILD_A_SCORE)
    check.optional("schedule", schedule, Schedule, check.BUILD_A_SCHEDULE)
    check.optional("plan", plan, Mapping, "such as the _cp_plan of a model")
    if layouts is not None:
        check.function("layouts", layouts, "of the number of tokens that returns a layout")
    names = tuple(check.listed("joined", joined, "names of inputs"))
    processors = _processors(model)
    detach(model)
    config: Any = model._parallel_config
    if config is not None:
        for name, given in dict(group=group, mask=mask, layouts=layouts, joined=names or None, plan=plan).items():
            if given is not None:
                raise ValueError(
                    f"{name} is given, but enable_parallelism was called on the model, whose ranks and cuts it keeps: leave {name} out, or "
                    "attach a model without enable_parallelism"
                )
        ring, handles = DiffusersRing(_group_of(config), score=score, schedule=schedule), []
    else:
        own: Any = getattr(model, "_cp_plan", None)
        plan = own if plan is None else plan
        if plan is None:
            raise ValueError(
                f"{type(model).__name__} has no plan for context parallelism, its _cp_plan: give plan=, which says what is cut"
            )
        ring = DiffusersRing(group, mask, score, schedule, layouts, _joined(plan, names, mask))
        handles = hook_plan(model, plan, ring)
    found = _Attached(handles, [(each, each._attention_backend, each._parallel_config) for each in processors])
    backend = register()
    for each in processors:
        each._attention_backend, each._parallel_config = backend, ring
    setattr(model, _NAME, found)


def detach(model: nn.Module) -> None:
    """Undo `attach`: the model runs as before. A model that is not attached stays as it is."""
    found: _Attached | None = vars(model).pop(_NAME, None)
    if found is not None:
        for handle in found.handles:
            handle.remove()
        for processor, backend, config in found.processors:
            processor._attention_backend, processor._parallel_config = backend, config


@dataclass(frozen=True)
class _Attached:
    """What `detach` undoes: hooks; and processors with their backends and parallel configs."""

    handles: list[Any]
    processors: list[tuple[Any, Any, Any]]


def _processors(model: nn.Module) -> list[Any]:
    """The processors of all attention modules. Raises ValueError for one that takes no backend."""
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    found: dict[int, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, (Attention, MochiAttention, AttentionModuleMixin)):
            processor: Any = module.processor
            if not (hasattr(processor, "_attention_backend") and hasattr(processor, "_parallel_config")):
                raise ValueError(
                    f"{name} of {type(model).__name__} computes attention by {type(processor).__name__}, which takes no backend of "
                    "diffusers: it would attend within the shard; set a processor that calls dispatch_attention_fn"
                )
            found[id(processor)] = processor
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention module of diffusers")
    return list(found.values())


def _joined(plan: Mapping[str, Any], names: tuple[str, ...], mask: Mask | None) -> tuple[str, ...]:
    """The inputs whose tokens are one sequence in attention, if that is known."""
    inputs = [name for cuts in plan.values() if isinstance(cuts, Mapping) for name in cuts if isinstance(name, str)]
    tokens = list(dict.fromkeys(name for name in inputs if name.endswith("hidden_states")))
    unknown = [name for name in names if name not in inputs]
    if unknown:
        raise ValueError(f"joined holds {unknown[0]!r}, but the plan cuts {', '.join(dict.fromkeys(inputs))}")
    if not names and len(tokens) == 1:
        return tuple(tokens)
    missing = [name for name in tokens if name not in names]
    if missing and (names or mask is not None):
        what = "joined" if names else "mask is given, so joined"
        raise ValueError(
            f"{what} must name all inputs of tokens that the plan cuts, in the order in which attention has them: "
            f"{missing[0]} is missing"
        )
    return names


def _group_of(config: Any) -> Group:
    """The ranks of a `ParallelConfig` of diffusers. Raises ValueError for options that are not honoured."""
    of_context = config.context_parallel_config
    if of_context is None:
        raise ValueError("enable_parallelism was called with a tensor_parallel_config, but a ring needs a context_parallel_config")
    if not of_context.convert_to_fp32:
        raise ValueError("convert_to_fp32 is False, but sums around the ring are always in fp32: leave it True")
    if of_context.ulysses_degree == 1:
        return of_context._ring_mesh.get_group()
    return hybrid(of_context._mesh, ring="ring", heads="ulysses")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """The backend: out (b, s_local, h, d_v) of query (b, s_local, h, d), key (b, sk_local, hk, d) and value (b, sk_local, hk, d_v).

    The names are those of all backends of diffusers 0.42, which drops the names that a backend does not have.
    """
    around = _parallel_config is not None
    refused = {
        "attn_mask": (
            around and attn_mask is not None,
            "around a ring no tensor says what is live: drop the padding of text, and say what else is live by attach(model, mask=...)",
        ),
        "return_lse": (return_lse, "the backend returns the output alone"),
        "return_attn_probs": (return_attn_probs, "weights are never made"),
        "softcap": (softcap, "give it as attach(model, score=score(softcap=...))"),
        "deterministic": (deterministic, "use torch.use_deterministic_algorithms(True)"),
        "window_size": (not around and tuple(window_size) != NO_WINDOW, "outside of a ring there is no window"),
    }
    ring: DiffusersRing | None = _parallel_config
    if ring is not None and not isinstance(ring, DiffusersRing):
        ring = DiffusersRing(_group_of(_parallel_config))
    with nullcontext() if ring is None else refusing(ring.context.ranks):
        for name, (asked, instead) in refused.items():
            if asked:
                raise ValueError(f"{name} is given to attention of diffusers, but {instead}")
        if around and not enable_gqa and query.shape[-2] != key.shape[-2]:
            raise ValueError(f"key has {key.shape[-2]} heads and query has {query.shape[-2]}: pass enable_gqa=True to share them")
    if ring is not None:
        return ring.attend(query, key, value, dropout_p, is_causal, scale, window_size)
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return dispatch_attention_fn(query, key, value, **options, backend=AttentionBackendName.NATIVE)
