"""Stored transformers models: their folder, their tokenizer, and weights converted in memory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise.checkpoints import description, safetensors, source, torch_file
from headwise.checkpoints.config import CUT, layout_name, read_config
from headwise.errors import CheckpointError, OptionError
from headwise.layouts._layout import Layout
from headwise.layouts.plan import convert
from headwise.layouts.registry import find_quantisation, layout
from headwise.support.files import parse_json_object
from headwise.support.lazy import require_package, silence_imports
from headwise.support.text import list_some


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """Weights whose layout, ``stored``, is not that of their model's files, ``target``."""

    checkpoint: description.Checkpoint
    stored: Layout
    target: Layout

    @property
    def nbytes(self) -> int:
        return 2 * sum(header.nbytes for header in self.checkpoint.source.headers.values())

    def arguments(self, transformers: Any, code: Path | None) -> tuple[Any, dict[str, Any]]:
        """Return the model class and what its ``from_pretrained`` gets, in the model's layout."""
        known = self.checkpoint.known
        kind, config = class_of_config(transformers, self.checkpoint.config, code)
        state = convert(
            self.checkpoint.source, self.stored, self.target, accept=(), root=None, **known
        )
        return kind, {"pretrained_model_name_or_path": None, "config": config, "state_dict": state}


def open_described_model(path: Path) -> DescribedModel | None:
    """Return described weights that transformers cannot read; None where it can.

    Raises:
        CheckpointError: the description does not fit the tensors.
        OptionError: the catalogue has no layout for the model.
    """
    if not _may_be_described(path):
        return None
    opened = description.open_checkpoint(path, dict.fromkeys(description.COUNTS))
    if opened.description is None:
        return None
    stored, name = opened.description.layout, layout_name(opened.config)
    if name == stored.name and path.is_dir() and (path / "config.json").is_file():
        return None
    if name is None:
        kind = opened.config.text("model_type")
        raise OptionError(
            saw=f"{path} has weights in the layout {stored.name} and "
            + ("no model_type" if kind is None else f"the model_type {kind}"),
            needed="a config.json with a model_type of the catalogue, in the metadata or beside "
            "the weights",
            do="copy the model's config.json beside the weights",
        )
    return DescribedModel(opened, stored, layout(name))


def _may_be_described(path: Path) -> bool:
    """False for a folder in transformers' own format."""
    if path.is_file():
        return path.suffix in (source.SAFETENSORS, *source.TORCH)
    if not (path / CONFIG).is_file():
        return any(
            next(path.glob(f"*{suffix}"), None) for suffix in (source.SAFETENSORS, *source.TORCH)
        )
    for file in path.glob(f"*{source.SAFETENSORS}"):
        with suppress(CheckpointError, OSError):  # transformers reports a damaged file
            if safetensors.KEY in safetensors.read_safetensors_header(file).metadata:
                return True
    return False


CONFIG = "config.json"
MODEL, ADAPTER = "the model", "adapter_config.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model")
CODE = ("auto_map", "attn_implementation", "_attn_implementation")  # fields that may name code
PURPOSE = "which loads stored models"
SEPARATORS = (".", "\n")
# Names of a model in DistributedDataParallel and torch.compile begin with these words.
WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")
_UNREADABLE = (*torch_file.LOAD_ERRORS, ImportError, OSError)


