from __future__ import annotations

import collections

import pytest
import torch

from megads.data.tokenizer import ByteTokenizer
from megads.errors import ConfigError
from megads.train.generate import Sampling, choose, decode_stream, generate


class Counting:
    """A model that is sure the next id is the last one plus one; records what it was shown."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.shown: list[list[int]] = []

    def __call__(self, ids):
        self.shown.append(ids[0].tolist())
        return torch.nn.functional.one_hot((ids + 1) % self.vocab, self.vocab) * 50.0


def run(model, prompt, sampling, vocab_size=10, **options) -> list[int]:
    return list(generate(model, prompt, sampling, vocab_size=vocab_size, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continues_the_prompt(temperature):
    sampling = Sampling(max_tokens=4, temperature=temperature)
    assert run(Counting(10), [3, 4], sampling) == [5, 6, 7, 8]


def test_ends_before_the_end_of_document():
    assert run(Counting(10), [3], Sampling(temperature=0), eod=6) == [4, 5]


def test_shows_the_model_no_more_than_its_context():
    model = Counting(10)
    run(model, [1, 2, 3], Sampling(max_tokens=3, temperature=0), context=4)
    assert model.shown == [[1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]


def test_ids_the_tokenizer_does_not_have_are_never_chosen():
    sampling = Sampling(max_tokens=30, temperature=5.0, seed=0)
    assert max(run(Counting(10), [6], sampling, vocab_size=7)) == 6


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="prompt"):
        run(Counting(10), [], Sampling())


def flat_model(ids):
    return torch.zeros(1, ids.shape[1], 10)


def test_the_seed_decides():
    draws = [run(flat_model, [0], Sampling(max_tokens=20, seed=s)) for s in (1, 1, 2, None, None)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[3] != draws[4]


def frequencies(logits: torch.Tensor, **fields) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    sampling = Sampling(**fields)
    counts = collections.Counter(choose(logits, sampling, source) for _ in range(3000))
    return torch.tensor([counts[i] / 3000 for i in range(len(logits))])


def test_choices_follow_the_probabilities():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert torch.allclose(frequencies(p.log()), p, atol=0.03)
    cold = p**2 / (p**2).sum()
    assert torch.allclose(frequencies(p.log(), temperature=0.5), cold, atol=0.03)
    top2 = torch.tensor([0, 4 / 7, 0, 3 / 7])
    assert torch.allclose(frequencies(p.log(), top_k=2), top2, atol=0.03)
    # 0.4 alone is short of 0.6, and with 0.3 it is enough.
    assert torch.allclose(frequencies(p.log(), top_p=0.6), top2, atol=0.03)
    assert frequencies(p.log(), top_p=0.01)[1] == 1.0
    assert frequencies(p.log(), temperature=0)[1] == 1.0


def test_values_out_of_range_are_all_named():
    with pytest.raises(ConfigError) as caught:
        Sampling(max_tokens=-1, temperature=float("nan"), top_k=-2, top_p=0.0)
    assert len(caught.value.problems) == 4


def test_text_appears_in_whole_characters():
    tokenizer = ByteTokenizer()
    prompt, rest = tokenizer.encode("é?"), tokenizer.encode("a漢\U0001f600!")
    pieces = list(decode_stream(tokenizer.decode, prompt, iter(rest)))
    assert pieces == ["a", "漢", "\U0001f600", "!"]


def test_text_that_ends_inside_a_character_shows_that():
    tokenizer = ByteTokenizer()
    cut = tokenizer.encode("a漢")[:-1]
    assert "".join(decode_stream(tokenizer.decode, [], cut)) == "a\ufffd"
