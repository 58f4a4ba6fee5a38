"""Hugging Face models through headwise: the attention and the masks of transformers' interface."""

from __future__ import annotations

from headwise.errors import MissingExtraError

NAME = "headwise"
OLDEST = 5  # the first version whose models all take both functions by name


def register_huggingface() -> str:
    """Let transformers' models compute attention by `AttentionMatrix`; returns the name to ask for.

        headwise.register_huggingface()
        model = AutoModel.from_pretrained(place, attn_implementation="headwise")

    ``model.set_attn_implementation("headwise")`` switches a model that exists. Every model that
    goes through transformers' attention interface can be built or switched so. A model that
    computes attention by its own code cannot: it raises when it asks for its mask. The few of
    those that ask for none (DeBERTa, FlauBERT) go on by their own code, as they do under every
    name; ``set_attn_implementation`` warns of them.

    Calling it again changes nothing. `headwise.huggingface.masks` says which masks stay lazy,
    `headwise.huggingface.attention` what a model may hand over.

    Raises:
        MissingExtraError: transformers is not installed, or is older than 5.0.
    """
    try:
        import transformers
    except ImportError as error:
        raise _missing("transformers is not installed") from error
    if int(transformers.__version__.split(".")[0]) < OLDEST:
        raise _missing(f"transformers {transformers.__version__}")

    from headwise.huggingface.attention import attend
    from headwise.huggingface.masks import from_transformers, prepare

    prepare()
    transformers.AttentionMaskInterface.register(NAME, from_transformers)
    transformers.AttentionInterface.register(NAME, attend)
    return NAME


def _missing(saw: str) -> MissingExtraError:
    return MissingExtraError(
        saw=saw,
        needed=f"transformers from {OLDEST}.0: its models take attention and masks by name",
        do="pip install 'headwise[huggingface]'",
    )
