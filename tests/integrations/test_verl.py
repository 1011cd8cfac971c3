"""verl's engine around a ring equals verl's own engine in one process: outputs, losses, norms and weights, on packed batches."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

# verl brings hundreds of megabytes, which the development environment does without
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl"),
]

ROOT = Path(__file__).resolve().parents[2]
VOCAB, STEPS, CLIP = 61, 3, 0.05
FP32 = dict(rtol=2e-4, atol=2e-5)
# tokens of prompts and responses a step: one long sequence, short ones, and sums that no number of ranks divides
LENGTHS = [[(3, 40), (5, 2), (1, 9), (11, 7)], [(2, 21), (4, 18), (9, 1), (1, 6)], [(7, 30), (2, 4), (6, 13), (3, 3)]]
CASES = [
    (4, {}),
    (2, {}),
    (1, {}),
    (4, dict(pad_to_length=True, pad_to_length_bucket=16)),
    (2, dict(fsdp_size=2, entropy_from_logits_with_chunking=True, entropy_from_logits_chunk_size=7)),
    (4, dict(entropy_checkpointing=True, use_no_sync_for_gradient_accumulation=False)),
]


@pytest.fixture(scope="module")
def pools():
    """Ranks over gloo that have imported verl: of one process, and of four."""
    from ranks import Ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        made = {size: Ranks("gloo", size, ["ringattn.integrations.verl", "verl.workers.utils.losses"]) for size in (1, 4)}
        yield made
        for pool in made.values():
            pool.close()


def save_model(folder, **options):
    """A folder with a language model of 3 heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, initializer_range=0.2, **sizes, **options)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dense(pools, path):
    """What verl's own engine does in one process."""
    return pools[1].run(1, steps, path, 0, {})


