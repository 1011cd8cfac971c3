"""Programs as a person starts them, on all GPUs and all at once: each example at toy size, and the doctor."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.examples.programs import EXAMPLES, ROOT, TORCHRUN, figures, losses, needs_accelerate, needs_deepspeed, succeed

pytestmark = pytest.mark.gpu

GPU_TOY = [
    *("--vocab", 300, "--hidden", 512, "--layers", 2, "--heads", 8, "--kv-heads", 4),
    *("--tokens", 1024, "--steps", 4, "--warmup", 1, "--generate", 0),
]


@pytest.fixture(scope="session")
def on_gpus(text, tmp_path_factory):
    """Programs on all GPUs, all of them at once: what a job has printed, and the figures of a training run, by name."""
    count, folder = torch.cuda.device_count(), tmp_path_factory.mktemp("gpus")
    ranks = [*TORCHRUN, count]

    def train(name, *options):
        return [EXAMPLES / "finetune_long_document.py", *GPU_TOY, "--text", text, "--out", folder / name, *options]

    def job(*commands):
        return "".join(succeed(*command, gpus=True) for command in commands)

    fp32, same_bits = ["--dtype", "float32"], ["--wrapper", "fsdp2", "--deterministic"]
    jobs = {
        "hybrid": [[*ranks, EXAMPLES / "hybrid_mesh.py"]],
        "packed": [[*ranks, EXAMPLES / "train_packed.py"]],
        "gpt2": [
            [
                *ranks,
                EXAMPLES / "gpt2.py",
                "--attention",
                "ring",
                "--size",
                "tiny",
                "--context",
                256,
                "--tokens",
                1024,
                "--steps",
                60,
                "--seconds",
                200,
                "--lr",
                0.01,
            ]
        ],
        **{name: [[*ranks, EXAMPLES / f"train_{name}.py"]] for name in ("torch", "module", "huggingface", "fsdp2")},
        # how fast it is, beside all others, is no matter
        "doctor": [
            [*ranks, ROOT / "launch" / "doctor", "--slow", 100, "--link", 0.001, "--json", folder / "doctor" / "figures.json"]
        ],
        "verify": [train("verify", "--verify", "--verify-tokens", 1000)],
        "train": [train("train", *fp32)],
        "ulysses": [train("ulysses", "--attention", "ulysses-sdpa", "--layout", "contiguous")],
        "context-parallel": [train("context-parallel", "--attention", "context-parallel")],
        "resumed": [
            [*ranks, *train("first", *same_bits, "--save-every", 2)],
            [*ranks, *train("resumed", *same_bits, "--resume", folder / "first" / "checkpoint-000002")],
        ],
    }
    if importlib.util.find_spec("deepspeed") is not None:
        jobs["zero3"] = [[*ranks, EXAMPLES / "train_deepspeed.py"]]
        jobs["deepspeed"] = [[*ranks, *train("deepspeed", *fp32, "--wrapper", "deepspeed")]]
    if importlib.util.find_spec("accelerate") is not None:
        jobs |= {name: [[*ranks, EXAMPLES / f"train_{name}.py"]] for name in ("trainer", "accelerate")}
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = {name: pool.submit(job, *commands) for name, commands in jobs.items()}
        yield lambda name: running[name].result(), lambda name: figures(folder / name)


def test_a_grid_and_packed_documents_on_gpus(on_gpus):
    printed, _ = on_gpus
    errors = [float(line.rsplit(maxsplit=1)[-1]) for line in printed("hybrid").splitlines() if "a mesh of" in line]
    assert len(errors) == torch.cuda.device_count()
    assert max(errors) < 1e-5
    first, last = (float(line.split("loss ")[1].split()[0]) for line in printed("packed").splitlines() if line.startswith("step"))
    assert last < first / 5


def test_gpt2_learns_with_dropout_on_gpus(on_gpus):
    (line,) = [line for line in on_gpus[0]("gpt2").splitlines() if "mean loss of the last 20" in line]
    assert float(line.split()[-1]) < 3.5  # 5.5 at first


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("module", "torch"),
        ("fsdp2", "huggingface"),
        pytest.param("zero3", "huggingface", marks=needs_deepspeed),
        pytest.param("trainer", "huggingface", marks=needs_accelerate),
    ],
)
def test_wrappers_on_gpus_take_the_same_steps(on_gpus, name, same):
    found, expected = (losses(on_gpus[0](each)) for each in (name, same))
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=2e-3)


@needs_accelerate
def test_accelerate_on_gpus_learns(on_gpus):
    found = losses(on_gpus[0]("accelerate"))
    assert len(found) == 4
    assert found[-1] < found[0] - 0.2


def test_a_step_on_gpus_is_that_of_one_process(on_gpus):
    printed = on_gpus[0]("verify")
    assert "bfloat16" in printed
    assert "all within bounds" in printed


def test_a_run_on_gpus_resumed_under_torchrun_has_the_same_losses_to_the_bit(on_gpus):
    printed, found = on_gpus
    assert "perplexity" in printed("resumed")
    first, second = found("first"), found("resumed")
    for name in ("losses", "gradient_norms"):
        assert second[name] == first[name][2:]
    assert second["heldout_perplexity"] == first["heldout_perplexity"]
    assert first["losses"][-1] < first["losses"][0]


@pytest.mark.parametrize("peer", ["ulysses", "context-parallel"])
def test_peers_on_gpus_compute_the_same(on_gpus, peer):
    """In bf16, as the steps of the run that is resumed."""
    printed, found = on_gpus
    assert printed(peer)
    assert printed("resumed")
    assert found(peer)["losses"] == pytest.approx(found("first")["losses"], rel=5e-3)


@needs_deepspeed
def test_deepspeed_on_gpus_gives_the_same_losses(on_gpus):
    printed, found = on_gpus
    assert "wrapper deepspeed, ZeRO 3" in printed("deepspeed")
    assert printed("train")
    result, other = found("deepspeed"), found("train")
    for name in ("losses", "gradient_norms", "heldout_perplexity"):
        assert result[name] == pytest.approx(other[name], rel=2e-5)


def test_the_doctor_finds_all_gpus_well(on_gpus):
    printed, found = on_gpus
    assert "all is well" in printed("doctor")
    checks = {check["check"]: check for check in found("doctor")["checks"]}
    assert checks["collectives"]["text"].endswith("over nccl")
    count = torch.cuda.device_count()
    assert {len(check["ranks"]) for check in checks.values()} == {count}
    assert checks["symmetric memory"]["verdict"] == ("ok" if count > 1 else "note")
