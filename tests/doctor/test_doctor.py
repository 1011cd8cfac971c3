"""The doctor over gloo: a healthy job is found well, and each fault is found with the rank that has it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
GENEROUS = {"slow": 1e3, "link": 1e-6, "skew": 0.5}  # other tests share the processors, so nothing counts as slow


def doctor(name):
    return importlib.import_module(f"ringattn.doctor.{name}")


def site_of(rank, size, hosts, limits, store=None, device="cpu", group=None):
    board = doctor("board").Board(store, rank, size, hosts[rank])
    return doctor("facts").Site(rank, size, tuple(hosts), torch.device(device), board, group, **limits)


def examined(group, tag, odd, fault, hosts, limits):
    """The findings, as (check, verdict, ranks, text), when rank `odd` has a fault."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.PrefixStore(tag, dist.distributed_c10d._get_default_store())
    site = site_of(rank, size, hosts[:size], limits, store, group=group)
    with ExitStack() as stack:
        if rank == odd:
            for target, name, value in globals()[fault]():
                stack.enter_context(patch.object(target, name, value))
            if fault == "another_setting":
                stack.enter_context(patch.dict(os.environ, {"NCCL_ALGO": "Tree"}))
        found = doctor("examination").examine(site, [])
    return [(f.check, f.verdict.value, f.ranks, f.text) for f in found]


def nothing():
    return []


def another_version():
    versions = doctor("facts").versions
    return [(doctor("facts"), "versions", lambda device: {**versions(device), "torch": "2.6.0"})]


def another_checkout():
    return [(doctor("facts"), "source_digest", lambda: "01234567")]


def another_setting():
    return []


def other_kernels():
    return [(doctor("facts").KernelChoice, "observe", lambda *_: {"forward": "plain Triton", "backward": "plain torch: no GPU"})]


def a_fast_clock():
    return [(doctor("measure"), "now", lambda: time.time() + 7)]


def slow_work():
    mm = torch.mm
    return [(torch, "mm", lambda x, y: (time.sleep(0.15), mm(x, y)))]


def slow_links():
    exchange = dist.batch_isend_irecv
    return [(dist, "batch_isend_irecv", lambda ops: (time.sleep(0.15), exchange(ops))[1])]


