"""A trained model out of its checkpoint, as a plain module of one process."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from megads.checkpoint.directory import find_checkpoint, read_manifest
from megads.checkpoint.manifest import Manifest
from megads.checkpoint.reader import check_layers, fill_pieces
from megads.config.data_files import is_text
from megads.config.model import ModelConfig
from megads.config.schema import KernelsConfig
from megads.config.tokenizer_files import BYTE_VOCABULARY
from megads.data.tokenizer import Tokenizer, load_tokenizer, may_fill
from megads.errors import CheckpointError, ConfigError
from megads.kernels.api import select_kernels
from megads.models.gpt import GPTStage
from megads.parallel.batch import MicroBatch
from megads.parallel.mesh import Mesh
from megads.parallel.pieces import TensorPiece
from megads.parallel.sharding import flat_range_boxes
from megads.pipeline.partition import plan_stages


class LanguageModel(nn.Module):
    """The whole model on one device: token ids `[batch, seq]` to logits `[batch, seq, vocab_size]`.

    `config`: what was trained. Parameters have their canonical names under `stage.`.
    """

    def __init__(self, stage: GPTStage, config: ModelConfig) -> None:
        super().__init__()
        self.stage = stage
        self.config = config

    def forward(self, token_ids: Tensor) -> Tensor:
        """Raises ValueError for ids that are not in the vocabulary: rows past it are padding."""
        for extreme in (token_ids.min(), token_ids.max()) if token_ids.numel() else ():
            if not 0 <= int(extreme) < self.config.vocab_size:
                raise ValueError(
                    f"token id {int(extreme)} is outside the vocabulary of {self.config.vocab_size}"
                )
        return self.stage.logits(None, MicroBatch(tokens=token_ids, labels=token_ids))


def load_model(
    checkpoint_dir: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """The model of a checkpoint, in evaluation mode.

    `checkpoint_dir` is a `step-N` directory, or a run or its `checkpoints`, whose newest checkpoint
    is then taken. `dtype` None keeps the type the weights were saved in: that of the fp32 masters
    for a run in any precision. Raises CheckpointError naming what is missing or damaged.
    """
    path = find_checkpoint(Path(checkpoint_dir))
    manifest = read_manifest(path)
    config = manifest.model
    dtype = dtype or _saved_dtype(path, manifest)
    check_layers(path, manifest)
    mesh = Mesh.single(device)
    plan = plan_stages(config, pp=1, chunks=1, seq_length=config.max_seq_length)
    kernels, _ = select_kernels(KernelsConfig(), mesh.device, dtype)
    stage = GPTStage(
        config,
        plan.chunks_of(0)[0],
        mesh,
        kernels,
        sequence_parallel=False,
        recompute="none",
        dtype=dtype,
        device=mesh.device,
    )
    fill_pieces(path, manifest, _pieces(stage))
    return LanguageModel(stage, config).eval()


def run_tokenizer(checkpoint_dir: str | Path, name: str | None = None) -> Tokenizer:
    """The tokenizer called `name`, else the one the checkpoint's run was trained with.

    Raises ConfigError when the run's config.yaml does not say, also by naming one that read no text
    and cannot be the model's, or if the tokenizer has ids that are outside the model's vocabulary.
    """
    path = find_checkpoint(Path(checkpoint_dir))
    vocab_size = read_manifest(path).model.vocab_size
    config = path.parent.parent / "config.yaml"
    tokenizer = load_tokenizer(name or _configured_tokenizer(config, vocab_size))
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, but the model in {path} "
            f"knows only {vocab_size}; name the tokenizer it was trained with"
        )
    return tokenizer


def _configured_tokenizer(config: Path, vocab_size: int) -> str:
    try:
        data = yaml.safe_load(config.read_text(encoding="utf-8"))["data"]
        name, paths = data["tokenizer"], data.get("paths")
        was_used = paths is None or data.get("source") == "streaming" or any(map(is_text, paths))
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
        name, was_used = None, False
    # The default stands there too when only token files were read.
    is_default = name == "byte" and not was_used and not may_fill(BYTE_VOCABULARY, vocab_size)
    if not isinstance(name, str) or is_default:
        raise ConfigError(f"{config} does not say which tokenizer was used; name one (--tokenizer)")
    return name


def _saved_dtype(path: Path, manifest: Manifest) -> torch.dtype:
    found = {entry.dtype for key, entry in manifest.tensors.items() if key.startswith("param/")}
    if not found:
        raise CheckpointError(f"{path} holds no parameters")
    return reduce(torch.promote_types, (getattr(torch, name) for name in found))


def _pieces(stage: GPTStage) -> list[TensorPiece]:
    """Views of all parameters, with the padding, which no checkpoint holds, set to zero."""
    pieces = []
    for name, parameter in stage.named_parameters():
        spec = stage.specs[name]
        flat = parameter.data.zero_().view(-1)
        for box in flat_range_boxes(spec, tp=1, index=0):
            data = flat[box.flat_start : box.flat_start + box.numel]
            pieces.append(
                TensorPiece(
                    f"param/{spec.name}", data.dtype, spec.shape, box.offset, box.shape, data
                )
            )
    return pieces
