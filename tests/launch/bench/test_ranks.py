"""The ranks of a benchmark end with it, and share GPUs if they are more."""

import os
import time
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch
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


@pytest.mark.parametrize(("world_size", "shares"), [(None, False), (2, False), (3, True)])
def test_more_ranks_than_gpus_share_them(monkeypatch, tmp_path, capsys, world_size, shares):
    monkeypatch.syspath_prepend(LAUNCH)
    from bench.shared import ranks

    processes = mock.Mock(processes=[])
    processes.join.return_value = True
    started = mock.Mock(return_value=processes)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(ranks.mp, "start_processes", started)
    told = []
    monkeypatch.setattr(ranks, "_join", lambda *_, **__: told.append(os.environ.get("NCCL_HOSTID")))
    with mock.patch.dict(os.environ):
        ranks.start_ranks(print, Namespace(device="cuda", world_size=world_size))
        ranks._start(1, world_size or 2, f"{tmp_path}/store", print, Namespace(device="cuda"))
    assert told == ["rank 1" if shares else None]
    assert started.call_args.args[2] == (world_size or 2)
    assert ("3 ranks share 2 GPUs" in capsys.readouterr().out) is shares
