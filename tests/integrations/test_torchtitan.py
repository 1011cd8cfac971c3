"""torchtitan's trainer around a ring: losses, norms and weights are those of its own trainer and attention on one rank."""

import importlib.util
import os
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

# torchtitan brings hundreds of megabytes, which the development environment does without
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan"),
]

ROOT = Path(__file__).resolve().parents[2]
STEPS, ROWS, SEQ_LEN, VOCAB = 3, 4, 32, 2048
OVERRIDE = "ringattn.integrations.torchtitan.ring_attention_override"
CASES = [
    dict(context_parallel_degree=4),
    dict(context_parallel_degree=4, context_parallel_load_balancer=None),
    dict(context_parallel_degree=2, tensor_parallel_degree=2),
    dict(context_parallel_degree=2, tensor_parallel_degree=2, enable_sequence_parallel=False),
    dict(context_parallel_degree=2, data_parallel_shard_degree=2),
]


@pytest.fixture(scope="module")
def run():
    """`run(size, function, ...)` on new ranks over gloo that have imported torchtitan, whose meshes live as long as a process."""
    from ranks import Ranks

    def on_ranks(size, function, *args):
        pool = Ranks("gloo", size, ["torchtitan_on_cpus", "ringattn.integrations.torchtitan", "torchtitan.models.llama3"])
        try:
            return pool.run(size, function, *args, timeout=120)
        finally:
            pool.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        yield on_ranks


@pytest.fixture(scope="module")
def dense(run, tmp_path_factory):
    """What torchtitan's own trainer and attention do on one rank."""
    return run(1, train, None, str(tmp_path_factory.mktemp("dense")))[0]


