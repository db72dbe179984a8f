"""What is looked at before any worker starts."""

from __future__ import annotations

import logging
from pathlib import Path

from megads.checkpoint.directory import committed_steps
from megads.config.schema import Config
from megads.data.prepare import prepare_data
from megads.data.source import check_sources
from megads.data.tokenizer import may_fill

_log = logging.getLogger(__name__)


def check_data(config: Config) -> None:
    """Tokenize the texts that are not yet. Raises DataError for too little data, or none.

    Warns of a tokenizer that cannot be the model's: no error, since any model may be tried so.
    """
    saved = committed_steps(Path(config.run.dir, "checkpoints"))
    is_new = not saved and config.checkpoint.load is None
    data, vocab_size = prepare_data(config), config.model.vocab_size
    check_sources(config, data, is_new=is_new)
    if data.vocab_size is not None and not may_fill(data.vocab_size, vocab_size):
        _log.warning(
            "data.tokenizer=%s has %d ids, model.vocab_size=%d: the model never meets the other "
            "%d; name its tokenizer in data.tokenizer",
            config.data.tokenizer,
            data.vocab_size,
            vocab_size,
            vocab_size - data.vocab_size,
        )
