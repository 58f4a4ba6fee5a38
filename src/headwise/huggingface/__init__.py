"""Support for Hugging Face models: attention and masks for transformers' attention interface."""

from __future__ import annotations

from headwise.errors import MissingExtraError

NAME = "headwise"
OLDEST = 5  # first version in which models look up both functions by name


def register_huggingface() -> str:
    """Register headwise as an attention implementation of transformers, and return its name.

        headwise.register_huggingface()
        model = AutoModel.from_pretrained(model_dir, attn_implementation="headwise")

    ``model.set_attn_implementation("headwise")`` switches an existing model. Both work for every
    model that uses transformers' attention interface. A model that computes attention in its own
    code raises an error when it makes its mask. A few such models (DeBERTa, FlauBERT) make no mask,
    and keep using their own code under every name; ``set_attn_implementation`` warns about them.

    Repeated calls have no effect. `headwise.huggingface.masks` lists the masks that stay lazy, and
    `headwise.huggingface.attention` the supported options.

    Raises:
        MissingExtraError: transformers is not installed, or is older than 5.0.
    """
    try:
        import transformers
    except ImportError as error:
        raise _missing_transformers_error("transformers is not installed") from error
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise _missing_transformers_error(f"transformers {transformers.__version__}")

    from headwise.huggingface.attention import attend
    from headwise.huggingface.masks import make_transformers_mask, select_trusted_readers

    select_trusted_readers()  # checks the mask functions of transformers before a first call
    transformers.AttentionMaskInterface.register(NAME, make_transformers_mask)
    transformers.AttentionInterface.register(NAME, attend)
    return NAME


def _missing_transformers_error(saw: str) -> MissingExtraError:
    needed = f"transformers {OLDEST}.0 or newer: its models look up attention and masks by name"
    return MissingExtraError(saw=saw, needed=needed, do="pip install 'headwise[huggingface]'")
