"""The tree of configuration keys, and what to say about a key that is not in it."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from megads.config.layout_name import EXAMPLES, parse_layout_name
from megads.config.schema import Config
from megads.errors import ConfigError

# Names that other trainers give to the same thing.
_ALIASES = {
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "optimizer": "optim.name",
    "clip_grad": "optim.clip",
    "max_grad_norm": "optim.clip",
    "gradient_clipping": "optim.clip",
    "warmup_steps": "optim.warmup",
    "lr_warmup_iters": "optim.warmup",
    "lr_decay_style": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "batch_size": "train.micro_batch_size",
    "train_batch_size": "train.global_batch_size",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "num_steps": "train.steps",
    "gradient_accumulation_steps": "train.global_batch_size",
    "activation_checkpointing": "train.recompute",
    "gradient_checkpointing": "train.recompute",
    "recompute_granularity": "train.recompute",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_parallel": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp",
    "data_parallel_size": "parallel.dp",
    "zero_stage": "parallel.zero",
    "zero_optimization": "parallel.zero",
    "dtype": "precision.name",
    "output_dir": "run.dir",
    "save": "run.dir",
    "data_path": "data.paths",
    "save_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "async_checkpoint": "checkpoint.async_save",
    "finetune": "checkpoint.load_what",
    "no_load_optim": "checkpoint.load_what",
    "eval_interval": "eval.every",
    "log_interval": "logging.every",
    "resume": "checkpoint.load",
    "load": "checkpoint.load",
    "max_position_embeddings": "model.max_seq_length",
    "num_hidden_layers": "model.num_layers",
    "intermediate_size": "model.ffn_hidden_size",
    "num_key_value_heads": "model.num_kv_heads",
    "hidden": "model.hidden_size",
}


def group_of(annotation: Any) -> type[BaseModel] | None:
    """The configuration group that a field holds, `X | None` included; None for a plain value."""
    options = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (types.UnionType, typing.Union)
        else (annotation,)
    )
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def leaf_keys(group: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all plain values, in the order of the schema."""
    for name, field in group.model_fields.items():
        inner = group_of(field.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from leaf_keys(inner, f"{prefix}{name}.")


def is_known(key: str) -> bool:
    """Whether the dotted path names a value or a group of values."""
    return any(leaf == key or leaf.startswith(key + ".") for leaf in leaf_keys())


def near(word: str, choices: Iterable[str], *, count: int = 3) -> list[str]:
    """The choices most like `word`, best first; choices it begins are like it too."""
    pool = list(choices)
    found = difflib.get_close_matches(word, pool, n=count, cutoff=0.65)
    longer = [c for c in pool if len(word) > 1 and c.startswith(word) and c not in found]
    return (found + longer)[:count]


def did_you_mean(words: Iterable[str]) -> str:
    """`; did you mean a or b?`, or nothing without words."""
    found = list(words)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def explain_unknown_key(key: str, groups: Iterable[str] = ()) -> str:
    """One sentence about a key that is not a setting, with what may have been meant.

    `groups` are those that take a choice, like `model` in `model=gpt-13b`.
    """
    close = [f"{group}=..." for group in near(key, groups, count=1)] if "." not in key else []
    if close:
        return f"{key} is neither a group nor a setting{did_you_mean(close)}"
    leaves = list(leaf_keys())
    section, _, last = key.rpartition(".")
    word = last.lower().replace("-", "_")
    if word in _ALIASES:
        return f"{key} is not a setting{did_you_mean([_ALIASES[word]])}"
    elsewhere = [leaf for leaf in leaves if leaf.rpartition(".")[2] == word]
    if elsewhere and len(elsewhere) <= 3:
        return f"{key} is not a setting; {word} is {' or '.join(elsewhere)}"
    local = [leaf.removeprefix(f"{section}.") for leaf in leaves if leaf.startswith(f"{section}.")]
    found = [f"{section}.{name}" for name in near(word, local)]
    if not found and not local:
        found = near(key, leaves)
    if not found:
        by_name = {leaf.rpartition(".")[2]: leaf for leaf in leaves}
        found = [by_name[name] for name in near(word, by_name)]
    if found:
        return f"{key} is not a setting{did_you_mean(found)}"
    if local:
        return f"{key} is not a setting; {section} has {', '.join(local)}"
    return f"{key} is not a setting; groups are {', '.join(Config.model_fields)}"


def explain_not_an_override(text: str) -> str:
    """One sentence about a word of the command line that is not key=value."""
    key = text.lstrip("-").partition("=")[0].replace("-", "_")
    about = f"write {key}=..." if is_known(key) else explain_unknown_key(key)
    return f"{text} is not key=value; {about}"


def explain_unknown_choice(group: str, choice: object, options: Sequence[str]) -> str:
    """One sentence about `group=choice` where there is no such choice."""
    if isinstance(choice, dict):
        return f"{group}={choice}: write {group}.<key>=<value> for each value to change"
    if group == "parallel" and isinstance(choice, str):
        close = near(choice, (o for o in options if o not in EXAMPLES))
        if not close or re.match(r"(tp|pp|vpp|dp|zero|sp)\d*", choice):
            try:
                parse_layout_name(choice)
            except ConfigError as error:
                return str(error)
    text = "null" if choice is None else str(choice)
    hint = did_you_mean(near(text, options)) or f"; choices are {', '.join(options)}"
    return f"{group}={text}: there is no such {group}{hint}"
