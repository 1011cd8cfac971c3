"""Fixtures of all tests: `gloo` and `nccl` run functions on several ranks; `strategies.py` adds its strategies."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

# Tiny tensors gain nothing from more threads, which wait for each other on a busy machine. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.compile would start processes of its own, each of which imports torch, to compile what takes a second.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# For each connection torch looks up the name of the address. A name server that loses a request would hold up a store for 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest

# Until all tests are collected, hardly anything that is made becomes garbage, and looking for it takes a tenth of the time of imports.
gc.disable()


def _load(name: str):
    """Import a module of this folder, which is not on the path in pytest's importlib mode."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def cuda():
    """torch.cuda, for whose import a process that only hands out tests has no use."""
    import torch

    return torch.cuda


ranks = _load("ranks")
# files that take longest come first: a process that took one of them last would leave the others idle
LONGEST = (
    "tests/launch/repo/test_lint.py",
    "tests/examples/",
    "tests/transport/test_staged.py",
    "tests/kernels/test_interpreter.py",
)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="also run the tests marked thorough, as a machine with a GPU does")


def pytest_configure(config):
    # a process that only hands out tests to others needs no strategies, for which torch is imported
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()
    else:
        config.pluginmanager.register(_load("strategies"))


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    if ranks.SHARED in os.environ:
        _leave_out(config, items, [item for item in items if "nccl" not in item.fixturenames])
    if _load("strategies").is_thorough(config):
        return
    cases = {}
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("thorough"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for found in cases.values():
        count = min(found[0].get_closest_marker("some").args[0], len(found))
        always = {n * len(found) // count for n in range(count)}
        for number, item in enumerate(found):
            if number not in always:
                item.add_marker("thorough")
    _leave_out(config, items, [item for item in items if item.get_closest_marker("thorough")])


def _leave_out(config, items, some):
    config.hook.pytest_deselected(items=some)
    left_out = set(some)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    # garbage is looked for again and again, but not among modules and tests
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """How many processes `-n auto` means: one more than cores, because tests wait for one another's ranks, and 4 GiB of memory for each."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max(1, min(len(os.sched_getaffinity(0)) + 1, 4, memory // 4))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`, a process takes a whole file, and one process all of tests/examples, whose programs one server forks."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "tests/examples" if nodeid.startswith("tests/examples/") else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not cuda().is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def _gloo():
    # what this process has imported, the launcher imports once for all ranks
    slow = {
        "transformers": "transformers.models.llama.modeling_llama",
        "torch._dynamo": "torch._inductor.compile_fx",
        "torch.distributed.fsdp": "torch.distributed.fsdp",
        "diffusers": "diffusers.models.attention_processor",
        "megatron": "megatron.core.models.gpt.gpt_model",
    }
    processes = ranks.Ranks("gloo", 8, [module for name, module in slow.items() if name in sys.modules])
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def gloo(_gloo):
    """Ranks over gloo: `gloo.run(world_size, function, *args)`. The groups that functions make end with a file of tests."""
    yield _gloo
    _gloo.end_groups()


@pytest.fixture
def without_replays(monkeypatch):
    """Each pass is computed, also where a GPU would replay an earlier one."""
    from ringattn.device import local

    monkeypatch.setattr(local, "replayed", lambda found, facts, inputs, work, words=None: work(*inputs))


@pytest.fixture(scope="session")
def _gpus():
    processes = ranks.Ranks("nccl", ranks.gpu_ranks())
    yield processes
    processes.close()


@pytest.fixture
def nccl(_gpus):
    """Ranks over NCCL, one a GPU, for tests marked gpu: `nccl.run(world_size, function, *args)` skips where there are fewer."""
    return _gpus


@pytest.fixture
def llama():
    """A tiny Llama of transformers, attached to a ring of one rank, for 12 tokens below 31."""
    transformers = pytest.importorskip("transformers")
    import torch

    import ringattn as ra
    from ringattn.integrations.huggingface import attach

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes)).train()
    attach(model, layout=ra.zigzag(12, 1))
    return model


@pytest.fixture(params=[1, 2, 4, 8], ids="{}gpus".format)
def world_size(request):
    """A number of ranks on GPUs."""
    return request.param
