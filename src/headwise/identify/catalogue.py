"""All causes, one row each, in the order in which equal ones are named.

The prose about a cause is its page, ``causes/pages/NAME.md``. The function that looks for it is in
the module of ``causes`` for its stages; most causes of moved weights have none, since the moves
(`headwise.identify.moves`) that were found name their cause.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from headwise.function.records import STAGE_OF, STAGES, stages_of
from headwise.function.spec import AttentionSpec
from headwise.function.weights import NORMS

PAGES = Path(__file__).parents[1] / "diagnosis" / "causes" / "pages"


# How a cause is known; of those that explain the same, lower ones are listed first.
RANKS = ("a setting of configs", "a public report", "possible")
STATED, REPORTED, POSSIBLE = range(len(RANKS))


@dataclass(frozen=True)
class Cause:
    """A reason why two attentions differ.

    One that ``is_whole`` is named only where it explains all of its stages that part: it says that
    something is nowhere, which each of these stages can refute. The ``remedy`` may hold
    ``{weights}`` and ``{biases}`` of the roles that moved, the ``{text}`` of the move, and the
    ``{move}``.
    """

    name: str  # in a few words, as reports print it
    stages: tuple[str, ...]  # that it can change when those before them are given
    rank: int = POSSIBLE  # of `RANKS`
    cost: float = 1.0  # rank among causes that explain the same; a lower one is named first
    is_whole: bool = False
    is_statistical: bool = False  # numbers are only likely by this cause; exact ones come first
    remedy: str = "undo it in {weights}: {move}"  # makes weights right again that moved so
    unexpected: str = ""  # the name where the side in doubt has what the other one lacks

    @property
    def page(self) -> str:
        """The path of the page about it: ``.../rotary-theta.md`` in this package."""
        words = re.findall("[a-z0-9]+", self.name.lower().replace("'", ""))
        return str(PAGES / f"{'-'.join(words)}.md")


@dataclass(frozen=True)
class Page:
    """The page about a cause, without links to other files."""

    path: str  # of the file in the installed package
    title: str  # what people see and search for
    text: str  # everything below the title

    @classmethod
    def read(cls, path: str) -> Page:
        """Return the page in a file."""
        title, _, text = Path(path).read_text("utf-8").partition("\n")
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        return cls(path, title.removeprefix("# "), text.strip())

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return Path(self.path).stem

    @property
    def meaning(self) -> str:
        """The sentences that follow the name of the cause."""
        return self.text.partition("\n\n")[0].partition("**. ")[2]

    @property
    def repair(self) -> str:
        """The section about the repair."""
        return self.text.partition("## Repair\n\n")[2].partition("\n\n")[0]


PROJECTED = tuple(STAGE_OF.values())  # the stages that multiply by weights
NORMED = tuple(name for name, stage in STAGES.items() if {*NORMS} & {*stage.tensors})
ROTATED = STAGES["scores"].before
PLACED = (*ROTATED, "scores")  # the stages that depend on positions
SCORES, WEIGHTS = ("scores",), ("weights",)
# The stages in which heads meet keys and values, of all calls with a cache.
MIXED = tuple(name for name, stage in STAGES.items() if stage.cached)
WITH_HEADS = ("q", "k", "v", *MIXED, "output")
EVERY = tuple(stages_of(AttentionSpec()))  # of those that every function has
BY_NUMBER = "load each layer by its number"
OWN_TENSOR = "load {weights} from its own tensor: {text}"
NOT_LOADED = "load {weights}: not loaded, but initialised"

Q_AND_K_EXCHANGED = Cause("q and k exchanged", ("q", "k"), REPORTED)
K_AND_V_EXCHANGED = Cause("k and v exchanged", ("k", "v"), REPORTED)
Q_AND_V_EXCHANGED = Cause("q and v exchanged", ("q", "v"))
ANOTHER_ROLE = Cause("rows of another role", PROJECTED, cost=1.06, remedy=OWN_TENSOR)
FUSED_ROW_ORDER = Cause("order of fused rows", PROJECTED, REPORTED, cost=1.02)
FUSED_ROW_NESTING = Cause("nesting of fused rows", PROJECTED, REPORTED, cost=1.03)
FUSED_ROW_GROUPS = Cause("kv groups of fused rows", PROJECTED, REPORTED, cost=1.03)
FUSED_ROW_CUT = Cause("fused rows cut at another place", PROJECTED, cost=1.07)
HEADS_INTERLEAVED = Cause("heads interleaved", PROJECTED, REPORTED, cost=1.04)
HEADS_PERMUTED = Cause("heads permuted", PROJECTED, cost=1.05)
OUTPUT_GROUP_ORDER = Cause("output heads in another group order", PROJECTED, REPORTED, cost=1.04)
OUTPUT_RESHAPED = Cause(
    "output projection reshaped with exchanged axes", PROJECTED, REPORTED, cost=1.05
)
PROJECTION_RESHAPED = Cause("projection reshaped with exchanged axes", PROJECTED, cost=1.05)
MATRIX_TRANSPOSED = Cause(
    "square matrix transposed",
    PROJECTED,
    REPORTED,
    cost=1.02,
    remedy="transpose {weights}: weight.mT",
)
ROTARY_PERMUTATION_MISSING = Cause("rotary permutation missing", PROJECTED, REPORTED, cost=1.01)
ROTARY_PERMUTATION_DOUBLED = Cause("rotary permutation doubled", PROJECTED, REPORTED, cost=1.01)
ROTARY_PERMUTATION_HEADS = Cause(
    "rotary permutation with a wrong number of heads", PROJECTED, REPORTED, cost=1.02
)
ROTARY_PERMUTATION_WIDTH = Cause("rotary permutation of another width", PROJECTED, cost=1.03)
KV_HEADS_TILED = Cause("kv heads tiled instead of repeated", WITH_HEADS, REPORTED, cost=1.04)
SHARD_ORDER = Cause("shards joined in the wrong order", PROJECTED, REPORTED, cost=1.06)
SIGN = Cause("sign", ("q", "k", "v", "scores", "head outputs", "output"), cost=1.07)
FACTOR = Cause("factor", PROJECTED, REPORTED, cost=1.08)
ROWS_ZERO = Cause(
    "rows zero", PROJECTED, REPORTED, cost=1.07, remedy="load {weights} again: zero in {text}"
)
WEIGHTS_ROUNDED = Cause(
    "dtype's rounding of weights",
    PROJECTED,
    REPORTED,
    remedy="load the weights in a wider dtype than {text}",
)
BIAS_MISSING = Cause("bias missing", PROJECTED, STATED, remedy="load the biases {biases}")
INITIAL_WEIGHTS = Cause(
    "weights at their initial values", PROJECTED, REPORTED, is_statistical=True, remedy=NOT_LOADED
)
OUTPUT_PROJECTION_MISSING = Cause("output projection missing", ("output",))
MODULE_BYPASSED = Cause("projection never called", PROJECTED, cost=0.5)
ADAPTERS_MERGED = Cause("adapters merged or not", PROJECTED, REPORTED, cost=2.2)
SCALE = Cause("scale", SCORES, STATED)
ROTARY_THETA = Cause("rotary theta", ROTATED, STATED)
ROTARY_PAIRING = Cause("rotary pairing", ROTATED, STATED)
ROTARY_PARTIAL_WIDTH = Cause("rotary partial width", ROTATED, STATED)
ROTARY_DTYPE = Cause("rotary dtype", ROTATED)
ROTARY_EXPONENT_WIDTH = Cause("rotary exponent width", ROTATED, REPORTED, cost=0.9)
ROTARY_ATTENTION_FACTOR = Cause("rotary attention factor", ROTATED, STATED)
ROTARY_MISSING = Cause("rotary missing", ROTATED, STATED, cost=0.9, unexpected="rotary unexpected")
ROTARY_WHOLE_HEAD_PAIRS = Cause("rotary pairs across the whole head", ROTATED, REPORTED)
ROTARY_POSITION_OFFSET = Cause("rotary position offset", ROTATED)
ROTARY_DIRECTION = Cause("rotary direction", ROTATED, cost=0.95)
ROTARY_APPLIED_TWICE = Cause("rotary applied twice", ROTATED)
ROTARY_AXIS = Cause("rotary axis", ROTATED, REPORTED)
ROTARY_OTHER_CHANNELS = Cause("rotary on other channels", ROTATED)
ROTARY_OVER_HEADS = Cause("rotary over all heads at once", ROTATED, REPORTED)
ROTARY_ON_VALUES = Cause("rotary on values", ("v", "head outputs"), REPORTED)
ROTARY_SOME_HEADS = Cause("rotary on some heads only", ROTATED, REPORTED, cost=0.3)
ROTARY_SCALING_FACTOR = Cause("rotary scaling factor", ROTATED, STATED, cost=1.06)
ROTARY_SCALING_KIND = Cause("rotary scaling kind", ROTATED, STATED, cost=1.05)
QUERY_TEMPERATURE = Cause("temperature of queries", ("q after rotary",), STATED, cost=0.9)
QK_NORM_KIND = Cause("qk-norm kind", NORMED, STATED, is_whole=True)
QK_NORM_PLACE = Cause("qk-norm place", NORMED, REPORTED)
QK_NORM_WEIGHT_OFFSET = Cause("qk-norm weight offset", NORMED, REPORTED)
QK_NORM_EPS = Cause("qk-norm eps", NORMED, STATED, cost=1.1)
NORM_WEIGHTS_MISSING = Cause("norm weights missing", NORMED)
NORM_WEIGHTS_EXCHANGED = Cause("norm weights of q and k exchanged", NORMED)
NORM_WEIGHTS_ORDER = Cause("norm weights in another order", NORMED)
NORM_OF_ANOTHER_ROLE = Cause("norm on another role", ("v", *NORMED))
LATENT_NORM_MISSING = Cause(
    "latent norm missing", ("c",), STATED, unexpected="latent norm unexpected"
)
LATENT_NORM_EPS = Cause("latent norm eps", ("q", "c"), STATED, cost=1.1)
LATENT_FACTOR_MISSING = Cause(
    "latent factor missing", ("q", "c"), STATED, unexpected="latent factor unexpected"
)
SHARED_KEY_WIDTH = Cause("width of the shared key", ("q", "k_r"), STATED)
DIFFERENCE_FACTOR = Cause("factor of a difference", ("head outputs",), STATED, cost=0.9)
ROTATED_CHANNELS_PLACE = Cause(
    "rotated channels behind the others",
    PROJECTED,
    remedy="put the rows of {weights} that turn where the code expects them: {text}",
)
MSCALE_MISSING = Cause("mscale missing", SCORES, STATED, cost=0.8, unexpected="mscale unexpected")
MSCALE_OF_ANOTHER_FIELD = Cause("mscale for mscale_all_dim", SCORES, STATED, cost=0.8)
DISTANCE_BIAS_COEFFICIENT = Cause("distance bias coefficient", SCORES, STATED, cost=0.9)
DISTANCE_BIAS_SLOPE_RULE = Cause("distance bias slope rule", SCORES, REPORTED)
RELATIVE_BIAS_BUCKETS = Cause("relative bias buckets", SCORES, STATED)
RELATIVE_BIAS_REVERSED = Cause("relative bias reversed", SCORES)
RELATIVE_BIAS_RESHAPED = Cause("relative bias reshaped", SCORES)
TEMPERATURE_BY_LENGTH = Cause("temperature by length", SCORES, cost=1.05)
SCALE_TWICE = Cause("scale twice", SCORES, REPORTED, cost=1.2)
SOFTCAP = Cause("softcap", SCORES, STATED)
SINKS = Cause("sinks", WEIGHTS, REPORTED)
OUTPUT_GATE_MISSING = Cause("output gate missing", ("head outputs",), STATED, cost=0.9)
PART_LEFT_OUT = Cause(
    "part left out", ("q after norm", "k after norm", "head outputs"), STATED, cost=0.9
)
GATE_WITHOUT_SIGMOID = Cause("gate without sigmoid", ("head outputs",))
ANOTHER_COLUMN_CUT_OFF = Cause("another column cut off", WEIGHTS)
MASK_POLARITY = Cause("mask polarity", SCORES, REPORTED)
MASK_ALONG_QUERIES = Cause("mask along queries", SCORES)
MASK_AFTER_SOFTMAX = Cause("mask after the softmax", ("scores", "weights"))
PADDING_SIDE = Cause("padding side", SCORES)
PADDING_IGNORED = Cause("padding ignored", SCORES)
MASK_ADDED_AS_NUMBERS = Cause("mask added as 0/1", SCORES, REPORTED)
CAUSAL_MASK_MISSING = Cause("causal mask missing", SCORES, STATED, cost=0.9)
CAUSAL_MASK_INVERTED = Cause("causal mask inverted", SCORES)
CAUSAL_ALIGNMENT = Cause("causal alignment", SCORES, REPORTED, unexpected="causal mask unexpected")
WINDOW_MISSING = Cause("window missing", SCORES, STATED, cost=0.9)
WINDOW_SIDE = Cause("window on the wrong side", SCORES, cost=1.05)
WINDOW_OFF_BY_ONE = Cause("window off by one", SCORES, STATED, unexpected="window unexpected")
FINITE_FOR_INF = Cause("finite number for -inf", ("scores", "weights"), cost=1.1)
ROWS_WITHOUT_KEYS = Cause("rows without keys", WEIGHTS, REPORTED)
SOFTMAX_AXIS = Cause("softmax axis", WEIGHTS)
BATCH_SEQUENCE_EXCHANGED = Cause(
    "batch and sequence exchanged", (*PLACED, "head outputs"), REPORTED, cost=0.9
)
SOFTMAX_DTYPE = Cause("softmax dtype", WEIGHTS)
ONE_HEAD_FOR_ALL = Cause(
    "one head for all heads",
    ("q", "k", "v", "scores", "weights", "head outputs", "output"),
    cost=0.85,
)
ACTIVATIONS_DTYPE = Cause(
    "activations in a narrower dtype",
    ("k after norm", "scores", "head outputs", "output"),
    REPORTED,
    cost=1.2,
)
NUMBER_OF_HEADS = Cause("number of heads", WITH_HEADS, STATED)
HEADS_GONE = Cause("heads gone", EVERY, cost=1.5)
KV_HEADS_MERGED = Cause("kv heads merged", EVERY, cost=1.5)
SPLIT_WITHOUT_TRANSPOSE = Cause("split without transpose", ("q", "k", "v"), REPORTED)
MERGE_WITHOUT_TRANSPOSE = Cause("merge without transpose", ("output",), REPORTED)
BATCH_AND_HEADS = Cause("batch and heads in another order", ("q", "k", "v", *MIXED))
GATE_MERGED = Cause("gate merged without transpose", ("head outputs",))
ANOTHER_GROUP = Cause("kv head of another group", MIXED)
WEIGHTS_TRANSPOSED = Cause("weights transposed", ("head outputs",))
DROPOUT_LEFT_ON = Cause("dropout left on", WEIGHTS, STATED)
RESIDUAL_INSIDE = Cause("residual inside", ("output",))
NORM_INSIDE = Cause("norm inside", PROJECTED)
POSITION_IN_DECODING = Cause("position offset in decoding", PLACED, cost=0.7)
PADDING_IN_DECODING = Cause("left padding in decoding", PLACED, cost=0.7)
WINDOW_IN_DECODING = Cause("window in decoding", SCORES, cost=0.7)
EVICTED_KEYS = Cause("evicted keys", ("scores", "head outputs"), cost=0.75)
CACHED_VALUES_LOST = Cause("cached values lost", ("head outputs",), cost=0.75)
CACHE_JOINED_IN_ANOTHER_ORDER = Cause(
    "cache joined in another order", ("scores", "head outputs"), cost=0.8
)
LAYERS_EXCHANGED = Cause("layers exchanged", PROJECTED, remedy=BY_NUMBER)
LAYERS_OFF_BY_ONE = Cause("layers off by one", PROJECTED, remedy=BY_NUMBER)

CAUSES = tuple(each for each in [*globals().values()] if isinstance(each, Cause))


def cause_of_layer_shifts(shifts: AbstractSet[int]) -> Cause:
    """Return the cause of layers that moved by these numbers of places."""
    return LAYERS_OFF_BY_ONE if shifts in ({1}, {-1}) else LAYERS_EXCHANGED
