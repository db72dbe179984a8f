from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import megads
from megads.checkpoint.store import CheckpointStore
from megads.config.model import ModelConfig
from megads.convert.formats import open_source
from megads.errors import CheckpointError, ConfigError
from megads.models.families import param_specs
from megads.parallel.mesh import Axis
from megads.parallel.pieces import TensorPiece
from megads.parallel.sharding import flat_range_boxes
from megads.train import load
from megads.train.load import load_model, run_tokenizer
from tests.checkpoint.simulation import simulate

CONFIG = ModelConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=40,
    vocab_size=101,
    vocab_multiple=8,
    max_seq_length=16,
)
OUTER = {"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"}
INNER = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def gpt2() -> GPT2LMHeadModel:
    """A GPT-2 of the transformers library in which no parameter has a special value."""
    torch.manual_seed(3)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=101,
            n_positions=16,
            n_embd=24,
            n_layer=3,
            n_head=4,
            n_inner=40,
            attn_implementation="eager",
        )
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def canonical(model: GPT2LMHeadModel) -> dict[str, torch.Tensor]:
    """Its parameters under canonical names; GPT-2 stores matrices input first."""
    theirs = model.transformer.state_dict()
    out = {}
    for spec in param_specs(CONFIG):
        base, kind = spec.name.rsplit(".", 1)
        if base.startswith("blocks."):
            _, layer, inner = base.split(".", 2)
            tensor = theirs[f"h.{layer}.{INNER[inner]}.{kind}"]
        else:
            tensor = theirs[f"{OUTER[base]}.{kind}"]
        out[spec.name] = tensor.T.contiguous() if spec.role == "matrix" else tensor
    return out


def save_sharded(
    path: Path, tensors: dict[str, torch.Tensor], tp: int, dp: int, config: ModelConfig = CONFIG
) -> None:
    """Save as `tp` x `dp` ranks would, each dp rank holding a flat half of what is local."""

    def work(world: Axis):
        pieces = []
        for spec in param_specs(config):
            size = math.prod(spec.local_shape(tp))
            cut = world.index // tp * size // dp, (world.index // tp + 1) * size // dp
            for box in flat_range_boxes(spec, tp, world.index % tp, *cut):
                place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                data = tensors[spec.name][place].contiguous()
                key = f"param/{spec.name}"
                pieces.append(TensorPiece(key, data.dtype, spec.shape, box.offset, box.shape, data))
        layout = {"tp": tp, "pp": 1, "dp": dp}
        CheckpointStore(path, world).save(
            7, pieces, state={}, meta={"model": config, "layout": layout}
        )

    assert simulate(tp * dp, work) == [None] * (tp * dp)


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 3), (4, 1)])
def test_logits_are_those_of_transformers(tmp_path, tp, dp):
    theirs = gpt2()
    save_sharded(tmp_path / "checkpoints", canonical(theirs), tp, dp)
    ids = torch.randint(0, 101, (2, 13))
    with torch.no_grad():
        expected = theirs(ids).logits
        for place in ("", "checkpoints", "checkpoints/step-7"):
            model = megads.load_model(tmp_path / place)
            assert not model.training and isinstance(model, torch.nn.Module)
            logits = model(ids)
            assert logits.shape == (2, 13, 101) and logits.dtype == torch.float32
            assert (logits - expected).abs().max() < 1e-4
        swapped = canonical(theirs)
        first, second = "blocks.1.mlp_norm.bias", "blocks.1.attn_norm.bias"
        swapped[first], swapped[second] = swapped[second], swapped[first]
        save_sharded(tmp_path / "wrong", swapped, tp, dp)
        assert (load_model(tmp_path / "wrong")(ids) - expected).abs().max() > 1e-2