class StoredTokenizer:
    """Tokenizer of a stored model: token ids of a text, special tokens and separators."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size = len(tokenizer)
        self.specials: tuple[int, ...] = tuple(tokenizer.all_special_ids)
        begin = tokenizer.bos_token_id
        self.begin: int | None = tokenizer.cls_token_id if begin is None else begin
        # name -> id: [SEP], and the full stop and the new line if each is a single token
        self.separators: dict[str, int] = {}
        if tokenizer.sep_token_id is not None:
            self.separators[tokenizer.sep_token] = tokenizer.sep_token_id
        for text in SEPARATORS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
                self.separators[text] = ids[0]

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def first_ids(self, text: str, length: int) -> list[int]:
        options = {"truncation": True, "max_length": length, "verbose": False}
        return list(self._tokenizer(text, **options)["input_ids"])

    def spans(self, text: str, length: int | None) -> list[tuple[int, int]] | None:
        """Return the first character of each token, and the one after its last.

        Those of the first ``length`` tokens, or of all. A special token has no character. None
        for a tokenizer that does not say them, or whose tokens are in another order.
        """
        if not self._tokenizer.is_fast:
            return None
        cut = {} if length is None else {"truncation": True, "max_length": length}
        encoded = self._tokenizer(text, **cut, return_offsets_mapping=True, verbose=False)
        spans = [tuple(span) for span in encoded["offset_mapping"]]
        starts = [first for first, end in spans if end > first]
        return spans if starts == sorted(starts) else None

    def token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def write(self, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]] | None:
        """Return the text of token ids with its `spans`; None if it reads as other tokens."""
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        spans = self.spans(text, None) if self.ids(text) == [*ids] else None
        return None if spans is None else (text, spans)


def find_tokenizer(model: object) -> StoredTokenizer | None:
    """Return the tokenizer of a model that transformers loaded from this machine, if it has one."""
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    if not name:
        return None
    transformers = require_package("transformers", purpose=PURPOSE, pip="'headwise[huggingface]'")
    with silence_transformers(transformers):
        try:
            return StoredTokenizer(
                transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
            )
        except (OSError, ValueError):  # there is none here
            return None


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredModel:
    """Loaded model with its configuration and tokenizer."""

    # in eval mode, in the dtype of its file, with the attention of its configuration
    model: nn.Module
    config: Mapping[str, Any]  # the configuration, with the defaults of transformers
    tokenizer: StoredTokenizer | None  # the tokenizer; None where the folder has none
    vocabulary: int  # the number of tokens
    positions: int | None  # the longest input of the model; None where it states none
    begin: int | None  # the token that begins a text; None without such a token
    start: int | None  # the first decoder token of an encoder-decoder model; None for other models
    notes: tuple[str, ...]  # differences between the stored and the loaded model

    def inputs(self, ids: Int[Tensor, "batch length"]) -> dict[str, Tensor]:
        """Return the model's arguments; a decoder gets the same text as its encoder."""
        if self.start is None:
            return {"input_ids": ids}
        shifted = torch.cat([torch.full_like(ids[:, :1], self.start), ids[:, :-1]], 1)
        return {"input_ids": ids, "decoder_input_ids": shifted}


