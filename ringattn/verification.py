"""`verify`: one training step of a user's own model on shards, compared with the same step on the whole sequence: loss and all gradients.

The reference is the whole step in fp64, on rank 0. The whole step also runs in the ring's own precision. The ring's loss may be twice
as far from the reference as that step's, and its gradients three times as far. Below `FLOOR` any distance passes, because rounding
decides there. A gradient of few numbers may be farther, because the whole step's distance is then a matter of chance. So it is, whatever
the numbers, where a step magnifies rounding, as recurrences and routers may: if anything is too far, the reference runs again with each
weight moved by up to half a unit in its last place, and what that changes counts like the distance of the whole step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from . import scores
from .geometry.layout import Layout
from .geometry.mask import Mask
from .integrations.replace import replace_attention
from .runtime.agree import Facts, agree, refusing
from .runtime.groups import Group, get_context, process_groups
from .scores import ScoreMod
from .step_batch import StepBatch, step_batch
from .step_checks import check_arguments, check_comparable, check_unwrapped, is_replaced, refusing_dropout
from .step_hints import FailedStep, OutputRows, hint_of
from .training.causal_lm import IGNORE
from .whole_step import (
    DenseCalls,
    OwnAttention,
    attached_part,
    dense_copy,
    hides_rounding,
    in_fp64,
    of_transformers,
    on_device,
    score_of_copy,
    whole_inputs,
)

FLOOR = {torch.float64: 2e-6, torch.float32: 2e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
_LOSS_BOUND, _GRADIENT_BOUND = 2.0, 3.0
_MANY = 32  # from so many numbers on, the size of rounding errors is not a matter of chance
_NOTHING = 1e-12  # of all gradients: one so small, such as that of a bias of keys without rotary embeddings, is 0 but for rounding
_CLOSE = 0.5  # chance never allows a greater distance: a missing gradient has distance 1
_DRAWS = 2  # of weights moved by their rounding
_SEED = 0  # of dropout, where the user gives none

Loss = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How far the sharded and the whole step are from the reference, relative (L2), and the limit for the sharded one."""

    name: str
    sharded: float
    whole: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.sharded <= self.limit  # false for NaN


