"""`launch/jobs/torchrun.sh` and `slurm.sbatch`, with stand-ins for torchrun, ssh and srun that record how they are called."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = ROOT / "launch" / "jobs" / "torchrun.sh"

# each call writes its arguments and its environment to its own files; ssh then runs the command in a new shell, as a host would
RECORD = 'printf "%s\\0" "$@" > "$RECORD/${0##*/}.$$"; env -0 > "$RECORD/${0##*/}.$$.env"\n'
TORCHRUN = (
    "#!/bin/sh\n" + RECORD + 'case "$*" in *"--node-rank ${FAILS:-none} "*) exit 3;; esac; [ -z "${HANGS:-}" ] || exec sleep 60\n'
)
SSH = (
    "#!/bin/sh\n"
    + RECORD
    + 'for last; do :; done; exec env -i PATH=/usr/bin:/bin RECORD="$RECORD" FAILS="${FAILS:-}" HANGS="${HANGS:-}" sh -c "$last"\n'
)
SRUN = "#!/bin/sh\n" + RECORD
AWKWARD = [
    "train.py",
    "--title",
    "two words",
    "it's",
    'a "quote"',
    "new\nline\n",
    "",
    "*",
    "$HOME",
    "`id`",
    "\\",
    "-m",
    "--dry-run",
    "&",
]
ALONE = ["--nnodes", "1", "--nproc-per-node", "gpu", "--standalone", "--local-addr", "localhost"]


class Calls:
    """Runs the scripts with the stand-ins on the PATH, and reads how the stand-ins were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in {"torchrun": TORCHRUN, "ssh": SSH, "srun": SRUN}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def run(self, *arguments, script=LAUNCHER, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
        known = {"PATH": f"{self.bin}:/usr/bin:/bin", "RECORD": str(self.folder), "HOME": "/nowhere"}
        command = ["bash", str(script), *arguments]
        return subprocess.run(command, cwd=cwd, env={**known, **environment}, capture_output=True, text=True, timeout=300)

    def start(self, *arguments, **environment) -> subprocess.Popen:
        known = {"PATH": f"{self.bin}:/usr/bin:/bin", "RECORD": str(self.folder), "HOME": "/nowhere"}
        return subprocess.Popen(["bash", str(LAUNCHER), *arguments], env={**known, **environment}, stderr=subprocess.DEVNULL)

    def of(self, name: str) -> list[list[str]]:
        """The arguments of each call, sorted."""
        files = [path for path in self.folder.glob(f"{name}.*") if path.suffix != ".env"]
        return sorted(path.read_bytes().decode().split("\0")[:-1] for path in files)

    def environment(self, name: str) -> dict[str, str]:
        """The environment of the first call."""
        text = min(self.folder.glob(f"{name}.*.env")).read_bytes().decode()
        return dict(line.split("=", 1) for line in text.split("\0")[:-1])


@pytest.fixture
def calls(tmp_path):
    return Calls(tmp_path)


def across(nodes, node, endpoint, job="0", nproc="gpu"):
    return [
        *["--nnodes", str(nodes), "--nproc-per-node", nproc, "--node-rank", str(node)],
        *["--rdzv-backend", "static", "--rdzv-endpoint", endpoint, "--rdzv-id", f"ringattn-{job}", "--rdzv-conf", "timeout=600"],
    ]


SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NODEID": "4",
}
OMPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NPROC_PER_NODE": "8",
}
WHERE = {
    "one machine": ([], {}, ALONE),
    "processes": (["--nproc", "4"], {}, ["--nnodes", "1", "--nproc-per-node", "4", *ALONE[4:]]),
    "slurm range": ([], {**SLURM, "SLURM_STEP_NODELIST": "gpu[003-007,9]"}, across(6, 4, "gpu003:19569", "1234567")),
    "slurm list": ([], {**SLURM, "SLURM_STEP_NODELIST": "a,b[1-5]"}, across(6, 4, "a:19569", "1234567")),
    "slurm ranges": ([], {**SLURM, "SLURM_STEP_NODELIST": "r[2-3]n[07,9]-ib,x[1-2]"}, across(6, 4, "r2n07-ib:19569", "1234567")),
    "slurm several": ([], {**SLURM, "SLURM_STEP_NODELIST": "n[1-2],m[1-4]"}, across(6, 4, "n1:19569", "1234567")),
    "slurm, one node": ([], {"SLURM_JOB_NODELIST": "gpu1", "SLURM_JOB_NUM_NODES": "1"}, ALONE),
    "slurm, own port": (["--port", "77"], {**SLURM, "SLURM_STEP_NODELIST": "n[1-6]"}, across(6, 4, "n1:77", "1234567")),
    "open mpi": (["--master", "head"], OMPI, across(3, 2, "head:29500")),
    "open mpi, address": ([], {**OMPI, "MASTER_ADDR": "10.0.0.1"}, across(3, 2, "10.0.0.1:29500")),
    "open mpi in slurm": (
        ["--master", "head"],
        {**OMPI, **SLURM, "SLURM_STEP_NODELIST": "n[1-6]"},
        across(3, 2, "head:29500", "1234567"),
    ),
    "mpich": (["--master", "head", "--port", "1"], {"PMI_SIZE": "2", "PMI_RANK": "1"}, across(2, 1, "head:1")),
    "kubernetes": ([], PET, across(2, 1, "job-master-0:23456", nproc="8")),
}