def measure_model_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weights; raise an error where it holds no model.

    For weights with a description (`open_described_model`), this is the memory that loading takes.

    Raises:
        CheckpointError: weights that contradict their description.
        OptionError: no such folder, or a folder without a model.
    """
    if (described := open_described_model(folder)) is not None:
        return described.nbytes
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise OptionError(
            saw=f"{folder} {problem}",
            needed=f"a folder with a model: {CONFIG} and its weights",
            do="name a folder on this machine; nothing is downloaded. In Python, "
            "headwise.scan(model, ids) takes a model of your own",
        )
    weights = next(filter(None, (sorted(folder.glob(pattern)) for pattern in WEIGHTS)), [])
    if not weights:
        source.require_no_other_format(folder)
    if not (folder / CONFIG).is_file() or not weights:
        missing = "weights" if (folder / CONFIG).is_file() else CONFIG
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
        raise OptionError(
            saw=f"{folder} holds no {missing}: {names}",
            needed=f"{CONFIG} and {' or '.join(WEIGHTS)}, as save_pretrained writes them",
            do="merge the adapter: model.merge_and_unload().save_pretrained(NEW_DIR)"
            if (folder / ADAPTER).is_file()
            else "name a folder from save_pretrained, or a complete copy of a model repository",
        )
    with source.explained_os_errors(folder):  # a link to nowhere
        for path in weights:
            source.require_no_pointer(path)
        return sum(path.stat().st_size for path in weights)


def load(
    folder: Path, *, trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> StoredModel:
    """Load the model and the tokenizer of a folder, or of a file with a description.

    ``trust_remote_code`` is True to run code in the folder; ``dtype`` that of the file if None.

    Raises:
        MissingExtraError: transformers is not installed.
        OptionError: no model; or the model cannot be read, needs its own code, or takes no tokens.
        CheckpointError: weights in a pickle that holds code.
    """
    measure_model_bytes(folder)
    transformers = require_package("transformers", purpose=PURPOSE, pip="'headwise[huggingface]'")
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    parent = folder if folder.is_dir() else folder.parent
    find_trusted_code(parent, _read_tokenizer_config(parent), trusted=trust_remote_code)
    model, info = _read_model(folder, transformers, options, dtype or "auto")
    _require_fitting_weights(folder, info, model)
    config = model.config
    if "input_ids" not in inspect.signature(model.forward).parameters:
        argument = next(iter(inspect.signature(model.forward).parameters), "no argument")
        raise OptionError(
            saw=f"{type(model).__name__} takes {argument}",
            needed="a model that takes input_ids",
            do="call headwise.scan(model, inputs) from Python with the model's inputs",
        )
    tokenizer = None
    if any(next(parent.glob(pattern), None) for pattern in TOKENIZERS):
        with silence_transformers(transformers), _explain_load_errors(parent, "the tokenizer"):
            loaded = transformers.AutoTokenizer.from_pretrained(parent, **options)
            tokenizer = StoredTokenizer(loaded)
    begin = getattr(config, "bos_token_id", None)
    rows = None
    with suppress(NotImplementedError):  # a model with several kinds of input
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    vocabulary = int(rows or config.get_text_config().vocab_size)
    return StoredModel(
        model=model.eval(),
        config=config.to_dict(),
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        positions=read_longest_input(model),
        begin=tokenizer.begin if tokenizer is not None else begin,
        start=_read_decoder_start_token(config),
        notes=tuple(_describe_differences(info, parent, model)),
    )


def read_model(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the model of a folder, and the names of weights that are missing or do not fit.

    Weights of other sizes than the config states are random in the model; the second value names
    them, as "output_loading_info" of transformers does. The dtype is that of the file.

    Raises:
        MissingExtraError, OptionError, CheckpointError: see `load`.
    """
    measure_model_bytes(folder)
    transformers = require_package("transformers", purpose=PURPOSE, pip="'headwise[huggingface]'")
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    return _read_model(folder, transformers, options, "auto")


def make_empty_model(config: Mapping[str, Any], code: Path | None = None) -> Any:
    """Return the model of a config on the meta device: shapes without memory for weights.

    ``code`` is the folder with its classes, from `find_trusted_code`.

    Raises:
        MissingExtraError: transformers is not installed.
        OptionError: the config has no model_type of transformers.
        ValueError: sizes that the model's class refuses.
    """
    transformers = require_package("transformers", purpose=PURPOSE, pip="'headwise[huggingface]'")
    values = dict(config)
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if code is None and values.get("model_type") not in known:
        raise OptionError(
            saw=f"a config of the model_type {str(values.get('model_type'))[:40]}",
            needed="a model_type of transformers",
            do="name a folder from save_pretrained",
        )
    with silence_transformers(transformers):
        kind, made = class_of_config(transformers, values, code)
        with torch.device("meta"):
            return kind(made)


