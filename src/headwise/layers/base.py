"""Attention layer without its call: options, sizes, modules, its part and initial values."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn, Self, get_args
from uuid import uuid4

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.function.gate import gate_width
from headwise.function.rotary import Rotary
from headwise.function.spec import DifferentialRule, GateKind, Latent, TemperatureRule, ValueRule
from headwise.function.weights import LAMBDAS
from headwise.layers.distance import DebertaBias, PlaceTables, PositionBias
from headwise.layers.norm import QKNorm
from headwise.layers.options import OPTIONS, POSITIONAL, check_type, refuse
from headwise.masks.clauses.band import Band
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.checks import check_probability, check_scale_and_softcap
from headwise.support.arguments import ArgumentAdvice, explain_arguments, renamed_arguments
from headwise.support.text import describe_value, nearest_counts

# ---- other libraries' names ---------------------------------------------------------------------
# Options of torch.nn.MultiheadAttention, and the one-to-one renames of transformers and
# x-transformers, each with what to pass here. docs/migrating.md has the full migration guide.

_DROP_IN = "headwise.MultiheadAttention has it"
_BIASES = "q_bias={value}, k_bias={value}, v_bias={value}, out_bias={value}"
_SOURCE_DIM = ArgumentAdvice("one width of the source of keys and values", "source_dim={value}")
_NO_HINT = ArgumentAdvice("a mask for each call, or a window", "window=(None, 0)")

CONSTRUCTOR = {
    "bias": ArgumentAdvice("one option for each projection", _BIASES),
    "attention_bias": ArgumentAdvice(
        "one option for each projection; which of them it means depends on the model", _BIASES
    ),
    "batch_first": ArgumentAdvice(
        "inputs (batch, length, embed_dim): the batch is always first",
        "leave out batch_first, and pass x.transpose(0, 1) where the length is first",
    ),
    "add_bias_kv": ArgumentAdvice(
        f"a layer without an extra learned key and value; {_DROP_IN}",
        "leave it out, or use headwise.MultiheadAttention(..., add_bias_kv=True)",
    ),
    "add_zero_attn": ArgumentAdvice(
        "sink=True, whose logit stays at 0",
        "Attention(..., sink=True), then layer.sink.requires_grad_(False)",
    ),
    "kdim": _SOURCE_DIM,
    "vdim": _SOURCE_DIM,
    "causal": _NO_HINT,
    "is_causal": _NO_HINT,
    "attn_mask": ArgumentAdvice("a mask for each call", "layer(x, mask=Mask.from_torch(m))"),
    "rope": ArgumentAdvice("a Rotary", "rotary=Rotary()"),
    "rope_theta": ArgumentAdvice("a Rotary", "rotary=Rotary(theta={value})"),
    "sliding_window": ArgumentAdvice(
        "(left, right), beside the query's own key", "window=(sliding_window - 1, 0)"
    ),
}
COUNTS = renamed_arguments(
    num_heads="nhead n_heads heads num_attention_heads",
    num_kv_heads="kv_heads n_kv_heads num_key_value_heads",
)
# Options with another name and the same meaning.
CONSTRUCTOR |= COUNTS | renamed_arguments(
    embed_dim="d_model hidden_size dim",
    head_dim="dim_head",
    value_dim="value_dim_head",
    out_dim="dim_out",
    source_dim="dim_context",
    dropout="dropout_p attention_dropout",
    softcap="attn_logit_softcapping logit_cap",
    scale="softmax_scale",
    sink="sinks",
)


# ---- the layer ---------------------------------------------------------------------------------

Source = Literal["torch-packed", "torch-separate", "einops", "gpt2", "t5"]


LATENTS = ["q_latent_proj", "q_latent_norm", "kv_latent_proj", "kv_latent_norm", "shared_k_proj"]


class AttentionBase(nn.Module):
    """Options, sizes and modules of `headwise.Attention`."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    out_dim: int
    source_dim: int
    rotary: Rotary | None
    qk_norm: QKNorm | None
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    score_bias: nn.Module | None
    sink: Tensor | None
    output_gate: GateKind | None
    gate_proj: nn.Module | None
    # Pickles of earlier versions have none of these.
    temperature: TemperatureRule | None = None
    clip: float | None = None
    values: ValueRule | None = None
    output_norm: QKNorm | None = None
    latent: Latent | None = None
    differential: DifferentialRule | None = None
    o_norm: nn.Module | None
    q_latent_proj: nn.Module | None
    q_latent_norm: nn.Module | None
    kv_latent_proj: nn.Module | None
    kv_latent_norm: nn.Module | None
    shared_k_proj: nn.Module | None
    identity: str  # the owner of the caches that this layer makes
    proof: str = ""  # of a load: against which class, or why there is none
    part: HeadPart | None = None  # the heads that this module computes, if not all

    @explain_arguments(
        CONSTRUCTOR,
        beyond=lambda values: ArgumentAdvice(  # as in torch, where the third is dropout
            "every option after embed_dim and num_heads by name",
            f"dropout={describe_value(values[2])}",
        ),
    )
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        source_dim: int | None = None,
        q_bias: bool = True,
        k_bias: bool | None = None,
        v_bias: bool | None = None,
        out_bias: bool = True,
        rotary: Rotary | None = None,
        score_bias: PositionBias | None = None,
        qk_norm: QKNorm | None = None,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: bool = False,
        output_gate: GateKind | None = None,
        gate_bias: bool = True,
        temperature: TemperatureRule | None = None,
        clip: float | None = None,
        values: ValueRule | None = None,
        output_norm: QKNorm | None = None,
        latent: Latent | None = None,
        latent_bias: bool = False,
        differential: DifferentialRule | None = None,
        dropout: float = 0.0,
        init: Source = "torch-packed",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.identity = embed_dim, num_heads, uuid4().hex
        self._set_sizes(num_kv_heads, head_dim, value_dim, out_dim, source_dim)
        self.rotary, self.qk_norm, self.window, self.scale = rotary, qk_norm, window, scale
        self.softcap, self.output_gate, self.temperature = softcap, output_gate, temperature
        self.clip, self.values, self.output_norm = clip, values, output_norm
        self.differential, self.dropout, self.init = differential, dropout, init
        if latent is not None:
            self._take_latent(latent, k_bias=bool(k_bias), v_bias=bool(v_bias))
        check_options(self, score_bias, crosses=source_dim is not None, dtype=dtype)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        biases = [latent is None if each is None else each for each in (k_bias, v_bias)]
        self._make_projections((q_bias, *biases, out_bias), latent_bias=latent_bias, **options)
        self._make_optional_parts(score_bias, sink=sink, gate_bias=gate_bias, **options)
        self.reset_parameters()

    def _make_projections(
        self, biases: tuple[bool, ...], *, latent_bias: bool, **options: Any
    ) -> None:
        heads, kv_heads, latent = self.num_heads, self.num_kv_heads, self.latent
        from_x, from_source, key_dim = self.embed_dim, self.source_dim, self.head_dim
        if latent is not None:
            self._make_latents(latent, latent_bias, **options)
            from_x, from_source = latent.query_rank or from_x, latent.rank
            key_dim -= latent.shared_width
        of_q, of_k, of_v, of_out = biases
        self.q_proj = nn.Linear(from_x, heads * self.head_dim, of_q, **options)
        self.k_proj = nn.Linear(from_source, kv_heads * key_dim, of_k, **options)
        self.v_proj = nn.Linear(from_source, kv_heads * self.value_dim, of_v, **options)
        self.out_proj = nn.Linear(heads * self.value_dim, self.out_dim, of_out, **options)

    def _set_sizes(
        self,
        num_kv_heads: int | None,
        head_dim: int | None,
        value_dim: int | None,
        out_dim: int | None,
        source_dim: int | None,
    ) -> None:
        embed_dim, num_heads = self.embed_dim, self.num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive_whole_numbers(embed_dim=embed_dim, num_heads=num_heads)
        self.head_dim = width_of_head(embed_dim, num_heads, head_dim)
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.out_dim = embed_dim if out_dim is None else out_dim
        self.source_dim = embed_dim if source_dim is None else source_dim

    def _make_optional_parts(
        self, score_bias: PositionBias | None, *, sink: bool, gate_bias: bool, **options: Any
    ) -> None:
        heads, kind, norm = self.num_heads, self.output_gate, self.qk_norm
        each = (1, 1) if norm and norm.over == "head" else (heads, self.num_kv_heads)
        self.q_norm, self.k_norm = (
            None if norm is None else norm.module(n * self.head_dim, **options) for n in each
        )
        sizes: dict[str, Any] = {}
        if isinstance(score_bias, DebertaBias):
            sizes = {n: getattr(self, n) for n in ("num_kv_heads", "head_dim", "embed_dim")}
        self.score_bias = score_bias.module(heads, **sizes, **options) if score_bias else None
        norm, width = self.output_norm, self.value_dim
        if norm is not None:
            width *= heads if norm.over == "width" else 1
        self.o_norm = None if norm is None else norm.module(width, **options)
        self.sink = nn.Parameter(torch.empty(heads, **options)) if sink else None
        for name in LAMBDAS if self.differential else ():
            setattr(self, name, nn.Parameter(torch.empty(self.head_dim, **options)))
        gates = 0 if kind is None else heads * gate_width(kind, self.value_dim)
        self.gate_proj = nn.Linear(self.embed_dim, gates, gate_bias, **options) if gates else None

    def _take_latent(self, latent: Latent, *, k_bias: bool, v_bias: bool) -> None:
        """Take a latent as an option; a rotation turns the shared key alone."""
        _check_latent(self, latent, k_bias=k_bias, v_bias=v_bias)
        self.latent, rotary = latent, self.rotary
        if isinstance(rotary, Rotary) and rotary.width is None:
            self.rotary = replace(rotary, width=latent.shared_width)

    def _make_latents(self, latent: Latent, bias: bool, **options: Any) -> None:
        def make(width: int) -> nn.Linear:
            return nn.Linear(self.embed_dim, width, bias, **options)

        norm, query_rank = QKNorm(eps=latent.eps), latent.query_rank
        self.q_latent_proj = make(query_rank) if query_rank else None
        self.q_latent_norm = norm.module(query_rank, **options) if query_rank else None
        self.kv_latent_proj, self.shared_k_proj = make(latent.rank), make(latent.shared_width)
        self.kv_latent_norm = norm.module(latent.rank, **options) if latent.normed else None

    def reset_parameters(self) -> None:
        """Initialise all parameters: projections as in ``init``, the sink to 0."""
        initialise_projections(self, self.init)
        if self.sink is not None:
            nn.init.zeros_(self.sink)
        for name in LAMBDAS if self.differential else ():
            nn.init.normal_(getattr(self, name), std=0.1)  # as in DiffLlama
        latents = [getattr(self, name, None) for name in LATENTS]
        modules = (self.q_norm, self.k_norm, self.o_norm, self.score_bias, self.gate_proj)
        for module in (*modules, *latents):
            if reset := getattr(module, "reset_parameters", None):  # ALiBi and None have none
                reset()

    @property
    def applies_dropout(self) -> bool:
        """True if the next forward pass applies dropout."""
        return self.training and self.dropout > 0

    @property
    def place_tables(self) -> PlaceTables | None:
        """The module of DeBERTa's terms, which makes a bias of queries and keys in each call."""
        return self.score_bias if isinstance(self.score_bias, PlaceTables) else None

    @property
    def takes_positions(self) -> bool:
        """True if positions of tokens act, other than by the distances of masks and biases."""
        return self.rotary is not None or self.temperature is not None

    @property
    def _head_counts(self) -> tuple[int, int]:
        if self.part is None:
            return self.num_heads, self.num_kv_heads
        return len(self.part.heads), len(self.part.kv_heads)

    def extra_repr(self) -> str:
        """Return the sizes and the options that differ from their defaults, modules left out."""
        parts = [f"{self.embed_dim} to {self.num_heads} heads of {self.head_dim}"]
        if self.part is not None:
            parts.append(f"{self.part} here")
        if self.num_kv_heads != self.num_heads:
            parts.append(f"{self.num_kv_heads} kv_heads")
        usual = {"value_dim": self.head_dim, "source_dim": self.embed_dim}
        for name in (*usual, "scale", *OPTIONS):
            option = getattr(self, name)
            if option != usual.get(name) and not isinstance(option, nn.Module | QKNorm):
                parts.append(f"{name}={option}")
        if self.sink is not None:
            parts.append("sink")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        if self.proof:
            parts.append(self.proof)
        return ", ".join(parts)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Copy the layer; a cache belongs to the copy only if it is copied in the same call."""
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)], memo[self.identity] = copied, uuid4().hex
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.identity = memo[self.identity]
        return copied


# ---- options ------------------------------------------------------------------------------------


def width_of_head(embed_dim: int, num_heads: int, head_dim: int | None) -> int:
    """Return head_dim, by default embed_dim / num_heads; OptionError if that is not whole."""
    if head_dim is not None:
        return head_dim
    if num_heads < 1 or embed_dim % num_heads:
        near = nearest_counts(num_heads, lambda n: embed_dim % n == 0, most=embed_dim)
        raise OptionError(
            saw=f"embed_dim={embed_dim}, num_heads={num_heads} and no head_dim",
            needed="embed_dim divisible by num_heads, or an explicit head_dim",
            do=f"num_heads={near}, or head_dim={max(1, embed_dim // max(1, num_heads))}",
        )
    return embed_dim // num_heads


def check_positive_whole_numbers(**counts: int) -> None:
    """Raise OptionError unless every count is a whole number from 1."""
    for name, count in counts.items():
        if not isinstance(count, (int, torch.SymInt)) or count < 1:
            raise OptionError(
                saw=f"{name}={describe_value(count)}",
                needed="a whole number from 1",
                do=f"set {name}",
            )


def check_options(
    layer: AttentionBase,
    score_bias: PositionBias | None,
    *,
    crosses: bool,
    dtype: torch.dtype | None,
) -> None:
    counts = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_dim", "out_dim")
    check_positive_whole_numbers(**{name: getattr(layer, name) for name in (*counts, "source_dim")})
    if layer.num_heads % layer.num_kv_heads:
        divisors = (n for n in range(1, layer.num_heads + 1) if layer.num_heads % n == 0)
        raise OptionError(
            saw=f"num_heads={layer.num_heads} and num_kv_heads={layer.num_kv_heads}",
            needed="num_heads divisible by num_kv_heads: each kv head serves a group of heads",
            do="num_kv_heads=" + ", ".join(map(str, divisors)),
        )
    _check_option_types(layer, score_bias)
    for name in POSITIONAL:
        option = score_bias if name == "score_bias" else getattr(layer, name)
        if crosses and option is not None:
            refuse_in_cross_attention(name, option, f"source_dim={layer.source_dim}")
    if isinstance(score_bias, DebertaBias):
        for name, other in {"rotary": layer.rotary, "latent": layer.latent}.items():
            if other is not None:
                raise OptionError(
                    saw=f"score_bias={score_bias} with {name}={other}",
                    needed="one of the two: DeBERTa's terms are of plain queries and keys",
                    do=f"leave out {name}",
                )
    if layer.differential is not None and (layer.latent or layer.num_kv_heads % 2):
        raise OptionError(
            saw=f"{layer.differential} with num_kv_heads={layer.num_kv_heads} and "
            f"latent={layer.latent}",
            needed="an even number of kv heads, for pairs of heads, and no latent",
            do="set num_kv_heads, or leave out one of the two",
        )
    if layer.rotary is not None:
        layer.rotary.rotated_width(layer.head_dim)
    check_scale_and_softcap(layer.scale, layer.softcap, dtype=dtype or torch.get_default_dtype())
    check_probability(layer.dropout)


def _check_latent(layer: AttentionBase, latent: Any, *, k_bias: bool, v_bias: bool) -> None:
    check_type("latent", latent)
    if latent.rank is None or latent.shared_width is None:
        refuse("latent", str(latent))
    ranks = {"rank": latent.rank, "shared_width": latent.shared_width}
    if latent.query_rank is not None:
        ranks["query_rank"] = latent.query_rank
    check_positive_whole_numbers(**ranks)
    width, rotary = latent.shared_width, layer.rotary
    if isinstance(rotary, Rotary) and rotary.width not in (None, width):
        raise OptionError(
            saw=f"{rotary} beside a latent with shared_width={width}",
            needed="a rotation of the shared key, whole",
            do=f"Rotary(width={width}), or leave out its width",
        )
    if rotary is not None and width % 2:
        raise OptionError(
            saw=f"shared_width={width} with a rotation",
            needed="an even number of channels: two of them turn together",
            do=f"shared_width={width + 1}, or leave out rotary",
        )
    if width >= layer.head_dim:
        raise OptionError(
            saw=f"shared_width={width} in a head_dim of {layer.head_dim}",
            needed="a head_dim that also holds channels of the latent: it is their sum",
            do=f"head_dim={width} + the channels without rotation, such as {3 * width}",
        )
    others = {
        "num_kv_heads": (layer.num_kv_heads, layer.num_heads),
        "source_dim": (layer.source_dim, layer.embed_dim),
        "qk_norm": (layer.qk_norm, None),
        "clip": (layer.clip, None),
        "values": (layer.values, None),
        "k_bias": (k_bias, False),
        "v_bias": (v_bias, False),
    }
    for name, (value, usual) in others.items():
        if value != usual:
            raise OptionError(
                saw=f"{name}={value} with a latent",
                needed=f"{name}={usual}: one latent of x serves all heads, without a bias",
                do=f"leave out {name}",
            )


def refuse_in_cross_attention(name: str, option: object, source: str) -> NoReturn:
    raise OptionError(
        saw=f"{name}={option} with {source}",
        needed="one or the other: positions in x and in the source have no distance",
        do=f"leave out {name}; pass the call a Mask or ScoreBias with align=... instead",
    )


def _check_option_types(layer: AttentionBase, score_bias: object) -> None:
    for name in OPTIONS:
        check_type(name, score_bias if name == "score_bias" else getattr(layer, name))
    clip, norm = layer.clip, layer.output_norm
    if clip is not None and not 0 < clip < math.inf:
        refuse("clip", describe_value(clip))
    if norm is not None and norm.over == "head" and norm.has_weight:
        raise OptionError(
            saw=f"output_norm={norm}",
            needed='over="width" for a learned weight, or has_weight=False for each head',
            do='QKNorm(over="width") as in BitNet, or QKNorm(has_weight=False)',
        )
    window = layer.window
    if window is not None and len(window) != 2:
        refuse("window", describe_value(window))
    if window is not None:
        # This refuses a side that is no number from 0.
        (band,) = Mask.window(*window).clauses_of_kind(Band)
        layer.window = band.sides  # Python integers: those of NumPy may wrap


# ---- initial values ------------------------------------------------------------------------------
# As in other libraries, by name. Each draws from the distribution of its source for the same sizes.
# Scores have the source's size too: the queries' projection is multiplied by the source's scale
# over the layer's scale. (A qk_norm removes that factor; the sources have none.)


def initialise_projections(
    layer: AttentionBase, source: Source, *, num_layers: int | None = None
) -> None:
    """Initialise the projections of ``layer`` in place.

    After the same seed, torch, einops and T5 give the very numbers of the source, where the source
    has such a layer.

    * ``torch-packed``: nn.MultiheadAttention with one in_proj_weight; Xavier uniform over all
      three projections at once (torch/nn/modules/activation.py).
    * ``torch-separate``: nn.MultiheadAttention with kdim or vdim; Xavier uniform for each.
    * ``einops``: normal with the fan of one head, sqrt(2 / (embed_dim + head_dim)), and Xavier
      normal for the output (arogozhnikov/einops, docs/pytorch-examples.html, on the transformer).
    * ``gpt2``: normal with 0.02; with ``num_layers``, the number of layers of the model,
      0.02 / sqrt(2 * num_layers) for the output (Radford et al. 2019, section 2.3).
    * ``t5``: normal with (embed_dim * head_dim)**-0.5 for queries, embed_dim**-0.5 for keys and
      values, (num_heads * value_dim)**-0.5 for the output; T5 does not scale its scores
      (arXiv:1910.10683; transformers/models/t5/modeling_t5.py).

    Biases are 0, except for ``einops``, where they are drawn as in nn.Linear.

    Raises:
        OptionError: a source that is not among these, or num_layers for another than gpt2.
    """
    layers_fit = num_layers is None or (source == "gpt2" and num_layers >= 1)
    if source not in get_args(Source) or not layers_fit:
        layers = "" if num_layers is None else f" with num_layers={num_layers}"
        raise OptionError(
            saw=f"init={describe_value(source)}{layers}",
            needed=f"one of {', '.join(get_args(Source))}; num_layers, from 1, goes with gpt2",
            do='e.g. init="torch-packed"',
        )
    q, k, v, out = layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj
    if source in ("torch-packed", "torch-separate"):
        _initialise_torch(q, k, v, out, packed=source == "torch-packed")
    elif source == "einops":
        initialise_as_einops_page(q, k, v, out, head_dim=layer.head_dim, value_dim=layer.value_dim)
    else:
        output = 0.02 if num_layers is None else 0.02 / math.sqrt(2 * num_layers)
        stds = (0.02, 0.02, 0.02, output)
        if source == "t5":
            of_source = layer.source_dim**-0.5
            output = (layer.num_heads * layer.value_dim) ** -0.5
            stds = ((layer.embed_dim * layer.head_dim) ** -0.5, of_source, of_source, output)
        for projection, std in zip((q, k, v, out), stds, strict=True):
            nn.init.normal_(projection.weight, std=std)
    for projection in () if source == "einops" else (q, k, v, out):
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)
    _rescale_query_projection(layer, 1.0 if source == "t5" else layer.head_dim**-0.5)


def initialise_as_einops_page(
    q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear, *, head_dim: int, value_dim: int
) -> None:
    """Initialise four projections as einops' page does, in its order."""
    for projection in (q, k, v):
        projection.reset_parameters()
    for projection, width in ((q, head_dim), (k, head_dim), (v, value_dim)):
        nn.init.normal_(projection.weight, std=math.sqrt(2 / (projection.in_features + width)))
    out.reset_parameters()
    nn.init.xavier_normal_(out.weight)


