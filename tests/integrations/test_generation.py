"""Generation over a ring with `RingCache` gives the tokens of one process, on every rank; what it cannot do is refused on every rank."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import ringattn as ra
from ringattn.integrations import huggingface_call
from ringattn.integrations.generation import RingCache
from ringattn.integrations.huggingface import attach

# transformers 5.24: every model takes its cache by one name
ONE_NAME = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
VOCAB, WINDOW, EOS = 97, 7, 5
SIZES = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.3)
ALTERNATING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
MODELS: dict[str, dict] = {
    "Llama": {},
    "Mistral": dict(sliding_window=WINDOW),
    "Gemma2": dict(head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=2.0, **ALTERNATING),
    "DeepseekV3": dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4)
    | dict(
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1, num_key_value_heads=4
    ),
    "GptOss": dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, **ALTERNATING),
}


def make(kind: str = "Llama", dtype: torch.dtype = torch.float64, **settings) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS[kind], **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    for name, weights in model.named_parameters():
        if "sinks" in name:
            nn.init.normal_(weights)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.generation_config.do_sample = False
    return model


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(sum(lengths))
    n = max(lengths)
    ids, mask = torch.zeros(2, len(lengths), n, dtype=torch.int64).unbind()
    for row, length in enumerate(lengths):
        ids[row, n - length :] = torch.randint(1, VOCAB, (length,), generator=generator)
        mask[row, n - length :] = 1
    return dict(input_ids=ids, attention_mask=mask)


CALLS = {
    "greedy": (prompts(61), dict(max_new_tokens=5), 1),
    "fewer tokens than ranks": (prompts(1), dict(max_new_tokens=2), 1),
    "sampling": (prompts(37), dict(max_new_tokens=4, do_sample=True, temperature=1.5, num_return_sequences=3), 3),
    "beams": (prompts(29, 18), dict(max_new_tokens=5, num_beams=3, num_return_sequences=2), 6),
    "left padding": (prompts(40, 13, 40, 2), dict(max_new_tokens=4, repetition_penalty=1.3), 4),
    "end of text": (prompts(17, 23), dict(max_new_tokens=30, eos_token_id=list(range(3, VOCAB, 5)), pad_token_id=0), 2),
    "lookup of drafts": (dict(input_ids=torch.arange(60)[None] % 7 + 1), dict(max_new_tokens=6, prompt_lookup_num_tokens=4), 1),
    "prefill in pieces": (prompts(150), dict(max_new_tokens=2, prefill_chunk_size=75), 1),
}


def generate(model: nn.Module, call: tuple, **cache) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens and logits of a call as in `CALLS`."""
    inputs, options, _ = call
    torch.manual_seed(3)
    result = model.generate(**inputs, **options, **cache, return_dict_in_generate=True, output_logits=True)
    return result.sequences, list(result.logits)


@functools.cache
def of_one_process(kind: str, dtype: torch.dtype, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return generate(make(kind, dtype), CALLS[name])


def differences(group, kind: str, dtype: torch.dtype, expected: dict) -> list[str]:
    """The calls whose tokens or logits are not as expected."""
    model = make(kind, dtype)
    # a layout of other calls changes nothing
    attach(model, layout=ra.zigzag(12, group.size()) if dtype == torch.float32 else None, group=group)
    found = []
    for name, (tokens, logits) in expected.items():
        rows = CALLS[name][2]
        cache = RingCache(model, tokens=400, sequences=rows, page_size=16)
        result = generate(model, CALLS[name], past_key_values=cache)
        same = torch.equal(result[0], tokens) and len(result[1]) == len(logits)
        # eager attention rounds weights to fp32
        same = same and all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(result[1], logits))
        lengths = [sequence.length for sequence in cache.sequences]
        if not same or cache.batch_size != rows or max(lengths) != cache.get_seq_length():
            found.append(name)
    return found