@dataclass(frozen=True)
class Report:
    """What `verify` found, the same on every rank; `print(report)` shows a table with the worst layer of each kind.

    hint: what is likely wrong if it did not pass, such as positions that each rank counts from 0; empty if nothing is known.
    """

    layout: Layout
    loss: float
    whole_loss: float
    differences: tuple[Difference, ...]
    hint: str = ""

    @property
    def passed(self) -> bool:
        """Whether the loss and every gradient are within their bounds."""
        return all(row.passed for row in self.differences)

    def __str__(self) -> str:
        worst: dict[str, Difference] = {}
        for row in self.differences:
            kind = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name)
            if kind not in worst or not row.sharded / row.limit <= worst[kind].sharded / worst[kind].limit:
                worst[kind] = row
        rows = {row.name if row is self.differences[0] else f"gradient of {row.name}": row for row in worst.values()}
        width = max(map(len, rows))
        lines = [
            f"{self.layout!r}, against the whole sequence in fp64; differences are relative (L2), of like layers the worst",
            f"{'':{width}} {'sharded':>9} {'whole':>9} {'limit':>9}",
        ]
        for what, row in rows.items():
            lines.append(f"{what:{width}} {row.sharded:9.1e} {row.whole:9.1e} {row.limit:9.1e}  {'ok' if row.passed else 'FAILED'}")
        verdict = "all within bounds" if self.passed else "NOT within bounds"
        lines.append(f"loss {self.loss:.6f} sharded, {self.whole_loss:.6f} whole: {verdict}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    layout: Layout | None = None,
    kv_layout: Layout | None = None,
    of_keys: Collection[str] = (),
    mask: Mask | None = None,
    group: Group | None = None,
    loss: Loss | None = None,
    whole: nn.Module | None = None,
    score: ScoreMod | None = None,
    autocast: torch.dtype | None = None,
) -> Report:
    """Compare a step of `model` on shards with the whole step: loss and all gradients. A collective; changes neither weights nor `.grad`.

    Args:
        model: the same weights on every rank, not yet wrapped (FSDP2, DDP, DeepSpeed). For the step a transformers model is attached,
            and the attention of one that calls scaled_dot_product_attention is replaced, as by `replace_attention`; afterwards the
            model is as it was. Another model must shard its attention by itself, for `layout`, and come with `whole`.
        batch: whole sequences, the same on every rank: `input_ids` (b, s) and whatever else `shard_batch` takes. Without labels, the
            tokens are the labels. An encoder with a decoder takes `input_ids` (b, t) for the encoder, and `labels` (b, s), one for each
            of `decoder_input_ids`, which follow from them. Give short sequences: rank 0 also runs them whole, in fp64, with dense
            attention.
        layout: which positions each rank holds; zigzag over the group by default. Of an encoder with a decoder, that of the decoder.
        kv_layout: the layout of an encoder's tokens, zigzag by default; or of the keys of a model that comes with `whole`.
        of_keys: of a model that comes with `whole`, the names of the tensors in the batch that `kv_layout` cuts, (b, t) or (b, t, ...).
        mask: which pairs are live, as for `attach` and `replace_attention`.
        group: the ranks of the ring, as for `attach`.
        loss: `loss(model, inputs)`, the summed loss of the tokens in `inputs`, a shard or the whole; by default the cross-entropy of
            `model(**inputs).logits` with `shift_labels`.
        whole: for a model that shards its attention by itself, a copy of it that runs whole sequences with dense attention.
        score: what happens to scores and weights, as for `replace_attention`, in a model that calls scaled_dot_product_attention. The
            gradients of its slopes, table and sinks are compared too, if they require them. A model of transformers says by itself what
            happens to its scores, and is compared with its own attention.
        autocast: run in this precision under autocast, except for the reference.

    In training mode attention may drop weights, in models of both kinds: the whole step drops the same pairs, those of seed 0 unless
    `score` has another.

    Returns a `Report`: `assert report.passed, report`. Raises ValueError if the ranks' weights, batches or scores differ, if a dropout
    other than of weights is on or the step draws other random numbers, if no label counts, if nothing is trainable, if the weights
    are sharded, for a score of a model that brings its own attention, for a mask, padding or packed documents of an encoder with a
    decoder, for a mask or packed documents where the model makes ALiBi from its mask (BLOOM, Falcon), for a kv_layout of a model with
    one sequence, and if nothing says how the model runs whole sequences. A score or another argument of a wrong type is an error on
    every rank.

    >>> report = ringattn.verify(model, {"input_ids": tokens})  # doctest: +SKIP
    """
    context, axes = get_context(group), process_groups(group)
    ranks = context.ranks
    with context.turn:
        with refusing(ranks):
            ranks.order.check()
            check_arguments(model, batch, layout, kv_layout, of_keys, mask, loss, whole, score)
            if score is not None or is_replaced(model, whole):
                score = _prepared(scores.score() if score is None else score, model)
            facts = _facts(score)
        if ranks.size > 1:
            agree(ranks, facts, 0)
    check_unwrapped(model)
    cut = step_batch(model, batch, layout, kv_layout, of_keys, whole, ranks.size)
    check_comparable(model, cut.tensors, mask, whole, score, autocast)
    device = next(model.parameters()).device
    _check_weights(model, axes)
    _check_batches(cut.tensors, axes, device)
    own_loss, loss = loss is not None, _summed_cross_entropy if loss is None else loss
    everything, inputs = cut.whole(), on_device(cut.shards(ranks.rank), device)
    counted = int((everything["shift_labels"] != IGNORE).sum())
    if not counted:
        raise ValueError(f"all labels are {IGNORE}, so that there is no loss to compare: give some that count")
    step = functools.partial(_step, loss=loss, counted=counted)
    before = _random_states(device)
    around, rows = functools.partial(_around_ring, model, cut, mask, group, whole, score), OutputRows(model)
    with around(), refusing_dropout(model), rows:
        ours = step(model, score, inputs, autocast)
    if not all(map(torch.equal, before, _random_states(device))):
        raise ValueError("the step draws random numbers (dropout, noise), so no two steps are alike: call model.eval() first")
    for value in ours:
        _reduce(value, axes)
    precision = next(model.parameters()).dtype if autocast is None else autocast
    limit = functools.partial(_limit, floor=FLOOR[precision])
    # rows (sharded, whole, moved) of relative differences, and a last one of the whole loss, from rank 0: NaN, which never passes, if it
    # fails
    found = torch.full((len(ours) + 1, 3), float("nan") if ranks.rank == 0 else 0.0, dtype=torch.float64)
    names = ["loss", *(name for name, parameter in model.named_parameters() if parameter.requires_grad), *_learned(score, model)]
    compared = None
    try:
        if ranks.rank == 0:
            dense = dense_copy(model) if whole is None else whole
            run = functools.partial(_whole_step, step, model, whole=whole, batch=everything, mask=mask, score=score)
            reference = in_fp64(dense)
            with OutputRows(dense) as same_rows:
                same = run(dense=dense, autocast=autocast)
            with OutputRows(reference) as exact_rows:
                exact = run(dense=reference, autocast=None)
            all_gradients = torch.stack([x.norm() for x in exact[1:]]).norm()

            def distances(values: list[torch.Tensor]) -> list[float]:
                return [_distance(x, e, all_gradients) for x, e in zip(values, exact, strict=True)]

            columns = [distances(ours), distances(same), [0.0] * len(ours)]
            if not all(far <= limit(x, [theirs]) for x, far, theirs in zip([None, *ours[1:]], *columns[:2])):
                moved = [distances(run(dense=_moved(reference, precision, seed), autocast=None)) for seed in range(_DRAWS)]
                columns[2] = [max(row) for row in zip(*moved)]
            found = torch.tensor([*zip(*columns), [exact[0].item()] * 3], dtype=torch.float64)
            compared = FailedStep(
                cut, names, ours, same, exact, same_rows.found, exact_rows.found, everything, functools.partial(run, autocast=None),
                reference, floor=FLOOR[precision], own_loss=own_loss, alone=not of_transformers(model),
            )  # fmt: skip
    finally:
        found = _reduce(found.to(device), axes)
    *distances_of_all, (whole_loss, *_) = found.tolist()
    differences = tuple(
        Difference(name, sharded, theirs, limit(x, [theirs, moved]))
        for name, x, (sharded, theirs, moved) in zip(names, [None, *ours[1:]], distances_of_all, strict=True)
    )
    report = Report(cut.layout, ours[0].item(), whole_loss, differences)
    if report.passed or math.isnan(whole_loss):  # NaN: rank 0 may have failed and left
        return report

    def again() -> None:
        with around():
            step(model, score, inputs, autocast)

    add_up = functools.partial(_reduce, axes=axes)
    return replace(report, hint=hint_of(compared, rows, cut, ranks.rank, add_up, inputs, None if of_transformers(model) else again))


