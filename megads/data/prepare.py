"""The token files of a run, made from text where the configuration names text.

`data.paths` entries may be prefixes of token files, which are used where they are, or `.txt` and
`.jsonl` files, or `demo`, the text shipped with the package. Text is tokenized into
`run.dir/data/`; the name of the result carries a hash of everything it depends on, so a second
start uses it again and a change of the text or the tokenizer makes a new one. No torch: the local
launcher does this before it starts any worker, so that none waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from megads.config.data_files import (
    DEMO,
    data_problems,
    is_text,
    strip_suffix,
)
from megads.config.schema import Config, DataConfig
from megads.config.streams import is_streamed
from megads.data import indexed
from megads.data.preprocess import preprocess
from megads.data.streaming_source import check_stream
from megads.data.tokenizer import (
    file_identity,
    load_tokenizer,
    require_eod,
    tokenizer_identity,
)
from megads.data.unfinished import BusyError
from megads.errors import DataError

_CORPUS = Path(__file__).with_name("corpus") / "shakespeare.txt.gz"
_POLL_S = 0.2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedData:
    """Prefixes of the token files that training and validation read.

    `valid` is empty when validation takes its share of the training files, `train` when training
    reads a stream. `vocab_size` is the tokenizer's when a text is tokenized with it, None when only
    ready token files are used.
    """

    train: tuple[str, ...]
    valid: tuple[str, ...]
    vocab_size: int | None


def prepare_data(config: Config) -> ResolvedData:
    """Make the token files that are missing and say where all of them are.

    The launcher or one rank calls this before all others do; for them everything is there and
    nothing is written.
    Raises DataError with every problem of the settings, and for text that cannot be tokenized.
    """
    problems = list(data_problems(config))
    if problems:
        raise DataError(problems)
    data = config.data
    vocab_size = None
    streamed = is_streamed(config)
    if streamed or any(is_text(path) for path in (*data.paths, *data.valid_paths)):
        tokenizer = load_tokenizer(data.tokenizer)
        if data.append_eod:
            require_eod(tokenizer)
        vocab_size = tokenizer.vocab_size
        if vocab_size > config.model.vocab_size:
            raise DataError(
                f"tokenizer {tokenizer.name} has {vocab_size} ids, model.vocab_size="
                f"{config.model.vocab_size}; set model.vocab_size={vocab_size} or more"
            )
    if streamed:
        check_stream(config)
    return ResolvedData(
        () if streamed else tuple(_token_prefix(path, config) for path in data.paths),
        tuple(_token_prefix(path, config) for path in data.valid_paths),
        vocab_size,
    )


def _token_prefix(path: str, config: Config) -> str:
    if not is_text(path):
        return strip_suffix(path)
    data, text = config.data, _CORPUS if path == DEMO else Path(path)
    parts = [_identity(text), str(data.append_eod), data.tokenizer]
    if data.tokenizer != "byte":
        parts.append(tokenizer_identity(data.tokenizer))
    if data.text_key != DataConfig.model_fields["text_key"].default:
        parts.append(f"key {data.text_key}")
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    prefix = str(Path(config.run.dir) / "data" / f"{text.name.split('.')[0]}-{digest}")
    if not indexed.exists(prefix):
        _log.info("tokenizing %s into %s", text, prefix)
    while not indexed.exists(prefix):
        try:
            stats = preprocess(
                [text],
                prefix,
                data.tokenizer,
                json_key=data.text_key,
                append_eod=data.append_eod,
            )
        except BusyError:  # a rank of this node, or another job: what it makes serves all
            time.sleep(_POLL_S)
        except OSError as error:
            raise DataError(f"cannot write {prefix}.bin: {error}") from error
        else:
            _log.info("%d documents, %d tokens", stats.documents, stats.tokens)
    return prefix


def _identity(path: Path) -> str:
    path = path.resolve()
    if path == _CORPUS.resolve():
        # By content: the package may be installed at another place, another time, on each node.
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return file_identity(path)
