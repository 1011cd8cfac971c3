"""The model of `finetune_long_document.py`: made on the device, wrapped, and counted."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from ringattn import zigzag
from ringattn.integrations.huggingface import attach
from ringattn.training.causal_lm import CausalLMLoss, fused_token_loss, token_loss
from ringattn.training.tiled import tile_modules

from .settings import DTYPES, QWEN, WEIGHTS, Settings


def make_config(settings: Settings, vocab: int) -> PretrainedConfig:
    if settings.model != "tiny":
        config = AutoConfig.from_pretrained(settings.model)
        if config.get_text_config().vocab_size < vocab:
            raise ValueError(
                f"the document's tokens go to {vocab}, but {settings.model} has a vocabulary of "
                f"{config.get_text_config().vocab_size}: use its tokenizer"
            )
        config.use_cache = False
        return config
    if settings.shape in QWEN:
        return qwen_config(settings, QWEN[settings.shape])
    return LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=1 << 20,
        rope_theta=10_000.0 if settings.shape is None else 500_000.0,
        tie_word_embeddings=settings.shape is None,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def qwen_config(settings: Settings, every: int) -> PretrainedConfig:
    """Qwen3.5's model of text, in which one of `every` layers is attention and the others are gated delta rules."""
    from transformers import Qwen3_5TextConfig  # of transformers 5

    d = settings.hidden // settings.heads
    return Qwen3_5TextConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        layer_types=["linear_attention" if (i + 1) % every else "full_attention" for i in range(settings.layers)],
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=d,
        linear_num_key_heads=2 * settings.heads,
        linear_num_value_heads=2 * settings.heads,
        linear_key_head_dim=d // 2,
        linear_value_head_dim=d // 2,
        max_position_embeddings=1 << 20,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
        tie_word_embeddings=False,
        use_cache=False,
    )


def check_model(settings: Any) -> None:
    """Raise ValueError or OSError if `--model` cannot be trained on a ring: tried without memory for its weights."""
    config = make_config(settings, vocab=0)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{type(config).__name__} belongs to no causal language model")
    with parameters_on_meta():
        model = CausalLMLoss(AutoModelForCausalLM.from_config(config)).model
    if settings.attention == "ringattn":
        attach(model, layout=zigzag(2, 1))


def build_model(settings: Settings, device: torch.device, vocab: int = 0) -> CausalLMLoss:
    """The model before it is wrapped, with the same weights on every rank. With `--shape` weights are on meta; `wrap` makes them."""
    config = make_config(settings, vocab)
    torch.manual_seed(settings.seed)
    with parameters_on_meta() if settings.shape else device:
        model = AutoModelForCausalLM.from_config(config).to(WEIGHTS[settings.dtype])
    if Path(settings.model).is_dir():
        load_weights(model, Path(settings.model))
    if settings.mlp_tile:
        for suffix in ("MLP", "Norm"):
            tile_modules(model, settings.mlp_tile, suffix)
        heads = getattr(config, "linear_num_value_heads", None)
        if heads and "linear_attention" in config.layer_types:
            tile_modules(model, settings.mlp_tile * heads, "NormGated")
    return CausalLMLoss(model, loss=token_loss if settings.deterministic else fused_token_loss)


def wrap(settings: Settings, model: CausalLMLoss, device: torch.device) -> nn.Module:
    """The module that training calls: the model, in DDP, in FSDP2 or alone, on the device with its weights."""
    if settings.wrapper == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[settings.dtype], reduce_dtype=WEIGHTS[settings.dtype])
        mesh = init_device_mesh(settings.device, (dist.get_world_size(),))
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    if settings.shape:
        draw_weights(model, settings.seed, device)
    model.to(device)
    if settings.wrapper == "ddp":
        return DistributedDataParallel(model)
    return model


def decoder_layers(model: CausalLMLoss) -> nn.ModuleList:
    """The layers that run one after the other: `layers` of most models, `h` of GPT-2."""
    return max((module for module in model.model.get_decoder().children() if isinstance(module, nn.ModuleList)), key=len)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made within have parameters without memory; buffers, such as rotary frequencies, are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, device: torch.device, prefix: str = "") -> None:
    """Allocate weights on the device and draw Llama's or Qwen3.5's initial values, seeded by each parameter's name (after `prefix`).

    The values do not depend on the sharding. One whole parameter exists at a time.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    # Qwen3.5's norms, but for the gated ones, add 1 to their weights
    centred = {id(module.weight) for module in model.modules() if type(module).__name__ == "Qwen3_5RMSNorm"}
    for name, parameter in model.named_parameters(prefix):
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        if name.endswith("A_log"):
            _fill(parameter, torch.empty(parameter.shape, device=device).uniform_(0.01, 16, generator=generator).log_())
            continue
        if parameter.dim() < 2:
            # of norms, and dt_bias: the shapes have no other biases
            parameter.fill_(0.0 if id(parameter) in centred else 1.0)
            continue
        _fill(parameter, torch.empty(parameter.shape, device=device).normal_(0.0, 0.02, generator=generator))


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """A folder's safetensors, one tensor at a time from the file's own memory. Raises ValueError for names that are not the model's."""
    parameters = dict(model.named_parameters())
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (the file is not a mapping)
                if name in parameters:
                    parameters[name].copy_(file.get_tensor(name))
                    found.add(name)
    missing = sorted(set(parameters) - found)
    if missing:
        raise ValueError(
            f"{folder} has no weights under {len(missing)} of the model's {len(parameters)} names, {missing[0]} for one: "
            "save it anew with save_pretrained of this transformers"
        )


def _fill(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """A parameter's values from the whole tensor, of which it may hold a shard along dimension 0."""
    if not hasattr(parameter, "to_local"):
        parameter.copy_(whole)
        return
    local = parameter.to_local()
    parts = torch.chunk(whole, dist.get_world_size(), dim=0)
    if dist.get_rank() < len(parts):
        local.copy_(parts[dist.get_rank()])


def count_parameters(model: nn.Module) -> int:
    """The parameters of the whole model. One that ZeRO-3 has partitioned is empty between its uses, but remembers its size."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def activation_bytes(config: Any, tokens: float) -> float:
    """About the bytes that all layers keep for backward without recomputation, in bf16: 20 widths and 4 hidden layers a token."""
    config = config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return tokens * config.num_hidden_layers * (40 * config.hidden_size + 8 * inner)


def count_flops(config: Any, model: nn.Module, tokens: int) -> float | None:
    """Model FLOPs of a step on a sequence, forward and twice that backward, with causal attention; None for windows and experts.

    2 a weight and token in matmuls (the input embedding is none), and 2 * tokens^2 * heads * head_dim a layer of attention for the causal
    half of scores and values (Narayanan et al. 2021, appendix). A layer of gated delta rules multiplies its state, (d_k, d_v) a head, by
    three vectors a token: 6 * d_k * d_v; that chunks do more does not count, and neither does recomputation.
    """
    config = config.get_text_config()
    experts = any(getattr(config, name, None) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    if experts or getattr(config, "sliding_window", None):
        return None
    weights = count_parameters(model)
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    recurrent = (getattr(config, "layer_types", None) or []).count("linear_attention")
    attention = 2 * tokens**2 * config.num_attention_heads * head_dim * (config.num_hidden_layers - recurrent)
    states = 0
    if recurrent:
        heads, d_k, d_v = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
        states = 6 * tokens * heads * d_k * d_v * recurrent
    return 3.0 * (2 * weights * tokens + attention + states)
