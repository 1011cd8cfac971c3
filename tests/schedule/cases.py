"""Schedules for the tests of this folder, and what they read of rows."""

from __future__ import annotations

import math

import torch

import ringattn as ra
from ringattn.geometry.rows import Rows
from ringattn.schedule.schedules import DoubleRing

SCHEDULES = {
    "ring": ra.ring(),
    "gather": ra.gather(),
    "waves-1": ra.waves(1),
    "waves-2": ra.waves(2),
    "waves-3": ra.waves(3),
    "double-ring-2": ra.double_ring(2),
    "double-ring-4": ra.double_ring(4),
}


def listed(rows: Rows) -> list[int]:
    return rows.index(torch.device("cpu")).tolist()


def fitting(schedule, world_size):
    """The schedule, made to fit `world_size` ranks."""
    return ra.double_ring(math.gcd(world_size, schedule.ranks_per_node)) if isinstance(schedule, DoubleRing) else schedule
