"""Between plain mappings or YAML text and `Config`; errors say the dotted path, not the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megads.config.keys import did_you_mean, explain_unknown_key, group_of, near
from megads.config.schema import Config
from megads.errors import ConfigError

_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
}


def decode(values: Mapping[str, Any]) -> Config:
    """The typed configuration of a nested mapping.

    Raises:
        ConfigError: with one problem for each key that is unknown or has a value it cannot have.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError([_explain(detail) for detail in error.errors()]) from None


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML; `from_yaml` gives it back."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def from_yaml(text: str) -> Config:
    """The configuration that `to_yaml` wrote."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not a YAML file: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("not a configuration: the YAML text is not a mapping")
    return decode(values)


def load_config(path: str | Path) -> Config:
    """The configuration in a file such as `run.dir/config.yaml`."""
    try:
        return from_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from None


def schema_defaults(group: type[BaseModel] = Config) -> dict[str, Any]:
    """Defaults of all settings as a nested mapping; `???`, as in OmegaConf, where there is none."""
    defaults: dict[str, Any] = {}
    for name, field in group.model_fields.items():
        inner = group_of(field.annotation)
        if inner is not None and (field.is_required() or field.default_factory is not None):
            defaults[name] = schema_defaults(inner)
        elif field.is_required():
            defaults[name] = "???"
        else:
            default = field.get_default(call_default_factory=False)
            defaults[name] = list(default) if isinstance(default, tuple) else default
    return defaults


def explain_error(error: BaseException) -> str:
    """The messages of an error and of what caused it, on one line."""
    reasons = []
    seen: BaseException | None = error
    while seen is not None:
        text = " ".join(str(seen).split())
        if text and text not in reasons:
            reasons.append(text)
        seen = seen.__cause__
    return ": ".join(reasons) or type(error).__name__


def _dotted(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _explain(detail: ErrorDetails) -> str:
    path, kind, value = _dotted(detail["loc"]), detail["type"], detail.get("input")
    if kind == "extra_forbidden":
        return explain_unknown_key(path)
    if kind == "missing":
        return f"{path} is missing"
    context = detail.get("ctx", {})
    if kind == "value_error":
        return f"{path}: {context.get('error', detail['msg'])}"
    if kind == "literal_error":
        choices = str(context.get("expected", "")).replace(" or ", ", ").replace("'", "")
        return f"{path}={_shown(value)}: must be one of {choices}" + did_you_mean(
            near(str(value), choices.split(", "), count=1)
        )
    reason = detail["msg"].replace("Input should be", "must be")
    for library_word, word in _WORDS.items():
        reason = reason.replace(library_word, word)
    return f"{path}={_shown(value)}: {reason}"


def _shown(value: Any) -> str:
    """A value as it is written in YAML or on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value) if isinstance(value, str | int | float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