def configure(path, ring, options, model):
    """The actor's configuration, and what an engine is made of; verl's own engine for a ring of 0 ranks."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    options = dict(use_torch_compile=False, mixed_precision=dict(param_dtype="fp32", reduce_dtype="fp32")) | options
    fsdp = FSDPEngineConfig(ulysses_sequence_parallel_size=max(ring, 1), **options)
    # verl makes the actor's strategy the engine's
    strategy = "ringattn" if ring else "fsdp2"
    actor = FSDPActorConfig(strategy=strategy, fsdp_config=fsdp, rollout_n=1, use_dynamic_bsz=True, entropy_coeff=0.01)
    own = (
        dict(use_remove_padding=True) if ring else dict(use_remove_padding=False, override_config=dict(attn_implementation="sdpa"))
    )
    parts = dict(
        model_config=HFModelConfig(path=path, load_tokenizer=False, **(own | model)),
        engine_config=actor.engine,
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=0.5, weight_decay=0.0, clip_grad=CLIP, total_training_steps=STEPS, override_optimizer_config={}
        ),
        checkpoint_config=CheckpointConfig(),
    )
    return actor, parts


def make_engine(path, ring, options, model):
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    actor, parts = configure(path, ring, options, model)
    engine = EngineRegistry.new("language_model", actor.strategy, **parts) if ring else FSDPEngineWithLMHead(**parts)
    engine.initialize()
    return engine, actor


def make_batch(step, replica=0, replicas=1, **options):
    """The sequences of a step that a replica gets, as verl's trainer hands them to an engine."""
    from verl.utils.tensordict_utils import get_tensordict

    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    generator = torch.Generator().manual_seed(step)
    tensors: dict = {name: [] for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages")}
    for prompt, response in LENGTHS[step]:
        tensors["prompts"].append(torch.randint(VOCAB, (prompt,), generator=generator))
        tensors["responses"].append(torch.randint(VOCAB, (response,), generator=generator))
        tensors["response_mask"].append((torch.arange(response) != 3).long())
        tensors["old_log_probs"].append(torch.randn(response, generator=generator) - 4)
        tensors["advantages"].append(torch.randn(response, generator=generator))
    tensors = {name: values[replica::replicas] for name, values in tensors.items()}
    whole = [torch.cat(pair) for pair in zip(tensors["prompts"], tensors["responses"])]
    tensors |= dict(input_ids=whole, position_ids=[torch.arange(len(x)) for x in whole], loss_mask=tensors["response_mask"])
    options = dict(global_batch_size=len(LENGTHS[step]), calculate_entropy=True, use_dynamic_bsz=True) | options
    made = get_tensordict({name: jagged(values) for name, values in tensors.items()}, options)
    if "temperature" not in options:
        made["temperature"] = torch.tensor([0.7, 1.3, 1.0, 0.9])[replica::replicas]
    return made


def steps(group, path, ring, options, model=None, flags=None):
    """A rank's replica; outputs before each step, by sequence; losses and norms; and the weights after the last."""
    from verl.workers.utils.losses import ppo_loss

    torch.manual_seed(0)
    engine, actor = make_engine(path, ring, options, model or {})
    replica, replicas = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    # several micro-batches of other lengths a step, packed around a ring and padded in one process
    given = dict(flags or {}, use_remove_padding=bool(ring), max_token_len_per_gpu=-(-45 // max(ring, 1)))
    outputs, figures = [], []
    for step in range(STEPS):
        with engine.eval_mode():
            found = engine.infer_batch(make_batch(step, replica, replicas, **given))["model_output"]
        outputs.append({name: [x.clone() for x in values.unbind()] for name, values in found.items()})
        with engine.train_mode():
            found = engine.train_batch(make_batch(step, replica, replicas, **given), partial(ppo_loss, actor))
        assert replicas > 1 or len(found["loss"]) > 1, "several micro-batches"
        total = torch.tensor([sum(found["loss"])])
        torch.distributed.all_reduce(total, group=engine.get_data_parallel_group())
        figures.append((total.item() / replicas, found["metrics"].get("grad_norm")))  # norms come from a ring's first rank
    weights = {name: weight.full_tensor() for name, weight in engine.module.state_dict().items()}
    return (replica, replicas), outputs, figures, weights


def compare(found, dense):
    """Every rank's outputs, losses, norms and weights with those of one process."""
    ((_, outputs, figures, weights),) = dense
    for (replica, replicas), mine, here, after in found:
        for step in range(STEPS):
            assert mine[step].keys() == outputs[step].keys() == {"log_probs", "entropy"}
            for name, values in outputs[step].items():
                # the last token's label is of whichever sequence comes next
                expected = [x[:-1] for x in values[replica::replicas]]
                torch.testing.assert_close([x[:-1] for x in mine[step][name]], expected, **FP32)
            assert here[step][0] == pytest.approx(figures[step][0], rel=2e-4, abs=2e-5)
            if here[step][1] is not None:
                assert here[step][1] == pytest.approx(figures[step][1], rel=2e-4)
                assert here[step][1] > CLIP
        assert after.keys() == weights.keys()
        torch.testing.assert_close(after, weights, **FP32)
    assert sum(here[0][1] is not None for _, _, here, _ in found) == len({place for place, *_ in found})


@pytest.mark.parametrize(("ring", "options"), CASES, ids=str)
def test_steps_equal_those_of_one_process(pools, path, dense, ring, options):
    compare(pools[4].run(4, steps, path, ring, options), dense)


def test_adapters(pools, path):
    """LoRA trains its adapters alone; the ring goes through the model inside."""
    compare(pools[4].run(4, steps, path, 2, {}, dict(lora_rank=4)), pools[1].run(1, steps, path, 0, {}, dict(lora_rank=4)))


FOUND_BY_VERL = """
import verl
from omegaconf import open_dict
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry

with initialize_config_module("verl.trainer.config"):
    config = compose("ppo_trainer", [
        "actor_rollout_ref.actor.strategy=ringattn",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=6",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    ]).actor_rollout_ref
for part in (config.actor, config.ref):
    with open_dict(part):  # verl's worker renames what is the reference's
        for name in [name for name in part if name.startswith("log_prob_")]:
            part.pop(name)
        part.ppo_micro_batch_size_per_gpu = 1
    engine = omega_conf_to_dataclass(part).engine
    print(engine.strategy, engine.ulysses_sequence_parallel_size)
    print(EngineRegistry.get_engine_cls("language_model", engine.strategy).__name__)
"""


def test_verl_finds_the_engine_by_itself(tmp_path):
    """As an installed ringattn, by its entry point; and verl's own configuration chooses it for actor and reference."""
    entry = re.search(r'\[project.entry-points."(verl.plugins)"\]\n(\w+) = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert entry
    metadata = tmp_path / "ringattn-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ringattn\nVersion: 9\n")
    (metadata / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*entry.groups()))
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "VERL_PLATFORM": "cpu"}
    done = subprocess.run([sys.executable, "-c", FOUND_BY_VERL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ringattn", "6", "RingEngineWithLMHead", "ringattn", "3", "RingEngineWithLMHead"]


def refusals(group, path):
    """What the engine says to configurations and batches that a ring cannot honour."""
    from verl.workers.engine import EngineRegistry

    def told(function):
        try:
            function()
        except ValueError as error:
            return str(error)
        return None

    def make(ring=4, vision=False, **model):
        actor, parts = configure(path, ring, {}, model)
        if vision:
            parts["model_config"].hf_config.vision_config = {}
        return EngineRegistry.new("language_model", actor.strategy, **parts)

    engine = make()
    engine.initialize()

    def infer(tensors=(), **flags):
        batch = make_batch(0, max_token_len_per_gpu=60, **{"temperature": 1.0, **flags})
        for name, value in tensors:
            batch[name] = value
        with engine.eval_mode():
            engine.infer_batch(batch)

    from tensordict import NonTensorStack

    pixels = NonTensorStack(*[{"pixel_values": torch.zeros(1, 2)}] * 4)
    kinds = torch.nested.as_nested_tensor([torch.zeros(4, a + b, dtype=torch.int64) for a, b in LENGTHS[0]], layout=torch.jagged)
    return [
        told(lambda: make(use_remove_padding=False)),
        told(lambda: make(ring=3)),
        told(lambda: make(vision=True)),
        told(lambda: make(use_fused_kernels=True)),
        told(lambda: infer(use_remove_padding=False)),
        told(lambda: infer(distillation_use_topk=True)),
        told(lambda: infer([("position_ids", kinds)])),
        told(lambda: infer([("multi_modal_inputs", pixels)])),
        told(infer),
    ]


def test_what_cannot_be_honoured_is_refused_by_name(pools, path):
    names = [
        "use_remove_padding is False, but a ring takes packed",
        "ulysses_sequence_parallel_size is 3, but must divide the number of ranks, 4",
        "LlamaConfig has a vision or audio config",
        "use_fused_kernels is True, and the output embedding is not tied",
        "use_remove_padding is False in the batch",
        "distillation_use_topk is True",
        "position_ids are of several kinds",
        "the batch has ['pixel_values'] for the model",
    ]
    for found in pools[4].run(4, refusals, path):
        *messages, fine = found
        assert fine is None
        assert [name for name, message in zip(names, messages, strict=True) if name not in (message or "")] == []


def test_fused_kernels(pools, tmp_path):
    """verl's linear layer and loss in one take the shard's own labels; they have one temperature."""
    path, flags = save_model(tmp_path, tie_word_embeddings=True), dict(temperature=0.8)
    fused = dict(use_fused_kernels=True, fused_kernel_options=dict(impl_backend="torch"))
    found = pools[4].run(4, steps, path, 4, {}, fused, dict(flags, use_fused_kernels=True))
    compare(found, pools[1].run(1, steps, path, 0, {}, {}, flags))


def test_example():
    """GRPO on two ranks raises the reward of what the model generates."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / "train_verl.py")]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rewards = [float(reward) for reward in re.findall(r"mean reward (\S+),", done.stdout)]
    assert len(rewards) == 8
    assert rewards[-1] > rewards[0] + 0.1