def _read_model(
    folder: Path, transformers: Any, options: dict[str, Any], dtype: torch.dtype | str
) -> tuple[Any, dict[str, Any]]:
    described = open_described_model(folder)
    _require_no_pruned_heads(folder, transformers)
    stated = read_config(folder) if described is None else described.checkpoint.config
    code = find_trusted_code(folder, stated, trusted=options["trust_remote_code"])
    with silence_transformers(transformers), _explain_load_errors(folder, MODEL):
        if described is None:
            if CUT in stated:
                kind, config = class_of_config(transformers, stated)
            else:
                config = transformers.AutoConfig.from_pretrained(folder, **options)
                kind = _model_class(transformers, config, code)
            weights = {"pretrained_model_name_or_path": folder, "config": config, **options}
        else:
            kind, weights = described.arguments(transformers, code)
        weights |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = kind.from_pretrained(**weights)
        unplaced = info["unexpected_keys"]
        if unplaced and info["missing_keys"] and all(map(WRAPPERS.match, unplaced)):
            weights["key_mapping"] = {WRAPPERS.pattern: ""}
            model, info = kind.from_pretrained(**weights)
    return model, info


def _require_no_pruned_heads(folder: Path, transformers: Any) -> None:
    """Raise OptionError for layers with fewer heads, which transformers builds before 5 only."""
    pruned = read_config(folder).section("pruned_heads")
    if pruned and not hasattr(transformers.PreTrainedModel, "prune_heads"):
        raise OptionError(
            saw=f"{folder} with pruned_heads in layers {', '.join(sorted(pruned))}, and "
            f"transformers {transformers.__version__}",
            needed="transformers 4, whose classes build layers with fewer heads",
            do=f"headwise prune {folder} --keep 1.0 --out NEW_DIR, which takes no head, and writes "
            "a folder that loads",
        )


# ---- code in a folder ---------------------------------------------------------------------------


class UntrustedCodeError(OptionError):
    """Raised for a folder whose code may not run."""


def find_trusted_code(path: Path, config: Mapping[str, Any], *, trusted: bool) -> Path | None:
    """Return the folder with the code that a config names in ``auto_map``; None without code.

    All that builds a model of a folder asks here whether its code may run. A kernel of a
    repository, which a config names as its attention, is code of another repository.

    Raises:
        OptionError: code outside of the folder, such as that of another repository.
        UntrustedCodeError: the caller does not trust the code.
    """
    folder, named = path if path.is_dir() else path.parent, list(_list_code(config))
    if CUT in config:  # headwise runs its own copy of the file
        return None
    for field, name in named:
        if field != "auto_map" or "--" in name or Path(name).is_absolute():
            raise OptionError(
                saw=f"{folder} names code outside of this folder in {field}: {name[:100]}",
                needed="code in the folder; no other repository is read, nothing is downloaded",
                do=f"remove {field} where transformers has the class; or copy the .py files into "
                "the folder and name them in auto_map, such as modeling.Model",
            )
    if named and not trusted:
        raise UntrustedCodeError(
            saw=f"{folder} holds code, which runs only with {{trust_remote_code}}",
            needed=f"your permission to run {named[0][1][:100]} and what it imports",
            do="read the code, then pass {trust_remote_code}",
            parameter="trust_remote_code",
        )
    return folder if named else None


