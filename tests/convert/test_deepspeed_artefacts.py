"""Checkpoints by Megatron-DeepSpeed and GPT-NeoX themselves: hashes, logits, masters, moments."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import megads
from megads.checkpoint.directory import find_checkpoint, read_manifest
from megads.checkpoint.reader import fill_pieces
from megads.config.model import ModelConfig
from megads.config.schema import KernelsConfig
from megads.convert.pickles import load_pickle
from megads.convert.report import summary
from megads.convert.run import convert, mapping, open_checked
from megads.convert.source import ReadOptions, Source, WriteOptions
from megads.errors import CheckpointError
from megads.kernels.api import select_kernels
from megads.models.gpt import GPTStage
from megads.parallel.batch import MicroBatch
from megads.parallel.layout import ParallelLayout
from megads.parallel.pieces import TensorPiece
from megads.parallel.sharding import flat_range_boxes
from megads.pipeline.partition import plan_stages
from tests.cases import case
from tests.convert.deepspeed_cases import (
    BIGSCIENCE,
    DEEPSPEEDAI,
    KINDS,
    PYTHIA,
    Dialect,
    canonical,
    digest,
    part_of,
    place,
)
from tests.distributed import Workers, mesh_for

DEFAULT = ReadOptions()
THIRDS = Dialect(first_block=2, norm=0, head=1, qkv="thirds")


@dataclass(frozen=True)
class Artefact:
    path: str
    dialect: Dialect
    options: ReadOptions = DEFAULT
    expected: str = ""


BLOOM = Artefact("megatron_deepspeed/bloom_tp1pp1_z1_fp32", BIGSCIENCE)
BF16 = Artefact("megatron_deepspeed/bloom_tp2pp2_z0_bf16", BIGSCIENCE)
UNIVERSAL = Artefact(f"{BLOOM.path}_universal", BIGSCIENCE, expected=BLOOM.path)
GQA = Artefact("megatron_deepspeed_ds/llama_gqa_tp1pp1_z1_fp32", DEEPSPEEDAI)
HEAD = Artefact("megatron_deepspeed_ds/llama_mha_head_tp2pp1_z1_fp32", THIRDS)
NEOX = Artefact("gpt_neox/pythia_tp1pp1", PYTHIA, ReadOptions(vocab_size=512))
FILES = [BLOOM, BF16, GQA, HEAD, NEOX]
ALL = [*FILES, UNIVERSAL]


def name_of(artefact: Artefact) -> str:
    return Path(artefact.path).name


def opened(artefact: Artefact) -> Source:
    return open_checked(case(artefact.path), "auto", artefact.options)


def expected(artefact: Artefact, name: str) -> Path:
    return case(artefact.expected or artefact.path) / name


def logits(directory: Path, artefact: Artefact) -> Tensor:
    model = megads.load_model(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.from_numpy(np.load(expected(artefact, "expected_input_ids.npy"))))


def expected_logits(artefact: Artefact) -> Tensor:
    low = expected(artefact, "expected_logits_fp32.npy")
    high = expected(artefact, "expected_logits.npy")
    return torch.from_numpy(np.load(low if low.exists() else high))


def hugging_face(model: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and cuts of the Hugging Face classes in the expected hashes."""
    out: dict[str, Tensor] = {}
    heads = (model.num_attention_heads, model.num_kv_heads, model.num_kv_heads)
    rows = [count * model.head_dim for count in heads]
    for name, tensor in tensors.items():
        if not model.tie_embeddings and model.norm == "layernorm":  # GPT-NeoX
            grouped = part_of(PYTHIA, model, name, tensor, 1, 0)
            names = {"attn.qkv": "attention.query_key_value", "attn.out": "attention.dense"}
            names |= {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
            layers, final = "gpt_neox.layers", "gpt_neox.final_layer_norm"
            edges = {"embedding.word": "gpt_neox.embed_in", "head": "lm_head", "final_norm": final}
        elif model.tie_embeddings:  # BLOOM
            grouped = part_of(BIGSCIENCE, model, name, tensor, 1, 0)
            names = {"attn.qkv": "self_attention.query_key_value", "mlp.up": "mlp.dense_h_to_4h"}
            names |= {"attn.out": "self_attention.dense", "mlp.down": "mlp.dense_4h_to_h"}
            layers = "transformer.h"
            edges = {"embedding.word": "transformer.word_embeddings"}
            edges |= {"embedding.norm": "transformer.word_embeddings_layernorm"}
            edges |= {"final_norm": "transformer.ln_f"}
        else:
            grouped, layers = tensor, "model.layers"
            names = {"attn.out": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
            edges = {"embedding.word": "model.embed_tokens", "head": "lm_head"}
            edges |= {"final_norm": "model.norm"}
        names |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if not name.startswith("blocks."):
            base, _, kind = name.rpartition(".")
            out[f"{edges[base]}.{kind}"] = grouped
            continue
        _, layer, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        if part in names:
            out[f"{layers}.{layer}.{names[part]}.{kind}"] = grouped
        elif part == "attn.qkv":
            for which, piece in zip("qkv", tensor.split(rows), strict=True):
                out[f"{layers}.{layer}.self_attn.{which}_proj.{kind}"] = piece
        else:
            for which, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                out[f"{layers}.{layer}.mlp.{which}_proj.{kind}"] = piece
    return out


@pytest.mark.parametrize("artefact", ALL, ids=name_of)
def test_tensors_are_the_expected_ones_to_the_bit(artefact: Artefact) -> None:
    """Weights in the type they were trained in; for bf16 that is the masters rounded."""
    source = opened(artefact)
    tensors = canonical(source)
    if artefact is BF16:
        assert all(t.dtype == torch.float32 for t in tensors.values())
        tensors = {name: t.bfloat16() for name, t in tensors.items()}
    theirs = json.loads(expected(artefact, "expected_hf_tensors.json").read_text())["tensors"]
    ours = {
        name: [list(t.shape), digest(t)] for name, t in hugging_face(source.model, tensors).items()
    }
    if "lm_head.weight" in theirs.keys() - ours.keys():
        ours["lm_head.weight"] = ours["transformer.word_embeddings.weight"]
    assert ours == theirs


@pytest.mark.parametrize("artefact", ALL, ids=name_of)
def test_logits_are_the_expected_ones(artefact: Artefact, tmp_path: Path) -> None:
    source = opened(artefact)
    options = WriteOptions(dtype=torch.bfloat16 if artefact is BF16 else None)
    convert(source, tmp_path / "out", "megads", options, lambda kind, name: None)
    assert (logits(tmp_path / "out", artefact) - expected_logits(artefact)).abs().max() < 1e-4
    manifest = read_manifest(find_checkpoint(tmp_path / "out"))
    assert manifest.step == 4 and manifest.state["optimizer_updates"] == 4
    assert manifest.state["train"]["samples"] == 32  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    "artefact, wrong",
    [(HEAD, "grouped"), (GQA, "thirds"), (BLOOM, "thirds"), (NEOX, "thirds")],
    ids=lambda value: name_of(value) if isinstance(value, Artefact) else value,
)
def test_another_order_gives_other_logits(artefact: Artefact, wrong: str, tmp_path: Path) -> None:
    options = ReadOptions(qkv=wrong, vocab_size=512)  # type: ignore[arg-type]
    source = open_checked(case(artefact.path), "auto", options)
    convert(source, tmp_path / "out", "megads", WriteOptions(), lambda kind, name: None)
    assert (logits(tmp_path / "out", artefact) - expected_logits(artefact)).abs().max() > 0.01


def test_the_order_taken_is_told() -> None:
    source = opened(HEAD)
    assert "--qkv grouped" in summary(source, mapping(source), every=False)
    assert not opened(GQA).notes


@pytest.mark.parametrize("artefact", FILES, ids=name_of)
def test_masters_and_moments_are_those_of_the_flat_buffers(artefact: Artefact) -> None:
    """Walked through in the order of the shapes of the parameters, without the files' addresses."""
    source = opened(artefact)
    assert source.kinds == KINDS
    step = case(artefact.path) / "global_step4"
    tp = 1 + max(int(path.name[15:17]) for path in step.glob("layer_*"))
    tensors = {kind: canonical(source, kind) for kind in KINDS}
    wanted = {place(artefact.dialect, source.model, name): name for name in tensors["param"]}
    seen = 0
    for file in sorted(step.glob("mp_rank_*")):
        number = int(file.name[8:10])
        shapes = load_pickle(file)["param_shapes"]
        (flat_file,) = step.glob(f"*zero_pp_rank_0_mp_rank_{number:02d}_optim_states.pt")
        state = load_pickle(flat_file)["optimizer_state_dict"]
        if shapes is None:  # bf16 without ZeRO: names from the addresses, sizes from the layers
            weights: list[dict[tuple[int, str], Tensor]] = [{} for _ in range(tp)]
            for path in step.glob("layer_*"):
                for key, tensor in load_pickle(path).items():
                    weights[int(path.name[15:17])][int(path.name[6:8]), key] = tensor
            shapes = [
                {
                    name: list(weights[number % tp][located(artefact.dialect, name)].shape)
                    for name in names
                }
                for names in state["param_slice_mappings"]
            ]
        for group, table in enumerate(shapes):
            buffers = dict(state["base_optimizer_state"]["state"][group])
            buffers["param"] = state["single_partition_of_fp32_groups"][group].detach()
            position = 0
            for name, shape in table.items():
                ours = wanted[located(artefact.dialect, name)]
                for kind in KINDS:
                    theirs = buffers[kind][position : position + math.prod(shape)].view(shape)
                    mine = tensors[kind][ours]
                    if ours in ("embedding.word.weight", "head.weight"):
                        first = number % tp * shape[0]
                        mine = mine[first : first + shape[0]]
                        theirs = theirs[: len(mine)]
                    else:
                        mine = part_of(artefact.dialect, source.model, ours, mine, tp, number % tp)
                    assert torch.equal(mine, theirs), (kind, ours, file.name)
                position += math.prod(shape)
                seen += 1
    assert seen >= len(wanted) * tp


def located(dialect: Dialect, name: str) -> tuple[int, str]:
    layer, _, key = name.partition(".")
    if layer == "tied_modules":
        return dialect.embedding, key.partition(".")[2]
    return int(layer), key


def test_a_universal_folder_holds_what_the_files_it_was_made_of_hold() -> None:
    files, universal = opened(BLOOM), opened(UNIVERSAL)
    for kind in KINDS:
        whole = canonical(universal, kind)
        assert all(torch.equal(whole[n], t) for n, t in canonical(files, kind).items())


def test_padding_is_kept_when_asked_for() -> None:
    source = open_checked(case(BF16.path), "auto", ReadOptions(keep_padding=True))
    assert source.model.vocab_size == 528
    assert source.tensor("param", "embedding.word.weight").shape == (528, 32)
    neox = open_checked(case(NEOX.path), "auto", ReadOptions())
    assert neox.model.vocab_size == 528 and "--vocab-size" in neox.notes[0]
    with pytest.raises(CheckpointError, match="600 words cannot be in 528 rows"):
        open_checked(case(NEOX.path), "auto", ReadOptions(vocab_size=600))


def logits_in_stages(rank: int, world: int, checkpoint: Path, pp: int, ids: Tensor) -> Tensor:
    """Worker: the logits, each stage filled from the checkpoint's pieces, one after the other."""
    manifest = read_manifest(find_checkpoint(checkpoint))
    config = manifest.model
    mesh = mesh_for(ParallelLayout(tp=world), rank, config.num_kv_heads)
    kernels, _ = select_kernels(KernelsConfig(), "cpu", torch.float32)
    plan = plan_stages(config, pp=pp, chunks=1, seq_length=ids.shape[1])
    batch, hidden = MicroBatch(tokens=ids, labels=ids), None
    for index in range(pp):
        stage = GPTStage(
            config,
            plan.chunks_of(index)[0],
            mesh,
            kernels,
            sequence_parallel=False,
            recompute="none",
            dtype=torch.float32,
            device="cpu",
        )
        pieces = []
        for name, parameter in stage.named_parameters():
            spec, flat = stage.specs[name], parameter.data.zero_().view(-1)
            for box in flat_range_boxes(spec, tp=world, index=mesh.tp.index):
                data = flat[box.flat_start : box.flat_start + box.numel]
                pieces.append(
                    TensorPiece(
                        f"param/{spec.name}", data.dtype, spec.shape, box.offset, box.shape, data
                    )
                )
        fill_pieces(find_checkpoint(checkpoint), manifest, pieces)
        with torch.no_grad():
            last = index == pp - 1
            hidden = stage.logits(hidden, batch) if last else stage(hidden, batch)
    assert hidden is not None
    return hidden


@pytest.mark.parametrize("artefact", [BLOOM, GQA, NEOX], ids=name_of)
def test_the_result_loads_in_any_layout(
    artefact: Artefact, workers: Workers, tmp_path: Path
) -> None:
    convert(opened(artefact), tmp_path / "out", "megads", WriteOptions(), lambda kind, name: None)
    ids = torch.from_numpy(np.load(expected(artefact, "expected_input_ids.npy")))
    for tp, pp in ((1, 2), (2, 1), (2, 2)):
        results = workers(tp).run(logits_in_stages, tmp_path / "out", pp, ids)
        for result in results:
            assert (result - expected_logits(artefact)).abs().max() < 1e-4, (tp, pp)