def _limit(gradient: torch.Tensor | None, distances: Sequence[float], floor: float) -> float:
    """The greatest relative difference allowed for a gradient, or None for the loss, if rounding alone gives these."""
    bounds = (_LOSS_BOUND * each if gradient is None else gradient_limit(each, gradient.numel()) for each in distances)
    return max(floor, *bounds)


@torch.no_grad()
def _moved(reference: nn.Module, precision: torch.dtype, seed: int) -> nn.Module:
    """A copy of the reference in fp64, each of whose weights has moved by at most what rounding it to a precision may change."""
    copied = copy.deepcopy(reference)
    for number, parameter in enumerate(copied.parameters()):
        draw = torch.Generator(parameter.device).manual_seed(_DRAWS * number + seed)
        sizes = torch.rand(parameter.shape, generator=draw, dtype=parameter.dtype, device=parameter.device) - 0.5
        parameter.mul_(1 + torch.finfo(precision).eps * sizes)
    return copied


def gradient_limit(theirs: float, numbers: int) -> float:
    """The greatest relative difference allowed for a gradient of `numbers` numbers, if the whole step's is `theirs`.

    The norm of n rounding errors varies by about 1/sqrt(n) of itself; for a few numbers it may be close to zero.
    """
    chance = max(1.0, (_MANY / max(1, numbers)) ** 0.5)
    return max(_GRADIENT_BOUND * theirs, min(_GRADIENT_BOUND * chance * theirs, _CLOSE))


def _random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the random number generators of the host and the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _summed_cross_entropy(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    inputs = dict(inputs)
    labels = inputs.pop("shift_labels")
    output = model(**inputs)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} returns a {type(output).__name__} without logits to take the cross-entropy of: give "
            "loss=, a function of the model and its inputs that returns the summed loss of the tokens in inputs['shift_labels']"
        )
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def _step(
    model: nn.Module,
    score: ScoreMod | None,
    inputs: Mapping[str, Any],
    autocast: torch.dtype | None,
    *,
    loss: Loss,
    counted: int,
) -> list[torch.Tensor]:
    """The loss of these inputs, and its gradient for each trainable parameter and learned tensor of the score, in fp64."""
    parameters = [*(parameter for parameter in model.parameters() if parameter.requires_grad), *_learned(score, model).values()]
    with torch.autocast(parameters[0].device.type, autocast) if autocast is not None else contextlib.nullcontext():
        value = loss(model, inputs) / max(1, counted)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return [value.detach().double(), *(gradient.double() for gradient in filled)]


def _whole_step(
    step: Callable[..., list[torch.Tensor]],
    model: nn.Module,
    dense: nn.Module,
    whole: nn.Module | None,
    batch: Mapping[str, Any],
    mask: Mask | None,
    score: ScoreMod | None,
    autocast: torch.dtype | None,
) -> list[torch.Tensor]:
    """A step of a dense copy of the model, or of a copy of `whole`, with a whole batch."""
    own = None if score is None else score_of_copy(score, model, dense)
    inputs = whole_inputs(dense, batch, mask, add_mask=whole is None and of_transformers(model))
    calls = contextlib.nullcontext() if own is None else DenseCalls(mask, own)
    with OwnAttention(_SEED, hides_rounding(model, dense)) if of_transformers(model) else calls:
        return step(dense, own, inputs, autocast)


