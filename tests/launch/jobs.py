"""Configurations of jobs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import yaml

from megads.config.decode import decode, schema_defaults
from megads.config.schema import Config


def configured(words: Sequence[str] = ()) -> Config:
    """What `compose` makes of simple words, without Hydra, which takes its time."""
    values = schema_defaults()
    values["model"] = {"name": "any", "num_layers": 8, "hidden_size": 64}
    values["model"] |= {"num_attention_heads": 8, "vocab_size": 512, "max_seq_length": 1024}
    values["run"]["dir"], values["launch"]["where"] = "run", "slurm"
    values["data"]["paths"] = ["demo"]
    for word in words:
        *path, last = word.partition("=")[0].split(".")
        group = functools.reduce(dict.__getitem__, path, values)
        group[last] = yaml.safe_load(word.partition("=")[2])
    return decode(values)
