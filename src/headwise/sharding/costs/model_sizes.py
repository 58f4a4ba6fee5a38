"""Sizes of a model, read from its config: heads, widths, layers and windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwise.checkpoints.config import (
    Config,
    ConfigFields,
    attention_window,
    layout_name,
    read_config,
    read_config_file,
    read_head_dim,
    read_stated_counts,
    text_config,
)
from headwise.errors import OptionError

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_MLP = ("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim", "n_inner")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LATENT = ("kv_lora_rank", "q_lora_rank")  # keys and values are projected from a latent vector
# Layouts of models whose MLP has a gate, unless its activation is one of those below.
_GATED = (
    *("chameleon", "cohere", "gemma2", "gemma3", "glm", "granite", "hunyuan", "internlm2", "lfm2"),
    *("llama", "modernbert", "olmo2", "phi3", "qwen2", "qwen3"),
)
_WITHOUT_GATE = ("relu2", "xielu")  # Arcee and Apertus
_KINDS = {"full_attention", "sliding_attention", "global", "local"}


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model of equal layers, and what the counts leave out.

    Attributes:
        layers: the number of layers.
        embed_dim: width of the tokens between layers.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: width of a query, a key and a value.
        hidden_dim: width within the MLP; 0 if the MLP is not counted.
        mlp_matrices: 3 with a gate, else 2.
        vocabulary: number of tokens that exist; 0 if the config has none.
        is_tied: True if the embedding and the unembedding are one matrix.
        windows: keys that a query may attend to, for each layer; None for all.
        notes: what is not counted, as sentences.
    """

    layers: int
    embed_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_dim: int = 0
    mlp_matrices: int = 3
    vocabulary: int = 0
    is_tied: bool = False
    windows: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def attention_weights(self) -> int:
        """Numbers in the four matrices of a layer; biases and norms are not counted."""
        return 2 * self.embed_dim * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Numbers in the matrices of the MLP of a layer."""
        return self.mlp_matrices * self.embed_dim * self.hidden_dim

    @property
    def vocabulary_weights(self) -> int:
        """Numbers in the embedding and the unembedding."""
        return (1 if self.is_tied else 2) * self.vocabulary * self.embed_dim

    @property
    def weights(self) -> int:
        """Numbers in all matrices of the model."""
        return self.layers * (self.attention_weights + self.mlp_weights) + self.vocabulary_weights

    @classmethod
    def of(cls, model: Path | str | Config) -> ModelSizes:
        """Return the sizes that a config states.

        Args:
            model: a folder with config.json, a file with such a config, or its fields.

        Raises:
            OptionError: the config states no attention, or one of another form.
        """
        fields = _load_config_fields(model)
        sizes = text_config(fields)
        _require_plain_attention(fields, sizes)
        counts = read_stated_counts(fields)
        counts["layers"] = _first_count(sizes, _LAYERS) or 0
        counts["embed_dim"] = _first_count(sizes, _WIDTH) or 0
        needed = {"heads": "num_attention_heads", "layers": _LAYERS[0], "embed_dim": _WIDTH[0]}
        missing = [name for size, name in needed.items() if not counts.get(size)]
        if missing:
            raise OptionError(
                saw=f"{fields.origin} without {', '.join(missing)}",
                needed="the config of a transformer, which states its heads, layers and widths",
                do="name the folder of a model, or its config.json",
            )
        heads, embed_dim, layers = counts["heads"], counts["embed_dim"], counts["layers"]
        head_dim = read_head_dim(sizes, counts) or embed_dim // heads
        kv_heads = counts.get("kv_heads", heads)
        if heads % kv_heads:
            raise OptionError(
                saw=f"{heads} heads and {kv_heads} kv heads in {fields.origin}",
                needed="kv heads that divide the heads",
                do="correct the config",
            )
        hidden_dim, matrices, mlp_notes = _read_mlp(fields, sizes, embed_dim)
        windows, window_notes = _read_windows(fields, layers)
        return cls(
            layers=layers,
            embed_dim=embed_dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_dim=hidden_dim,
            mlp_matrices=matrices,
            vocabulary=sizes.count("vocab_size") or 0,
            is_tied=fields.flag("tie_word_embeddings", default=True),
            windows=windows,
            notes=(*mlp_notes, *window_notes),
        )


def _load_config_fields(model: Path | str | Config) -> ConfigFields:
    if not isinstance(model, str | Path):
        return ConfigFields.wrap(model)
    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file():
        return read_config(path)
    if path.is_file() and path.suffix == ".json":
        return read_config_file(path)
    raise OptionError(
        saw=f"{path} is no config" if path.is_file() else f"{path} has no config.json",
        needed="the folder of a model with its config.json, or a file with such a config",
        do="write the config of the model's publisher into a file; no weights are needed",
    )


def _require_plain_attention(fields: ConfigFields, sizes: ConfigFields) -> None:
    kinds = {kind for kind in sizes.layer_values("layer_types") if kind not in _KINDS}
    latent = [name for name in _LATENT if sizes.get(name)]
    saw = ""
    if fields.flag("is_encoder_decoder"):
        saw = "an encoder and a decoder, whose lengths differ"
    elif latent:
        saw = f"{latent[0]}: keys and values of a latent vector"
    elif kinds:
        saw = f"layers without attention ({min(map(str, kinds))})"
    if saw:
        raise OptionError(
            saw=f"{fields.origin} describes {saw}",
            needed="a model of equal layers, with attention whose keys and values are projections",
            do="compute the plan for a model of the same heads and widths",
        )


def _read_mlp(
    fields: ConfigFields, sizes: ConfigFields, embed_dim: int
) -> tuple[int, int, list[str]]:
    """Return the width within the MLP, its matrices, and notes."""
    if (_first_count(sizes, _EXPERTS) or 1) > 1:
        return 0, 3, ["The MLP is not counted: its experts are divided in ways of their own."]
    name, width = layout_name(fields), _first_count(sizes, _MLP)
    if width is None and "n_inner" in sizes:
        width = 4 * embed_dim  # null in a GPT-2
    if width is None or name is None:
        lacks = "width of it" if width is None else "model_type of the catalogue"
        return 0, 3, [f"The MLP is not counted: the config states no {lacks}."]
    has_gate = name in _GATED and sizes.text("hidden_act") not in _WITHOUT_GATE
    return width, 3 if has_gate else 2, []


def _read_windows(fields: ConfigFields, layers: int) -> tuple[tuple[int | None, ...], list[str]]:
    try:
        return tuple(attention_window(fields, layer) for layer in range(layers)), []
    except OptionError:
        return (None,) * layers, [
            "Every layer attends to all keys: the config states a window, and not which layers "
            "have it."
        ]


def _first_count(fields: ConfigFields, names: tuple[str, ...]) -> int | None:
    counts = (fields.count(name) for name in names)
    return next((count for count in counts if count is not None), None)