SOME = ["greedy", "beams"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "dtype", "names"),
    [
        pytest.param("Llama", torch.float64, list(CALLS), id="llama"),
        pytest.param("Llama", torch.float32, SOME, id="llama in fp32"),
        pytest.param("Mistral", torch.float64, [*SOME, "left padding"], id="windows"),
        # its own attention gives NaN in rows that begin with padding, in fp64
        pytest.param("Gemma2", torch.float64, ["greedy", "sampling"], id="softcap and windows"),
        pytest.param("GptOss", torch.float64, SOME, id="sinks and windows"),
        # its cache is given latents
        pytest.param("DeepseekV3", torch.float64, ["greedy", "left padding"], id="latent keys"),
    ],
)
@pytest.mark.some(5)
def test_tokens_are_those_of_one_process(gloo, world_size, kind, dtype, names):
    expected = {name: of_one_process(kind, dtype, name) for name in names}
    assert gloo.run(world_size, differences, kind, dtype, expected) == [[]] * world_size


def more(ids: torch.Tensor, *tokens: int) -> torch.Tensor:
    return torch.cat([ids, torch.tensor([tokens] * len(ids))], 1)


def fail(error: type[BaseException], *_) -> None:
    raise error("stop")


def conversation(group) -> list[str]:
    """Questions to a document that is in the cache already; the steps that differ from one process, which computes all tokens."""
    whole, model = make("Mistral"), make("Mistral")
    attach(model, group=group)
    found = []
    document = prompts(45)["input_ids"]
    cache = RingCache(model, tokens=400, sequences=4, page_size=16, layout=ra.striped)
    free = cache.paged.free_pages

    def ask(name, cache, ids, expected=None, **options):
        options = dict(max_new_tokens=3) | options
        seen = cache.get_seq_length()
        with torch.no_grad():
            answers = model.generate(ids, past_key_values=cache, **options)
        wanted = whole.generate(ids, **options) if expected is None else expected
        if not torch.equal(answers, wanted) or cache.get_seq_length() <= seen:
            found.append(name)
        return answers

    told = ask("document", cache, document)
    twin, copied = cache.fork(), copy.deepcopy(cache)
    # 18 tokens: two pieces of queries
    question = more(told, *range(2, 20))
    with mock.patch.object(huggingface_call, "prefill", wraps=ra.prefill) as on_shards:
        ask("question", cache, question)
        if on_shards.call_count:
            found.append("a question on shards")
    book = more(question, *torch.randint(1, VOCAB, (90,), generator=torch.Generator().manual_seed(1)).tolist())
    with mock.patch.object(huggingface_call, "prefill", wraps=ra.prefill) as on_shards:
        ask("a second document", cache, book)
        if on_shards.call_count != 2:
            found.append("a second document, but not on shards")
    ask("of a fork", twin, more(told, 9, 8, 7))
    mask = torch.ones(1, told.shape[1] + 2, dtype=torch.int64)
    expected = whole.generate(more(told, 4, 4), max_new_tokens=3)[:, told.shape[1] - 1 :]
    # the last token of an answer is not in the cache
    ask("new tokens alone", copied, more(told[:, -1:], 4, 4), expected, attention_mask=mask)
    cache.crop(len(document[0]) - cache.get_seq_length())
    ask("after a crop", cache, more(document, 3, 1, 4, 1, 5))
    cache.crop(len(document[0]) - cache.get_seq_length())
    cache.batch_repeat_interleave(3)
    beams = ask("beams", cache, more(document, 6, 6), num_beams=3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    for other in (twin, copied):
        other.reset()
    if cache.paged.free_pages != free:
        found.append("pages that are not given back")
    ask("after a reset", cache, beams)

    # rows that end at different columns within the conversation
    cache.reset()
    batch = prompts(40, 13)
    told = ask("rows", cache, batch["input_ids"], whole.generate(**batch, max_new_tokens=3), attention_mask=batch["attention_mask"])
    ids, mask = told, torch.cat([batch["attention_mask"], torch.ones(2, 3, dtype=torch.int64)], 1)
    for second in (prompts(3, 20), prompts(70, 11)):
        begin = cache.get_seq_length()
        ids, mask = torch.cat([ids, second["input_ids"]], 1), torch.cat([mask, second["attention_mask"]], 1)
        with torch.no_grad():
            logits = model(ids[:, begin:], past_key_values=cache, attention_mask=mask).logits
        for row in range(2):
            seen = mask[row] > 0
            with torch.no_grad():
                alone = whole(ids[row][None, seen]).logits[0]
            new = seen[begin:]
            if not torch.allclose(logits[row, new], alone[-int(new.sum()) :], atol=1e-9) or logits[row, ~new].any():
                found.append(f"row {row} of a padded question of {len(new)} tokens")

    # all outputs are whole; a call that fails leaves nothing
    cache.reset()
    with torch.no_grad():
        # torch runs no hooks after an interrupt
        for error in (KeyboardInterrupt, RuntimeError):
            hook = model.model.layers[1].register_forward_pre_hook(functools.partial(fail, error))
            with pytest.raises(error, match="stop"):
                model(document, past_key_values=cache)
            hook.remove()
        if cache.get_seq_length() or cache.sequences or cache.paged.free_pages != free:
            found.append("a call that failed")
        ours, theirs = (x(document, output_hidden_states=True, **y) for x, y in ((model, dict(past_key_values=cache)), (whole, {})))
        pairs = zip([ours.logits, *ours.hidden_states], [theirs.logits, *theirs.hidden_states], strict=True)
        if not all(torch.allclose(*pair, atol=1e-9) for pair in pairs):
            found.append("whole outputs")
    return found


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.some(1)
def test_questions_about_a_cached_document(gloo, world_size):
    assert gloo.run(world_size, conversation) == [[]] * world_size


def refused(group) -> dict[str, str]:
    """By case, the error that this rank raises. Rank 1 is the odd one."""
    odd = dist.get_rank(group) == 1
    found = {}
    model, ids = make(), prompts(20)["input_ids"]
    attach(model, group=group)

    def tell(name, function, *args, **kwargs):
        with pytest.raises(ValueError) as caught:
            function(*args, **kwargs)
        found[name] = f"{type(caught.value).__name__}: {caught.value}"

    def cached(**options):
        return RingCache(model, **dict(dict(tokens=200, page_size=16), **options))

    tell("no cache", model.generate, ids, max_new_tokens=2)
    tell("another prompt", model.generate, more(ids, 3 + odd), past_key_values=cached(), max_new_tokens=2)
    tell("another length", model.generate, ids[:, odd:], past_key_values=cached(), max_new_tokens=2)
    mask = (torch.arange(20) >= odd)[None].long()
    tell("another padding", model.generate, ids, attention_mask=mask, past_key_values=cached(), max_new_tokens=2)
    torch.manual_seed(odd)
    tell("other draws", model.generate, ids, past_key_values=cached(), max_new_tokens=9, do_sample=True)
    tell("too long", model.generate, ids.repeat(1, 3), past_key_values=cached(tokens=16), max_new_tokens=2)
    small = cached(tokens=16)
    tell(
        "full at the prompt",
        model.generate,
        ids.repeat(3, 1) // 2 + torch.arange(3)[:, None],
        past_key_values=small,
        max_new_tokens=2,
    )
    full = cached(tokens=32)
    told = model.generate(ids, past_key_values=full, max_new_tokens=1)
    full.batch_repeat_interleave(3)
    # each of the three needs a page of its own for its next token
    tell("full", model.generate, told, past_key_values=full, max_new_tokens=4, num_beams=3)
    tell("odd tokens", lambda: model.generate(ids, past_key_values=cached(tokens=0 if odd else 9), max_new_tokens=2))
    wider, other = make(num_key_value_heads=4), make()
    attach(wider, group=group)
    attach(other, mask=ra.documents([20]), group=group)
    tell("another model", wider.generate, ids, past_key_values=cached(), max_new_tokens=2)
    tell("a mask", RingCache, other, tokens=9)
    detached = make()
    tell("detached", RingCache, detached, tokens=9)
    tell("in a detached model", detached.generate, ids, past_key_values=cached(), max_new_tokens=2)
    with torch.no_grad():
        filled = cached()
        model(ids, past_key_values=filled)
        tell("no new tokens", model.generate, more(ids[:, :3], 1), past_key_values=filled, max_new_tokens=2)
        tell("more rows", model, ids[:, :2].repeat(2, 1), past_key_values=filled)
        tell("positions", model, ids, past_key_values=filled, position_ids=torch.arange(20)[None])
        tell("short mask", model, ids, past_key_values=filled, attention_mask=torch.ones(1, 20))
        tell("right padding", model, ids, past_key_values=cached(), attention_mask=torch.arange(20)[None] < 18)
        tell("labels", model, ids, past_key_values=cached(), labels=ids)
        tell("embeddings", model, inputs_embeds=torch.zeros(1, 20, 24), past_key_values=cached())
        tell("crop", filled.crop, 3)
        tell("no such row", filled.batch_select_indices, torch.tensor([1]))
        tell("outside", filled.update, ids, ids, 0)
    tell("no use of it", model.generate, ids, past_key_values=cached(), max_new_tokens=2, use_cache=False)
    tell("gradients", model, ids, past_key_values=cached())
    model.gradient_checkpointing_enable()
    if ONE_NAME:
        # without gradients, layers of transformers 5.24 are not checkpointed, and keep their cache
        answers = (state.generate(ids, past_key_values=cached(), max_new_tokens=2) for state in (model.train(), model.eval()))
        assert torch.equal(*answers)
    else:
        tell("checkpointing", model.train().generate, ids, past_key_values=cached(), max_new_tokens=2)
    return found


MESSAGES = {
    "no cache": "(past_key_values|cache) is a DynamicCache, but key/value caches are not supported: .* give past_key_values=RingCache",
    "another prompt": "ranks disagree on the tokens of a model's call with a RingCache: 0, 2 / 1 are ranks that agree",
    "another length": "ranks disagree: tokens of a row is 19 on rank 1, but 20 on ranks 0, 2",
    "another padding": "ranks disagree on the tokens of a model's call",
    "other draws": "ranks sampled a token from generators in different states: 0, 2 / 1 are ranks that agree|ranks disagree on the tokens",
    "too long": "OutOfPages: a row would have 60 tokens, but the pages of all ranks hold 48: make the RingCache with more tokens=",
    "full at the prompt": "OutOfPages: rank 0 has 1 free pages of 1, but 20 more tokens of 3 sequences need 2 there",
    "full": "OutOfPages: rank 1 has 0 free pages of 1, but 1 more tokens of 3 sequences need 2 there",
    "odd tokens": "tokens is 0, but must be",
    "another model": "the cache was made for a model of .*kv_heads=2.*, but LlamaForCausalLM has .*kv_heads=4",
    "a mask": "LlamaForCausalLM was attached with mask=.*, but generation is causal",
    "detached": r"LlamaForCausalLM is not attached: call ringattn.integrations.huggingface.attach\(model\) first",
    "in a detached model": "a RingCache is given to a model that is not attached",
    "no new tokens": "no tokens are left to compute: the cache holds 20 of each row",
    "more rows": "input_ids has 2 rows, but the cache 1: for several answers or beams call cache.batch_repeat_interleave",
    "positions": "position_ids are not those that follow the tokens in the cache",
    "short mask": r"attention_mask is \(1, 20\), but must be \(1, 40\)",
    "right padding": "attention_mask hides the last token of a row: pad on the left",
    "labels": "labels is a tensor of shape .*, but a call with a RingCache takes",
    "embeddings": "inputs_embeds is given",
    "crop": "tokens_to_remove is 3, but must be at most 0",
    "no such row": "rows are \\[1\\], but the cache has the rows 0 to 0",
    "outside": "a RingCache is given to a model that is not attached",
    "no use of it": "use_cache is False, perhaps from generation_config, but past_key_values is a RingCache",
    "gradients": "a RingCache keeps no gradients",
    "checkpointing": r"LlamaAttention wrote no keys to the cache: .* is in training mode with checkpointing: call model.eval",
}


def test_what_is_refused_is_refused_on_every_rank(gloo):
    ranks = gloo.run(3, refused)
    for rank in ranks:
        for name, message in rank.items():
            assert re.search(MESSAGES[name], message), (name, message)
        assert rank.keys() == MESSAGES.keys() - ({"checkpointing"} if ONE_NAME else set())


def other_group(group) -> str:
    """What a model that moved to half of the ranks says of the cache that it had before."""
    halves = [dist.new_group(list(range(begin, begin + 4))) for begin in (0, 4)]
    model = make()
    attach(model, group=group)
    cache = RingCache(model, tokens=50)
    attach(model, group=halves[dist.get_rank(group) // 4])
    with pytest.raises(ValueError) as caught:
        model.generate(prompts(9)["input_ids"], past_key_values=cache, max_new_tokens=2)
    return str(caught.value)


def test_a_cache_of_other_ranks_is_refused(gloo):
    for message in gloo.run(8, other_group):
        assert "the cache was made for 8 ranks and LlamaForCausalLM is attached to 4, in another group" in message


TINY = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, pad_token_id=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        pytest.param(
            "GPTJ",
            dict(n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
            "the attention of GPTJForCausalLM has no door for a RingCache",
            marks=pytest.mark.skipif(ONE_NAME, reason="GPT-J decodes from transformers 5.24 on"),
        ),
        (
            "GPTNeoXJapanese",
            dict(num_hidden_layers=1, intermediate_multiple_size=1),
            "the attention of GPTNeoXJapaneseForCausalLM has no door for a RingCache",
        ),
        (
            "Roberta",
            dict(is_decoder=True),
            "RobertaForCausalLM counts positions in a way of its own, which a RingCache does not support",
        ),
        (
            "Bart",
            dict(d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48),
            "the attention of BartForCausalLM has no door for a RingCache",
        ),
        (
            "Llama4",
            dict(head_dim=8, num_local_experts=1, intermediate_size_mlp=48, attention_chunk_size=4, no_rope_layers=[1]),
            "the attention of Llama4ForCausalLM has no door for a RingCache",
        ),
        ("LlamaForSequenceClassification", {}, "LlamaForSequenceClassification answers once for a sequence"),
    ],
    ids=lambda x: x if isinstance(x, str) and " " not in x else "",
)
def test_models_that_cannot_decode_are_refused(name, options, message):
    kind = name.split("For")[0]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Llama4" else f"{kind}Config")(**TINY | options)
    model = getattr(transformers, name if "For" in name else f"{name}ForCausalLM")(config).eval()
    attach(model)
    with pytest.raises(ValueError, match=message):
        RingCache(model, tokens=40)


def on_gpus(group) -> list[str]:
    """The calls whose tokens differ from those of the whole model in fp32, on GPUs."""
    model = make("Llama", torch.float32, hidden_size=128, head_dim=32).cuda()
    with torch.device("cuda"):
        expected = {
            name: model.generate(**on_device(inputs), **options) for name, (inputs, options, _) in CALLS.items() if name in ON_GPUS
        }
    attach(model, group=group)
    found = []
    for name, tokens in expected.items():
        inputs, options, rows = CALLS[name]
        cache = RingCache(model, tokens=400, sequences=rows)
        if not torch.equal(model.generate(**on_device(inputs), **options, past_key_values=cache), tokens):
            found.append(name)
    return found


ON_GPUS = ("greedy", "beams", "left padding", "prefill in pieces")


def on_device(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.cuda() for name, x in inputs.items()}


@pytest.mark.gpu
def test_gpus(nccl, world_size):
    assert nccl.run(world_size, on_gpus, timeout=180) == [[]] * world_size
