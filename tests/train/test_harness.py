"""The lm-evaluation-harness on a checkpoint of ours against its own `hf` model on the same weights.

The checkpoint is converted by megads-convert and opened by transformers; the tasks are files over
local data, so that nothing needs a network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers
import yaml

from megads.checkpoint.store import CheckpointStore
from megads.cli import convert, evaluate
from megads.config.model import ModelConfig
from megads.errors import ConfigError, DataError
from megads.parallel.mesh import Axis
from megads.parallel.pieces import TensorPiece
from megads.train import load, scoring
from tests.models.stages import random_weights

pytest.importorskip("lm_eval", reason="needs lm_eval: pip install 'megads[eval]'")
pytest.importorskip("accelerate", reason="the harness's hf model needs accelerate")

from lm_eval.models.huggingface import HFLM

from megads.train.harness import HarnessModel, TaskRequest, run_tasks

END = "<|endoftext|>"
TEXTS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer",
    "Ein Bär läuft durch den Wald; 漢字 and \U0001f600 take several tokens each, as they should.",
    "one two three four five six seven eight nine ten",
]
SPLITS = [(text[:cut], text[cut:]) for text in TEXTS for cut in (8, 19, 31)]
SPACE_IN_CONTEXT = ("The answer is ", "yes")  # it becomes the continuation's
NO_CONTEXT = ("", "no context at all")
TOO_LONG = (" ".join(TEXTS) * 2, " which is too long")
ANSWERED = [(f"{question}:", f" {answer}") for question in "QR" for answer in "AB"]
PAIRS = [*SPLITS, *ANSWERED, SPACE_IN_CONTEXT, NO_CONTEXT, TOO_LONG]
TASKS: dict[str, dict[str, Any]] = {
    "made_up_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text[:20]}}",
        "doc_to_choice": ["{{text[20:30]}}", " something else", " X"],
        "doc_to_target": 0,
        "num_fewshot": 1,
        "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "made_up_words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "made_up_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{text[:20]}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 10, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
ANSWERS = TASKS["made_up_answers"]["generation_kwargs"]


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each, task_name="") for each in arguments]


def write_checkpoint(run: Path, config: ModelConfig, tokenizer: Path) -> None:
    pieces = []
    for name, data in random_weights(config).items():
        shape = tuple(data.shape)
        pieces.append(
            TensorPiece(f"param/{name}", data.dtype, shape, (0,) * len(shape), shape, data)
        )
    store = CheckpointStore(run / "checkpoints", Axis("world"))
    store.save(2, pieces, state={}, meta={"model": config, "layout": {}})
    (run / "config.yaml").write_text(f"data:\n  tokenizer: {tokenizer}\n")


def train_tokenizer(path: Path) -> int:
    """A byte-level BPE tokenizer.json, as GPT-2 has it; returns how many ids it has."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, vocab_size=330, special_tokens=[END], show_progress=False)
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random weights, and the same weights for transformers."""
    place = tmp_path_factory.mktemp("harness")
    size = train_tokenizer(place / "tokenizer.json")
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=size, max_seq_length=64
    )
    write_checkpoint(place / "run", config, place / "tokenizer.json")
    assert convert.main([str(place / "run"), str(place / "hf"), "--to", "hf"]) == 0
    (place / "hf/tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes())
    (place / "hf/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )
    # A model without it goes on behind the end of a text.
    hf_config = json.loads((place / "hf/config.json").read_text())
    (place / "hf/config.json").write_text(json.dumps(hf_config | {"eos_token_id": 0}))
    return place


def opened(place: Path, **options: Any) -> HarnessModel:
    model, tokenizer = load.load_model(place / "run"), load.run_tokenizer(place / "run")
    return HarnessModel(model, tokenizer, **({"batch_size": 4} | options))


@pytest.fixture(scope="module")
def ours(place: Path) -> HarnessModel:
    return opened(place)


@pytest.fixture(scope="module")
def theirs(place: Path) -> Any:
    # Its cache takes the wrong logits where one text is cut into question and answer in two ways.
    return HFLM(
        pretrained=str(place / "hf"),
        device="cpu",
        dtype="float32",
        batch_size=3,
        logits_cache=False,
    )


@pytest.fixture(scope="module")
def tasks(place: Path, theirs: Any) -> Path:
    """Task files over local data, in which half the answers are what the model says."""
    said = theirs.generate_until(requests(*[(text[:20], ANSWERS) for text in TEXTS]))
    docs = [
        {"text": text, "answer": answer if number % 2 else "something else"}
        for number, (text, answer) in enumerate(zip(TEXTS, said, strict=True))
    ]
    (place / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (place / "tasks").mkdir()
    files = {"data_files": {"test": str(place / "docs.jsonl")}, "cache_dir": str(place / "cache")}
    for name, task in TASKS.items():
        data = {"task": name, "dataset_path": "json", "test_split": "test", "dataset_kwargs": files}
        (place / f"tasks/{name}.yaml").write_text(yaml.safe_dump(data | task))
    return place / "tasks"


@pytest.fixture(autouse=True)
def no_tasks_of_its_own(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Reading the harness's own 14,000 tasks takes it seconds each time."""
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(place / "none/manager.py"))


