"""Libraries of JAX, TensorFlow and Keras, in whose matrices inputs come first.

A tree of parameters is written flat: with dots, as `flatten_dict(sep=".")` and Hugging Face's
exports do, or with slashes where the library itself names a tensor so. Files are read with both.
"""

from functools import partial

from headwise.function.spec import FROM_CONFIG, AttentionSpec, NormRule, RotaryRule
from headwise.layouts import catalogue
from headwise.layouts.catalogue import APART, describe_layout, projections

_ON_REQUEST = "tested on request: pip install headwise[jax]"
_BERT_OUTSIDE = (
    "tokens=embeddings.word_embeddings.embedding "
    "positions=embeddings.position_embeddings.embedding "
    "token_types=embeddings.token_type_embeddings.embedding "
    "embed_norm=embeddings.LayerNorm.scale* pooler=pooler.dense.kernel* | "
    "encoder.layer.{layer}. norm_1=attention.output.LayerNorm.scale* "
    "norm_2=output.LayerNorm.scale* up=intermediate.dense.kernel* down=output.dense.kernel*"
)
_TENSORFLOW_1 = "it runs with TensorFlow 1 only; a layer after its source is run"
_ALL_QKV = "([wq: heads head_dim | wk: heads head_dim | wv: heads head_dim])"
_KERNEL = (".kernel", ".bias")


def _three_axis_kernels(
    *, kv_heads: str = "heads", value_dim: str = "head_dim", out: str = "out", mark: str = "."
) -> dict[str, str]:
    """Kernels of three axes, as of an einsum: (inputs, heads, head_dim), and back."""
    patterns = {
        "query.kernel": "wq: embed_dim heads head_dim",
        "key.kernel": f"wk: source_dim {kv_heads} head_dim",
        "value.kernel": f"wv: source_dim {kv_heads} {value_dim}",
        "query.bias": "bq: heads head_dim",
        "key.bias": f"bk: {kv_heads} head_dim",
        "value.bias": f"bv: {kv_heads} {value_dim}",
        f"{out}.kernel": f"wo: heads {value_dim} out_dim",
        f"{out}.bias": "bo: out_dim",
    }
    return {name.replace(".", mark): pattern for name, pattern in patterns.items()}


_library = partial(describe_layout, mask="True attends")

_gemma = partial(
    _library,
    where={"self": "layer_{layer}.attn."},
    function=catalogue.left_to_config("scale softcap window", rotary=RotaryRule()),
    source="google-deepmind/gemma, gemma/gm/nn/_modules.py",
    note="Gemma 1 and 2; mha is the 7B model of Gemma 1. Tested on request: pip install --no-deps "
    "gemma-llm",
)
_GEMMA_OUT = {"attn_vec_einsum.w": "wo: heads head_dim out_dim"}
_GEMMA = _GEMMA_OUT | {
    "q_einsum.w": "wq: heads embed_dim head_dim",
    "kv_einsum.w": "([wk: | wv: ]) kv_heads embed_dim head_dim",
}