def batches(step):
    """Documents of any lengths, other ones in each row; some tokens do not count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (ROWS, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].where(torch.rand(ROWS, SEQ_LEN, generator=generator) > 0.2, -100)
    positions = torch.arange(SEQ_LEN).repeat(ROWS, 1)
    for row in range(ROWS):
        for start in (3 + 5 * row, 17 + row + step):
            positions[row, start:] = torch.arange(SEQ_LEN - start)
    return tokens[:, :-1], positions, labels


def make_config(parallelism, folder, **options):
    """A small Llama around a ring; or, without `parallelism`, with torchtitan's own trainer and attention."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.models import llama3
    from torchtitan.trainer import Trainer

    from ringattn.integrations.torchtitan import RingTitanTrainer

    class Batches(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_world_size, dp_rank, **kwargs):
            self.mine = slice(dp_rank, None, dp_world_size)

        def __iter__(self):
            for step in range(STEPS):
                tokens, positions, labels = (x[self.mine] for x in batches(step))
                yield {"input": tokens, "positions": positions}, labels

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **kwargs):
            pass

        def encode(self, *args, **kwargs):
            return []

        def decode(self, *args, **kwargs):
            return ""

        def get_vocab_size(self):
            return VOCAB

    own = parallelism is None
    replicas = (parallelism or {}).get("data_parallel_shard_degree", 1)
    training = dict(local_batch_size=ROWS // replicas, seq_len=SEQ_LEN, steps=STEPS, mixed_precision_param="float32")
    training |= dict(disable_cuda_graphs=True) | options.pop("training", {})
    given = dict(
        model_spec=llama3.model_registry("debugmodel"),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB),
        optimizer=default_adamw(lr=1e-3),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(),
        checkpoint=CheckpointManager.Config(enable=False),
        dump_folder=folder,
        # the backend with which torchtitan 0.3.0 runs on torch 2.13, too
        parallelism=ParallelismConfig(**(dict(spmd_backend="full_dtensor") | (parallelism or {}))),
        override=OverrideConfig(imports=[] if own else [OVERRIDE]),
        training=TrainingConfig(**training),
    )
    config = (Trainer if own else RingTitanTrainer).Config(**(given | options))
    del config.model_spec.model.layers[2:]
    return config


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def train(group, parallelism, folder, full_checkpoints=False):
    """The losses and the norms of gradients of the steps, and the weights after them."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    options = dict(activation_checkpoint=FullAC.Config()) if full_checkpoints else {}
    trainer = make_config(parallelism, folder, **options).build()
    (model,) = trainer.model_parts
    # the same weights on any number of ranks
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters(), key=lambda pair: pair[0].replace("_checkpoint_wrapped_module.", "")):
        full = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
        full = full + 1 if "norm" in name else full
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(full)
    losses, norms, forward_backward = [], [], trainer.fwd_bwd_fn

    def step(*given):
        # a loss is a part on each rank, or the same on all
        losses.append(whole(loss := forward_backward(*given)))
        return loss

    trainer.fwd_bwd_fn = step
    trainer.metrics_processor.log = lambda step, mean, most, norm, **rest: norms.append(norm)
    trainer.metrics_processor.should_log = lambda step: True
    trainer.train()
    weights = {name: whole(x) for name, x in model.state_dict().items()}
    trainer.close()
    return torch.stack(losses), torch.tensor(norms), weights


def compare(found, dense):
    for losses, norms, weights in found:
        torch.testing.assert_close(losses, dense[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(norms, dense[1], rtol=5e-5, atol=0)
        torch.testing.assert_close(weights, dense[2], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("parallelism", CASES, ids=str)
def test_steps_equal_those_of_one_rank(run, dense, parallelism, tmp_path):
    compare(run(4, train, parallelism, str(tmp_path)), dense)


def test_one_rank_and_full_checkpoints(run, dense, tmp_path):
    """A layer that runs again in the backward pass attends as it did before."""
    compare(run(1, train, {}, str(tmp_path), True), dense)


def refusals(group, folder):
    """What the trainer and the attention say to what they cannot honour."""
    from torchtitan.components.validate import Validator
    from torchtitan.config import CompileConfig
    from torchtitan.config.override import OverrideConfig
    from torchtitan.models.common.attention import FlexAttention

    from ringattn.integrations.torchtitan import RingInnerAttention, ring_attention_override

    def told(function):
        try:
            function()
        except ValueError as error:
            return str(error)
        return None

    def build(parallelism=(), **options):
        return lambda: make_config(dict(parallelism), folder, **options).build()

    x = torch.zeros(1, 4, 2, 8)
    attention = RingInnerAttention.Config().build()
    return [
        told(build(override=OverrideConfig())),
        told(build(dict(context_parallel_load_balancer="ptrr"))),
        told(build(dict(context_parallel_ptrr_mask_key="full"))),
        told(build(training=dict(disable_cuda_graphs=False))),
        told(build(compile=CompileConfig(enable=True))),
        told(build(dict(pipeline_parallel_degree=2))),
        told(build(validator=Validator.Config(enable=True, steps=1))),
        told(build(dict(spmd_backend="partial_dtensor"))),
        told(lambda: attention(x, x, x, score_mod=abs)),
        told(lambda: attention(x, x, x)),
        told(lambda: ring_attention_override(FlexAttention.Config(kernel_options=dict(BACKEND="FLASH")))),
    ]


def test_what_cannot_be_honoured_is_refused_by_name(run, tmp_path):
    names = [
        "override.imports are []",
        "context_parallel_load_balancer is 'ptrr'",
        "context_parallel_ptrr_mask_key",
        "disable_cuda_graphs is False",
        "compile.enable is True for the model",
        "pipeline_parallel_degree is 2",
        "validator.enable is True",
        "spmd_backend is 'partial_dtensor'",
        "the model passes ['score_mod']",
        "attention_masks is a NoneType",
        "kernel_options are",
    ]
    (messages,) = run(1, refusals, str(tmp_path))
    assert [name for name, message in zip(names, messages, strict=True) if name not in (message or "")] == []


def run_example(group, folder):
    from torchtitan.components.metrics import MetricsProcessor

    shown = []
    MetricsProcessor.log = lambda self, step, mean, *rest, **more: shown.append((step, mean))
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    runpy.run_path(str(ROOT / "examples" / "train_torchtitan.py"), run_name="__main__")
    return shown


def test_example(run, tmp_path):
    for (first, loss), (last, lower) in run(4, run_example, str(tmp_path)):
        assert (first, last) == (1, 10)
        assert lower < 0.8 * loss, "it learns"
