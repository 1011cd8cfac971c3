"""The CPU as a Hopper GPU, for tests of what is launched: nothing runs."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ringattn_kernels import (
    ahead,
    attention,
    compiled,
    config,
    dispatch,
    hopper,
    launches,
    paged,
    plain_backward,
    plain_forward,
    splits,
)

PROCESSORS = 132  # of an H200


def choose_as_on_hopper(monkeypatch) -> None:
    """Launches on CPU tensors choose kernels, configurations and splits as on an H200."""
    for module in (ahead, attention, config, dispatch, hopper.fused, paged, plain_backward, plain_forward):
        monkeypatch.setattr(module, "architecture", lambda device: "sm_90")
    for module in (splits, hopper.forward, hopper.forward_config, hopper.fused, paged):
        monkeypatch.setattr(module, "multiprocessors", lambda device: PROCESSORS)
    for module in (hopper.forward, hopper.fused):
        monkeypatch.setattr(module, "work_counter", lambda device: torch.zeros(3, dtype=torch.int32))


def launched_forms(monkeypatch) -> set[tuple]:
    """The compiled forms that launches on CPU tensors need from now on: a set that grows, of kernels' names and all that they are
    compiled for."""
    forms = set[tuple]()

    def note(kernel: triton.JITFunction, grid: Any, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        if min(grid if isinstance(grid, tuple) else (grid,)) > 0:
            named = {name: arguments[name] for name in kernel.arg_names}
            facts = compiled.specialization(kernel, named)
            assert facts is not None
            forms.add((kernel.fn.__name__, *sorted(options.items()), *map(str, facts)))

    def launch(kernel, table, facts, moving, make, **options) -> None:
        note(kernel, *make(), options)

    def run(self, *args, grid, warmup, **arguments) -> None:
        note(self, grid, arguments, {name: x for name, x in arguments.items() if name not in self.arg_names})

    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(triton.JITFunction, "run", run)
    return forms
