"""Tasks of EleutherAI's lm-evaluation-harness on a model of ours, through its model interface.

Importing this needs the package lm_eval. Texts are cut into tokens, truncated and rolled over as in
the harness's own `hf` model, so that results can be compared with those published for others.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
    make_table,
)
from tqdm import tqdm

from megads.data.tokenizer import Tokenizer, require_eod
from megads.errors import ConfigError, DataError
from megads.train.generate import Sampling, generate_batch
from megads.train.load import LanguageModel
from megads.train.scoring import Pair, Score, score

NEW_TOKENS = 256
"""Most tokens that are generated where a task does not say, as in the harness's other models."""


@dataclass(frozen=True)
class TaskRequest:
    """What to run. `names` may have wildcards, and `folder` task files of its own.

    `num_fewshot`: solved examples before each question, None as the task has it; `limit`: questions
    of each task, None all; `generation`: settings over those of the tasks, as in
    `max_gen_toks=32,temperature=0.7`.
    """

    names: Sequence[str]
    folder: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    generation: str | None = None


def list_tasks(folder: Path | None = None) -> str:
    """A table of everything that can be asked for."""
    return str(_manager(folder).list_all_tasks())


def run_tasks(model: HarnessModel, request: TaskRequest) -> dict[str, Any]:
    """The harness's results: metrics by task under "results", and how they were measured.

    Raises ConfigError for unknown tasks and for what a task asks that the model cannot do, and
    DataError for data that cannot be had.
    """
    manager = _manager(request.folder)
    unknown = [name for name in request.names if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError([_unknown(name, manager.all_tasks) for name in unknown])
    try:
        results: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=manager.match_tasks(list(request.names)),
            num_fewshot=request.num_fewshot,
            batch_size=model.batch_size,
            device=str(model.device),
            limit=request.limit,
            log_samples=False,
            gen_kwargs=request.generation,
            task_manager=manager,
        )
    except OSError as error:  # what datasets raises without network is one
        raise DataError(
            f"tasks {', '.join(request.names)}: {error}. The harness fetches a task's data from "
            f"the Hugging Face hub and keeps it; where there is no network, fill that cache "
            f"elsewhere or name tasks over local files (--include-path)"
        ) from error
    return results


def table(results: dict[str, Any]) -> str:
    """The results for people: a metric a line, and those of groups of tasks below."""
    parts = [make_table(results)]
    if results.get("groups"):
        parts.append(make_table(results, "groups"))
    return "\n".join(parts)


def to_json(results: dict[str, Any]) -> str:
    """The results for programs."""
    return json.dumps(results, indent=2, default=handle_non_serializable)


def _manager(folder: Path | None) -> Any:
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--include-path {folder}: there is no such folder of task files")
    return TaskManager(include_path=folder)


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"close to it: {', '.join(close)}" if close else "`--tasks list` prints all"
    return f"--tasks: the harness has no task {name}; {hint}"


class HarnessModel(TemplateLM):
    """A language model with its tokenizer, as the harness sees one.

    A text begins with the tokenizer's end-of-document id, which ends the one before in training,
    wherever the harness has nothing else to begin with. Models trained with an id before every text
    (most of the Llama family) need it as `bos`. The model's `max_seq_length` is never exceeded:
    contexts lose their first tokens, long texts are read in windows. Raises ConfigError when `bos`
    is not in the vocabulary.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 1,
        device: torch.device | str = "cpu",
        bos: int | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        if bos is not None and not 0 <= bos < model.config.vocab_size:
            raise ConfigError(
                f"--bos-id {bos}: the vocabulary has ids 0 to {model.config.vocab_size - 1}"
            )
        self._model, self._text, self._bos, self._name = model, tokenizer, bos, name
        self._device = torch.device(device)
        self.batch_size = batch_size
        self.max_length = model.config.max_seq_length

    @property
    def eot_token_id(self) -> int:
        return require_eod(self._text)

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._bos is None else self._bos

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes down about the model."""
        parameters = list(self._model.parameters())
        return {
            "checkpoint": self._name,
            "tokenizer": self._text.name,
            "model_num_parameters": sum(parameter.numel() for parameter in parameters),
            "model_dtype": str(parameters[0].dtype),
        }

    def tok_encode(
        self, string: str, *, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        ids = self._text.encode(string)
        if self._bos is None or add_special_tokens is False or ids[:1] == [self._bos]:
            return ids
        return [self._bos, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[Score]:
        pairs = [Pair(context, continuation) for _, context, continuation in requests]
        with tqdm(total=len(pairs), desc="log-likelihoods", disable=None) as bar:
            return score(
                self._model,
                pairs,
                max_length=self.max_length,
                batch_size=self.batch_size,
                device=self._device,
                report=bar.update,
            )

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Log-likelihood of each whole text; every token once, after as many as there is room."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, (text,) in enumerate(request.args for request in requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, scored in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += scored.loglikelihood
        return sums

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continuations up to the first stop string, the end of a document or the most tokens."""
        arguments = [request.args for request in requests]
        batches = Collator(
            arguments,
            sort_fn=lambda each: -len(self.tok_encode(each[0])),
            group_by="gen_kwargs",
            group_fn=lambda each: each[1],
        )
        texts: list[str] = []
        with tqdm(total=len(arguments), desc="generation", disable=None) as bar:
            for batch in batches.get_batched(n=self.batch_size):
                texts += self._continued([context for context, _ in batch], batch[0][1])
                bar.update(len(batch))
        original: list[str] = batches.get_original(texts)
        return original

    def _continued(self, contexts: Sequence[str], settings: dict[str, Any]) -> list[str]:
        sampling, stops = _sampling(settings)
        room = self.max_length - sampling.max_tokens
        if room < 1:
            raise ConfigError(
                f"the task generates up to max_gen_toks={sampling.max_tokens} tokens, the model "
                f"has {self.max_length} positions; --gen-kwargs max_gen_toks=N sets fewer"
            )
        eod = self._text.eod

        def finished(ids: list[int]) -> bool:
            return ids[-1] == eod or any(stop in self._text.decode(ids) for stop in stops)

        encoded = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        new = generate_batch(
            self._model,
            [ids[-room:] for ids in encoded],
            sampling,
            vocab_size=min(self._text.vocab_size, self._model.config.vocab_size),
            finished=finished,
            device=self._device,
        )
        texts = [self._text.decode(ids[:-1] if ids[-1:] == [eod] else ids) for ids in new]
        return [postprocess_generated_text(text, stops, None) for text in texts]


def _sampling(settings: dict[str, Any]) -> tuple[Sampling, list[str]]:
    """How a task wants its text continued, and at what strings it ends."""
    wanted = dict(normalize_gen_kwargs(settings, NEW_TOKENS))
    stops = [stop for stop in wanted.pop("until") if stop]
    sampled, temperature = wanted.pop("do_sample"), wanted.pop("temperature", 1.0)
    sampling = Sampling(
        wanted.pop("max_gen_toks"),
        float(temperature) if sampled else 0.0,
        int(wanted.pop("top_k", 0)),
        float(wanted.pop("top_p", 1.0)),
    )
    if wanted.pop("num_beams", 1) != 1 or wanted:
        raise ConfigError(
            f"the task generates with {settings}; of these, megads-eval has until, max_gen_toks, "
            f"do_sample, temperature, top_k and top_p"
        )
    return sampling, stops