@pytest.mark.parametrize(("options", "environment", "expected"), WHERE.values(), ids=WHERE)
def test_the_place_of_the_job_is_detected(calls, options, environment, expected):
    done = calls.run(*options, *AWKWARD, **environment)
    assert done.returncode == 0, done.stderr
    assert calls.of("torchrun") == [[*expected, *AWKWARD]]
    found = calls.environment("torchrun")
    assert (found["NCCL_NVLS_ENABLE"], found["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")


def test_hosts_start_over_ssh_with_every_argument_and_the_settings(calls, tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    given = {"NCCL_DEBUG": "WARN it's\n'$(id)'\n", "PYTHONPATH": "a b", "HF_TOKEN": "hf_secret"}
    kept = {"SECRET": "x", "HF_OTHER": "y"}
    options = ["--hosts", "me@one,two,three", "--nproc", "8", "--env", "HF_TOKEN"]
    done = calls.run(*options, *AWKWARD, cwd=folder, **given, **kept)
    assert done.returncode == 0, done.stderr
    assert calls.of("torchrun") == [[*across(3, node, "one:29500", nproc="8"), *AWKWARD] for node in range(3)]
    assert {words[words.index("--") + 1] for words in calls.of("ssh")} == {"me@one", "two", "three"}
    found = calls.environment("torchrun")
    assert {name: found.get(name) for name in given} == given
    assert not kept.keys() & found.keys()
    assert found["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert found["PYTHONUNBUFFERED"] == "1"
    assert found["PWD"] == str(folder)
    # no value of the environment is on a command line
    assert "WARN" not in str(calls.of("ssh"))
    printed = calls.run("--dry-run", *options, "train.py", **given, **kept).stdout
    assert "# standard input sets: HF_TOKEN NCCL_DEBUG" in printed
    for text in (str(calls.of("ssh")), printed):
        assert "hf_secret" not in text
        assert "a b" not in text


@pytest.mark.parametrize(("options", "processes"), [([], ["8", "gpu", "2"]), (["--nproc", "3"], ["3"] * 3)], ids=["slots", "given"])
def test_a_host_file_gives_hosts_and_slots(calls, tmp_path, options, processes):
    path = tmp_path / "hostfile"
    path.write_text("# ours\n\nnode01 slots=8\nnode02   # all of them\nnode03 slots=2")
    assert calls.run("--hostfile", str(path), *options, "train.py").returncode == 0
    expected = [[*across(3, n, "node01:29500", nproc=processes[n]), "train.py"] for n in range(3)]
    assert calls.of("torchrun") == sorted(expected)


@pytest.mark.parametrize("hosts", [[], ["--hosts", "one,two"]], ids=["here", "hosts"])
def test_a_dry_run_prints_what_a_shell_would_run_and_runs_nothing(calls, hosts):
    done = calls.run(*hosts, "--dry-run", *AWKWARD)
    assert done.returncode == 0
    assert not calls.of("torchrun")
    assert not calls.of("ssh")
    if not hosts:
        assert shlex.split(done.stdout)[-len(AWKWARD) :] == AWKWARD
    stdout, known = done.stdout, {"PATH": f"{calls.bin}:/usr/bin:/bin", "RECORD": str(calls.folder)}
    subprocess.run(["sh", "-c", stdout], env=known, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=300)
    if hosts:  # whose commands end where their standard input, with the settings, is closed
        commands = [shlex.split(words[-1]) for words in calls.of("ssh")]
        assert sorted(words[words.index(str(ROOT)) + 2 :] for words in commands) == [
            [*across(2, n, "one:29500"), *AWKWARD] for n in range(2)
        ]
    else:
        assert calls.of("torchrun") == [[*ALONE, *AWKWARD]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_hosts_end_with_the_launcher_however_it_ends(calls, number):
    with calls.start("--hosts", "one,two", "train.py", HANGS="yes") as launcher:
        until(lambda: len(calls.of("torchrun")) == 2)
        jobs = [int(path.name.split(".")[1]) for path in calls.folder.glob("torchrun.*.env")]
        launcher.send_signal(number)
        launcher.wait(300)
    until(lambda: not any(alive(job) for job in jobs))


def alive(pid: int) -> bool:
    try:
        facts = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False
    return facts.rpartition(")")[2].split()[0] != "Z"


def until(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_host_that_fails_is_named_and_ends_the_others(calls):
    began = time.monotonic()
    done = calls.run("--hosts", "one,two,three", "train.py", FAILS="1", HANGS="yes")
    assert done.returncode == 3
    assert "node 1, two, ended with status 3" in done.stderr
    assert time.monotonic() - began < 30, "the others sleep for a minute if nobody ends them"


def test_a_module_runs_and_a_wrong_setting_is_corrected(calls):
    done = calls.run("-m", "pkg.train", "-m", NCCL_NVLS_ENABLE="1")
    assert calls.of("torchrun") == [[*ALONE, "-m", "pkg.train", "-m"]]
    assert "NCCL_NVLS_ENABLE is 1 here, and is set to 0" in done.stderr
    assert calls.environment("torchrun")["NCCL_NVLS_ENABLE"] == "0"


REFUSALS = {
    "no script": (["--nproc", "2"], {}, "no script is given"),
    "option": (["--nprocs", "2", "a.py"], {}, "--nprocs is not an option of torchrun.sh"),
    "no value": (["--hosts"], {}, "--hosts needs a value"),
    "no number": (["--nproc", "many", "a.py"], {}, "--nproc is 'many', but must be a whole number"),
    "no port": (["--port", "70000", "a.py"], {}, "the port is 70000, but ports go to 65535"),
    **{
        f"no number: {name}": (["a.py"], {**job, name: "x[$(touch ran)]"}, f"{name} is 'x[$(touch")
        for job, names in (
            ({**SLURM, "SLURM_STEP_NODELIST": "n[1-6]"}, SLURM),
            (OMPI, ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")),
            (PET, ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT", "PET_NPROC_PER_NODE")),
            ({"PMI_SIZE": "2", "PMI_RANK": "1"}, ("PMI_SIZE", "PMI_RANK")),
        )
        for name in names
    },
    "octal": (["a.py"], {**SLURM, "SLURM_STEP_NODELIST": "n[1-6]", "SLURM_NODEID": "08"}, "SLURM_NODEID is '08'"),
    "node too many": (["a.py"], {**PET, "PET_NODE_RANK": "2"}, "this is node 2, counted from 0, but there are 2 nodes"),
    "a value": (["--hosts", "a,b", "--env", "HF_TOKEN=x", "a.py"], {}, "but takes names of variables, without their values"),
    "not set": (["--hosts", "a,b", "--env", "HF_TOKEN", "a.py"], {}, "--env names HF_TOKEN, which is not set here"),
    "environment here": (["--env", "HOME", "a.py"], {}, "--env is for --hosts and --hostfile"),
    "empty host": (["--hosts", "a,,b", "a.py"], {}, "--hosts has an empty host name"),
    "host twice": (["--hosts", "a,b,a", "a.py"], {}, "--hosts names a twice, but a host runs one torchrun"),
    "no host": (["--hosts", "", "a.py"], {}, "--hosts names no host"),
    "no file": (["--hostfile", "/nowhere/hosts", "a.py"], {}, "--hostfile is /nowhere/hosts, which cannot be read"),
    "task a GPU": (
        ["a.py"],
        {**SLURM, "SLURM_STEP_NODELIST": "n[1-6]", "SLURM_STEP_NUM_TASKS": "48"},
        "srun started 8 processes on this node",
    ),
    "process a GPU": (["a.py"], {**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "pass --map-by ppr:1:node"),
    "batch script": (["a.py"], {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}, "start it with srun"),
    "nowhere to meet": (["a.py"], OMPI, "3 nodes must know where to meet: pass --master HOST"),
    "no torchrun": (["a.py"], {"PATH": "/usr/bin:/bin"}, "torchrun is not on the PATH"),
}


@pytest.mark.parametrize(("arguments", "environment", "message"), REFUSALS.values(), ids=REFUSALS)
def test_impossible_jobs_are_refused_before_anything_starts(calls, arguments, environment, message):
    done = calls.run(*arguments, cwd=calls.folder, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert not calls.of("torchrun")
    assert not (calls.folder / "ran").exists(), "bash computed with it"


def test_a_bad_line_of_a_host_file_is_refused(calls, tmp_path):
    (tmp_path / "hosts").write_text("one slots=8\ntwo gpus=8\n")
    done = calls.run("--hostfile", str(tmp_path / "hosts"), "a.py")
    assert done.returncode == 2
    assert "says 'two gpus=8', but a line is HOST or HOST slots=N" in done.stderr


def test_the_slurm_job_starts_one_launcher_per_node(calls):
    script = ROOT / "launch" / "jobs" / "slurm.sbatch"
    done = calls.run(*AWKWARD, script=script, cwd="/", SLURM_SUBMIT_DIR=str(ROOT), SLURM_CPUS_PER_TASK="64")
    assert done.returncode == 0, done.stderr
    (words,) = calls.of("srun")
    at = words.index("launch/jobs/torchrun.sh")
    assert words[at + 1 :] == AWKWARD
    assert {"--ntasks-per-node=1", "--cpus-per-task=64", "--kill-on-bad-exit=1"} <= set(words[:at])
    assert calls.environment("srun")["PWD"] == str(ROOT)
    options = [line.split()[1].split("=")[0] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node"} <= set(options)
    elsewhere = calls.run("train.py", script=script, SLURM_SUBMIT_DIR="/usr")
    assert (elsewhere.returncode, "submit from the root" in elsewhere.stderr) == (2, True)


def test_help_lists_every_option(calls):
    done = calls.run("--help")
    assert done.returncode == 0
    assert all(
        name in done.stdout
        for name in ("--hosts", "--hostfile", "--nproc", "--master", "--port", "--timeout", "--env", "--dry-run")
    )
    assert "set -" not in done.stdout
    assert os.access(LAUNCHER, os.X_OK)
