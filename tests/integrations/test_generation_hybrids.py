"""Hybrid models generate over a ring with `RingCache`, whose states and convolutions go on: the tokens of one process, on every rank."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils

import ringattn as ra
from ringattn.integrations.generation import RingCache
from ringattn.integrations.generation_models import CachedHeads
from ringattn.integrations.generation_states import VALUES_FIRST, LayerState, OneTokenCache
from ringattn.integrations.huggingface import attach
from ringattn.integrations.huggingface_inputs import cache_name
from tests.integrations.test_generation import ONE_NAME, generate, more, on_device, prompts
from tests.integrations.test_huggingface_mixers import HYBRIDS, sweep

pytestmark = pytest.mark.skipif(
    not hasattr(masking_utils, "create_recurrent_attention_mask"), reason="this version of transformers has other hybrid layers"
)

# a function, or a form of states, of its own each; the others are variants of them
SOME = ["qwen3-next", "mamba 2", "jamba", "lfm2"]
# in transformers 5.17 this config does not say which layers attend, and its model keeps its states itself
REFUSED = [] if hasattr(transformers.RecurrentGemmaConfig(), "layer_types") else ["recurrent gemma"]
OTHERS = [name for name in HYBRIDS if name not in (*SOME, *REFUSED)]
CALLS = {
    "greedy": (prompts(23), dict(max_new_tokens=4), 1),
    "fewer tokens than ranks": (prompts(1), dict(max_new_tokens=3), 1),
    "a convolution longer than a shard": (prompts(5), dict(max_new_tokens=2), 1),
    "beams": (prompts(19, 19), dict(max_new_tokens=4, num_beams=3, num_return_sequences=2), 6),
    "sampling": (prompts(17), dict(max_new_tokens=3, do_sample=True, temperature=1.5, num_return_sequences=3), 3),
    "prefill in pieces": (prompts(150), dict(max_new_tokens=2, prefill_chunk_size=75), 1),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with sweep.quiet():
        model = sweep.tiny("causal", HYBRIDS[name]).to(dtype).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def with_cache(model: nn.Module, cache: RingCache) -> dict:
    return {cache_name(model): cache}


@functools.cache
def of_one_process(name: str, calls: tuple[str, ...]) -> dict[str, tuple[torch.Tensor, list[torch.Tensor]]]:
    model = make(name)
    # in transformers 5.23 MiniMax's cache says that it holds no tokens, and RecurrentGemma's states stay where they are when beams move
    options = dict(use_cache=False) if name in ("minimax", "recurrent gemma") else {}
    return {call: generate(model, CALLS[call], **options) for call in calls}


def differences(group, expected: dict) -> list[tuple[str, str]]:
    """The models and calls whose tokens or logits are not as expected."""
    torch.set_num_threads(1)
    found = []
    for name, calls in expected.items():
        model = make(name)
        attach(model, group=group)
        for call, (tokens, logits) in calls.items():
            rows = CALLS[call][2]
            cache = RingCache(model, tokens=400, sequences=rows, page_size=16)
            result = generate(model, CALLS[call], **with_cache(model, cache))
            same = torch.equal(result[0], tokens) and len(result[1]) == len(logits)
            same = same and all(torch.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in zip(result[1], logits))
            if not same or cache.batch_size != rows:
                found.append((name, call))
    return found


# transformers' Mamba has no call that goes on with several tokens
def calls_of(name: str) -> tuple[str, ...]:
    return tuple(call for call in CALLS if call != "prefill in pieces" or name in ("qwen3-next", "lfm2"))


@pytest.mark.parametrize("world_size", [3, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2))])
def test_tokens_are_those_of_one_process(gloo, world_size):
    expected = {name: of_one_process(name, calls_of(name)) for name in SOME}
    assert gloo.run(world_size, differences, expected, timeout=120) == [[]] * world_size


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.thorough
def test_tokens_of_other_models(gloo, name):
    for world_size in (1, 2, 3):
        assert gloo.run(world_size, differences, {name: of_one_process(name, calls_of(name))}, timeout=120) == [[]] * world_size


def test_older_transformers_find_the_states_of_one_token():
    """Up to 5.17, layers ask whether there are states, and take them from the cache's layers."""
    before = LayerState(torch.ones(1, 4, 3), (torch.ones(1, 2, 5, 6),))
    cache = OneTokenCache(before, VALUES_FIRST)
    assert cache.has_previous_state(7) and not cache.layers[7].record_past
    inputs, recurrent = cache.layers[7].conv_states[0], cache.layers[7].recurrent_states[0]
    assert inputs is cache.get_conv_state(7) and recurrent is cache.get_recurrent_state(7) and recurrent.shape == (1, 2, 6, 5)
    inputs.zero_()  # as the layer does
    cache.update_recurrent_state(2 * recurrent, 7)
    after = cache.after()
    assert not after.inputs.any() and (after.recurrent[0] == 2).all() and (before.recurrent[0] == 1).all() and before.inputs.all()


