"""torch's own layers, and those that took over their names."""

from functools import partial

from headwise.layouts import catalogue
from headwise.layouts.catalogue import describe_layout, projections, qkv_fused_by_projection

_OUT = catalogue.output_projection("out_proj")
_PACKED = {
    "in_proj_weight": qkv_fused_by_projection("")[".weight"],
    "in_proj_bias": qkv_fused_by_projection("")[".bias"],
    **_OUT,
}
# add_bias_kv=True: one more key and value, after the projection.
_EXTRA = {"bias_k": "extra_k: () () (heads head_dim)", "bias_v": "extra_v: () () (heads head_dim)"}
_WHERE = {"self": "layers.{layer}.self_attn.", "cross": "layers.{layer}.multihead_attn."}
# Those of a layer are torch's own. Around the layers torch has no class; the names are BERT's.
_LAYER = (
    "tokens=embeddings.word_embeddings.weight positions=embeddings.position_embeddings.weight "
    "token_types=embeddings.token_type_embeddings.weight embed_norm=embeddings.LayerNorm.* "
    "pooler=pooler.dense.* | layers.{layer}. norm_1=norm1.* norm_2=norm2.* up=linear1.* "
    "down=linear2.*"
)
_of_torch = partial(
    describe_layout,
    where=_WHERE,
    outside=_LAYER,
    mask="True hides",
    axes=None,
    optional=("extra_k", "extra_v"),
)
_ABOUT_EXTRA = (
    "bias_k and bias_v, of add_bias_kv=True, are one more key and value behind the others"
)

LAYOUTS = (
    _of_torch(
        name="torch-packed",
        tensors=_PACKED | _EXTRA,
        source="torch, torch/nn/modules/activation.py and transformer.py",
        note="nn.MultiheadAttention, and nn.TransformerEncoder around it; batch_first tells the "
        f"order of axes. {_ABOUT_EXTRA}. add_zero_attn=True is in no tensor",
    ),
    _of_torch(
        name="torch-separate",
        tensors={
            "q_proj_weight": "wq: (heads head_dim) embed_dim",
            "k_proj_weight": "wk: (heads head_dim) source_dim",
            "v_proj_weight": "wv: (heads head_dim) source_dim",
            "in_proj_bias": _PACKED["in_proj_bias"],
            **_OUT,
            **_EXTRA,
        },
        source="torch, torch/nn/modules/activation.py",
        note="nn.MultiheadAttention with another width of keys and values: parameters of their own "
        "without `.weight`, and one fused bias. Keys and values must come from one source",
    ),
    _of_torch(
        name="torch-quantizable",
        tensors=projections("linear_Q linear_K linear_V") | _OUT | _EXTRA,
        beside=("in_proj_weight", "in_proj_bias"),
        source="torch, torch/ao/nn/quantizable/modules/activation.py",
        note="holds in_proj_weight and in_proj_bias as well, and uses neither. With "
        "batch_first=True torch 2.13 puts batch and length together in the wrong order",
    ),
    describe_layout(
        name="fairseq",
        tensors=projections("q_proj k_proj v_proj") | _OUT | _EXTRA,
        where=catalogue.both_sides("{side}.layers.{layer}.", "self_attn.", "encoder_attn."),
        mask="True hides",
        axes="length batch width",
        optional=("extra_k", "extra_v"),
        source="facebookresearch/fairseq, fairseq/modules/multihead_attention.py",
        unchecked="fairseq is not among the packages of the tests",
        note=f"{_ABOUT_EXTRA}. Files from before 2019 are torch-packed",
    ),
    describe_layout(
        name="clip-openai",
        tensors=_PACKED,
        where={"self": "transformer.resblocks.{layer}.attn."},
        outside="| transformer.resblocks.{layer}. norm_1=ln_1.* norm_2=ln_2.* up=mlp.c_fc.* "
        "down=mlp.c_proj.*",
        mask="added",
        axes="length batch width",
        source="openai/CLIP, clip/model.py",
        note="nn.MultiheadAttention; open_clip has the same names",
    ),
    describe_layout(
        name="clip-attnpool",
        tensors=projections("q_proj k_proj v_proj c_proj"),
        where={"self": "attnpool."},
        beside=("positional_embedding",),
        axes="length batch width",
        source="openai/CLIP, clip/model.py",
        note="the last layer of CLIP's ResNets: the mean is the only query, and the output has "
        "another width",
    ),
)
