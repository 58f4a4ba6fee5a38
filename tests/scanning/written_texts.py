"""Texts in many scripts, and the three kinds of tokenizers, trained on them on the spot."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = {
    "accents": "Élodie naïvely ate CRÈME brûlée; the café, São Paulo, ÅNGSTRÖM, Straße.",
    "combining": "cafe\u0301 and e\u0302tre, a\u0328\u0301 Z\u0351\u036bl\u0354g\u0321o",
    "cjk": "東京の電車は速い。我们都喜欢学习，한국어도 있어요！",
    "arabic": "قال الولدُ: «السلامُ عليكم» ثم ذهب إلى المدرسة في 12 يناير.",
    "hebrew": "שָׁלוֹם עולם, זה טקסט (ארוך) עם English words בתוכו.",
    "emoji": "Hi 👋🏽! A 👩‍👩‍👧‍👦 family 🐇🐇, flags 🇫🇷🇯🇵, a heart ❤️ and 1️⃣.",
    "lines": "first line\nsecond line\r\n\n\tindented\n  two blanks\u2028separated\n",
    "blanks": "   three before," + "\ta\tb" * 20 + ",  two   three, and after   \t ",
    "invisible": "zero\u200bwidth, soft\u00adhyphen, \u200fRLM, no\u00a0break, \x07 bell",
    "long": "word " * 40 + "x" * 300,
}
SIZE = 400  # of a vocabulary
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def _finish(tokenizer: Any, trainer: Any, **options: Any) -> Any:
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", **options)


def _word_piece() -> Any:
    """As BERT's: lower case, without accents and control characters."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=SPECIALS)
    marks = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return _finish(tokenizer, trainer, **marks)


def _byte_level() -> Any:
    """As GPT-2's: bytes, with the blank before a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=["[PAD]", "<|end|>"], initial_alphabet=alphabet
    )
    return _finish(tokenizer, trainer, eos_token="<|end|>")


def _unigram() -> Any:
    """As T5's or Llama's: compatibility forms, blanks as ▁, unknown characters as bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=["[PAD]", "</s>", "<unk>"], unk_token="<unk>"
    )
    return _finish(tokenizer, trainer, eos_token="</s>", unk_token="<unk>")


KINDS: dict[str, Callable[[], Any]] = {
    "word-piece": _word_piece,
    "byte-level": _byte_level,
    "unigram": _unigram,
}


@cache
def tokenizer_of(kind: str) -> Any:
    """A trained tokenizer of this kind."""
    return KINDS[kind]()
