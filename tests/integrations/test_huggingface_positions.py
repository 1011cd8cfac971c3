"""Positions that a model would count within a shard, or that have several axes, are exact or refused."""

import inspect

import pytest
import torch
import transformers
from torch import nn

import ringattn as ra
from ringattn.integrations.huggingface import attach
from ringattn.integrations.huggingface_checks import check_head_dims, check_positions_taken

N = 24
TEXT = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
VISION = dict(depth=1, num_heads=2, patch_size=2, spatial_merge_size=2, temporal_patch_size=1, in_channels=3)
VISIONS = {
    "Qwen2VL": dict(embed_dim=16, hidden_size=32),
    "Qwen2_5_VL": dict(hidden_size=16, out_hidden_size=32, intermediate_size=16, fullatt_block_indexes=[0], window_size=8),
    "Qwen3VL": dict(
        hidden_size=16, out_hidden_size=32, intermediate_size=16, deepstack_visual_indexes=[0], num_position_embeddings=16
    ),
}
IMAGE, START, END = 60, 58, 57
# one rank that holds the sequence in another order: positions of the shard would be others
TURNED = ra.Layout(N, spans=((ra.Span(11, N - 11), ra.Span(0, 11)),))

# before version 5 these models find images in input_ids
OF_THIS_VERSION = "mm_token_type_ids" in inspect.signature(transformers.Qwen2VLModel.forward).parameters


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        text_config=dict(**TEXT, head_dim=8, rope_parameters=ROPE, pad_token_id=None),
        vision_config={**VISION, **VISIONS[kind]},
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).double()


def with_an_image() -> dict:
    """24 tokens, of which tokens 5 to 8 are an image of 4 x 4 patches."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(50, (1, N), generator=generator)
    ids[0, 4:10] = torch.tensor([START, *[IMAGE] * 4, END])
    patches = torch.randn(16, 3 * 2 * 2, dtype=torch.float64, generator=generator)
    return dict(
        input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=torch.tensor([[1, 4, 4]]), pixel_values=patches
    )


@pytest.mark.parametrize("kind", VISIONS if OF_THIS_VERSION else ())
def test_three_axes_of_positions_around_images(kind):
    """The language model is attached; the vision tower runs on whole images."""
    model, batch = make(kind), with_an_image()
    images = {name: batch[name] for name in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        dense = model(**batch, use_cache=False).logits
        whole = {name: batch[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
        positions, _ = model.model.get_rope_index(**whole)
        attach(model.model.language_model, layout=TURNED, mask=ra.causal())
        ids, types, cut = (
            ra.shard(x, TURNED, 0, dim) for x, dim in ((batch["input_ids"], 1), (batch["mm_token_type_ids"], 1), (positions, 2))
        )
        found = model(input_ids=ids, position_ids=cut, **images, use_cache=False).logits
        torch.testing.assert_close(found, ra.shard(dense, TURNED, 0), rtol=0, atol=1e-10)
        for flat in (None, TURNED.positions(0)[None]):
            with pytest.raises(
                ValueError, match="positions have several axes where there are images, but position_ids are flat or miss"
            ):
                model(input_ids=ids, position_ids=flat, mm_token_type_ids=types, **images)
        # text alone has one axis, and gets it whatever the model would count
        text = torch.arange(N)[None]
        attach(model.model.language_model, layout=ra.zigzag(N, 1))
        dense = model(input_ids=text).logits
        attach(model.model.language_model, layout=TURNED)
        found = model(input_ids=ra.shard(text, TURNED, 0)).logits
        torch.testing.assert_close(found, ra.shard(dense, TURNED, 0), rtol=0, atol=1e-10)
        with pytest.raises(ValueError, match=r"inputs_embeds is given to .* whose positions have several axes"):
            model.model.language_model(inputs_embeds=torch.zeros(1, N, 32).double())


def test_parts_for_images_are_refused_where_they_run():
    model, batch = make("Qwen2VL"), with_an_image()
    attach(model, layout=ra.zigzag(N, 1), mask=ra.causal())
    with pytest.raises(ValueError, match="is part of an attached model but takes no tokens, as parts for images and sound do"):
        model(**batch, position_ids=torch.zeros(3, 1, N, dtype=torch.int64))


class Counts(transformers.LlamaForCausalLM):
    """A head that counts positions itself."""

    def forward(self, input_ids, position_ids=None, **options):
        position_ids = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        return super().forward(input_ids=input_ids, position_ids=position_ids, **options)


def test_positions_that_a_holder_counts_within_the_shard_are_refused():
    model, ids = Counts(transformers.LlamaConfig(**TEXT)), torch.arange(N)[None]
    for mask in (None, ra.causal()):
        attach(model.model, layout=TURNED, mask=mask)
        with pytest.raises(ValueError, match="Counts was called without position_ids and made them from this rank's shard"):
            model(input_ids=ids)
        model(input_ids=ids, position_ids=TURNED.positions(0)[None])
    attach(model.model, layout=ra.zigzag(N, 1))
    model(input_ids=ids)


def test_positions_after_the_padding_are_refused_outside_of_embeddings_too():
    modeling = pytest.importorskip("transformers.models.kosmos2_5.modeling_kosmos2_5")
    config = transformers.Kosmos2_5TextConfig(vocab_size=61, embed_dim=32, layers=1, ffn_dim=48, attention_heads=4)
    with pytest.raises(ValueError, match="embed_positions has positions that start after padding_idx 1"):
        attach(modeling.Kosmos2_5TextForCausalLM(config), layout=ra.zigzag(N, 1))


class TakesNone(transformers.LlamaModel):
    def forward(self, input_ids):
        return super().forward(input_ids=input_ids)


def test_models_that_take_no_positions_are_refused():
    with pytest.raises(ValueError, match="TakesNone takes no position_ids, and would count positions within the shard"):
        check_positions_taken(TakesNone(transformers.LlamaConfig(**TEXT)))


def test_heads_that_are_too_wide_are_refused_when_attached():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, head_dim=576))
    with pytest.raises(ValueError, match="LlamaAttention has a head_dim of 576, but it must be 1 to 512"):
        attach(model, layout=ra.zigzag(N, 1))
    check_head_dims([nn.Linear(2, 2)])


@pytest.mark.skipif(not hasattr(transformers, "DogeConfig"), reason="this version of transformers has no Doge")
def test_a_model_that_changes_its_mask_is_refused_with_a_reason():
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**TEXT))
    attach(model, layout=ra.zigzag(N, 1))
    with pytest.raises(ValueError, match=r"uses its mask as a tensor \(dtype\).* a module changes its mask \(Doge's\)"):
        model(input_ids=torch.arange(N)[None])
