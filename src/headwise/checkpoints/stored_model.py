"""A model of transformers that lies in a folder, with its tokenizer; nothing is downloaded.

    config.json                which class, and its sizes
    *.safetensors              the weights; pytorch_model*.bin where there are none
    tokenizer.json, vocab.txt  the tokenizer, where there is one

Code that lies beside the weights runs only where that was asked for.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from headwise.checkpoints.config import read_config
from headwise.checkpoints.described_model import described_model
from headwise.checkpoints.torch_file import unread
from headwise.errors import OptionError
from headwise.support.optional_imports import require

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model")
PURPOSE = "which reads stored models"
SEPARATORS = (".", "\n")
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


class StoredTokenizer:
    """Text as ids, and what is known of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size = len(tokenizer)
        self.specials: tuple[int, ...] = tuple(tokenizer.all_special_ids)
        begin = tokenizer.bos_token_id
        self.begin: int | None = tokenizer.cls_token_id if begin is None else begin
        # what separates, by its name: [SEP], and a full stop and a new line where they are one
        self.separators: dict[str, int] = {}
        if tokenizer.sep_token_id is not None:
            self.separators[tokenizer.sep_token] = tokenizer.sep_token_id
        for text in SEPARATORS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
                self.separators[text] = ids[0]

    def ids(self, text: str) -> list[int]:
        """The whole text, with the special tokens that the model is used to."""
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def cut(self, text: str, length: int) -> list[int]:
        """The beginning of a text, so that it has ``length`` tokens with the special ones."""
        options = {"truncation": True, "max_length": length, "verbose": False}
        return list(self._tokenizer(text, **options)["input_ids"])

    def name(self, token: int) -> str:
        """How a token is written."""
        return str(self._tokenizer.decode([token]))


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredModel:
    """What lay in a folder.

    Attributes:
        model: in eval mode, in the dtype of its file, with the attention of its configuration.
        config: its configuration, as transformers completes it.
        tokenizer: None where there is none.
        vocabulary: how many tokens the model knows.
        positions: the longest input that it is made for; None where it does not say.
        begin: the token that begins a text, where there is one.
        start: the token that begins what a decoder beside an encoder reads; None without such.
        notes: what of it is not as it was stored.
    """

    model: nn.Module
    config: Mapping[str, Any]
    tokenizer: StoredTokenizer | None
    vocabulary: int
    positions: int | None
    begin: int | None
    start: int | None
    notes: tuple[str, ...]

    def inputs(self, ids: Int[Tensor, "batch length"]) -> dict[str, Tensor]:
        """What the model is called with; a decoder reads the same text as its encoder."""
        if self.start is None:
            return {"input_ids": ids}
        started = torch.cat([torch.full_like(ids[:, :1], self.start), ids[:, :-1]], 1)
        return {"input_ids": ids, "decoder_input_ids": started}


def require_model(folder: Path) -> int:
    """How many bytes of weights a folder holds, without reading them.

    Of weights that describe themselves (`described_model`), also of one file, those that loading
    takes.

    Raises:
        CheckpointError: weights that are not as they describe themselves.
        OptionError: no such folder, or one without a model.
    """
    if (described := described_model(folder)) is not None:
        return described.nbytes
    if not folder.is_dir():
        there = "which is a file" if folder.exists() else "which does not exist"
        raise OptionError(
            saw=f"{folder}, {there}",
            needed=f"a folder with a model: {CONFIG} and its weights",
            do="name a folder on this machine; nothing is downloaded",
        )
    weights = next((found for p in WEIGHTS if (found := sorted(folder.glob(p)))), [])
    if not (folder / CONFIG).is_file() or not weights:
        missing = "weights" if (folder / CONFIG).is_file() else CONFIG
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
        raise OptionError(
            saw=f"{folder}, which holds no {missing}: {there}",
            needed=f"{CONFIG} and {' or '.join(WEIGHTS)}, as save_pretrained writes them",
            do="name the folder that save_pretrained wrote, or a whole copy of a model repository",
        )
    return sum(path.stat().st_size for path in weights)


def load(folder: Path, *, trust_remote_code: bool = False) -> StoredModel:
    """The model and the tokenizer of a folder, or of a file that describes itself.

    Raises:
        MissingExtraError: transformers is not installed.
        OptionError: no model, one that cannot be read, one that needs its own code, or one that
            reads no tokens.
        CheckpointError: weights in a pickle that holds code.
    """
    require_model(folder)
    transformers = require("transformers", purpose=PURPOSE, pip="'headwise[huggingface]'")
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    described = described_model(folder)
    if described is None:
        _require_known_code(folder, transformers, trusted=trust_remote_code)
    with _quiet(transformers), _refusing(folder, "the model"):
        if described is None:
            config = transformers.AutoConfig.from_pretrained(folder, **options)
            kind = _class_of(transformers, config, trusted=trust_remote_code)
            weights = {"pretrained_model_name_or_path": folder, **options}
        else:
            config = described.config(transformers)
            kind = _class_itself(transformers, config)
            weights = {"pretrained_model_name_or_path": None, "state_dict": described.state()}
        model, info = kind.from_pretrained(
            config=config, dtype="auto", output_loading_info=True, **weights
        )
    if "input_ids" not in inspect.signature(model.forward).parameters:
        takes = next(iter(inspect.signature(model.forward).parameters), "nothing")
        raise OptionError(
            saw=f"{type(model).__name__}, which reads {takes}",
            needed="a model that reads input_ids",
            do="call headwise.scan(model, inputs) from Python with what it reads",
        )
    place = folder if folder.is_dir() else folder.parent
    tokenizer = _tokenizer(place, transformers, options)
    begin = getattr(config, "bos_token_id", None)
    return StoredModel(
        model=model.eval(),
        config=config.to_dict(),
        tokenizer=tokenizer,
        vocabulary=_vocabulary(model),
        positions=_positions(model),
        begin=tokenizer.begin if tokenizer is not None else begin,
        start=_start(config),
        notes=_notes(info, model),
    )