def fail(*_) -> None:
    raise RuntimeError("stop")


def conversation(group, names: list[str]) -> list[str]:
    """Padded rows, questions and forks; the steps whose logits differ from those of whole rows of one process."""
    torch.set_num_threads(1)
    found = []
    for name in names:
        whole, model = make(name, torch.float64), make(name, torch.float64)
        attach(model, group=group)
        cache = RingCache(model, tokens=600, sequences=9, page_size=16, layout=ra.contiguous)
        free = cache.paged.free_pages

        def ask(step, cache, ids, mask, model=model, whole=whole, name=name):
            begin = cache.get_seq_length()
            with torch.no_grad():
                logits = model(ids[:, begin:], attention_mask=mask, use_cache=True, **with_cache(model, cache)).logits
            for row in range(len(ids)):
                seen = mask[row] > 0
                with torch.no_grad():
                    alone = whole(ids[row][None, seen], use_cache=False).logits[0]
                new = seen[begin:]
                # parts of some models round to fp32
                if not torch.allclose(logits[row, new], alone[-int(new.sum()) :], atol=1e-4) or logits[row, ~new].any():
                    found.append(f"{name}: row {row} of {step}")

        first, short, book = prompts(20, 9), prompts(2, 6), prompts(70, 11)
        ids, mask = first["input_ids"], first["attention_mask"]
        ask("rows", cache, ids, mask)
        twin, copied, again = cache.fork(), copy.deepcopy(cache), cache.fork()
        for step, new in (("a question", short), ("a second document", book)):
            longer = torch.cat([ids, new["input_ids"]], 1), torch.cat([mask, new["attention_mask"]], 1)
            hook = model.base_model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="stop"):
                ask(step, cache, *longer)
            hook.remove()
            ask(step, cache, *longer)
            ids, mask = longer
        # turned around, one row twice
        twin.reorder_cache(torch.tensor([1, 0, 1]))
        ids, mask = (x[[1, 0, 1]] for x in (first["input_ids"], first["attention_mask"]))
        ask("a fork", twin, more(ids, 5, 6, 7), more(mask, 1, 1, 1))
        copied.crop(0)
        ask("a copy", copied, more(first["input_ids"], 9), more(first["attention_mask"], 1))
        ask("another copy", again, more(first["input_ids"], 8), more(first["attention_mask"], 1))
        copied.crop(-copied.get_seq_length())
        ask("a new beginning", copied, ids=book["input_ids"], mask=book["attention_mask"])
        for each in (cache, twin, copied, again):
            each.reset()
        if cache.states or cache.paged.free_pages != free:
            found.append(f"{name}: what a reset leaves")
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_states_go_on(gloo, world_size):
    names = [name for name in ("qwen3.5", "mamba", "minimax", "recurrent gemma") if name not in REFUSED]
    assert gloo.run(world_size, conversation, names, timeout=120) == [[]] * world_size


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name for name in (*SOME, *OTHERS) if name != "zamba 2"]
)  # its one-token code does not limit its steps
def test_states_of_other_models_go_on(gloo, name):
    assert gloo.run(2, conversation, [name], timeout=120) == [[]] * 2


