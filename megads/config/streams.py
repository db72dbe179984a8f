"""What the data settings say with `data.source=streaming`. Which sources, how many lanes? No torch.

A stream is dealt to a fixed number of lanes, each with a place of its own in the data. Rows of a
global batch belong to lanes, and a data-parallel rank reads whole lanes, so which samples a step
reads depends on the number of lanes and not on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megads.config.schema import Config, DataConfig
from megads.errors import ConfigError

DEFAULT_LANES = 8
"""Lanes where `data.lanes` is not given, if every batch size divides by it."""
HUB = "hf:"
"""Before the name of a data set of the Hugging Face hub."""


@dataclass(frozen=True)
class HubName:
    """A data set of the Hugging Face hub, from `hf:NAME[:CONFIG][@SPLIT]`."""

    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, path: str) -> HubName:
        """Raises ConfigError when there is no name."""
        rest, _, split = path.removeprefix(HUB).partition("@")
        name, _, config = rest.partition(":")
        if not name:
            raise ConfigError(f"data.paths: {path}: expected hf:NAME, hf:NAME:CONFIG or ...@SPLIT")
        return cls(name, config or None, split or "train")


def is_streamed(config: Config) -> bool:
    """Whether training reads its data as a stream."""
    return config.data.source == "streaming"


def batch_sizes(config: Config) -> tuple[int, ...]:
    """Numbers that every global batch is a sum of: the final size, or how a ramp-up gets there."""
    train = config.train
    ramp = train.batch_rampup[:2] if train.batch_rampup else ()
    return (train.global_batch_size, *ramp)


def num_lanes(config: Config) -> int:
    """`data.lanes`, or as many of DEFAULT_LANES as divide every batch; the same for any layout."""
    return config.data.lanes or math.gcd(DEFAULT_LANES, *batch_sizes(config))


def setting_problems(config: Config, dp: int) -> Iterator[str]:
    """Settings that do not go together with a stream, or mean nothing without one."""
    data = config.data
    if not is_streamed(config):
        for name in ("lanes", "shuffle_buffer"):
            value = getattr(data, name)
            if value != DataConfig.model_fields[name].default:
                yield f"data.{name}={value} is only read with data.source=streaming"
        return
    yield from _lane_problems(config, dp)
    for name in ("weights", "epochs", "limits", "skip"):
        value = getattr(data, name)
        if value != DataConfig.model_fields[name].default:
            yield (
                f"data.{name}={value} is about token files and has no meaning with "
                f"data.source=streaming, which reads its paths as one stream; leave it out, or "
                f"tokenize the sources beforehand with data.source=files"
            )
    if config.eval.every and not data.valid_paths:
        yield (
            f"eval.every={config.eval.every}: a stream keeps nothing back for evaluation; name "
            f"texts or token files in data.valid_paths, or set eval.every=0"
        )


def source_problems(config: Config, suffixes: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with the `data.paths` of a stream: names of files with one of these endings,
    or one of the hub. No data is read and no network used."""
    paths = config.data.paths
    hubs = [path for path in paths if path.startswith(HUB)]
    for path in paths:
        if path in hubs:
            try:
                HubName.parse(path)
            except ConfigError as error:
                yield from error.problems
        elif not path.endswith(suffixes):
            yield (
                f"data.paths: {path} cannot be streamed: expected a file ending in "
                f"{', '.join(suffixes)}, or {HUB}NAME; token files need data.source=files"
            )
        elif not Path(path).is_file():
            yield f"data.paths: {path}: there is no such file"
    if hubs and len(paths) > 1:
        yield f"data.paths: {hubs[0]} can only be streamed alone, there are {len(paths)} paths"


def _lane_problems(config: Config, dp: int) -> Iterator[str]:
    lanes, sizes = num_lanes(config), batch_sizes(config)
    names = ("train.global_batch_size", "train.batch_rampup start", "train.batch_rampup increment")
    common = math.gcd(*sizes)
    valid = [n for n in range(1, common + 1) if common % n == 0 and n % dp == 0]
    fix = f"it can be {', '.join(map(str, valid))}" if valid else f"dp={dp} divides no batch"
    for name, size in zip(names, sizes, strict=False):
        if size % lanes:
            yield f"data.lanes={lanes} does not divide {name}={size}; {fix}"
    if lanes % dp:
        yield (
            f"data.lanes={lanes} is not a multiple of the data parallel size {dp}, whose ranks "
            f"read whole lanes; {fix}. A run keeps its lanes when dp changes"
        )