def _prepared(score: ScoreMod, model: nn.Module) -> ScoreMod:
    """The score with a seed, and with leaves in the place of tensors that are not parameters of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    found = score.mapped(lambda x: x if id(x) in own else x.detach().requires_grad_(x.requires_grad))
    return replace(found, seed=_SEED) if found.seed is None else found


def _learned(score: ScoreMod | None, model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the score that require gradients and are not parameters of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    given = {} if score is None else score.given
    return {f"score.{name}": x for name, x in given.items() if x.requires_grad and id(x) not in own}


def _facts(score: ScoreMod | None) -> Facts:
    """What must be equal on all ranks: the score, with the numbers in its tensors."""
    facts: dict[str, object] = {"function": "verify", "score": "none" if score is None else score.kind}
    if score is not None:
        for name, x in score.given.items():
            numbers = x.detach().double().cpu().numpy().tobytes()
            facts[f"{name} of score"] = f"{x.dtype} {tuple(x.shape)} {hashlib.blake2b(numbers, digest_size=6).hexdigest()}"
        facts["seed and offset of dropout"] = (score.seed, score.offset) if score.dropout else "none"
    return Facts(facts)


@contextlib.contextmanager
def _around_ring(
    model: Any, cut: StepBatch, mask: Mask | None, group: Group | None, whole: nn.Module | None, score: ScoreMod | None
):
    """Run the model's attention around the ring within the block, unless the model does so by itself; afterwards it is as it was."""
    if is_replaced(model, whole):
        replaced = replace_attention(model, layout=cut.layout, mask=mask, group=group, score=score)
        try:
            yield
        finally:
            replaced.restore()
        return
    if not of_transformers(model):
        yield
        return
    parts = [(model, cut.layout)]
    if cut.is_answer:
        parts = [(model.get_encoder(), cut.kv_layout), (model.get_decoder(), cut.layout)]
    with contextlib.ExitStack() as stack:
        for part, layout in parts:
            stack.enter_context(_attached(part, layout, mask, group))
        yield


@contextlib.contextmanager
def _attached(model: Any, layout: Layout | None, mask: Mask | None, group: Group | None):
    """Attach a model of transformers, or its part that is attached already, within the block; afterwards it is as it was."""
    from .integrations.huggingface import NAME, attach, attach_seeded, detach

    part = attached_part(model)
    before = getattr(part, NAME, None)
    attach_seeded(model, layout, mask, group, () if before is None else before.ignored, _SEED)
    try:
        yield
    finally:
        if part is not model:
            detach(model)
        if before is not None:
            options = dict(group=before.group, ignore=before.ignored, recurrence_kernels=before.recurrence_kernels)
            attach(part, layout=before.fixed_layout, mask=before.live.mask, **options)


def _check_batches(batch: Mapping[str, Any], axes: list[dist.ProcessGroup], device: torch.device) -> None:
    """Raise ValueError, on every rank, if the ranks' batches differ."""
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(batch):
        value = torch.as_tensor(batch[name]).cpu() if isinstance(batch[name], (torch.Tensor, np.ndarray)) else batch[name]
        digest.update(
            repr((name, value.shape, value.flatten().tolist()) if isinstance(value, torch.Tensor) else (name, value)).encode()
        )
    own = float(int.from_bytes(digest.digest(), "little"))  # 48 bits, exact
    highest, lowest = _reduce(torch.tensor([own, -own], dtype=torch.float64, device=device), axes, dist.ReduceOp.MAX).tolist()
    if highest != -lowest:
        raise ValueError("the ranks have different batches: verify takes whole sequences, the same ones on every rank of the ring")


def _check_weights(model: nn.Module, axes: list[dist.ProcessGroup]) -> None:
    """Raise ValueError, on every rank, if the ranks' weights differ."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    highest, lowest = (_reduce(value, axes, dist.ReduceOp.MAX) for value in (sums.clone(), -sums))
    different = [name for (name, _), high, low in zip(model.named_parameters(), highest, lowest) if high != -low]
    if different:
        raise ValueError(f"the ranks have different weights, for one in {different[0]}: seed them alike, or load the same ones")


def _reduce(value: torch.Tensor, axes: list[dist.ProcessGroup], operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce a value in place over all ranks of the ring."""
    for axis in axes:
        dist.all_reduce(value, operation, group=axis)
    return value


def _distance(value: torch.Tensor, exact: torch.Tensor, all_gradients: torch.Tensor) -> float:
    """The norm of the difference, relative to the exact value's; or to that of all gradients, if the exact value is 0 but for rounding."""
    own = exact.norm()
    scale = own if own > _NOTHING * all_gradients else all_gradients
    return float((value - exact).norm() / (scale if scale else 1.0))
