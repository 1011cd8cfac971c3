"""`bench deal`: rings of one size hold each sequence once, and a row compares all ways."""

from __future__ import annotations

import argparse
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def test_a_row_for_each_mix(monkeypatch, capsys):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench import deal

    parser = argparse.ArgumentParser()
    deal.add_arguments(parser)
    given = ["--gpus", "8", "--gpus-per-node", "4", "--tokens", "512", "2048", "--means", "700", "--steps", "2", "--batches", "1"]
    deal.main(parser.parse_args(given))
    head, _, *rows = [[part.strip() for part in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert head[3:] == list(deal.WAYS)
    assert [row[:3] for row in rows] == [["8", "512", "700"], ["8", "2,048", "700"]]
    for row in rows:
        for part in row[3:]:
            rate, tokens = map(float, part.split(", "))
            assert rate > 0
            assert tokens >= 1


def test_rings_of_one_size_hold_each_sequence_once(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench.deal import fixed_rings
    from bench.shared.cases import log_normal_lengths

    lengths = log_normal_lengths(100, 1.0, 4000, seed=0, longest=400)
    assert sum(lengths) == 4000
    assert max(lengths) <= 400
    steps = fixed_rings(lengths, 8, 100, 4)
    assert sorted(i for step in steps for ring in step for i in ring.sequences) == list(range(len(lengths)))
    for step in steps:
        assert [(ring.first, ring.size) for ring in step] == [(0, 4), (4, 4)]
        assert all(sum(lengths[i] for i in ring.sequences) <= 400 for ring in step)
