"""Encoders of images, by the names in their files."""

from functools import partial

from headwise.function.spec import FROM_CONFIG, AttentionSpec, Other, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts.catalogue import describe_layout, projections, qkv_fused_by_projection

_TIMM_MLP = "norm_1=norm1.* norm_2=norm2.* up=mlp.fc1.* down=mlp.fc2.*"
_VIT_MLP = (
    "norm_1=layernorm_before.* norm_2=layernorm_after.* up=intermediate.dense.* down=output.dense.*"
)
_TIMM = "| blocks.{layer}. " + _TIMM_MLP
_VIT = "| encoder.layer.{layer}. " + _VIT_MLP
_VIT_WHERE = {"self": "encoder.layer.{layer}.attention."}
_CLIP = (
    "| encoder.layers.{layer}. norm_1=layer_norm1.* norm_2=layer_norm2.* up=mlp.fc1.* "
    "down=mlp.fc2.*"
)
# The layers of each stage are numbered from 0, and have heads of their own number.
_timm = partial(describe_layout, where={"self": "blocks.{layer}.attn."}, outside=_TIMM)
_swin = partial(
    describe_layout,
    function=AttentionSpec(score_bias=Other("by place in the window")),
    mask="added",
    note="stages have different numbers of heads: give head_dim, which they share",
)

_clip = partial(describe_layout, where={"self": "encoder.layers.{layer}.self_attn."}, outside=_CLIP)
_vit = partial(describe_layout, where=_VIT_WHERE)

LAYOUTS = (
    _vit(
        name="vit",
        tensors=projections("attention.query attention.key attention.value output.dense"),
        outside=_VIT,
        beside=("attention.relative_position_bias.*",),
        function=AttentionSpec(score_bias=FROM_CONFIG),
        source="transformers, models/vit/modeling_vit.py and conversion_mapping.py",
        note="DeiT, DINOv2, BEiT and others, as their files are; since transformers 5 the modules "
        "say q_proj, k_proj, v_proj and o_proj. BEiT has no bias of keys",
    ),
    _timm(
        name="vit-timm",
        tensors=qkv_fused_by_projection("qkv", "proj"),
        beside=("rel_pos_h", "rel_pos_w"),
        source="huggingface/pytorch-image-models, timm/layers/attention.py",
        note="timm, and the published code of DINO, DINOv2, MAE and SAM. The check runs VitDet of "
        "transformers, which has these tensors; timm's q_norm and k_norm are not described",
    ),
    _vit(
        name="vitdet",
        tensors=qkv_fused_by_projection("qkv", "proj"),
        outside="| encoder.layer.{layer}. " + _TIMM_MLP,
        beside=("rel_pos_h", "rel_pos_w"),
        function=AttentionSpec(score_bias=FROM_CONFIG),
    ),
    _timm(
        name="beit",
        tensors={
            "qkv.weight": qkv_fused_by_projection("")[".weight"],
            "q_bias": "bq: (heads head_dim)",
            "v_bias": "bv: (heads head_dim)",
            **catalogue.output_projection("proj"),
        },
        beside=("k_bias", "relative_position_bias_table", "relative_position_index"),
        function=AttentionSpec(score_bias=FROM_CONFIG),
        source="microsoft/unilm, beit/modeling_finetune.py",
        unchecked="timm is not among the packages of the tests; its 1.0.31 was run once, by hand",
        note="BEiT, EVA and VideoMAE as published, and timm's eva: no bias of keys, and those of "
        "queries and values by themselves. k_bias is a buffer of zeros",
    ),
    _vit(
        name="videomae",
        tensors={
            **projections("attention.query attention.key attention.value", biases=""),
            "attention.q_bias": "bq: (heads head_dim)",
            "attention.v_bias": "bv: (heads head_dim)",
            **catalogue.output_projection("output.dense"),
        },
        outside=_VIT,
        source="transformers, models/videomae/modeling_videomae.py and conversion_mapping.py",
    ),
    _swin(
        name="swin",
        tensors=projections("self.query self.key self.value output.dense")
        | {"self.relative_position_bias_table": "distances: buckets heads"},
        where={"self": "encoder.layers.{stage}.blocks.{layer}.attention."},
        outside="| encoder.layers.{stage}.blocks.{layer}. " + _VIT_MLP,
        beside=("self.relative_position_index",),
        source="transformers, models/swin/modeling_swin.py and conversion_mapping.py",
    ),
    _swin(
        name="swin-microsoft",
        tensors=qkv_fused_by_projection("qkv", "proj")
        | {"relative_position_bias_table": "distances: buckets heads"},
        where={"self": "layers.{stage}.blocks.{layer}.attn."},
        outside="| layers.{stage}.blocks.{layer}. " + _TIMM_MLP,
        beside=("relative_position_index",),
        source="microsoft/Swin-Transformer, models/swin_transformer.py; timm has the same",
        unchecked="timm is not among the packages of the tests; its 1.0.31 was run once, by hand",
    ),
    describe_layout(
        name="dinov3",
        tensors=projections("q_proj k_proj v_proj o_proj"),
        where={"self": "layer.{layer}.attention."},
        outside="| layer.{layer}. norm_1=norm1.* norm_2=norm2.* up=mlp.up_proj.* "
        "down=mlp.down_proj.*",
        function=AttentionSpec(rotary=RotaryRule()),
        model="dinov3_vit",
        note="half of the angles are of a patch's row and half of its column, and the first tokens "
        "have none; the check rotates by place. Keys have no bias",
    ),
    _clip(
        name="clip",
        tensors=projections("q_proj k_proj v_proj out_proj"),
        mask="added",
        note="SigLIP as well. The text and the image part are two models in one file, text_model "
        "and vision_model",
    ),
    _clip(
        name="blip",
        tensors=qkv_fused_by_projection("qkv", "projection"),
        note="the image part of BLIP, BLIP-2 and InstructBLIP",
    ),
)
