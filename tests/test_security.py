"""Nothing that people run here loads code from data, by pickles, shells or evaluated text, or opens a port to other hosts unasked.

docs/security.md says what remains to be trusted.
"""

from __future__ import annotations

import argparse
import ast
import ipaddress
import os
import stat
import sys
from pathlib import Path

import pytest

from ringattn.transport import shared_records

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ringattn", "kernels", "launch", "examples")
SOURCES = {path: path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}

# modules that read code from data
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# functions, by the end of their dotted names; those of torch.distributed that pickle end in _object or _object_list
CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "tempfile.mktemp",
    "mktemp",
    "yaml.load",
    "yaml.unsafe_load",
    "numpy.load",
    "np.load",
}
BUILT_IN = {"eval", "exec"}


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute; empty for what is neither."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def problems(source: str) -> list[str]:
    """What a file must not do, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node, f"imports {alias.name}") for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            found.append((node, f"imports {node.module}"))
        elif dotted(node) == "ctypes.py_object":
            continue  # a type of C
        elif isinstance(node, (ast.Name, ast.Attribute)) and dotted(node).split(".")[-1].endswith(("_object", "_object_list")):
            found.append((node, f"uses {dotted(node)}, which pickles"))
        elif isinstance(node, ast.Call):
            found += [(node, problem) for problem in problems_of_call(node)]
    return [f"line {node.lineno}: {problem}" for node, problem in found]


def problems_of_call(call: ast.Call) -> list[str]:
    name = dotted(call.func)
    options = {option.arg: option.value for option in call.keywords}
    found = [f"calls {name}"] if name in CALLS and (name in BUILT_IN or "." in name or name == "mktemp") else []
    weights_only = options.get("weights_only")
    if name.endswith("torch.load") and not is_constant(weights_only, True):
        found.append("calls torch.load without weights_only=True")
    elif weights_only is not None and not is_constant(weights_only, True):
        found.append("passes weights_only that is not True")
    unsafe = ("shell", "allow_pickle", "trust_remote_code")
    return found + [f"passes {option}" for option in unsafe if option in options and not is_constant(options[option], False)]


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_code_comes_from_data(folder):
    found = {
        path.relative_to(ROOT).as_posix(): problems(source) for path, source in SOURCES.items() if ROOT / folder in path.parents
    }
    assert len(found) > 5
    assert {name: of_file for name, of_file in found.items() if of_file} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load('x')",
        "torch.load('x', weights_only=False)",
        "torch.load('x', weights_only=safe)",
        "load_checkpoint(x, weights_only=False)",
        "dist.broadcast_object_list([1])",
        "dist.all_gather_object(found, 1)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "eval('1')",
        "exec(code)",
        "os.system('ls')",
        "yaml.load(text)",
        "tempfile.mktemp()",
        "np.load('x')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_each_kind_is_found(line):
    assert problems(line)


@pytest.mark.parametrize(
    "line",
    ["model.eval()", "torch.load('x', weights_only=True)", "subprocess.run(['ls'])", "yaml.safe_load(x)", "tempfile.mkstemp()"],
)
def test_what_is_harmless_is_not(line):
    assert problems(line) == []


def test_programs_meet_at_a_file_or_where_the_launcher_says():
    """A store of torch's listens on all interfaces, whatever its address: what starts ranks by itself uses a file."""
    for path, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            where = f"{path.relative_to(ROOT).as_posix()}: line {node.lineno}"
            if dotted(node.func).endswith("TCPStore"):
                # the doctor's rehearsal of torchrun's own meeting
                assert path == ROOT / "ringattn" / "doctor" / "examination.py", where
                assert 'os.environ["MASTER_ADDR"]' in source, where
            for option in node.keywords:
                if option.arg == "init_method":
                    assert ast.unparse(option.value).startswith("f'file://"), where


def test_a_launch_on_one_host_is_standalone():
    script = (ROOT / "launch" / "jobs" / "torchrun.sh").read_text()
    assert "command+=(--standalone --local-addr localhost)" in script


def listening(arguments: argparse.Namespace) -> None:
    """Write the addresses at which this process listens."""
    # not the descriptor that lists this folder, which is closed by then
    mine = {os.readlink(link) for link in list(Path("/proc/self/fd").iterdir()) if link.is_symlink()}
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in mine:
                words = bytes.fromhex(local.split(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(str(ipaddress.ip_address(packed)))
    (Path(arguments.folder) / str(os.getpid())).write_text("\n".join(found))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who listens")
def test_ranks_of_a_benchmark_listen_on_loopback_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch" / "bench")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    from shared import ranks

    ranks.start_ranks(listening, argparse.Namespace(device="cpu", world_size=2, folder=str(tmp_path)))
    written = [path.read_text().split() for path in tmp_path.iterdir()]
    assert len(written) == 2
    assert any(written)
    assert all(ipaddress.ip_address(address).is_loopback for addresses in written for address in addresses)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="records go through files without a name where there are such")
def test_shared_memory_has_no_name_and_no_other_user_opens_it():
    file, key = shared_records.create(2)
    with file:
        pid, number, _ = key.split()
        assert os.fstat(file.fileno()).st_nlink == 0
        # the folder through which other ranks open it is this user's
        folder = os.stat(f"/proc/{pid}/fd")
        assert stat.S_IMODE(folder.st_mode) & 0o077 == 0
        assert folder.st_uid == os.getuid()
        assert os.readlink(f"/proc/{pid}/fd/{number}").startswith("/memfd:")
