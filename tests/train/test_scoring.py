"""Batches of texts of unequal length score, and go on, as each text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megads.errors import DataError
from megads.parallel.mesh import Mesh
from megads.train import generate, scoring
from megads.train.generate import Sampling, generate_batch
from megads.train.load import LanguageModel
from megads.train.scoring import Pair, Score, score
from tests.models.huggingface import FAMILIES
from tests.models.stages import make_stage, random_weights

LIMIT = 24
IDS = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(0)).tolist()
PAIRS = [
    Pair(IDS[:1], IDS[1:2]),
    Pair(IDS[:9], IDS[9:12]),
    Pair(IDS[:9], IDS[3:4]),
    Pair(IDS[4:20], IDS[20:25]),
    Pair(IDS[:30], IDS[30:33]),  # too long: the context loses its first tokens
    Pair(IDS[:3], IDS[:LIMIT]),  # the continuation alone fills the model, one token of context left
]


class Model:
    """A model of a family with random weights; records the shapes of what it was shown."""

    def __init__(self, family: str = "gpt2") -> None:
        config = FAMILIES[family].config
        stage = make_stage(config, random_weights(config), Mesh.single("cpu"))
        self._model = LanguageModel(stage, config).eval()
        self.shapes: list[tuple[int, ...]] = []

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        self.shapes.append(tuple(ids.shape))
        return self._model(ids)


def one_by_one(model: Model, pair: Pair) -> Score:
    """The score from what the model says after each prefix, shown without anything behind it."""
    text = [*pair.context, *pair.continuation]
    start, total, greedy = max(0, len(text) - LIMIT - 1), 0.0, True
    for end in range(len(pair.context), len(text)):
        last = model(torch.tensor([text[start:end]]))[0, -1].double()
        total += float(last[text[end]] - last.logsumexp(0))
        greedy &= int(last.argmax()) == text[end]
    return Score(total, greedy)


def differ(got: Sequence[Score], want: Sequence[Score]) -> list[int]:
    return [
        number
        for number, (mine, theirs) in enumerate(zip(got, want, strict=True))
        if abs(mine.loglikelihood - theirs.loglikelihood) > 1e-4 or mine.greedy != theirs.greedy
    ]


def on_the_left(rows: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])


@pytest.mark.parametrize("family", ["gpt2", "mistral window", "bloom"])
def test_a_batch_scores_as_each_text_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = Model(family), IDS[:7]
    likely = []
    for _ in range(3):
        likely.append(int(model(torch.tensor([context + likely]))[0, -1].argmax()))
    pairs = [*PAIRS, Pair(context, likely)]
    want = [one_by_one(model, pair) for pair in pairs]
    assert [scored.greedy for scored in want] == [False] * len(PAIRS) + [True]
    for batch in (1, 4):
        assert differ(score(model, pairs, max_length=LIMIT, batch_size=batch), want) == []
    cut = [] if "window" in family else [4]  # three windows of 7 see less than the limit
    assert differ(score(model, pairs[:5], max_length=LIMIT - 1, batch_size=4), want[:5]) == cut
    monkeypatch.setattr(scoring, "padded", on_the_left)
    assert differ(score(model, pairs, max_length=LIMIT, batch_size=4), want)


def test_equal_inputs_are_computed_once_and_everything_is_reported() -> None:
    model, told = Model(), []
    pairs = [*(Pair(IDS[:5], [answer]) for answer in range(4)), Pair(IDS[:4], [IDS[4], 9])]
    score(model, pairs, max_length=LIMIT, batch_size=2, report=told.append)
    assert model.shapes == [(1, 5)] and told == [5]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair([], [1]), "a context of 0 tokens"),
        (Pair([1], []), "a continuation of 0 cannot"),
        (Pair([1], [2] * 25), "25 tokens does not fit into the 24 positions"),
    ],
)
def test_what_cannot_be_scored(pair: Pair, message: str) -> None:
    with pytest.raises(DataError, match=message):
        score(Model(), [pair], max_length=LIMIT, batch_size=1)


def test_a_batch_goes_on_as_each_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, sampling = [IDS[:3], IDS[5:12], IDS[20:21]], Sampling(max_tokens=9, temperature=0)

    def batch(model: Model, finished: Callable[[list[int]], bool] = lambda ids: False):
        return generate_batch(model, prompts, sampling, vocab_size=101, finished=finished)

    model = Model()
    want = [list(generate.generate(model, p, sampling, vocab_size=101)) for p in prompts]
    assert batch(model) == want and len({tuple(ids) for ids in want}) == 3
    model.shapes.clear()
    stop = want[1][2]
    ends = [ids.index(stop) + 1 if stop in ids else 9 for ids in want]
    assert batch(model, lambda ids: ids[-1] == stop) == [
        ids[:end] for ids, end in zip(want, ends, strict=True)
    ]
    rows = [shape[0] for shape in model.shapes]
    assert rows == [sum(end > step for end in ends) for step in range(max(ends))]
    monkeypatch.setattr(generate, "padded", on_the_left)
    assert batch(model) != want


def test_sampled_batches_follow_the_seed() -> None:
    def draw(seed: int | None) -> list[list[int]]:
        sampling = Sampling(max_tokens=8, temperature=5.0, seed=seed)
        return generate_batch(
            Model(), [IDS[:3], IDS[:3]], sampling, vocab_size=101, finished=lambda ids: False
        )

    assert draw(1) == draw(1) != draw(2)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(draw(None))
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != draws[0][1]