def test_dtype_is_the_saved_one_or_the_one_asked_for(tmp_path):
    tensors = {name: t.bfloat16() for name, t in canonical(gpt2()).items()}
    save_sharded(tmp_path, tensors, 1, 1)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.bfloat16}
    mixed = tensors | {"final_norm.weight": tensors["final_norm.weight"].float()}
    save_sharded(tmp_path / "mixed", mixed, 1, 1)  # nothing is rounded
    assert {p.dtype for p in load_model(tmp_path / "mixed").parameters()} == {torch.float32}
    as_float = load_model(tmp_path, dtype=torch.float32)
    found = dict(as_float.stage.named_parameters())["blocks.2.mlp.up.weight"]
    assert torch.equal(found, tensors["blocks.2.mlp.up.weight"].float())


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    save_sharded(tmp_path, canonical(gpt2()), 1, 1)
    model = load_model(tmp_path)
    assert model.stage.embedding.word.weight.shape[0] == 104, "padded rows exist"
    with pytest.raises(ValueError, match="101"):
        model(torch.tensor([[101]]))
    with pytest.raises(ValueError, match="-100 is outside the vocabulary of 101"):
        model(torch.tensor([[3, -100]]))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    piece = TensorPiece("other/x", torch.float32, (1,), (0,), (1,), torch.ones(1))
    store = CheckpointStore(tmp_path, Axis("world"))
    store.save(1, [piece], state={}, meta={"model": CONFIG, "layout": {}})
    with pytest.raises(CheckpointError, match="no parameters"):
        load_model(tmp_path)


def test_the_tokenizer_is_the_runs_own(tmp_path):
    save_sharded(tmp_path / "checkpoints", canonical(gpt2()), 1, 1)
    with pytest.raises(ConfigError, match=r"config\.yaml does not say"):
        run_tokenizer(tmp_path)
    (tmp_path / "config.yaml").write_text("data: {tokenizer: byte}\n")
    with pytest.raises(ConfigError, match=r"byte has 257 ids.*101"):
        run_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("data", "vocab_size", "is_known"),
    [
        ({"tokenizer": "byte", "source": "files", "paths": ["corpus"]}, 1000, False),
        ({"tokenizer": "byte", "source": "files", "paths": ["corpus"]}, 257, True),
        ({"tokenizer": "byte", "source": "files", "paths": ["corpus", "a.jsonl"]}, 1000, True),
        ({"tokenizer": "byte", "source": "streaming", "paths": ["hf:x"]}, 1000, True),
        ("byte", 257, False),
    ],
)
def test_a_default_that_read_no_text_is_not_taken_for_the_tokenizer(
    tmp_path, monkeypatch, data, vocab_size, is_known
):
    (tmp_path / "config.yaml").write_text(json.dumps({"data": data}))
    known = partial(load._configured_tokenizer, tmp_path / "config.yaml", vocab_size)
    if is_known:
        assert known() == "byte"
    else:
        with pytest.raises(ConfigError, match=r"name one \(--tokenizer\)"):
            known()


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_a_model_that_was_evaluated_can_be_trained(tmp_path, position):
    """What is kept of a pass in inference mode serves one that is differentiated."""
    config = ModelConfig(**CONFIG.model_dump() | {"position": position})
    tensors = {spec.name: torch.randn(spec.shape) for spec in param_specs(config)}
    save_sharded(tmp_path, tensors, 1, 1, config)
    model, ids = load_model(tmp_path), torch.randint(0, 101, (2, 8))
    with torch.inference_mode():
        model(ids)
    model.train()
    model(ids).sum().backward()


def test_more_layers_than_tensors_are_refused_before_anything_is_made(tmp_path):
    """What a manifest from elsewhere says of its model may be anything."""
    piece = TensorPiece("param/x", torch.float32, (1,), (0,), (1,), torch.ones(1))
    model = ModelConfig(**CONFIG.model_dump() | {"num_layers": 10**9})
    store = CheckpointStore(tmp_path, Axis("world"))
    store.save(1, [piece], state={}, meta={"model": model, "layout": {}})
    for opened in (load_model, open_source):
        with pytest.raises(CheckpointError, match=r"cannot hold 1000000000 layers: .* 1 tensors"):
            opened(tmp_path)