def _require_known_code(folder: Path, transformers: Any, *, trusted: bool) -> None:
    stored = read_config(folder)
    name = stored.text("model_type")
    known = name in transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if "auto_map" in stored and not known and not trusted:
        raise OptionError(
            saw=f"{folder}, a {name} model that runs by code in {folder.name}",
            needed="a model that transformers knows, or your word that this code may run",
            do="read the code, then say --trust-remote-code",
        )


def _class_of(transformers: Any, config: Any, *, trusted: bool) -> Any:
    """The class that the configuration names; one with an unembedding where it names none."""
    auto_map = getattr(config, "auto_map", None) or {}
    if trusted and auto_map:
        names = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")
        return getattr(transformers, next((n for n in names if n in auto_map), "AutoModel"))
    for name in config.architectures or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    # BERT has a causal class too, whose head no BERT's file holds.
    is_causal = (
        type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in transformers.MODEL_FOR_MASKED_LM_MAPPING
    )
    return transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel


def _class_itself(transformers: Any, config: Any) -> Any:
    """The class, where another one of transformers would look for it in a folder."""
    kind = _class_of(transformers, config, trusted=False)
    if issubclass(kind, transformers.PreTrainedModel):
        return kind
    with torch.device("meta"):  # a model without numbers
        return type(kind.from_config(config))


def _tokenizer(folder: Path, transformers: Any, options: dict[str, Any]) -> StoredTokenizer | None:
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZERS):
        return None
    with _quiet(transformers), _refusing(folder, "the tokenizer"):
        return StoredTokenizer(transformers.AutoTokenizer.from_pretrained(folder, **options))


def _vocabulary(model: Any) -> int:
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # a model of several kinds of input names none
        embedding = None
    rows = getattr(embedding, "num_embeddings", None)
    return int(rows or model.config.get_text_config().vocab_size)


def _positions(model: Any) -> int | None:
    """RoBERTa and its kin count positions from behind their padding token."""
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            behind = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - behind
    return stated if isinstance(stated, int) and stated > 0 else None


def _start(config: Any) -> int | None:
    if not getattr(config, "is_encoder_decoder", False):
        return None
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    return 0


def _notes(info: dict[str, Any], model: nn.Module) -> tuple[str, ...]:
    state = model.state_dict()
    missing = sorted(name for name in info["missing_keys"] if _is_random(state.get(name)))
    if not missing:
        return ()
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"the file lacks {', '.join(missing[:3])}{more}: these weights are random, and what "
        "depends on them means nothing",
    )


def _is_random(tensor: Tensor | None) -> bool:
    """False for a bias of zeros, which is none: nanoGPT stores a model without them."""
    return tensor is None or bool(tensor.any())


@contextmanager
def _refusing(folder: Path, what: str) -> Iterator[None]:
    """Turn what transformers raises at a folder that it cannot read into an OptionError.

    transformers checks some types of a config, and computes with the others as they are: a number
    of heads that is 0, or a text in the place of a list, ends in an error of Python.
    """
    import huggingface_hub.errors
    from safetensors import SafetensorError

    # the error of a config whose types huggingface_hub checks, in releases that do
    strict = getattr(huggingface_hub.errors, "StrictDataclassError", SafetensorError)
    unreadable: tuple[type[Exception], ...] = (*_UNREADABLE, strict, SafetensorError)
    try:
        yield
    except unreadable as error:
        if "weights_only" in str(error):
            raise unread(folder, str(error)) from None
        reason = " ".join(str(error).split())
        raise OptionError(
            saw=f"{folder}: {what} cannot be read: {reason[:200]}",
            needed="a model as save_pretrained writes it, whole, and of a kind that this "
            "version of transformers knows",
            do="copy the folder again; look whether it opens with transformers alone",
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without a progress bar, and without what packages say that transformers imports on the way.

    What it would say of weights that are missing is in `StoredModel.notes`.
    """
    bars = transformers.utils.logging
    had_bar, before = bars.is_progress_bar_enabled(), logging.root.manager.disable
    bars.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logging.disable(before)
        if had_bar:
            bars.enable_progress_bar()
