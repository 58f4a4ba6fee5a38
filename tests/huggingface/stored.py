"""Small models in folders, as save_pretrained writes them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.huggingface.models import ENCODER

WORDS = ("the", "cat", "sat", "on", "mat", ".", "dog", "and", "ran", "far")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Few positions, and weights so large that heads differ.
SHARP = {"max_position_embeddings": 40, "initializer_range": 0.5}
TEXT = "the cat sat on the mat . the dog and the cat ran far . the mat sat on the dog ."


def tokenizer() -> Any:
    """Words of one syllable, with BERT's special tokens."""
    vocabulary = {word: number for number, word in enumerate((*SPECIALS, *WORDS))}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, **dict(zip(names, SPECIALS, strict=True))
    )


def bert(**changes: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.BertConfig(**{**ENCODER, **SHARP, **changes})
    return transformers.BertModel(config).eval()


def masked_lm(**changes: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.BertConfig(**{**ENCODER, **SHARP, **changes})
    return transformers.BertForMaskedLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(2)
    config = transformers.GPT2Config(
        vocab_size=60,
        n_embd=48,
        n_layer=2,
        n_head=6,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def stored(folder: Path, model: Any, *, with_tokenizer: bool = True) -> Path:
    model.save_pretrained(folder)
    if with_tokenizer:
        tokenizer().save_pretrained(folder)
    return folder
