"""verl's engines around a ring equal verl's own engine in one process: outputs, losses, norms and weights, on packed batches."""

import dataclasses
import importlib.util
import os
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# verl brings hundreds of megabytes, so the development environment has none: CONTRIBUTING.md says how to run these tests
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl"),
]

VOCAB, STEPS, CLIP = 61, 3, 0.05
# one long sequence, short ones, and an odd number of tokens
LENGTHS = [[(3, 40), (5, 2), (1, 9), (11, 7)], [(2, 21), (4, 18), (9, 1), (1, 6)], [(7, 30), (2, 4), (6, 13), (3, 3)]]
IN_FP32 = dict(param_dtype="fp32", reduce_dtype="fp32")


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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a language model of 3 heads, and one that gives a value a token."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

    folders = {}
    sizes = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1)
    for name, kind in (("language_model", LlamaForCausalLM), ("value_model", LlamaForTokenClassification)):
        torch.manual_seed(0)
        model = kind(LlamaConfig(vocab_size=VOCAB, num_labels=1, tie_word_embeddings=False, initializer_range=0.2, **sizes))
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
    return folders


def make_engine(kind, path, ring, model=None, **options):
    """An engine around rings of this many ranks; verl's own for 0."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    options = dict(use_torch_compile=False, mixed_precision=IN_FP32) | options
    fsdp = FSDPEngineConfig(ulysses_sequence_parallel_size=max(ring, 1), **options)
    # as the configurations of verl do it, the actor's strategy becomes the engine's
    actor = FSDPActorConfig(
        strategy="ringattn" if ring else "fsdp2", fsdp_config=fsdp, rollout_n=1, use_dynamic_bsz=True, entropy_coeff=0.01
    )
    attention = {} if ring else dict(override_config=dict(attn_implementation="sdpa"))
    config = HFModelConfig(path=path, load_tokenizer=False, model_type=kind, use_remove_padding=bool(ring), **attention, **(model or {}))
    parts = dict(
        model_config=config,
        engine_config=actor.engine,
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=0.5, weight_decay=0.0, clip_grad=CLIP, total_training_steps=STEPS
        ),
        checkpoint_config=CheckpointConfig(),
    )
    if ring:
        engine = EngineRegistry.new(kind, actor.strategy, **parts)
    else:
        engine = (FSDPEngineWithLMHead if kind == "language_model" else FSDPEngineWithValueHead)(**parts)
    engine.initialize()
    return engine, actor


def make_batch(step, replica=0, replicas=1, **options):
    """The sequences of a step that a replica gets, as verl's trainer hands them to an engine."""
    from verl.utils.tensordict_utils import get_tensordict

    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    generator = torch.Generator().manual_seed(step)
    tensors: dict = {name: [] for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages", "values", "returns")}
    for prompt, response in LENGTHS[step]:
        tensors["prompts"].append(torch.randint(VOCAB, (prompt,), generator=generator))
        tensors["responses"].append(torch.randint(VOCAB, (response,), generator=generator))
        tensors["response_mask"].append((torch.arange(response) != 3).long())
        for name in ("old_log_probs", "advantages", "values", "returns"):
            tensors[name].append(torch.randn(response, generator=generator) - (4 if name == "old_log_probs" else 0))
    mine = slice(replica, None, replicas)
    tensors = {name: values[mine] for name, values in tensors.items()}
    whole = [torch.cat(pair) for pair in zip(tensors["prompts"], tensors["responses"])]
    tensors |= dict(input_ids=whole, position_ids=[torch.arange(len(x)) for x in whole], loss_mask=tensors["response_mask"])
    temperature = torch.tensor([0.7, 1.3, 1.0, 0.9])[mine]
    options = dict(global_batch_size=len(LENGTHS[step]), calculate_entropy=True, use_dynamic_bsz=True) | options
    made = get_tensordict({name: jagged(values) for name, values in tensors.items()}, options)
    if "temperature" not in options:
        made["temperature"] = temperature
    return made


def loss_of(kind, actor):
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    if kind == "language_model":
        return partial(ppo_loss, actor)
    return partial(value_loss, CriticConfig(strategy="fsdp2", use_dynamic_bsz=True, rollout_n=1))


def steps(group, kind, path, ring, model=None, flags=None, **options):
    """Outputs before each step, by sequence; losses and norms; and the weights after the last."""
    torch.manual_seed(0)
    engine, actor = make_engine(kind, path, ring, model, **options)
    replica, replicas = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    # about three micro-batches of other lengths a step, packed around a ring and padded in one process
    given = dict(flags or {}, use_remove_padding=bool(ring), max_token_len_per_gpu=45 if not ring else -(-45 // ring))
    outputs, figures = [], []
    for step in range(STEPS):
        with engine.eval_mode():
            found = engine.infer_batch(make_batch(step, replica, replicas, **given))["model_output"]
        outputs.append({name: [x.clone() for x in values.unbind()] for name, values in found.items()})
        with engine.train_mode():
            found = engine.train_batch(make_batch(step, replica, replicas, **given), loss_of(kind, actor))
        assert len(found["loss"]) > 1, "several micro-batches"
        total = torch.tensor([sum(found["loss"])])
        torch.distributed.all_reduce(total, group=engine.get_data_parallel_group())
        norm = found["metrics"].get("grad_norm")  # of the ring's first rank
        figures.append((total.item() / replicas, norm))
    weights = {name: weight.detach().clone() for name, weight in engine.get_per_tensor_param()[0]}
    return (replica, replicas), outputs, figures, weights


def compare(found, dense, within):
    """Every rank's outputs, losses, norms and weights with those of one process."""
    (_, outputs, figures, weights), = dense
    for (replica, replicas), mine, here, after in found:
        for step in range(STEPS):
            assert mine[step].keys() == outputs[step].keys()
            for name, values in outputs[step].items():
                expected = values[replica::replicas]
                assert len(mine[step][name]) == len(expected) > 0
                for a, b in zip(mine[step][name], expected):
                    torch.testing.assert_close(a, b, **within)
            assert here[step][0] == pytest.approx(figures[step][0], rel=within["rtol"], abs=within["atol"])
            if here[step][1] is not None:
                assert here[step][1] == pytest.approx(figures[step][1], rel=within["rtol"])
                assert here[step][1] > CLIP
        assert after.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(after[name], weight, **within)
    assert sum(here[0][1] is not None for _, _, here, _ in found) == len({place for place, *_ in found})


@pytest.mark.parametrize(
    ("kind", "ring", "options"),
    [
        ("language_model", 4, {}),
        ("language_model", 2, {}),
        ("language_model", 1, {}),
        ("language_model", 4, dict(pad_to_length=True, pad_to_length_bucket=16)),
        ("language_model", 2, dict(fsdp_size=2, entropy_from_logits_with_chunking=True, entropy_from_logits_chunk_size=7)),
        ("language_model", 4, dict(entropy_checkpointing=True, use_no_sync_for_gradient_accumulation=False)),
        ("value_model", 4, {}),
        ("value_model", 2, {}),
    ],
    ids=str,
)
def test_steps_equal_those_of_one_process(pools, models, kind, ring, options):
    dense = pools[1].run(1, steps, kind, models[kind], 0)
    found = pools[4].run(4, partial_steps, kind, models[kind], ring, options)
    compare(found, dense, dict(rtol=2e-4, atol=2e-5))


def partial_steps(group, kind, path, ring, options):
    return steps(group, kind, path, ring, **options)
