"""What all programs are trained on, and one finished run."""

import importlib

import pytest
import torch
import torch.distributed as dist

from tests.examples.programs import EXAMPLES, PROGRAM, TOY, run


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from more threads, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("document") / "text.txt"
    path.write_text("".join(f"Line {n} of a document that is long enough: {n * n} is the square of {n}.\n" for n in range(60)))
    return path


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """A whole run of `finetune_long_document.py` on two ranks, with a checkpoint half way, and what it printed."""
    out = tmp_path_factory.mktemp("run")
    printed = run(PROGRAM, *TOY, "--text", text, "--out", out, "--save-every", 2)
    return out, printed


@pytest.fixture
def program(monkeypatch):
    """The module `finetune_long_document`."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("finetune_long_document")


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
