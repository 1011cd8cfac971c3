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
    from ringattn_kernels import hopper, splits
    from ringattn_kernels import launches as kernel_launches
    from tests.kernels.as_hopper import choose_as_on_hopper
    from tests.kernels.test_hopper_backward import launch_anew

    choose_as_on_hopper(monkeypatch)
    monkeypatch.setattr(kernel_launches, "launch", launch_anew)
    kernels = Recorded(), Recorded()
    monkeypatch.setattr(hopper.forward, "hopper_forward_kernel", kernels[0])
    monkeypatch.setattr(splits, "merge_kernel", kernels[1])
    return kernels
