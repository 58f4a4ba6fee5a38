"""Multi-head attention as it is taught: the paper, its code, and what people learn it from."""

from headwise.layouts import catalogue
from headwise.layouts.catalogue import both_sides, describe_layout, projections
from headwise.layouts.catalogue.decoders_fused import GPT2

LAYOUTS = (
    describe_layout(
        name="per-head",
        tensors={
            "wq": "wq: heads head_dim embed_dim",
            "wk": "wk: kv_heads head_dim source_dim",
            "wv": "wv: kv_heads value_dim source_dim",
            "wo": "wo: (heads value_dim) out_dim",
            "bq": "bq: heads head_dim",
            "bk": "bk: kv_heads head_dim",
            "bv": "bv: kv_heads value_dim",
            "bo": "bo: out_dim",
        },
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2",
        note="one matrix for each head: the transposes of the paper's W_i^Q, W_i^K and W_i^V, and "
        "its W^O. The paper has no biases",
    ),
    describe_layout(
        name="tensor2tensor",
        tensors=projections(
            "q k v output_transform",
            source="source_dim",
            value="value_dim",
            biases="",
            leaves=("/kernel", ""),
            columns=True,
        ),
        where=both_sides(
            "transformer/body/{side}/layer_{layer}/",
            "self_attention/multihead_attention/",
            "encdec_attention/multihead_attention/",
        ),
        mask="added",
        source="tensorflow/tensor2tensor, tensor2tensor/layers/common_attention.py",
        note="the paper's own code; TensorFlow's kernels are (in, out), and there are no biases",
    ),
    describe_layout(
        name="annotated",
        tensors=projections("linears.0 linears.1 linears.2 linears.3"),
        where=both_sides("{side}.layers.{layer}.", "self_attn.", "src_attn."),
        mask="True attends",
        source="harvardnlp/annotated-transformer, the_annotated_transformer.py",
    ),
    describe_layout(
        name="einops",
        tensors=projections("w_qs w_ks w_vs fc", **catalogue.APART),
        where=both_sides("{side}.layer_stack.{layer}.", "slf_attn.", "enc_attn."),
        beside=("layer_norm.*",),
        source="arogozhnikov/einops, docs/pytorch-examples.html",
        note="the example of einops' page, before and after; jadore801120's "
        "attention-is-all-you-need-pytorch, which it rewrites, has the same names and no biases. "
        "Both end with a residual and layer_norm, which are not attention",
    ),
    describe_layout(
        name="nanogpt",
        tensors=catalogue.qkv_fused_by_projection("c_attn", "c_proj"),
        where={"self": "h.{layer}.attn."},
        outside=GPT2,
        beside=("bias",),
        source="karpathy/nanoGPT, model.py; karpathy/minGPT, mingpt/model.py",
        note="GPT-2's names for nn.Linear, whose matrices are the transposes of GPT-2's. Square "
        "ones, c_proj, look the same either way. `attn.bias` is a causal mask",
    ),
    describe_layout(
        name="mingpt",
        tensors=projections("query key value proj"),
        where={"self": "blocks.{layer}.attn."},
        beside=("mask",),
        source="karpathy/minGPT, mingpt/model.py, before 2022",
        unchecked="no package has it; a layer after its source is run",
        note="VQGAN took this code over. In 2022 its layer became that of nanogpt",
    ),
)
