"""The likely cause of a difference that `verify` found: where outputs differ, and which wrong step would give the sharded step's numbers.

A step on shards that fails leaves its loss, its gradients and, if the model puts out a row a token, a few numbers of each row. Rank 0
compares them with wrong steps that it runs whole, in fp64: other labels, or each shard alone. A hint says `likely`, because two mistakes
may look alike; it is empty if nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .geometry.layout import Layout, shard
from .step_batch import StepBatch
from .training.causal_lm import IGNORE
from .training.data import tokens_of
from .whole_step import on_device

_NUMBERS = 8  # random sums of a row, by which rows are compared
_FAR = 4.0  # times the distance of the whole step in the model's own precision: what is farther differs by more than rounding
_MUCH = 10.0  # times that distance, for one gradient
_TEXT = 1024  # bytes of a hint
_ANY_LOSS = 1e-4  # the losses of two steps in fp64 that should be equal

Values = list[torch.Tensor]
AddUp = Callable[[torch.Tensor], torch.Tensor]


class OutputRows:
    """While it is on, keeps `found` (b, s, 8), random sums of each row of the model's output; None if the model puts out no rows."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: torch.Tensor | None = None

    def __enter__(self) -> OutputRows:
        self._hook = self.model.register_forward_hook(self._keep)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        rows = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
        self.found = None
        if not isinstance(rows, torch.Tensor) or not rows.is_floating_point() or rows.dim() < 3:
            return
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            rows = rows.flatten(2)
            rows = rows if rows.dtype == torch.float64 else rows.float()
            sums = torch.randn(rows.shape[2], _NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            self.found = (rows @ sums.to(rows)).double()

    def of_all(self, cut: StepBatch, rank: int, device: torch.device, add_up: AddUp) -> torch.Tensor | None:
        """The rows of all ranks in the order of the sequence, on every rank; None on all if one has none. A collective."""
        here = shard(torch.arange(cut.layout.seq_len)[None], cut.layout, rank)[0]
        shape = (tokens_of(cut.tensors).shape[0], len(here), _NUMBERS)
        mine = self.found if self.found is not None and self.found.shape == shape else None
        rows = torch.zeros(shape[0], cut.layout.seq_len, _NUMBERS, dtype=torch.float64, device=device)
        missing = torch.tensor(float(mine is None), dtype=torch.float64, device=device)
        if mine is not None:
            rows[:, here.to(device)] = mine
        add_up(rows)
        add_up(missing)
        return None if missing else rows


class _Reads(TorchFunctionMode):
    """While it is on, notes whether a function takes a tensor. Asking for its shape or its device does not count."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        super().__init__()
        self.tensor, self.found = tensor, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.found |= getattr(func, "__name__", "") != "__get__" and any(
            x is self.tensor for x in (*args, *kwargs.values()) if x is not None
        )
        return func(*args, **kwargs)


def hint_of(
    failed: FailedStep | None,
    rows: OutputRows,
    cut: StepBatch,
    rank: int,
    add_up: AddUp,
    inputs: Mapping[str, Any],
    again: Callable[[], Any] | None,
) -> str:
    """What is likely wrong, on every rank. A collective.

    failed: on rank 0 alone. rows: this rank's, in its step with `inputs`. add_up: adds up a tensor over ranks, in place. again: runs that
    step again; None for a model that certainly reads `position_ids`.
    """
    device = next(rows.model.parameters()).device
    found, reads = rows.of_all(cut, rank, device, add_up), True
    if found is not None and again is not None:
        reads = bool(add_up(torch.tensor(float(_reads_positions(rows.model, inputs, again)), device=device)))
    text = ""
    try:
        text = "" if failed is None else failed.cause(found, reads)
    finally:  # the other ranks wait for it
        text = _shared(text, device, add_up)
    return text


def _reads_positions(model: nn.Module, inputs: Mapping[str, Any], step: Callable[[], Any]) -> bool:
    """Whether a step with these inputs reads their `position_ids`; also true where that cannot be seen, in compiled models."""
    positions = inputs.get("position_ids")
    compiled = any(hasattr(part, "_orig_mod") for part in model.modules())
    with _Reads(positions) as reads:
        step()
    return reads.found or compiled or positions is None


def _shared(text: str, device: torch.device, add_up: AddUp) -> str:
    """A text of one rank on every rank, if the others give an empty one. A collective."""
    letters = text.encode()[:_TEXT]
    sent = torch.tensor([*letters, *[0] * (_TEXT - len(letters))], dtype=torch.int64, device=device)
    return bytes(add_up(sent).tolist()).rstrip(b"\0").decode(errors="ignore")


@dataclass(frozen=True)
class FailedStep:
    """What rank 0 knows of a step that failed.

    names: of `ours`, `same` and `exact`: the loss, then gradients; of the sharded step, of the whole step, and of that in fp64. same_rows,
    exact_rows: as of `OutputRows`. run: a step of `dense` with a `batch`. floor: a relative distance that rounding alone gives. own_loss:
    whether the user gives the loss. alone: whether each rank may attend to its own shard alone.
    """

    cut: StepBatch
    names: Sequence[str]
    ours: Values
    same: Values
    exact: Values
    same_rows: torch.Tensor | None
    exact_rows: torch.Tensor | None
    whole: Mapping[str, Any]
    run: Callable[..., Values]
    reference: nn.Module
    floor: float
    own_loss: bool
    alone: bool

    def cause(self, rows: torch.Tensor | None, reads: bool) -> str:
        """A sentence or two on what is likely wrong; empty if nothing fits. rows: of the sharded step. reads: see `reads_positions`."""
        if rows is None or self.exact_rows is None or self.same_rows is None or rows.shape != self.exact_rows.shape:
            return self._of_loss("")
        differs = self._differing(rows, self.exact_rows)
        if differs.any():
            return self._of_outputs(rows, differs, reads)
        return self._of_loss("outputs are right in every row; ")

    @property
    def _places(self) -> list[torch.Tensor]:
        """The positions of each rank's rows."""
        layout: Layout = self.cut.layout
        return [shard(torch.arange(layout.seq_len)[None], layout, rank)[0] for rank in range(layout.world_size)]

    def _real(self) -> torch.Tensor:
        """Which tokens are not padding, (b, s)."""
        mask = self.whole.get("attention_mask")
        shape = self.whole["shift_labels"].shape
        return mask.cpu().bool() if isinstance(mask, torch.Tensor) and mask.shape == shape else torch.ones(shape, dtype=torch.bool)

    def _differing(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Where rows of the sharded step differ from others by more than rounding, (b, s); padding never does."""
        assert self.exact_rows is not None and self.same_rows is not None
        size = self.exact_rows.norm(dim=-1).square().mean().sqrt()
        noise = (self.same_rows - self.exact_rows).norm(dim=-1).max()
        return ~((rows - others).norm(dim=-1) <= torch.maximum(_FAR * noise, self.floor * size)).cpu() & self._real()

    def _of_outputs(self, rows: torch.Tensor, differs: torch.Tensor, reads: bool) -> str:
        wrong, places = differs.any(0), self._places
        first = int(wrong.nonzero()[0])
        rank = next(n for n, here in enumerate(places) if first in here)
        row = int((places[rank] == first).nonzero()[0])
        where = f"outputs differ at {int(wrong.sum())} of {len(wrong)} positions, first at {first} (row {row} of rank {rank}); "
        padded = ~self._real().all(1)
        if padded.any() and not padded.all() and not differs[~padded].any():
            return f"{where}likely padding, which the model may attend to or take positions from: only sequences with it differ"
        if self.alone and self._each_alone(rows):
            return f"{where}likely each rank attends to its own shard alone, as that gives just these outputs"
        moved = torch.zeros_like(wrong)
        for here in places:
            moved[here] = here != torch.arange(len(here))
        inside = not (wrong & ~moved).any() and all(wrong[here].any() for here in places if moved[here].any())
        if not reads and inside:
            return f"{where}likely positions that each rank counts from 0, as nothing reads position_ids: pass the batch's to the model"
        if "cu_seq_lens_q" not in self.whole and moved.any() and torch.equal(wrong, moved):
            return (
                f"{where}likely positions that each rank counts from 0, or keys of other ranks that do not arrive: rows are right just "
                "where their number in the shard is their position"
            )
        # without a causal mask all rows see wrong positions
        positions = "; or its positions, as nothing reads position_ids" if not reads and wrong.all() else ""
        return f"{where}likely the model's attention, mask or layout on shards, not the loss{positions}"

    def _each_alone(self, rows: torch.Tensor) -> bool:
        """Whether the reference has these outputs if it runs each shard as a whole sequence."""
        found = torch.full_like(rows, float("nan"))
        for rank, here in enumerate(self._places):
            if not len(here):
                continue
            # masks and tables of a twin may be made for the whole sequence alone
            with OutputRows(self.reference) as of_shard, suppress(ValueError, RuntimeError, IndexError, AssertionError):
                self.run(dense=self.reference, batch=on_device(self.cut.shards(rank), rows.device))
            if of_shard.found is None or of_shard.found.shape[1] != len(here):
                return False
            found[:, here.to(found.device)] = of_shard.found
        return not self._differing(rows, found).any()

    def _of_loss(self, right: str) -> str:
        return next(
            filter(None, (self._of_parts(right), self._of_labels(right), self._of_factor(right), self._of_gradients(right))), ""
        )

    def _of_parts(self, right: str) -> str:
        """Whether the user's loss is a sum over the tokens that have labels: the losses of two parts of them add up to that of all."""
        labels = self.whole["shift_labels"]
        first = torch.zeros(labels.shape[1], dtype=torch.bool)
        first[self._places[0]] = True
        parts = [labels.masked_fill(~part.to(labels.device), IGNORE) for part in (first, ~first)]
        if not self.own_loss or any((part == IGNORE).all() for part in parts):
            return ""
        one, other = (self._with_labels(part)[0] for part in parts)
        total, bound = self.exact[0], _ANY_LOSS * self.exact[0].abs()
        if (one - total).abs() <= bound and (other - total).abs() <= bound:
            return (
                f"{right}likely a label shift within each shard, wrong in shards' last rows: loss= never reads shift_labels, "
                "so compare row i of the outputs with row i of the batch's shift_labels"
            )
        if (one + other - total).abs() <= bound:
            return ""
        return (
            f"{right}likely a mean over each rank's tokens: loss= is no sum, as two parts of the labels give {float(one / total):.3g} and "
            f"{float(other / total):.3g} of the loss of all, so return the sum over tokens (reduction='sum')"
        )

    def _of_labels(self, right: str) -> str:
        """Whether the sharded step is the whole step with labels that are shifted otherwise."""
        for what, labels in _shifted_otherwise(self.whole["shift_labels"], self._places).items():
            if (labels != IGNORE).any() and self._near(self._with_labels(labels)):
                return f"{right}likely labels that are {what}, as that gives just this loss and these gradients"
        return ""

    def _of_factor(self, right: str) -> str:
        """Whether all gradients differ by one factor."""
        ours, exact = _joined(self.ours[1:]), _joined(self.exact[1:])
        factor = float(ours @ exact / (exact @ exact))
        rounding = max(_FAR * _far(self.same, self.exact), self.floor)
        if not abs(factor - 1) > rounding or not (ours - factor * exact).norm() <= rounding * (factor * exact).norm():
            return ""
        of_loss = float(self.ours[0] / self.exact[0])
        if abs(of_loss - factor) <= rounding * abs(factor):
            return f"{right}likely loss scaling: the loss and all gradients are those of the whole step times {self._named(factor)}"
        if abs(of_loss - 1) <= rounding:
            return (
                f"{right}likely gradients that are added up or divided once too often: the loss is right, but all gradients are those of "
                f"the whole step times {self._named(factor)}"
            )
        return ""

    def _named(self, factor: float) -> str:
        """A factor, and what it equals."""
        labels, ranks = self.whole["shift_labels"], self.cut.layout.world_size
        share = float((labels != IGNORE).float().mean())
        known = {
            "the number of ranks": ranks,
            "1 / the number of ranks": 1 / ranks,
            "the share of tokens with labels": share,
            "1 / the share of tokens with labels": 1 / share,
            "the number of tokens with labels": share * labels.numel(),
            "1 / the number of tokens with labels": 1 / (share * labels.numel()),
        }
        names = [name for name, value in known.items() if abs(value - factor) <= 1e-3 * abs(factor)]
        return f"{factor:.6g}" + (f", {names[0]}" if names else "")

    def _of_gradients(self, right: str) -> str:
        """Whether the loss is right, so that the backward pass is not."""
        rounding = max(_FAR * _far(self.same, self.exact), self.floor)
        if not right or not _far(self.ours[:1], self.exact[:1]) <= rounding:
            return f"{right}likely the loss" if right else ""
        missing = [name for name, x, e in zip(self.names, self.ours, self.exact, strict=True) if not x.any() and e.any()]
        if missing:
            return f"outputs and loss are right; likely a detached tensor or torch.no_grad: the gradient of {missing[0]} is 0"
        gradients = [*zip(self.names, self.ours, self.same, self.exact, strict=True)][1:]
        wrong = [
            name for name, x, s, e in gradients if not (x - e).norm() <= max(_MUCH * (s - e).norm(), _MUCH * self.floor * e.norm())
        ]
        if wrong:
            return f"outputs and loss are right; likely the backward pass of the model's own functions: the gradient of {wrong[0]} is not"
        return "outputs and loss are right; likely rounding alone, as no gradient is much farther than in the whole step"

    def _with_labels(self, labels: torch.Tensor) -> Values:
        return self.run(dense=self.reference, batch={**self.whole, "shift_labels": labels})

    def _near(self, values: Values) -> bool:
        return _far(self.ours, values) <= max(_FAR * _far(self.same, self.exact), self.floor)


def _shifted_otherwise(shifted: torch.Tensor, places: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Labels (b, s) of wrong shifts, by what they are; the label of a row is the token after it in `shifted`."""
    nothing = torch.full_like(shifted[:, :1], IGNORE)
    tokens = torch.cat([nothing, shifted[:, :-1]], 1)  # that are not shifted
    once_more = torch.cat([shifted[:, 1:], nothing], 1)
    within, again = torch.full_like(shifted, IGNORE), torch.full_like(shifted, IGNORE)
    for here in places:
        within[:, here[:-1]] = tokens[:, here[1:]]
        again[:, here[:-1]] = shifted[:, here[1:]]
    return {
        "shifted within each shard, wrong in shards' last rows": within,
        "shifted once more, within each shard": again,
        # the loss itself shifts, in the whole step too
        "shifted once more by the loss, within each shard": torch.cat([nothing, again[:, :-1]], 1),
        "not shifted": tokens,
        "shifted once more": once_more,
    }


def _joined(values: Values) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values])


def _far(values: Values, exact: Values) -> float:
    """The relative difference of the losses, or of all gradients together, whichever is greater."""
    parts = [part for part in (slice(1), slice(1, None)) if exact[part]]
    return max(
        float((_joined(values[part]) - _joined(exact[part])).norm() / _joined(exact[part]).norm().clamp_min(1e-300))
        for part in parts
    )