def different(mine: Sequence[Any], other: Sequence[Any]) -> list[int]:
    """Which scores differ by more than rounding, or in being greedy."""
    return [
        number
        for number, (one, two) in enumerate(zip(mine, other, strict=True))
        if abs(one[0] - two[0]) > 1e-4 or one[1] != two[1]
    ]


def test_loglikelihoods(ours: HarnessModel, theirs: Any) -> None:
    contexts = [context for context, _ in SPLITS]
    likely = ours.generate_until(
        requests(*[(context, {"max_gen_toks": 1}) for context in contexts])
    )
    asked = requests(*PAIRS, *[pair for pair in zip(contexts, likely, strict=True) if pair[1]])
    mine = ours.loglikelihood(asked)
    assert different(mine, theirs.loglikelihood(asked)) == []
    assert {score.greedy for score in mine} == {True, False}


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [("prefix", NO_CONTEXT), ("boundary", SPACE_IN_CONTEXT), ("truncation", TOO_LONG)],
)
def test_a_mistake_would_be_seen(
    ours: HarnessModel,
    theirs: Any,
    monkeypatch: pytest.MonkeyPatch,
    mistake: str,
    seen: tuple[str, str],
) -> None:
    def apart(self: HarnessModel, context: str, continuation: str) -> Any:
        return self.tok_encode(context), self.tok_encode(continuation)

    def from_the_right(pair: Any, max_length: int) -> tuple[int, ...]:
        return tuple([*pair.context, *pair.continuation][:-1][:max_length])

    if mistake == "prefix":
        monkeypatch.setattr(HarnessModel, "prefix_token_id", 7)
    elif mistake == "boundary":
        monkeypatch.setattr(HarnessModel, "_encode_pair", apart)
    else:
        monkeypatch.setattr(scoring, "_input", from_the_right)
    wrong, right = (model.loglikelihood(requests(*PAIRS)) for model in (ours, theirs))
    assert PAIRS.index(seen) in different(wrong, right)


def test_rolling_loglikelihoods(
    ours: HarnessModel, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = requests(*[(text,) for text in (*TEXTS, " ".join(TEXTS) * 3, "")])
    mine, other = ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts)
    assert mine == pytest.approx(other, rel=1e-6, abs=1e-4)
    assert len(ours.tok_encode(texts[-2].args[0])) > 3 * ours.max_length and mine[-1] == 0.0
    monkeypatch.setattr(ours, "max_length", ours.max_length - 1)
    assert ours.loglikelihood_rolling(texts)[-2] != pytest.approx(other[-2], rel=1e-4)


@pytest.mark.parametrize("until", [[], ["e"], ["th", " a"]])
def test_generations(ours: HarnessModel, theirs: Any, until: list[str]) -> None:
    settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
    asked = requests(*[(context, settings) for context, _ in PAIRS if context])
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, float)}


def test_metrics_of_tasks(tasks: Path, ours: HarnessModel, theirs: Any) -> None:
    request = TaskRequest(["made_up_*"], tasks)
    mine, other = (run_tasks(model, request)["results"] for model in (ours, theirs))
    assert set(mine) == set(TASKS)
    for task in TASKS:
        assert numbers(mine[task]) == pytest.approx(numbers(other[task]), rel=1e-5)
    assert mine["made_up_answers"]["exact_match,none"] == 0.5


