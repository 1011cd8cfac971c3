"""Run the causal and masked language models of the installed transformers around a ring, in tiny sizes, and write what came of each.

    python launch/repo/model_sweep.py                        # all of them; make models
    python launch/repo/model_sweep.py --only Llama --only Gpt  # those whose class name holds one of these; writes nothing
    python launch/repo/model_sweep.py --only Llama --update    # puts their rows in the place of those that the page has

Each model runs once on a whole sequence in one process, and once attached on `--ranks` processes over gloo. Its logits, its loss and all
gradients are compared, in fp64. A model is one of:

    equal              the largest difference is at most TOLERANCE of a tensor's largest value
    refused            with the error's first sentence
    not constructible  the tiny config, or a whole sequence in one process, fails: nothing can be compared
    WRONG              anything else, a hang and a crash too

The result goes to docs/lab/models.md if no model was left out, that of transformers 4 to models-4.57.md and the like. The exit status
is 1 if a model is wrong.

Each model has processes of its own, forked from this one, so a model that hangs or crashes leaves the others alone.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "lab"
SEQ_LEN, BATCH, VOCAB = 37, 2, 97
TOLERANCE = 1e-7
LIMIT = 90  # seconds for a model
MOST_PARAMETERS = 20_000_000
EQUAL, REFUSED, NOT_MADE, WRONG = "equal", "refused", "not constructible", "WRONG"

# what makes a config tiny, under the names that configs have for it
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "tgt_vocab_size", "src_vocab_size", "decoder_vocab_size"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "d_embed", "emb_dim", "n_embed"), 32
    ),
    **dict.fromkeys(("input_dim", "state_size", "attention_hidden_size", "lru_width", "word_embed_proj_dim", "ffn_config_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(
        ("ffn_hidden_size", "dim_ff", "intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate"), 48
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "global_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("global_head_dim", "d_kv", "d_head", "attention_head_size", "kv_channels", "index_head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(
        ("n_shared_experts", "n_group", "topk_group", "num_shared_experts", "first_k_dense_replace", "moe_num_shared_experts"), 1
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions"), 64),
    **dict.fromkeys(("max_target_positions", "max_sequence_length", "block_size"), 64),
    **dict.fromkeys(("sliding_window", "window_size", "local_attention", "attention_window", "sliding_window_size"), 8),
    **dict.fromkeys(("attention_chunk_size",), 16),
    **dict.fromkeys(("num_kv_shared_layers",), 0),
    "use_cache": False,
}
_HYBRID = dict(layer_types=["linear_attention", "full_attention"])
_DELTA_RULE = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
_MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=16)
# what a model needs beside that, by the kind of its config
SETTINGS: dict[str, dict[str, Any]] = {
    **{kind: {**_HYBRID, **_DELTA_RULE} for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")},
    "kimi_linear": {**_HYBRID, "linear_head_dim": 8, "linear_num_heads": 3},
    "bailing_hybrid": _HYBRID,
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_HYBRID, **_MAMBA2, "shared_intermediate_size": 16},
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        **dict(mamba_num_heads=4, mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=16),
        moe_shared_expert_intermediate_size=16,
    ),
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "mamba2": dict(num_heads=4, head_dim=16, n_groups=2, state_size=8, chunk_size=16),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"], mamba_d_state=8, mamba_ngroups=2, n_mamba_heads=4, chunk_size=16
    ),
    "zamba": dict(
        **dict(num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"]),
        mamba_d_state=8,
        n_mamba_heads=2,
        mamba_dt_rank=4,
        attention_hidden_size=64,
        head_dim=16,
    ),
    "mamba": dict(state_size=8, time_step_rank=4, use_associative_scan=False),
    "falcon_mamba": dict(state_size=8, time_step_rank=4, use_associative_scan=False),
    "jamba": dict(mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1, use_associative_scan=False),
    **{kind: dict(layer_types=["conv", "full_attention"], num_dense_layers=1) for kind in ("lfm2", "lfm2_moe")},
    "lfm3": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "sliding_attention"]),
    "zaya": dict(num_experts_per_tok=1),
    "minimax": {**_HYBRID, "block_size": 8},
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], lru_width=24),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "gptj": dict(rotary_dim=4),
    "codegen": dict(rotary_dim=4),
    "xlnet": dict(d_head=8),
    "gemma4_text": dict(global_head_dim=16),
    "gemma4_unified_text": dict(global_head_dim=16),
    "llama4_text": dict(no_rope_layers=[1, 0], floor_scale=4),
    "esmc": dict(num_key_value_heads=4),
    "modernbert": dict(global_attn_every_n_layers=2),
    "reformer": dict(axial_pos_embds=False),
    "esm": dict(token_dropout=False, position_embedding_type="rotary"),
    "longformer": dict(attention_window=[8, 8]),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=1.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2, hidden_size=32),
    ),
}


@dataclass(frozen=True)
class ModelFate:
    """What came of a model: the class, the kind (causal or masked), a status, and the largest relative difference or a reason."""

    name: str
    kind: str
    status: str
    note: str


class _Double(TorchFunctionMode):
    """While it is on, what asks for fp32 gets fp64: models round norms and softmaxes to fp32, which would hide small mistakes."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a part of a class name, in any case; may be given again")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the ring")
    parser.add_argument("--layout", choices=("zigzag", "contiguous", "striped"), default="zigzag")
    parser.add_argument("--update", action="store_true", help="with --only: replace the rows of these classes in the page")
    given = parser.parse_args()
    begun = time.monotonic()
    fates = []
    for kind, name in listed(given.only):
        fates.append(fate(kind, name, given.ranks, given.layout))
        print(f"{kind:6} {name:45} {fates[-1].status:18} {fates[-1].note}", flush=True)
    counts = Counter(found.status for found in fates)
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {time.monotonic() - begun:.0f} s")
    if given.update:
        found = {(x.kind, x.name): x for x in fates}
        known = {(x.kind, x.name): x for x in rows(page_path().read_text())}
        fates = [found.get(key, known.get(key, ModelFate(key[1], key[0], NOT_MADE, "not tried"))) for key in listed()]
    if given.update or not given.only:
        page_path().write_text(page(fates, given.ranks, given.layout))
        print(f"wrote {page_path().relative_to(ROOT)}")
    return bool(counts[WRONG])