def refused(group) -> dict[str, str]:
    """By case, the error that this rank raises."""
    torch.set_num_threads(1)
    found = {}
    model, mamba, ids = make("lfm2"), make("mamba 2"), prompts(12)["input_ids"]
    for each in (model, mamba):
        attach(each, group=group)

    def tell(case, function, *args, **kwargs):
        with pytest.raises(ValueError) as caught:
            function(*args, **kwargs)
        found[case] = f"{type(caught.value).__name__}: {caught.value}"

    def cached(model, **options):
        return RingCache(model, tokens=200, page_size=16, **options)

    filled, of_mamba = cached(model), cached(mamba)
    told = model.generate(ids, past_key_values=filled, max_new_tokens=2)
    assert not filled.is_croppable
    tell("crop", filled.crop, -1)
    tell("drafts", model.generate, ids, past_key_values=cached(model), max_new_tokens=4, prompt_lookup_num_tokens=2)
    tell("strides", model.generate, ids, past_key_values=cached(model, layout=ra.striped), max_new_tokens=2)
    told_by_mamba = mamba.generate(ids, cache_params=of_mamba, max_new_tokens=2)
    if ONE_NAME:
        # old tokens are cut off for Mamba's kind, too
        answers = [mamba.generate(told_by_mamba, cache=cache, max_new_tokens=2) for cache in (of_mamba, cached(mamba))]
        assert torch.equal(*answers)
    else:
        tell("all tokens again", mamba.generate, told_by_mamba, cache_params=of_mamba, max_new_tokens=2)
    tell("a cache of transformers", mamba.generate, ids, max_new_tokens=2)
    tell("another model", make_attached("jamba", group).generate, more(told, 1), past_key_values=filled, max_new_tokens=2)
    with torch.no_grad():
        if not ONE_NAME:
            tell("another name", mamba, ids, past_key_values=cached(mamba))
        tell("a layer by itself", model.base_model.layers[0].conv, torch.zeros(1, 3, 32), past_key_values=filled)
        model.base_model.layers[0].forward = lambda hidden_states, **options: hidden_states
        tell("a layer left out", model, ids, past_key_values=cached(model))
    del model.config.layer_types
    tell("no kinds of layers", CachedHeads.of, model)
    return found


def make_attached(name, group):
    model = make(name)
    attach(model, group=group)
    return model


MESSAGES = {
    "crop": "crop by 1 of 13 tokens takes tokens back, but 1 layers of the model keep states, which only go on: fork",
    "drafts": "speculative decoding takes tokens back, but 1 layers of the model keep states",
    "strides": "positions 2 apart, but a state passes between runs of consecutive tokens: take contiguous, zigzag",
    "another name": "Mamba2ForCausalLM takes its cache as cache_params: model.generate",
    # transformers 5.17 makes a mask of the 14 tokens
    "all tokens again": r"cache 13, but no attention_mask .* says whether they are new|attention_mask is \(1, 14\), but must be \(1, 27\)",
    "a cache of transformers": "(cache_params|cache) is a DynamicCache, but key/value caches are not supported",
    "another model": "the cache was made for a model of .*kinds=.'Lfm2ShortConv'.*, but JambaForCausalLM has",
    "a layer by itself": "past_key_values is given, but Lfm2ShortConv keeps its states on shards in a RingCache alone",
    "a layer left out": "1 of 1 layers with states did not run: the model shares keys",
    "no kinds of layers": "the config of Lfm2ForCausalLM has no layer_types",
}


def test_what_is_refused_is_refused_on_every_rank(gloo):
    for rank in gloo.run(2, refused, timeout=60):
        for case, message in rank.items():
            assert re.search(MESSAGES[case], message), (case, message)
        assert rank.keys() == MESSAGES.keys() - ({"another name", "all tokens again"} if ONE_NAME else set())


def on_gpus(group) -> list[str]:
    """The models whose tokens differ from those of the whole model, in fp32, or whose logits do, in bf16."""
    found = []
    inputs = on_device(prompts(61, 61))
    for name in ("qwen3-next", "bamba"):
        for dtype, near in ((torch.float32, 1e-2), (torch.bfloat16, 0.5)):
            model = make(name, dtype).cuda()
            tokens = model.generate(**inputs, max_new_tokens=6)
            with torch.no_grad():
                whole = model(tokens[:, :-1], use_cache=False).logits[:, -1]
            attach(model, group=group)
            cache = RingCache(model, tokens=400, sequences=2)
            result = model.generate(
                **inputs, max_new_tokens=6, past_key_values=cache, return_dict_in_generate=True, output_logits=True
            )
            same = torch.equal(result.sequences, tokens)
            if (dtype == torch.float32 and not same) or (
                same and not torch.allclose(result.logits[-1].float(), whole.float(), atol=near, rtol=near)
            ):
                found.append(f"{name} in {dtype}")
    return found


@pytest.mark.gpu
def test_gpus(nccl):
    assert nccl.run(2, on_gpus, timeout=180) == [[]] * 2
