"""What tests of launches share: kernels that only note what they are launched with."""

from __future__ import annotations

import pytest


class Recorded:
    """Stands in for a kernel: keeps the grids and arguments of its launches."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda **arguments: self.calls.append((grid, arguments))


@pytest.fixture
def recorded(monkeypatch):
    """(forward, merge): their launches on an H200."""
    from ringattn_kernels import dispatch, hopper, splits
    from ringattn_kernels import launches as kernel_launches
    from ringattn_kernels.hopper import forward_config
    from tests.kernels.test_hopper_backward import launch_anew

    monkeypatch.setattr(dispatch, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(hopper.forward, "work_counter", lambda device: None)
    for module in (splits, hopper.forward, forward_config):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(kernel_launches, "launch", launch_anew)
    kernels = Recorded(), Recorded()
    monkeypatch.setattr(hopper.forward, "hopper_forward_kernel", kernels[0])
    monkeypatch.setattr(splits, "merge_kernel", kernels[1])
    return kernels