def listed(parts: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The kinds and the names of classes in the mappings of transformers; parts: only those whose name holds one of these."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    found = []
    for kind, mapping in (("causal", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("masked", MODEL_FOR_MASKED_LM_MAPPING_NAMES)):
        names = {name for value in mapping.values() for name in ([value] if isinstance(value, str) else value)}
        found += [(kind, name) for name in sorted(names, key=str.lower)]
    return [(kind, name) for kind, name in found if not parts or any(part.lower() in name.lower() for part in parts)]


def fate(kind: str, name: str, ranks: int, layout: str) -> ModelFate:
    """Run one model on a whole sequence and on shards, in processes of its own."""
    import transformers

    try:
        with quiet():
            getattr(transformers, name)  # imported once, before the fork
    except (ImportError, AttributeError, RuntimeError) as error:
        return ModelFate(name, kind, NOT_MADE, first_sentence(error))
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(ranks)]
        # not an argument of processes: a pipe's end must close in all processes but one
        processes = [context.Process(target=_rank, args=(ends, rank, kind, name, layout, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()
        replies = _replies([ours for ours, _ in ends])
        for process in processes:
            process.kill()
            process.join()
    return ModelFate(name, kind, *judged(replies))


def judged(replies: Sequence[tuple[str, str] | None]) -> tuple[str, str]:
    """The status and the note of what all ranks say; None is a rank that said nothing."""
    said = [reply for reply in replies if reply is not None]
    statuses = {status for status, _ in said}
    if NOT_MADE in statuses:
        return next(reply for reply in said if reply[0] == NOT_MADE)
    if len(said) < len(replies):
        return WRONG, f"{len(replies) - len(said)} of {len(replies)} ranks ended or took more than {LIMIT} s"
    if statuses == {REFUSED}:
        return said[0]
    if statuses == {EQUAL}:
        return said[0]
    return next((reply for reply in said if reply[0] == WRONG), (WRONG, "only some ranks refused: " + said[0][1]))


def _replies(pipes: Sequence[Connection]) -> list[tuple[str, str] | None]:
    replies: list[tuple[str, str] | None] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + LIMIT
    while waiting and (ready := wait(list(waiting), max(0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = waiting.pop(pipe)
            with contextlib.suppress(EOFError):
                replies[rank] = pipe.recv()
    return replies


def _rank(ends: list, rank: int, kind: str, name: str, layout: str, folder: str) -> None:
    """What a forked process does: its verdict goes into its pipe."""
    for index, (ours, theirs) in enumerate(ends):
        ours.close()
        if index != rank:
            theirs.close()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", len(ends))
    with quiet():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ends), timeout=timedelta(seconds=LIMIT))
        verdict = compared(lambda: tiny(kind, name), layout)
    ends[rank][1].send(verdict)
    ends[rank][1].close()
    os._exit(0)


def tiny(kind: str, name: str) -> nn.Module:
    """A model in a tiny size, in fp64, whose weights differ enough that each mistake shows."""
    import transformers

    kind_of_model = getattr(transformers, name)
    config = tiny_config(kind_of_model.config_class, kind)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind_of_model(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the tiny config gives {size} parameters")
    config = tiny_config(kind_of_model.config_class, kind)
    model = kind_of_model(config).double().eval()  # without dropout
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # transformers 4 lets torch's attention leave the softcap out
    with contextlib.suppress(Exception):  # models without experts, or whose eager experts are the only ones
        model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # MiniMax keeps decays, which it has rounded to fp32
            _make_decays_exact(module)
    make_distinct(model)
    return model


def _make_decays_exact(module: Any) -> None:
    factors = module.decay_factors(module.slope_rate)
    module.query_decay, module.key_decay, module.diagonal_decay = factors


def make_distinct(model: nn.Module) -> None:
    """Give a model weights with which attention is far from even, and norms and biases that are not those of a new model."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * 1.5)
            else:
                parameter.add_(0.1 * noise)


def tiny_config(config_class: Any, kind: str) -> Any:
    """A tiny config of a class, and of the configs within it."""
    names = inspect.signature(config_class).parameters.keys() | set(getattr(config_class, "attribute_map", ()))
    names |= set(getattr(config_class, "__dataclass_fields__", ()))
    settings = {name: value for name, value in TINY.items() if name in names}
    for name, sub in (getattr(config_class, "sub_configs", None) or {}).items():
        if hasattr(sub, "model_type") and sub.model_type:
            settings[name] = tiny_config(sub, kind)
    if kind == "causal" and "is_decoder" in names:
        settings["is_decoder"] = True
    for name in names & {"bos_token_id", "eos_token_id"}:
        settings[name] = 2
    if "pad_token_id" in names:
        settings["pad_token_id"] = 1
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # latent attention has no groups of heads
    settings |= SETTINGS.get(getattr(config_class, "model_type", ""), {})
    return config_class(**settings)


def compared(make: Callable[[], nn.Module], layout: str, group: dist.ProcessGroup | None = None) -> tuple[str, str]:
    """A model on a whole sequence, in this process, against the model on shards of the group's ranks: the status and the note."""
    import ringattn as ra
    from ringattn.integrations.huggingface import attach
    from ringattn.training.causal_lm import sum_gradients

    tokens = torch.randint(5, VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with _Double():
        # every rank, because a model that fails on whole sequences is to be refused nowhere
        try:
            model = make()
            wanted = results(model, tokens, torch.arange(SEQ_LEN))
        except Exception as error:
            return NOT_MADE, first_sentence(error)
        model = make()
        cut = getattr(ra, layout)(SEQ_LEN, size)
        try:
            attach(model, group=group)
            logits, loss, _ = results(model, ra.shard(tokens, cut, rank), cut.positions(rank), layout=cut)
        except ValueError as error:
            return (REFUSED, first_sentence(error)) if is_ours(error) else (WRONG, f"ValueError: {first_sentence(error)}")
        except Exception as error:
            return WRONG, f"{type(error).__name__}: {first_sentence(error)}"
    sum_gradients(model.parameters(), group)
    # an expert without tokens on this rank has a gradient by now
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    dist.all_reduce(loss, group=group)
    worst = max(
        difference(logits, ra.shard(wanted[0], cut, rank)),
        difference(loss, wanted[1]),
        *(difference(gradients[name], wanted[2][name]) for name in wanted[2]),
    )
    if worst <= TOLERANCE:
        return EQUAL, f"{worst:.0e}"
    parts = {"logits": difference(logits, ra.shard(wanted[0], cut, rank))}
    parts |= {name: difference(gradients[name], wanted[2][name]) for name in wanted[2]}
    name = max(parts, key=parts.__getitem__)
    return WRONG, f"{name} differs by {worst:.1e} of its largest value"


def results(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, **inputs: Any) -> tuple:
    """Logits, a weighted sum of log-probabilities, and the gradients by name: None stays None."""
    logits = model(input_ids=tokens, **inputs).logits
    if logits.shape[:2] != tokens.shape:
        raise TypeError(f"logits of shape {tuple(logits.shape)} are not one a token")
    # each token has a label and a weight of its own, which follow from its position
    labels = (tokens * 7 + 3) % min(VOCAB, logits.shape[-1])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(tokens.shape)
    loss = (losses * (1 + positions % 5)).sum()
    loss.backward()
    return logits.detach(), loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def difference(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """The largest difference over the largest value wanted; infinite if only one is there, or one is not finite."""
    if found is None or wanted is None:
        present = found if wanted is None else wanted
        return 0.0 if present is None or not bool(present.any()) else float("inf")
    if not bool(found.isfinite().all()) or not bool(wanted.isfinite().all()):
        return float("inf")
    scale = wanted.abs().max().item()
    return (found - wanted).abs().max().item() / (scale if scale > 1e-12 else 1.0)


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised by ringattn, and not by a model or by torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(ROOT / "ringattn")


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error, in one line of a table."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(": ")[0].replace("|", "/")[:160] if isinstance(error, ValueError) else text.replace("|", "/")[:160]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of models, which say nothing about attention."""
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def page_path() -> Path:
    """Where the result for the installed transformers goes."""
    import transformers

    major, minor, *_ = transformers.__version__.split(".")
    return PAGES / ("models.md" if int(major) > 4 else f"models-{major}.{minor}.md")


def rows(text: str) -> list[ModelFate]:
    """The rows of a page."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return [ModelFate(*row) for row in cells[1:]]


def page(fates: Sequence[ModelFate], ranks: int, layout: str) -> str:
    """The page of the installed transformers."""
    import transformers

    counts = Counter(found.status for found in fates)
    lines = [
        "# Models of transformers on a ring",
        "",
        f"All causal and masked language models of transformers {transformers.__version__}, in tiny sizes, on {ranks} ranks with",
        f"`{layout}` against one process: logits, loss and every gradient, in fp64. Made by `python launch/repo/model_sweep.py`, with",
        f"torch {torch.__version__.split('+')[0]} and Python {platform.python_version()}, on a CPU.",
        "",
        f"{counts[EQUAL]} are equal (the largest difference over a tensor's largest value is given), {counts[REFUSED]} are refused (by the",
        f"error that is quoted), {counts[NOT_MADE]} are not constructible in this way, and {counts[WRONG]} are wrong.",
        "",
        "| class | kind | result | difference, or reason |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {x.name} | {x.kind} | {x.status} | {x.note} |" for x in fates), ""])


if __name__ == "__main__":
    sys.exit(main())
