"""What an attached model of diffusers holds: who the ranks are, what is live, and how inputs are cut and outputs assembled.

A model's plan for context parallelism names its modules, and which of their inputs and outputs have a dimension of tokens. Hooks cut
these for this rank, and assemble what a module returns on every rank.

Shapes: b batch, s_local rows of this rank, sk_local keys of this rank, h query heads, hk key/value heads, d head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from .. import check
from ..attention import ring_attention
from ..collective import unshard
from ..geometry.layout import Layout, contiguous, shard
from ..geometry.mask import Mask, causal, full, sliding_window
from ..geometry.span import Span
from ..runtime.agree import Facts, gather_integers, refusing
from ..runtime.context import Context
from ..runtime.groups import Group, get_context
from ..runtime.op import in_one_dtype
from ..schedule.schedules import Schedule
from ..scores import ScoreMod, with_dropout

NO_WINDOW = (-1, -1)  # as diffusers' backends write it

_OF_ATTENTION = Facts({"function": "the rows of an attention call of diffusers"})
_OF_OUTPUT = Facts({"function": "the rows that a module of diffusers returns"})


@dataclass(frozen=True, eq=False)
class DiffusersRing:
    """The ring of a model, which its attention gets as its parallel config.

    joined: names of the inputs that attention has in one sequence, in order; () if unknown. rows: their numbers of tokens in the
    latest call of the model.
    """

    group: Group | None = None
    mask: Mask | None = None
    score: ScoreMod | None = None
    schedule: Schedule | None = None
    layouts: Callable[[int], Layout] | None = None
    joined: tuple[str, ...] = ()
    rows: dict[str, int] = field(default_factory=dict)
    _masks: dict[tuple[bool, tuple[int, int]], Mask] = field(default_factory=dict)
    _latest: dict[tuple[int, ...], Layout] = field(default_factory=dict)

    @property
    def context_parallel_config(self) -> NoReturn:
        """Other backends of diffusers ask for it. Raises ValueError."""
        raise ValueError(
            "the model is cut for ringattn, but another attention backend was chosen: call detach(model) of "
            "ringattn.integrations.diffusers first"
        )

    @property
    def context(self) -> Context:
        return get_context(self.group)

    def layout(self, tokens: int) -> Layout:
        """Which of so many tokens each rank holds. Raises ValueError for a layout of other tokens or ranks."""
        size = self.context.ranks.size
        if self.layouts is None:
            return contiguous(tokens, size)
        found = self.layouts(tokens)
        check.instance(f"layouts({tokens})", found, Layout, check.BUILD_A_LAYOUT)
        if (found.seq_len, found.world_size) != (tokens, size):
            raise ValueError(f"layouts({tokens}) is {found!r}, but must be for {tokens} tokens and the group's {size} ranks")
        return found

    def cut(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's rows of x along `dim`."""
        ranks = self.context.ranks
        with refusing(ranks):
            return shard(x, self.layout(x.shape[dim]), ranks.rank, dim)

    def assembled(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All rows along `dim`, on every rank. A collective."""
        context = self.context
        (lengths,) = _lengths(context, _OF_OUTPUT, x.shape[dim])
        with refusing(context.ranks):
            layout = self.layout(sum(lengths))
            if layout.lengths != lengths:
                raise ValueError(
                    f"the ranks return {lengths} rows, but {layout!r} has {layout.lengths}: cut with the same layouts="
                )
        return unshard(x, layout, self.group, dim)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, is_causal: bool, scale: Any, window: Any
    ) -> torch.Tensor:
        """out (b, s_local, h, d_v) of q (b, s_local, h, d), k (b, sk_local, hk, d) and v (b, sk_local, hk, d_v).

        Raises ValueError, on every rank, for bad input and for a mask of unknown positions.
        """
        context = self.context
        with refusing(context.ranks):
            check.tensors(q, k, v)
            mask = self._mask(check.flag("is_causal", is_causal), window)
            score = with_dropout(self.score, dropout_p) if dropout_p else self.score
            joint = self._joint(q.shape[1], k.shape[1]) if self.joined else None
        if joint is None:
            queries, keys = map(in_turn, _lengths(context, _OF_ATTENTION, q.shape[1], k.shape[1]))
        else:
            queries = keys = joint
        return ring_attention(
            *in_one_dtype(q, k, v),
            layout=queries,
            kv_layout=None if keys == queries else keys,
            mask=mask,
            group=self.group,
            softmax_scale=scale,
            score=score,
            schedule=self.schedule,
        )

    def _mask(self, is_causal: bool, window: Any) -> Mask:
        """What is live in a call. Raises ValueError for an option that asks for positions, if they are unknown."""
        left, right = check.window("window_size", window)
        key = is_causal, (left, right)
        if key not in self._masks:
            asked = "is_causal" if is_causal else "window_size" if key[1] != NO_WINDOW else None
            if asked is not None and not self.joined:
                raise ValueError(
                    f"{asked} is given, but the order of the tokens is unknown: name the inputs that attention has in one sequence, such "
                    'as attach(model, joined=("encoder_hidden_states", "hidden_states"))'
                )
            mask = full() if self.mask is None else self.mask
            if is_causal:
                mask = causal() if self.mask is None else mask & causal()
            if key[1] != NO_WINDOW:
                band = sliding_window(*(None if side == -1 else check.integer("window_size", side) for side in key[1]))
                mask = band if self.mask is None and not is_causal else mask & band
            self._masks[key] = mask
        return self._masks[key]

    def _joint(self, queries: int, keys: int) -> Layout:
        """The layout of the joined inputs of the latest call, one after the other."""
        lengths = tuple(self.rows[name] for name in self.joined if name in self.rows)
        if not lengths:
            raise ValueError(f"none of {', '.join(self.joined)} was cut in this call of the model, so the positions are unknown")
        if lengths not in self._latest:
            found = one_after_another([self.layout(n) for n in lengths])
            self._latest.clear()
            self._latest[lengths] = found
        layout = self._latest[lengths]
        here = layout.lengths[self.context.ranks.rank]
        if (queries, keys) != (here, here):
            raise ValueError(
                f"attention has {queries} queries and {keys} keys on this rank, but {', '.join(self.joined)} have {here} rows: name in "
                "joined= all inputs that attention has in one sequence; attention to other keys goes with neither joined= nor mask="
            )
        return layout


def in_turn(lengths: tuple[int, ...]) -> Layout:
    """The layout of so many rows on each rank, in the order of the ranks. Full attention needs no other order."""
    starts = np.cumsum([0, *lengths]).tolist()
    return Layout(starts[-1], tuple((Span(start, n),) for start, n in zip(starts, lengths)))


def one_after_another(parts: list[Layout]) -> Layout:
    """The layout of sequences that follow each other; a rank's rows are its rows of the first, then those of the second, and so on."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(part.seq_len for part in parts)]).tolist()
    ranks = range(parts[0].world_size)
    moved = [
        tuple(Span(start + span.start, span.length, span.stride) for part, start in zip(parts, starts) for span in part.spans[rank])
        for rank in ranks
    ]
    return Layout(starts[-1], tuple(moved))


def hook_plan(model: nn.Module, plan: Mapping[str, Any], ring: DiffusersRing) -> list[Any]:
    """Cut and assemble what the plan says, and note the rows of joined inputs. Returns the hooks' handles.

    Raises ValueError for a module that the model does not have, and for entries of unknown kinds.
    """
    found = [(module, of_plan) for name, of_plan in plan.items() for module in _modules(model, name)]
    for _, of_plan in found:
        listed = of_plan.values() if isinstance(of_plan, Mapping) else _as_list(of_plan)
        for one in (each for entry in listed for each in _as_list(entry) if each is not None):
            if not hasattr(one, "split_dim" if isinstance(of_plan, Mapping) else "gather_dim"):
                raise ValueError(f"plan holds {one!r}, but must hold ContextParallelInput and ContextParallelOutput of diffusers")
    handles: list[Any] = [model.register_forward_pre_hook(lambda *_: ring.rows.clear())]
    for module, of_plan in found:
        if isinstance(of_plan, Mapping):
            inputs = {name: cuts for name, cuts in of_plan.items() if isinstance(name, str)}
            outputs = {index: cuts for index, cuts in of_plan.items() if not isinstance(index, str)}
            if inputs:
                handles.append(module.register_forward_pre_hook(_CutInputs(ring, inputs), with_kwargs=True))
            if outputs:
                handles.append(module.register_forward_hook(_ChangedOutputs(ring.cut, outputs, "split_dim")))
        else:
            gathers = dict(enumerate(_as_list(of_plan)))
            handles.append(module.register_forward_hook(_ChangedOutputs(ring.assembled, gathers, "gather_dim")))
    return handles


class _CutInputs:
    """Cuts inputs of a module, by name, before it runs."""

    def __init__(self, ring: DiffusersRing, cuts: Mapping[str, Any]) -> None:
        self._ring, self._cuts = ring, cuts

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = dict(zip(names, args)) | kwargs
        changed = {name: self._cut(name, given[name], cuts) for name, cuts in self._cuts.items() if given.get(name) is not None}
        args = tuple(changed.get(name, x) for name, x in zip(names, args)) + args[len(names) :]
        return args, {name: changed.get(name, x) for name, x in kwargs.items()}

    def _cut(self, name: str, x: Any, cuts: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(self._cut(name, each, cut) for each, cut in zip(x, cuts))
        if not _applies(cuts, x):
            return x
        if name in self._ring.joined:
            self._ring.rows[name] = x.shape[cuts.split_dim]
        return self._ring.cut(x, cuts.split_dim)


class _ChangedOutputs:
    """Cuts or assembles what a module returned, by its place."""

    def __init__(self, change: Callable[[torch.Tensor, int], torch.Tensor], entries: Mapping[int, Any], dim: str) -> None:
        self._change, self._entries, self._dim = change, entries, dim

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        alone = isinstance(output, torch.Tensor)
        parts = [output] if alone else list(output)
        for index, entry in self._entries.items():
            if entry is not None and _applies(entry, parts[index]):
                parts[index] = self._change(parts[index], getattr(entry, self._dim))
        return parts[0] if alone else tuple(parts)


def _applies(entry: Any, x: Any) -> bool:
    """Whether x has the dimensions for which the plan's entry is meant: timesteps of Wan have tokens only in some of its models."""
    return isinstance(x, torch.Tensor) and entry.expected_dims in (None, x.dim())


def _as_list(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _modules(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that a name of a plan means; * stands for all modules of a list."""
    before, star, after = name.partition("*")
    try:
        if not star:
            yield model.get_submodule(name)
        else:
            for part in model.get_submodule(before.rstrip(".")).children():
                yield part.get_submodule(after.lstrip("."))
    except AttributeError as error:
        raise ValueError(f"plan names {name!r}, but {type(model).__name__} has no such module: {error}") from None


def _lengths(context: Context, facts: Facts, *rows: int) -> list[tuple[int, ...]]:
    """For each number of this rank, the numbers of all ranks. A collective between the hosts."""
    with context.turn:
        found = gather_integers(context.ranks, facts, np.array(rows, dtype=np.int64))
    return [tuple(map(int, numbers)) for numbers in zip(*found)]
