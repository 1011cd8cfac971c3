"""The ranks of a benchmark end with it."""

import time
from argparse import Namespace
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessContext

LAUNCH = Path(__file__).resolve().parents[3] / "launch"


def test_an_interrupted_bench_ends_its_ranks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench.shared.ranks import start_ranks

    started = []

    def interrupted(context, *_):
        started.extend(context.processes)
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        raise KeyboardInterrupt

    def wait(_):
        (tmp_path / str(time.monotonic_ns())).touch()
        time.sleep(600)

    monkeypatch.setattr(ProcessContext, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_ranks(wait, Namespace(device="cpu", world_size=2))
    for process in started:
        process.join(20)
        assert not process.is_alive()
    assert len(started) == 2
