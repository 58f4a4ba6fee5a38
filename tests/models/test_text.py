"""The sentences that ship: two halves of the same mix, none of them twice."""

import math
import re

import pytest
from scipy.stats import ks_2samp

from headwise.models.minilm import model_folder
from headwise.models.text import read_sentences
from tests.models.test_minilm import here

KINDS, QUESTION, TALK, REMARK = 20, 1, 6, 11
MOST_TOKENS = 256  # of all-MiniLM-L6-v2: max_seq_length of its sentence_bert_config.json

HALVES = read_sentences()


def words(sentence: str) -> list[str]:
    return re.findall(r"[\w'-]+", sentence.lower())


def test_there_are_two_halves_of_200_and_no_sentence_twice() -> None:
    assert [len(half) for half in HALVES] == [200, 200]
    assert len({tuple(words(sentence)) for half in HALVES for sentence in half}) == 400


def test_no_two_sentences_are_made_of_one_template() -> None:
    """No two that are longer than a remark share half of their words."""
    bags = [set(words(sentence)) for half in HALVES for sentence in half]
    bags = [bag for bag in bags if len(bag) > 6]
    shares = [len(a & b) / len(a | b) for i, a in enumerate(bags) for b in bags[:i]]
    assert max(shares) < 1 / 2


@pytest.mark.parametrize("half", HALVES, ids=["to fit on", "held out"])
def test_kinds_take_turns(half: tuple[str, ...]) -> None:
    assert all(sentence.endswith("?") for sentence in half[QUESTION::KINDS])
    assert all(sentence.startswith('"') for sentence in half[TALK::KINDS])
    assert all(4 <= len(words(sentence)) <= 6 for sentence in half[REMARK::KINDS])
    assert sum(sentence.startswith('"') for sentence in half) == len(half) // KINDS
    lengths = [len(sentence.split()) for sentence in half]
    assert min(lengths) == 4
    assert 40 <= max(lengths) <= 45


def test_both_halves_have_the_same_mix_of_lengths() -> None:
    """The largest gap of the two distributions is below that of chance at 95 %."""
    lengths = [[len(words(sentence)) for sentence in half] for half in HALVES]
    by_chance = math.sqrt(math.log(2 / 0.05) / len(HALVES[0]))  # Smirnov, 1948
    assert ks_2samp(*lengths).statistic < by_chance


@here
def test_no_sentence_is_longer_than_the_trained_encoder_reads() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    for half in HALVES:
        assert max(map(len, tokenizer(list(half))["input_ids"])) <= MOST_TOKENS