LAYOUTS = (
    _gemma("gemma-jax", tensors=_GEMMA),
    _gemma(
        "gemma-jax-mha",
        tensors=_GEMMA_OUT | {"qkv_einsum.w": "([wq: | wk: | wv: ]) heads embed_dim head_dim"},
    ),
    _gemma(
        "gemma3-jax",
        tensors=_GEMMA | catalogue.head_norms("_query_norm", "_key_norm", leaf="scale"),
        function=catalogue.left_to_config(
            "scale window", rotary=RotaryRule(), qk_norm=NormRule(weight_offset=1.0)
        ),
        unchecked="its package wants TensorFlow and Kauldron; a layer after its source is run",
        note="layers with a window have another theta",
    ),
    describe_layout(
        name="bert-tensorflow",
        tensors=projections(
            "self/query self/key self/value output/dense", leaves=("/kernel", "/bias"), columns=True
        ),
        where={"self": "encoder/layer_{layer}/attention/"},
        outside=_BERT_OUTSIDE.replace(".embedding", "")
        .replace("layer.", "layer_")
        .replace("scale*", "gamma*")
        .replace(".", "/"),
        columns=True,
        beside=("output/LayerNorm/*",),
        mask="added",
        source="google-research/bert, modeling.py",
        unchecked=_TENSORFLOW_1,
        note="BERT's own files, and ELECTRA's",
    ),
    describe_layout(
        name="gpt2-tensorflow",
        tensors={
            "c_attn/w": f"() embed_dim {_ALL_QKV}",
            "c_attn/b": _ALL_QKV.replace("w", "b"),
            "c_proj/w": "wo: () (heads head_dim) out_dim",
            "c_proj/b": "bo: out_dim",
        },
        where={"self": "h{layer}/attn/"},
        source="openai/gpt-2, src/model.py",
        unchecked=_TENSORFLOW_1,
        note="matrices have an axis of 1 in front: once they were convolutions",
    ),
    describe_layout(
        name="easylm",
        tensors=projections("wq wk wv wo", kv_heads="kv_heads", leaves=_KERNEL, columns=True),
        where={"self": "transformer.h.{layer}.attention."},
        function=AttentionSpec(rotary=RotaryRule()),
        rows="interleaved",
        source="young-geng/EasyLM, EasyLM/models/llama/llama_model.py",
        unchecked="it is not released as a package; a layer after its source is run",
        note="Llama as OpenLLaMA and Koala were trained: Meta's order of rows, transposed",
    ),
    _library(
        name="flax",
        tensors=_three_axis_kernels() | catalogue.head_norms("query_ln", "key_ln", leaf="scale"),
        function=AttentionSpec(qk_norm=FROM_CONFIG),
        source="google/flax, flax/linen/attention.py and flax/nnx/nn/attention.py",
        note="MultiHeadDotProductAttention of Linen, MultiHeadAttention of NNX; Big Vision and "
        f"Scenic use it. {_ON_REQUEST}",
    ),
    _library(
        name="flax-bert",
        tensors=projections(
            "self.query self.key self.value output.dense",
            source="source_dim",
            leaves=_KERNEL,
            columns=True,
        ),
        where={"self": "encoder.layer.{layer}.attention."},
        outside=_BERT_OUTSIDE,
        columns=True,
        source="transformers 4, models/bert/modeling_flax_bert.py",
        unchecked="transformers 5 has no models in Flax",
        note="RoBERTa, ELECTRA and other encoders too; flax_model.msgpack, flattened, or its "
        "export to safetensors",
    ),
    _library(
        name="flax-gpt2",
        tensors={
            "c_attn.kernel": f"{_ALL_QKV} embed_dim",
            "c_attn.bias": _ALL_QKV.replace("w", "b"),
            "c_proj.kernel": "wo: out_dim (heads head_dim)",
            "c_proj.bias": "bo: out_dim",
        },
        where={"self": "h.{layer}.attn."},
        outside="tokens=wte.embedding positions=wpe.embedding final_norm=ln_f.scale* | h.{layer}. "
        "norm_1=ln_1.scale* norm_2=ln_2.scale* up=mlp.c_fc.kernel* down=mlp.c_proj.kernel*",
        source="transformers 4, models/gpt2/modeling_flax_gpt2.py, FlaxConv1D",
        unchecked="transformers 5 has no models in Flax",
        note="kernels here are stored as torch stores a linear layer, against the habit of Flax "
        "and against gpt2 itself",
    ),
    _library(
        name="keras",
        tensors=_three_axis_kernels(value_dim="value_dim", out="attention_output", mark="/"),
        source="keras-team/keras, keras/src/layers/attention/multi_head_attention.py",
        note="MultiHeadAttention, names as in variable.path behind the layer's own; its key_dim is "
        f"that of one head. {_ON_REQUEST}",
    ),
    _library(
        name="keras-gqa",
        tensors=_three_axis_kernels(kv_heads="kv_heads", out="attention_output", mark="/"),
        source="keras-team/keras, keras/src/layers/attention/grouped_query_attention.py",
        note=f"GroupQueryAttention; names as in keras. {_ON_REQUEST}",
    ),
    describe_layout(
        name="maxtext",
        tensors=_three_axis_kernels(kv_heads="kv_heads"),
        where={"self": "decoder.layers_{layer}.self_attention."},
        outside=catalogue.weights_outside_attention(
            "tokens=token_embedder.embedding final_norm=decoder.decoder_norm.scale | "
            "decoder.layers_{layer}. norm_1=pre_self_attention_layer_norm.scale "
            "norm_2=post_self_attention_layer_norm.scale gate=mlp.wi_0.kernel up=mlp.wi_1.kernel "
            "down=mlp.wo.kernel",
            columns=True,
        )
        | {"decoder.logits_dense.kernel": "unembedding: embed_dim vocabulary"},
        function=AttentionSpec(scale=1.0, rotary=RotaryRule()),
        rows="interleaved",
        source="AI-Hypercomputer/maxtext, src/MaxText/utils/ckpt_conversion/utils/param_mapping.py",
        unchecked="its layers are built only within its own configuration and device mesh",
        note="Llama 3.1, layers not scanned; files of Llama 2 and of Mistral have another order of "
        "rows. 1 / sqrt(head_dim) is multiplied into the query kernel, "
        "which no conversion undoes without rounding: the scale of what reads the result must be 1",
    ),
    describe_layout(
        name="t5x",
        tensors=projections(
            "query key value out", source="source_dim", biases="", leaves=_KERNEL, columns=True
        ),
        where={
            "encoder": "encoder.layers_{layer}.attention.",
            "decoder": "decoder.layers_{layer}.self_attention.",
            "cross": "decoder.layers_{layer}.encoder_decoder_attention.",
        },
        function=AttentionSpec(scale=1.0, score_bias=FROM_CONFIG),
        source="google-research/t5x, t5x/examples/t5/layers.py",
        unchecked="it is not released as a package",
        note="layers not scanned. One table of distances, relpos_bias.rel_embedding, of axes "
        "(heads buckets), serves all layers and stands outside of them",
    ),
    _library(
        name="haiku",
        tensors=projections("query key value linear", leaves=("/w", "/b"), columns=True, **APART),
        source="google-deepmind/dm-haiku, haiku/_src/attention.py",
        note=f"haiku.MultiHeadAttention: a module's name and its parameter's. {_ON_REQUEST}",
    ),
    _library(
        name="equinox",
        tensors=projections("query_proj key_proj value_proj output_proj", **APART),
        axes="length width",
        source="patrick-kidger/equinox, equinox/nn/_attention.py",
        note=f"equinox.nn.MultiheadAttention, of one sequence at a time. {_ON_REQUEST}",
    ),
    _library(
        name="levanter",
        tensors={
            "q_proj.weight": "wq: kv_heads group head_dim embed_dim",
            "k_proj.weight": "wk: kv_heads head_dim embed_dim",
            "v_proj.weight": "wv: kv_heads head_dim embed_dim",
            "o_proj.weight": "wo: out_dim heads head_dim",
            "q_proj.bias": "bq: kv_heads group head_dim",
            "k_proj.bias": "bk: kv_heads head_dim",
            "v_proj.bias": "bv: kv_heads head_dim",
            "o_proj.bias": "bo: out_dim",
        }
        | catalogue.head_norms("q_norm", "k_norm"),
        function=catalogue.left_to_config("scale softcap qk_norm", rotary=RotaryRule()),
        source="stanford-crfm/levanter, src/levanter/layers/attention.py",
        unchecked="it needs releases of JAX and Haliax that do not install beside the others",
        note="one layer's arrays of Haliax, whose axes have these names; layers are stacked in its "
        "own checkpoints, and its exports have the layout of Hugging Face",
    ),
)
