"""Tiny transformers of diffusers with inputs whose tokens no number of ranks divides: `MODELS[name]()` gives both."""

import diffusers
import torch

WAN = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    text_dim=8,
    freq_dim=16,
    ffn_dim=24,
    num_layers=2,
)
JOINT = dict(in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=12)


def flux(text=7, image=11, dtype=torch.float64):
    torch.manual_seed(0)
    options = dict(num_single_layers=1, pooled_projection_dim=6, axes_dims_rope=(2, 2, 4))
    model = diffusers.FluxTransformer2DModel(**JOINT, **options).to(dtype)
    return model, dict(
        hidden_states=torch.randn(2, image, 4, dtype=dtype),
        encoder_hidden_states=torch.randn(2, text, 12, dtype=dtype),
        pooled_projections=torch.randn(2, 6, dtype=dtype),
        timestep=torch.tensor([0.5, 0.25], dtype=dtype),
        img_ids=torch.randint(5, (image, 3)).to(dtype),
        txt_ids=torch.zeros(text, 3, dtype=dtype),
    )


def flux2():
    torch.manual_seed(0)
    options = dict(num_single_layers=1, timestep_guidance_channels=16, axes_dims_rope=(2, 2, 2, 2))
    model = diffusers.Flux2Transformer2DModel(**JOINT, **options)
    return model, dict(
        hidden_states=torch.randn(2, 11, 4),
        encoder_hidden_states=torch.randn(2, 7, 12),
        timestep=torch.tensor([0.5, 0.25]),
        img_ids=torch.randint(5, (2, 11, 4)).float(),
        txt_ids=torch.zeros(2, 7, 4),
        guidance=torch.tensor([3.0, 3.0]),
    )


def qwen():
    torch.manual_seed(0)
    options = dict(patch_size=2, out_channels=1, axes_dims_rope=(2, 2, 4))
    model = diffusers.QwenImageTransformer2DModel(**JOINT, **options)
    inputs = dict(hidden_states=torch.randn(2, 15, 4), encoder_hidden_states=torch.randn(2, 7, 12))
    return model, inputs | dict(timestep=torch.tensor([0.5, 0.25]), img_shapes=[[(1, 3, 5)]] * 2)


def ltx():
    """Its attention to the text runs around the ring, too."""
    torch.manual_seed(0)
    sizes = dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=2)
    model = diffusers.LTXVideoTransformer3DModel(**sizes, cross_attention_dim=16, caption_channels=12)
    inputs = dict(hidden_states=torch.randn(2, 25, 4), encoder_hidden_states=torch.randn(2, 7, 12), encoder_attention_mask=None)
    return model, inputs | dict(timestep=torch.tensor([3, 700]), num_frames=5, height=1, width=5)


def wan(**options):
    """A video of 5 frames of 1 x 5 tokens."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(**WAN, rope_max_seq_len=32, **options)
    inputs = dict(hidden_states=torch.randn(2, 4, 5, 2, 10), encoder_hidden_states=torch.randn(2, 5, 8))
    return model, inputs | dict(timestep=torch.tensor([3, 700]))


def wan_22():
    """A timestep for each token."""
    model, inputs = wan()
    return model, inputs | dict(timestep=torch.randint(900, (2, 25)))


def wan_of_images():
    """Attention to an image, beside the text."""
    model, inputs = wan(image_dim=6, added_kv_proj_dim=24)
    texts = dict(encoder_hidden_states=torch.randn(2, 512, 8), encoder_hidden_states_image=torch.randn(2, 9, 6))
    return model, inputs | texts


def wan_checkpointed():
    model, inputs = wan()
    model.enable_gradient_checkpointing()
    return model.train(), inputs


def chrono_edit():
    torch.manual_seed(0)
    return diffusers.ChronoEditTransformer3DModel(**WAN, rope_max_seq_len=32), wan()[1]


def helios():
    """It cuts and assembles in each layer; its plan is for 40 layers."""
    torch.manual_seed(0)
    options = dict(rope_dim=(4, 4, 4), has_multi_term_memory_patch=False, guidance_cross_attn=False)
    model = diffusers.HeliosTransformer3DModel(**WAN, **options)
    model._cp_plan = {name: cuts for name, cuts in model._cp_plan.items() if "*" in name or int(name.split(".")[1]) < 2}
    return model, wan()[1]


MODELS = {
    "Flux": flux,
    "Flux 2": flux2,
    "Qwen-Image": qwen,
    "LTX": ltx,
    "Wan": wan,
    "Wan 2.2": wan_22,
    "Wan of images": wan_of_images,
    "Wan, checkpointed": wan_checkpointed,
    "ChronoEdit": chrono_edit,
    "Helios": helios,
}