def test_an_id_before_every_text(place: Path, theirs: Any) -> None:
    """As the Llama family has it: the tokenizer adds it unless told not to."""
    from tokenizers.processors import TemplateProcessing

    backend = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    adding = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END, eos_token=END
    )
    other = HFLM(pretrained=theirs.model, tokenizer=adding, batch_size=1, logits_cache=False)
    mine, texts = opened(place, bos=0), requests(*[(text,) for text in TEXTS])
    pairs = requests(*PAIRS, (f"{END}It begins so", " already"))
    assert different(mine.loglikelihood(pairs), other.loglikelihood(pairs)) == []
    want = other.loglikelihood_rolling(texts)
    assert mine.loglikelihood_rolling(texts) == pytest.approx(want, rel=1e-6)
    assert opened(place).loglikelihood_rolling(texts) != pytest.approx(want, rel=1e-3)
    with pytest.raises(ConfigError, match=r"--bos-id 9999: the vocabulary has ids 0 to \d+"):
        opened(place, bos=9999)


def test_sampled_generations_follow_the_seed(ours: HarnessModel) -> None:
    def draw(seed: int) -> list[str]:
        torch.manual_seed(seed)
        settings = {"do_sample": True, "temperature": 3.0, "top_k": 40, "max_gen_toks": 8}
        return ours.generate_until(requests(("One", settings), ("Two", settings)))

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": 64}, "max_gen_toks=64 tokens, the model has 64 positions; --gen-kwargs"),
        ({}, "max_gen_toks=256 tokens"),
        ({"num_beams": 4, "max_gen_toks": 4}, "num_beams.* of these, megads-eval has until"),
        ({"repetition_penalty": 1.5, "max_gen_toks": 4}, "repetition_penalty"),
    ],
)
def test_what_a_task_cannot_have(ours: HarnessModel, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours.generate_until(requests(("One", settings)))


def test_a_context_is_needed_and_an_end_of_documents_gives_it(
    ours: HarnessModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ours.generate_until(requests(("", {"max_gen_toks": 2}))) == ours.generate_until(
        requests((END, {"max_gen_toks": 2}))
    )
    monkeypatch.setattr(ours._text, "eod", None)
    with pytest.raises(DataError, match="has no end-of-document token"):
        ours.loglikelihood(requests(NO_CONTEXT))


@pytest.mark.parametrize(
    ("names", "folder", "error", "message"),
    [
        (["made_up_choise"], "tasks", ConfigError, "no task made_up_choise; close to it: made_up_"),
        (["?"], "tasks", ConfigError, "`--tasks list` prints all"),
        (["made_up_choice"], "nowhere", ConfigError, "nowhere: there is no such folder"),
        (["broken"], "broken", DataError, "tasks broken: .*--include-path"),
    ],
)
def test_tasks_that_cannot_be_run(
    tasks: Path, ours: HarnessModel, names: list[str], folder: str, error: Any, message: str
) -> None:
    (tasks.parent / "broken").mkdir(exist_ok=True)
    no_data = {"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}
    task = {"task": "broken", "dataset_path": "json", "test_split": "test"} | no_data
    text = yaml.safe_dump(task | TASKS["made_up_choice"])
    (tasks.parent / "broken/broken.yaml").write_text(text)
    with pytest.raises(error, match=message):
        run_tasks(ours, TaskRequest(names, tasks.parent / folder))


def test_the_command(
    place: Path, tasks: Path, ours: HarnessModel, capsys: pytest.CaptureFixture[str]
) -> None:
    output = place / "results.json"
    words = [str(place / "run"), "--include-path", str(tasks), "--output", str(output)]
    few = ["--limit", "3", "--num-fewshot", "2", "--batch", "2", "--device", "cpu"]
    assert evaluate.main([*words, "--tasks", "made_up_choice,made_up_words", *few]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{place / 'run/checkpoints/step-2'}\n")
    results = json.loads(output.read_text())
    want = run_tasks(ours, TaskRequest(list(results["results"]), tasks, num_fewshot=2, limit=3))
    for task in ("made_up_choice", "made_up_words"):
        got = numbers(results["results"][task])
        assert got == pytest.approx(numbers(want["results"][task]), rel=1e-5)
        assert results["n-samples"][task]["effective"] == 3 and task in printed
    assert f"{results['results']['made_up_words']['word_perplexity,none']:.4f}" in printed
    assert results["config"]["checkpoint"].endswith("step-2")
    narrow = ["--dtype", "bf16", "--limit", "1", "--gen-kwargs", "max_gen_toks=1", "--json"]
    assert evaluate.main([*words, "--tasks", "made_up_answers,made_up_words", *narrow]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["config"]["model_dtype"] == "torch.bfloat16"
    bits = want["results"]["made_up_words"]["bits_per_byte,none"]
    assert results["results"]["made_up_words"]["bits_per_byte,none"] != bits
    assert evaluate.main([*words[:3], "--tasks", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(task in listed for task in TASKS)