def _list_code(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a config and of its parts that name code, with the names."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _list_code(part, name if name in CODE else field)
    elif isinstance(value, list):
        for part in value:
            yield from _list_code(part, field)
    elif field and isinstance(value, str) and (field == "auto_map" or "/" in value):
        yield field, value


def _read_tokenizer_config(folder: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):  # transformers reports a damaged file
        return parse_json_object((folder / "tokenizer_config.json").read_bytes(), unique=False)
    return {}


def _read_class(transformers: Any, code: Path | None, auto_map: Any, names: Iterable[str]) -> Any:
    """Return the first class of these names that a folder's code has; None for no such class."""
    name = next((each for each in names if each in (auto_map or ())), None)
    if code is None or name is None:
        return None
    read = transformers.dynamic_module_utils.get_class_from_dynamic_module
    return read(auto_map[name], code, local_files_only=True)


def auto_class_name(model: Any) -> str:
    """Return the name in transformers of the class that opens a model, one of code too."""
    kind = type(model).__name__
    auto_map = getattr(getattr(model, "config", None), "auto_map", None) or {}
    return next((n for n, code in auto_map.items() if str(code).endswith(f".{kind}")), kind)


def list_auto_classes(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of the Auto classes that load models of a config, and of their classes."""
    transformers = import_module("transformers")
    choose = import_module("transformers.models.auto.auto_factory")._get_model_class
    for auto in sorted(name for name in dir(transformers) if name.startswith("Auto")):
        mapping = getattr(getattr(transformers, auto), "_model_mapping", ())
        if type(config) in mapping:
            kind = choose(config, mapping).__name__
            if hasattr(transformers, kind):
                yield auto, kind


def cut_classes() -> Any:
    """Return the file of the form "code", which imports transformers."""
    return import_module("headwise.checkpoints.modeling_cut")


def class_of_config(
    transformers: Any, values: Mapping[str, Any], code: Path | None = None
) -> tuple[Any, Any]:
    """Return the model class of a config, and the config in its class."""
    kind = _read_class(transformers, code, values.get("auto_map"), ["AutoConfig"])
    if kind is None:
        kind = type(transformers.AutoConfig.for_model(values["model_type"]))
    cut = cut_classes() if CUT in values else None
    if cut is not None:
        kind = getattr(cut, f"Cut{kind.__name__}")
    config = kind.from_dict(dict(values))
    kind = _model_class(transformers, config, code)
    if not issubclass(kind, transformers.PreTrainedModel):  # an Auto class chooses by the config
        choose = import_module("transformers.models.auto.auto_factory")._get_model_class
        kind = choose(config, kind._model_mapping)
    return (kind if cut is None else getattr(cut, kind.__name__)), config


def _model_class(transformers: Any, config: Any, code: Path | None) -> Any:
    auto_map, stored = getattr(config, "auto_map", None) or {}, config.architectures or ()
    usual = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
    names = [*usual, *(name for name in auto_map if name.startswith("AutoModel"))]
    names.sort(key=lambda name: str(auto_map.get(name)).rpartition(".")[2] not in stored)
    if (kind := _read_class(transformers, code, auto_map, names)) is not None:
        return kind
    modeling = type(config).__module__.replace(".configuration_", ".modeling_")
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if kind is None and find_spec(modeling) is not None:  # not all are exported
            kind = getattr(import_module(modeling), name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    # BERT has a causal class too, but its files hold no weights of the causal head.
    is_causal = (
        type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING
    )
    return transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel


def read_longest_input(model: Any) -> int | None:
    """Return the most tokens that a model of transformers takes; None where it states none.

    RoBERTa's positions start after the padding index.
    """
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - first
    return stated if isinstance(stated, int) and stated > 0 else None


def _read_decoder_start_token(config: Any) -> int | None:
    if not getattr(config, "is_encoder_decoder", False):
        return None
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    return 0


def _require_fitting_weights(folder: Path, info: dict[str, Any], model: Any) -> None:
    kind = type(model).__name__
    missing, unplaced = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    unfit = [
        f"{name} is {tuple(stored)} in the file and {tuple(wanted)} in {kind}"
        for name, stored, wanted in sorted(info["mismatched_keys"])
    ]
    if not unfit and not unplaced:
        return
    if (method := _quantisation_method(folder)) is not None:
        reason = unfit[0] if unfit else f"{kind} has no place for {unplaced[0]}"
        raise _quantised_error(folder, method, reason)
    names = {*unplaced, *(name for name, *_ in info["mismatched_keys"])}
    state = model.state_dict()
    random = {state[name].data_ptr() for name in missing if name in state}
    if (quantisation := find_quantisation(sorted(names))) is not None:
        saw, needed, do = quantisation.reason, "weights in floating point", quantisation.do
    elif unfit:
        saw, needed = unfit[0], f"weights of the sizes in {CONFIG}"
        do = f"copy the {CONFIG} that belongs to the weights beside them"
    elif random.issuperset(tensor.data_ptr() for tensor in state.values()):  # tied weights once
        saw = f"no stored name fits {kind}: {unplaced[0]}, where it has {missing[0]}"
        needed = "weights under the names of transformers"
        do = "headwise detect DIR names their layout; headwise convert DIR NEW_DIR --to LAYOUT "
        do += "--root '' changes it, and leaves out a prefix"
    else:
        return
    raise OptionError(saw=f"{folder}: {saw}", needed=needed, do=do)


def _quantisation_method(folder: Path) -> str | None:
    stated = read_config(folder).get("quantization_config")
    if stated is None:
        return None
    return str(stated.get("quant_method") if isinstance(stated, Mapping) else stated)


def _quantised_error(folder: Path, method: str, reason: str) -> OptionError:
    return OptionError(
        saw=f"{folder} holds weights quantised by {method[:40]}, which were not read: {reason}",
        needed="weights in floating point, or the package and the device that these need",
        do="name a folder with the weights before quantisation",
    )


def _describe_differences(info: dict[str, Any], folder: Path, model: Any) -> Iterator[str]:
    state = model.state_dict()
    # weights that are all 0, such as the biases that nanoGPT's files leave out, count as there
    missing = sorted(n for n in info["missing_keys"] if n not in state or bool(state[n].any()))
    if missing:
        yield (
            f"the file lacks {list_some(missing)}: these weights are random, and results "
            "that depend on them are meaningless"
        )
    if unplaced := sorted(info["unexpected_keys"]):
        yield (
            f"{type(model).__name__} has no place for {list_some(unplaced)} of the file: results "
            "are those of a model without them"
        )
    if (folder / ADAPTER).is_file():  # transformers applies it with peft
        applied = "" if getattr(model, "_hf_peft_config_loaded", False) else "not "
        yield f"the adapter beside the weights ({ADAPTER}) is {applied}applied"


def list_load_errors() -> tuple[type[Exception], ...]:
    """Return the errors that transformers raises at a damaged folder, or at sizes in a config."""
    import huggingface_hub.errors
    from safetensors import SafetensorError

    # newer releases of huggingface_hub check the types of a config, and raise this error
    strict = getattr(huggingface_hub.errors, "StrictDataclassError", SafetensorError)
    return (*_UNREADABLE, strict, SafetensorError)


@contextmanager
def _explain_load_errors(folder: Path, part: str) -> Iterator[None]:
    """Turn the errors of transformers at a damaged folder into OptionErrors.

    transformers checks only some fields of a config: 0 heads, or a text in place of a list, raises
    an arbitrary Python error.
    """
    try:
        yield
    except list_load_errors() as error:
        if "weights_only" in str(error):
            raise torch_file.unreadable_error(folder, str(error)) from None
        reason = " ".join(str(error).split())
        if part == MODEL and (method := _quantisation_method(folder)) is not None:
            raise _quantised_error(folder, method, reason[:200]) from error
        needed = "a complete folder from save_pretrained, of a model type that transformers has"
        do = "copy the folder again; check that it opens with transformers alone"
        if isinstance(error, ImportError):
            needed, do = "the packages that it is made of", "install the package that is missing"
        raise OptionError(
            saw=f"{folder}: {part} cannot be read: {reason[:200]}", needed=needed, do=do
        ) from error


@contextmanager
def silence_transformers(transformers: Any) -> Iterator[None]:
    """Silence transformers and its imports; `StoredModel.notes` reports missing weights."""
    bars = transformers.utils.logging
    had_bar = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with silence_imports():
            yield
    finally:
        if had_bar:
            bars.enable_progress_bar()
