"""One training step around the ring against the same step in one process with dense attention.

The reference is the whole model in float64 on rank 0. Beside the ring stands the same single-process run in the ring's
own precision: the ring may be twice as far from the reference in the loss, and three times in the gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.integrations.causal_lm import IGNORE, sum_gradients
from ringattn.integrations.huggingface import attach

# where both are this close, rounding decides which is closer
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1e-4}


def verify(
    model: torch.nn.Module,
    dense: torch.nn.Module,
    summed_loss: Callable[..., torch.Tensor],
    layout: ra.Layout,
    ids: torch.Tensor,
    labels: torch.Tensor,
    dtype: torch.dtype,
) -> bool:
    """Print the differences; returns whether all are within bounds, on every rank. ids and labels (1, s) are the whole."""
    device = next(model.parameters()).device
    rank = dist.get_rank()
    counted = int((labels != IGNORE).sum())
    attach(model, layout=layout)
    loss = summed_loss(model, *(ra.shard(x, layout, rank).to(device) for x in (ids, labels)), dtype) / counted
    loss.backward()
    sum_gradients(model.parameters())
    loss = loss.detach()
    dist.all_reduce(loss)
    passed = torch.ones((), device=device)
    if rank == 0:
        ids, labels = ids.to(device), labels.to(device)
        same = _step(dense, summed_loss, ids, labels, dtype, counted)
        exact = _step(dense.double(), summed_loss, ids, labels, torch.float64, counted)
        ring = {"loss": loss.double(), **{name: p.grad.double() for name, p in model.named_parameters()}}
        print(f"{layout!r}, against dense attention in one process and float64; differences are relative (L2)")
        passed.fill_(_print_table(ring, same, exact, FLOOR[dtype]))
    dist.broadcast(passed, src=0)
    return bool(passed)


def _step(model, summed_loss, ids, labels, dtype, counted) -> dict[str, torch.Tensor]:
    """The loss and each parameter's gradient, float64, of one dense step."""
    model.zero_grad()
    loss = summed_loss(model, ids, labels, dtype) / counted
    loss.backward()
    gradients = {name: p.grad.detach().double() for name, p in model.named_parameters()}
    return {"loss": loss.detach().double(), **gradients}


def _print_table(ring: dict, same: dict, exact: dict, floor: float) -> bool:
    """One line for the loss and one for each kind of parameter, the worst of its layers."""
    rows: dict[str, tuple[float, float, float]] = {}
    for name, value in exact.items():
        away = [float((other[name] - value).norm() / value.norm()) for other in (ring, same)]
        limit = max(floor, (2 if name == "loss" else 3) * away[1])
        kind = re.sub(r"\.\d+\.", ".*.", name)
        rows[kind] = max(rows.get(kind, (0.0, 0.0, 1.0)), (*away, limit), key=lambda row: row[0] / row[2])
    print(f"{'':52} {'ring':>9} {'dense':>9} {'limit':>9}")
    for kind, (ours, theirs, limit) in rows.items():
        what = kind if kind == "loss" else f"gradient of {kind.removeprefix('model.')}"
        print(f"{what:52} {ours:9.1e} {theirs:9.1e} {limit:9.1e}  {'ok' if ours <= limit else 'FAILED'}")
    passed = all(ours <= limit for ours, _, limit in rows.values())
    print(f"loss {float(ring['loss']):.6f} around the ring, {float(exact['loss']):.6f} dense:", end=" ")
    print("all within bounds" if passed else "NOT within bounds", flush=True)
    return passed