def _initialise_torch(
    q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear, *, packed: bool
) -> None:
    # The output first, with its bias, and the bound as two roots: bit for bit torch's numbers.
    out.reset_parameters()
    together = q.out_features + k.out_features + v.out_features
    for projection in (q, k, v):
        width = together if packed else projection.out_features
        bound = math.sqrt(3) * math.sqrt(2 / (projection.in_features + width))
        nn.init.uniform_(projection.weight, -bound, bound)


@torch.no_grad()
def _rescale_query_projection(layer: AttentionBase, source_scale: float) -> None:
    layer_scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    if layer_scale in (0.0, source_scale):
        return
    # Clamped so that products stay finite in the layer's dtype.
    largest = math.sqrt(torch.finfo(layer.q_proj.weight.dtype).max)
    ratio = abs(source_scale / layer_scale)
    factor = math.copysign(min(max(ratio, 1 / largest), largest), layer_scale)
    for parameter in layer.q_proj.parameters():
        parameter.mul_(factor)


# ---- a part of the heads ------------------------------------------------------------------------


class HeadPart:
    """Query heads in a row, and the kv heads that they use, of a module that computes no others.

    The outputs of all parts add up to the output of the layer. The arguments of a call (mask, score
    bias, gate) are those of all heads.

    The projections of a module with a part give the channels of these heads alone. A subclass may
    change gradients of inputs, and choose its share of a parameter.
    """

    def __init__(self, heads: range, *, num_heads: int, num_kv_heads: int) -> None:
        self.heads, self.num_heads, self.num_kv_heads = heads, num_heads, num_kv_heads
        group = num_heads // num_kv_heads
        # the kv heads that the query heads use
        self.kv_heads = range(heads.start // group, (heads.stop - 1) // group + 1)
        used = [head // group - self.kv_heads.start for head in heads]
        each = max(1, len(heads) // len(self.kv_heads))
        is_even = used == [head // each for head in range(len(heads))]
        self._kv_of_head = None if is_even else used

    def check_inputs_and_sum_gradients(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the float inputs of a call, by name, as the part computes with them."""
        return dict(inputs)

    def own_share_of_parameter(self, parameter: Tensor) -> Tensor:
        return parameter

    def weights_of_all_heads(self, weights: Tensor, *, average: bool) -> Tensor:
        """Return the weights that a call returns, from those of these heads.

        ``average`` is True for their mean, (batch, queries, keys), whose share of the mean over
        all heads is returned.
        """
        return weights * (len(self.heads) / self.num_heads) if average else weights

    def mask(self, mask: Mask, *, device: torch.device, **sizes: int) -> Mask:
        """Return the mask of these heads, for ``sizes`` of batch, queries and keys.

        Raises:
            MaskError: made for other sizes than those of all heads.
        """
        if not mask.clauses:
            return mask
        mask.bind(**sizes, heads=self.num_heads, device=device)
        return mask.of_heads(self._indices_of_own_heads(device))

    def score_bias(self, bias: ScoreBias, *, device: torch.device, **sizes: int) -> ScoreBias:
        """Return the score bias of these heads; arguments and errors as in `mask`."""
        if not bias.all_tensors():
            return bias
        bias.check(**sizes, heads=self.num_heads, device=device)
        return bias.of_heads(self._indices_of_own_heads(device))

    def cut_channels(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Return the channels of these heads of an axis that holds those of all heads."""
        width = tensor.shape[dim] // self.num_heads
        return tensor.narrow(dim, self.heads.start * width, len(self.heads) * width)

    def share_kv(self, x: Tensor) -> Tensor:
        """Return keys or values with as many heads as the queries, where groups are uneven."""
        if self._kv_of_head is None:
            return x
        return x.index_select(1, torch.tensor(self._kv_of_head, device=x.device))

    def _indices_of_own_heads(self, device: torch.device) -> Tensor:
        return torch.arange(self.heads.start, self.heads.stop, device=device)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Self:
        """Return the part itself, which never changes."""
        return self

    def __str__(self) -> str:
        first, last = self.heads.start, self.heads.stop - 1
        return f"heads {first} to {last}" if first < last else f"head {first}"
