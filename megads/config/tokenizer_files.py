"""What names a tokenizer: a file, or a word. Without torch, and quick to import."""

from __future__ import annotations

from pathlib import Path

from megads.errors import DataError

BYTE_VOCABULARY = 257
"""256 bytes and the end-of-document token."""
TIKTOKEN = "tiktoken:"
"""Before the name of an encoding that the tiktoken library knows."""
END_OF_DOCUMENT_PIECES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "</s>",
    "<eos>",
    "<eod>",
)
"""Names that mark the end of a document, tried in order when tokenizer.json comes without a
tokenizer_config.json to say which of its tokens it is."""


def has_tokenizer_file(spec: str) -> bool:
    """Whether a tokenizer is loaded from a file, rather than known by its name."""
    return spec != "byte" and not spec.startswith(TIKTOKEN)


def tokenizer_file(spec: str) -> Path:
    """The file a tokenizer is loaded from: `spec`, or the one in that folder.

    Raises DataError if there is none.
    """
    path = Path(spec)
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model")]
        path = next((file for file in found if file.is_file()), path)
    if not path.is_file():
        raise DataError(
            f"data.tokenizer={spec}: no such file; it is byte, tiktoken:NAME, or the path of a "
            f"sentencepiece .model, a Hugging Face tokenizer.json or a .tiktoken file, or of the "
            f"folder that holds one of the first two"
        )
    if path.suffix not in (".model", ".json", ".tiktoken"):
        raise DataError(
            f"data.tokenizer={spec}: expected a file ending in .model or .json, or in .tiktoken"
        )
    return path


def tokenizer_companions(path: Path) -> tuple[Path, ...]:
    """The file of a tokenizer, and the one beside it that says more about it, if there is one."""
    beside = (
        path.with_name(path.name + ".json")
        if path.suffix == ".tiktoken"
        else path.with_name("tokenizer_config.json")
    )
    return (path, beside) if beside.is_file() else (path,)
