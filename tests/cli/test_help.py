"""The help of each command: it explains every word, and its examples are real commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megads.cli import (
    audit,
    convert,
    convert_arguments,
    evaluate,
    generate,
    inspect_tokens,
    merge_tokens,
    preprocess,
    report,
    train_tokenizer,
    verify_tokens,
)
from megads.config.compose import compose

COMMANDS: dict[str, Any] = {
    "megads-eval": evaluate.main,
    "megads-generate": generate.main,
    "megads-convert": convert.main,
    "megads-preprocess": preprocess.main,
    "megads-report": report.main,
}
SUBCOMMANDS = [
    "megads-convert verify",
    *(f"megads-preprocess {name}" for name in preprocess.TOOLS),
]
OPTION = re.compile(r"^  (-[\w-]+|[a-z_]+)\b")


def shown(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    name, *words = command.split()
    with pytest.raises(SystemExit, match="0"):
        COMMANDS[name]([*words, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_the_help_of(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = shown(command, capsys).splitlines()
    assert lines[0].startswith(f"usage: {command} ")
    assert [line for line in lines if len(line) > 100] == []
    start = next(n for n, line in enumerate(lines) if line.endswith(":") and n)
    end = next(n for n, line in enumerate(lines) if line in ("example:", "examples:", "formats:"))
    # An option is explained beside its name, or below it where that is long.
    for number in range(start, end):
        if OPTION.match(lines[number]):
            beside = re.search(r"\S  +\S", lines[number].strip())
            assert beside or lines[number + 1].startswith(" " * 20), lines[number]


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS])
def test_the_examples_of(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is parsed, as far as that goes without doing it."""
    parsed: list[str] = []

    def stop(name: str, work: Any) -> int:
        parsed.append(name)
        return 0

    text = shown(command, capsys)
    examples = re.findall(r"^  (megads-[a-z]+ .*?)(?:  .*)?$", text, flags=re.MULTILINE)
    examples = [line for line in examples if not line.endswith(tuple(preprocess.TOOLS))]
    assert any(line.startswith(command) for line in examples)
    for module in (evaluate, generate, convert, merge_tokens, inspect_tokens, verify_tokens):
        monkeypatch.setattr(module, "guarded", stop)
    monkeypatch.setattr(train_tokenizer, "guarded", stop)
    monkeypatch.setattr(preprocess, "_tokenize", lambda options: parsed.append("tokenized"))
    monkeypatch.setattr(preprocess, "_report", lambda prefix, stats: "")
    monkeypatch.setattr(audit, "audit", lambda run: 1 / 0)
    monkeypatch.setattr(report, "read_runs", lambda runs: 1 / 0)
    for line in examples:
        name, *words = shlex.split(line.replace("[", "'[").replace("]", "]'"))
        if name == "megads-train":
            compose(words)
        elif name == "megads-convert" and words[0] != "verify":
            assert convert_arguments.parse(words).source == Path(words[0])
        elif words[0] == "audit" or name == "megads-report":
            with pytest.raises(ZeroDivisionError):
                COMMANDS[name](words)
        else:
            parsed.clear()
            assert COMMANDS[name](words) == 0 and len(parsed) == 1, line