def wrong_sums():
    reduce = dist.all_reduce

    def wrong(x, **options):
        reduce(x, **options)
        x[len(x) // 2] += 1

    return [(dist, "all_reduce", wrong)]


def wrong_data():
    pattern = doctor("measure").pattern
    return [(doctor("measure"), "pattern", lambda rank, device: pattern(rank, device) + 1)]


def _attention(change):
    import ringattn

    attention = ringattn.ring_attention
    return [(ringattn, "ring_attention", lambda *args, **options: change(attention, args, options))]


def inexact():
    return _attention(lambda attention, args, options: attention(*args, **options) * 1.0001)


def not_a_number():
    return _attention(lambda attention, args, options: attention(*args, **options) * float("nan"))


def another_mask():
    import ringattn

    return _attention(lambda attention, args, options: attention(*args, **{**options, "mask": ringattn.full()}))


ONE_HOST, TWO_HOSTS = "aaaa", "aabb"
# fault -> check, ranks and words of its finding, and the limits that reveal it
FOUND = {
    "another_version": ("versions", (2,), r"torch is 2\.6\.0 on rank 2, but .* on ranks 0, 1, 3", {}),
    "another_checkout": ("versions", (2,), r"its code is 01234567 on rank 2, but \w+ on ranks 0, 1, 3", {}),
    "another_setting": ("environment", (2,), "NCCL_ALGO is Tree on rank 2, but not set on ranks 0, 1, 3", {}),
    "other_kernels": ("kernels", (2,), "forward is plain Triton on rank 2, but plain torch: no GPU on ranks", {}),
    "a_fast_clock": ("clocks", (2,), r"b is \+7\.\d+ s off rank 0's host", {}),
    "slow_work": ("speed", (2,), "rank 2 takes .* times the median", {"slow": 15.0}),
    "slow_links": ("links", (2,), "within a host", {"link": 0.1}),
    "wrong_sums": ("collectives", (2,), "rank 2: 1 wrong sums", {}),
    "wrong_data": ("collectives", (2,), "most ranks receive wrong data from rank 2", {}),
    "inexact": ("exactness", (2,), "error over what is allowed on rank 2: {'out'", {}),
    "not_a_number": ("exactness", (2,), "rank 2: .*nan", {}),
    "another_mask": ("exactness", (0, 1, 2, 3), r"ranks disagree: mask is full\(\) .* on rank 2", {}),
}


@pytest.mark.parametrize("fault", FOUND)
@pytest.mark.some(5)
def test_a_fault_is_found_at_its_rank(gloo, fault):
    check, ranks, words, limits = FOUND[fault]
    hosts = TWO_HOSTS if fault == "a_fast_clock" else ONE_HOST
    everywhere = gloo.run(4, examined, uuid.uuid4().hex, 2, fault, hosts, {**GENEROUS, **limits})
    assert everywhere == everywhere[:1] * 4, "all ranks come to the same findings"
    (bad,) = [finding for finding in everywhere[0] if finding[1] == "LOOK"]
    assert bad[:3] == (check, "LOOK", ranks)
    with pytest.raises(ValueError, match=words):
        raise ValueError(bad[3])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_healthy_job_is_found_well(gloo, size):
    found = gloo.run(size, examined, uuid.uuid4().hex, -1, "nothing", TWO_HOSTS, GENEROUS)[0]
    assert [finding[1] for finding in found] == ["ok"] * 8 + ["note"], found
    assert [finding[0] for finding in found] == [check.name for check in doctor("examination").CHECKS]


GPU_RECORDS = {
    "multicast on": (
        "Environment",
        [{"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, {"NCCL_NVLS_ENABLE": "0"}],
        (1,),
    ),
    "no peer access": ("Links", [{"GB/s with": [0, 9], "no P2P with": []}, {"GB/s with": [9, 0], "no P2P with": [0]}], (1,)),
    "symmetric memory fails": ("SymmetricMemory", ["rank 1 could not allocate its memory: out of memory"] * 2, (1,)),
    "symmetric memory of no use": ("SymmetricMemory", ["rank 1 is on host b and rank 0 on a"] * 2, ()),
    "symmetric memory": ("SymmetricMemory", ["", ""], ()),
    "hot": ("Speed", [{"seconds": 1.0, "MHz": 1980, "Celsius": 50}, {"seconds": 1.2, "MHz": 1400, "Celsius": 88}], (1,)),
}


@pytest.mark.parametrize(("check", "records", "ranks"), GPU_RECORDS.values(), ids=GPU_RECORDS)
def test_records_of_gpus_are_judged(check, records, ranks):
    kind = getattr(doctor("facts"), check, None) or getattr(doctor("measure"), check)
    site = site_of(0, 2, "aa", {"slow": 1.15, "link": 0.6, "skew": 0.5}, device="cuda:0")
    finding = kind().judge(site, records)
    assert finding.ranks == ranks
    assert (finding.verdict.value == "LOOK") == bool(ranks)
    if check == "Speed":
        assert "(1400 MHz, 88 C after it)" in finding.text


def test_what_each_rank_has_of_its_own_is_not_compared(monkeypatch):
    for name in ("NCCL_HOSTID", "CUDA_VISIBLE_DEVICES", "NCCL_ALGO"):
        monkeypatch.setenv(name, "1")
    assert {"NCCL_HOSTID", "CUDA_VISIBLE_DEVICES", "NCCL_ALGO"} & set(doctor("facts").Environment().observe(None)) == {"NCCL_ALGO"}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_all_ranks_meet_all_in_rounds_of_pairs(size):
    rounds = list(zip(*(doctor("measure").partners(rank, size) for rank in range(size))))
    for met in rounds:
        assert all(other is None or met[other] == rank for rank, other in enumerate(met)), "partners agree"
    for rank in range(size):
        assert sorted(met[rank] for met in rounds if met[rank] is not None) == [other for other in range(size) if other != rank]


SLOW_PAIRS = {
    "one link": ([(0, 1)], (0, 1)),
    "both ways": ([(0, 1), (1, 0)], (0, 1)),
    "one rank sends": ([(2, 0), (2, 1), (2, 3)], (2,)),
    "one rank, both ways": ([(2, 0), (0, 2), (1, 2)], (2,)),
    "two ranks": ([(2, 0), (2, 1), (5, 0), (5, 1), (5, 3)], (2, 5)),
    "none": ([], ()),
}


@pytest.mark.parametrize(("pairs", "ranks"), SLOW_PAIRS.values(), ids=SLOW_PAIRS)
def test_slow_pairs_point_to_ranks(pairs, ranks):
    assert doctor("measure").at_fault(pairs) == ranks


JOBS = ["well", "absent", "vanishes", "is killed for", "hangs", "fails"]


@pytest.fixture(scope="module", autouse=True)
def started(request, tmp_path_factory):
    """The process of whole jobs, and their folder. They wait a lot, so they begin with the first test of this file."""
    if not any("jobs" in item.fixturenames for item in request.session.items if item.path == request.path):
        yield None
        return
    folder = tmp_path_factory.mktemp("jobs")
    command = [sys.executable, Path(__file__).with_name("jobs.py"), folder, *JOBS]
    with open(folder / "errors", "w") as errors, subprocess.Popen(command, stdout=errors, stderr=errors) as process:
        yield process, folder
        process.kill()


@pytest.fixture(scope="module")
def jobs(started):
    """Whole jobs of three ranks, run at the same time: (status of each rank, printed text, JSON report)."""
    process, folder = started
    assert process.wait(timeout=800) == 0, (folder / "errors").read_text()
    statuses = {name: json.loads((folder / f"{name}.status").read_text()) for name in JOBS}
    return {n: (statuses[n], (folder / f"{n}.out").read_text(), json.loads((folder / f"{n}.json").read_text())) for n in JOBS}


ENDS = {
    "absent": ([1], "rank 1 of 3 never arrived within 15 s"),
    "vanishes": ([1], r"rank 1 \(.*\) ended, or stopped, without a word in: collectives"),
    "is killed for": ([1], r"rank 1 \(.*\) ended, or stopped, without a word in: exactness"),
    "hangs": ([1], r"rank 1 \(.*\) did not get past speed within 15 s, as the others did"),
    "fails": ([1], r"rank 1 \(.*\) failed: RuntimeError: an ECC error was encountered, in: links"),
}


@pytest.mark.parametrize("job", ENDS)
def test_a_rank_that_stops_ends_the_job_and_is_named(jobs, job):
    ranks, words = ENDS[job]
    statuses, printed, report = jobs[job]
    assert set(statuses.values()) <= {1, 9}
    assert not report["fine"]
    last = report["checks"][-1]
    assert (last["check"], last["look at"]) == ("examination", ranks)
    with pytest.raises(ValueError, match=words):
        raise ValueError(last["text"])
    assert printed.count("what was seen") == 1, "one rank reports"
    assert "not well: examination; look at rank 1" in printed
    if job != "absent":
        assert [check["verdict"] for check in report["checks"][:2]] == ["ok", "ok"], "earlier findings are kept"


def test_a_whole_job_that_is_well(jobs):
    statuses, printed, report = jobs["well"]
    assert statuses == {"0": 0, "1": 0, "2": 0}
    assert report["fine"]
    assert len(report["hosts"]) == 3
    assert "all is well" in printed
    assert "GB/s a direction, between ranks" in printed
    assert printed.count("what was seen") == 1


def test_without_a_launcher_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert doctor("examination").main([]) == 2
    assert "start it with launch/jobs/torchrun.sh or torchrun" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_folder_is_a_program_that_runs_anywhere(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK")}
    command = [sys.executable, LAUNCH / "doctor", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path, env=environment)
    assert (done.returncode, "start it with launch/jobs/torchrun.sh" in done.stdout) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--timeout", "0", "--timeout is 0.0, but must be above 0"),
        ("--timeout", "nan", "--timeout is nan, but must be above 0"),
        ("--slow", "0", "--slow is 0.0, but must be above 0"),
        ("--link", "-1", "--link is -1.0, but must be above 0"),
        ("--json", str(LAUNCH), "which is a folder: give a file"),
    ],
)
def test_bad_options_are_refused(capsys, option, value, message):
    with pytest.raises(SystemExit):
        doctor("examination").parse([f"{option}={value}"])
    assert message in capsys.readouterr().err
