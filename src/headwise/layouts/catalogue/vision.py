"""Encoders of images, by the names in their files."""

from functools import partial

from headwise.function.spec import (
    FROM_CONFIG,
    SWIN,
    SWIN_2,
    AttentionSpec,
    NormRule,
    Other,
    RotaryRule,
    ValueRule,
)
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
    function=AttentionSpec(score_bias=SWIN),
    mask="added",
    note="stages have different numbers of heads: give head_dim, which they share",
)
_swin_v2 = partial(
    describe_layout,
    function=AttentionSpec(
        scale=1.0,
        qk_norm=Other("l2 over head, with a learned scale for each head"),
        score_bias=SWIN_2,
    ),
    mask="added",
    note="scores are cosines times exp(logit_scale), at most 100, plus 16 sigmoid of the MLP; the "
    "weights of both are passed on as they are. Give head_dim, which all stages share",
)
_Q_V_BIASES = {"q_bias": "bq: (heads head_dim)", "v_bias": "bv: (heads head_dim)"}  # keys have none
_BEIT = (
    qkv_fused_by_projection("qkv", bias=False) | _Q_V_BIASES | catalogue.output_projection("proj")
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
        tensors=qkv_fused_by_projection("qkv", "proj")
        | catalogue.head_norms("q_norm", "k_norm", bias=True),
        beside=("rel_pos_h", "rel_pos_w"),
        function=AttentionSpec(qk_norm=FROM_CONFIG),
        source="huggingface/pytorch-image-models, timm/layers/attention.py",
        note="timm, and the published code of DINO, DINOv2, MAE and SAM. The check runs VitDet of "
        "transformers, which has these tensors. timm's gate and norm of outputs are not described",
    ),
    *(
        describe_layout(
            name=name,
            tensors=qkv_fused_by_projection("to_qkv", bias=False)
            | catalogue.output_projection(out),
            beside=("norm.*",),
            source=f"lucidrains/vit-pytorch, vit_pytorch/{file}",
            note="the norm is in front of the projections. A module's place differs between the "
            "models of this package. Tested on request: pip install vit-pytorch",
        )
        for name, out, file in (
            ("vit-pytorch", "to_out.0", "vit.py"),
            ("vit-pytorch-simple", "to_out", "simple_vit.py"),
        )
    ),
    _vit(
        name="vitdet",
        tensors=qkv_fused_by_projection("qkv", "proj"),
        outside="| encoder.layer.{layer}. " + _TIMM_MLP,
        beside=("rel_pos_h", "rel_pos_w"),
        function=AttentionSpec(score_bias=FROM_CONFIG),
    ),
    *(
        describe_layout(
            name=name,
            tensors=projections(names),
            where={"self": where},
            model=model,
            note=note,
        )
        for name, names, where, model, note in (
            (
                "janus",
                "q_proj k_proj v_proj projection_layer",
                "encoder.layers.{layer}.self_attn.",
                "janus",
                "the image part; those of InternVL and Qianfan OCR as well",
            ),
            (
                "xclip",
                "q_proj k_proj v_proj proj",
                "prompts_generator.decoder.{layer}.cross_attn.",
                "x_clip",
                "the prompts of X-CLIP; the image parts of Kimi K2.5 have the names",
            ),
        )
    ),
    describe_layout(
        name="timesformer",
        tensors=qkv_fused_by_projection("attention.qkv")
        | catalogue.output_projection("output.dense"),
        where={
            "self": "encoder.layer.{layer}.attention.",
            "encoder": "encoder.layer.{layer}.temporal_attention.",
        },
    ),
    _timm(
        name="beit",
        tensors=_BEIT,
        beside=("k_bias", "relative_position_bias_table", "relative_position_index"),
        function=AttentionSpec(score_bias=FROM_CONFIG),
        source="microsoft/unilm, beit/modeling_finetune.py",
        unchecked="timm is not among the packages of the tests; its 1.0.31 was run once, by hand",
        note="BEiT, EVA and VideoMAE as published, and timm's eva: no bias of keys, and those of "
        "queries and values by themselves. k_bias is a buffer of zeros",
    ),
    _vit(
        name="videomae",
        tensors=projections(
            "attention.query attention.key attention.value output.dense", biases="o"
        )
        | {f"attention.{name}": pattern for name, pattern in _Q_V_BIASES.items()},
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
    _swin_v2(
        name="swinv2",
        tensors=projections("self.query self.key self.value output.dense", biases="qvo"),
        where={"self": "encoder.layers.{stage}.blocks.{layer}.attention."},
        beside=("self.logit_scale", "self.continuous_position_bias_mlp.*"),
        marks=("self.logit_scale",),
    ),
    _swin_v2(
        name="swinv2-microsoft",
        tensors=_BEIT,
        where={"self": "layers.{stage}.blocks.{layer}.attn."},
        beside=("k_bias", "logit_scale", "cpb_mlp.*", "relative_*"),
        marks=("logit_scale",),
        source="microsoft/Swin-Transformer, models/swin_transformer_v2.py; timm has the same",
        unchecked="no package of the tests has it",
    ),
    describe_layout(
        name="eva-clip",
        tensors=projections("q_proj k_proj v_proj proj", biases="o") | _Q_V_BIASES,
        where={"self": "blocks.{layer}.attn."},
        beside=("inner_attn_ln.*", "rope.*"),
        function=AttentionSpec(rotary=Other("by row and column")),
        rows="interleaved",
        source="baaivision/EVA, EVA-CLIP/rei/eva_clip/eva_vit_model.py",
        note="EVA02-CLIP; EVA01-CLIP is in beit. inner_attn_ln normalises the outputs of all heads "
        "together, which no layer here does: it is passed on. The check is without it, and rotates "
        "by place. Tested on request: pip install timm",
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
    _timm(
        name="qwen-omni-vision",
        tensors=projections("q k v proj"),
        function=AttentionSpec(rotary=RotaryRule()),
        model="qwen2_5_omni",
        note="a rotation by row and column",
    ),
    describe_layout(
        name="gemma4-vision",
        tensors=projections(
            "q_proj.linear k_proj.linear v_proj.linear o_proj.linear",
            kv_heads="kv_heads",
            biases="",
        )
        | catalogue.head_norms("q_norm", "k_norm"),
        where={"self": "encoder.layers.{layer}.self_attn."},
        function=AttentionSpec(
            scale=1.0, rotary=RotaryRule(), qk_norm=NormRule(), values=ValueRule(FROM_CONFIG)
        ),
        model="gemma4",
        note="a rotation by row and column, each in a half of the head",
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
