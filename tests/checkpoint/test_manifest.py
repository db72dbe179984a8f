from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.checkpoint.manifest import (
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    model_differences,
)
from megads.errors import CheckpointError
from tests.checkpoint.simulation import MODEL

FILE = "rank00000-part00000.safetensors"


def small() -> Manifest:
    pieces = (
        PieceEntry(file=FILE, tensor="w@0,0", offset=(0, 0), shape=(2, 3)),
        PieceEntry(file=FILE, tensor="w@2,0", offset=(2, 0), shape=(1, 3)),
    )
    return Manifest(
        step=7,
        model=MODEL,
        layout={"tp": 2},
        state={"samples": 12, "lr": 0.1, "nested": {"a": [1, None, "x", True]}},
        tensors={"w": TensorEntry(dtype="float32", shape=(3, 3), pieces=pieces)},
        files={FILE: FileEntry(size=100, digest="crc32:00ff00ff")},
    )


def test_round_trip():
    assert decode_manifest(encode_manifest(small()), "m") == small()
    assert decode_manifest(encode_manifest(small()), "m").model == MODEL


def test_it_is_plain_json_that_says_what_is_where():
    raw = json.loads(encode_manifest(small()))
    assert raw["format"] == "megads" and raw["version"] == 2 and raw["step"] == 7
    assert raw["tensors"]["w"]["pieces"][1] == {
        "file": FILE,
        "tensor": "w@2,0",
        "offset": [2, 0],
        "shape": [1, 3],
    }
    assert raw["model"]["hidden_size"] == 24 and raw["state"]["samples"] == 12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_json_cannot_spell_are_refused(bad):
    manifest = small().model_copy(update={"state": {"loss": bad}})
    with pytest.raises(CheckpointError, match="JSON"):
        encode_manifest(manifest)


def change(path: str, value: object):
    """A manifest with one value replaced; `path` is dotted."""
    raw = json.loads(encode_manifest(small()))
    *parents, last = path.split(".")
    node = raw
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value
    return raw


PIECE = "tensors.w.pieces.1"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{PIECE}.file", "../../x", "file"),
        (f"{PIECE}.file", "/etc/passwd.safetensors", "file"),
        (f"{PIECE}.file", "sub/x.safetensors", "file"),
        (f"{PIECE}.file", "..safetensors", "file"),
        (f"{PIECE}.file", "x.safetensors\n", "file"),
        (f"{PIECE}.file", "other.safetensors", "not among the files"),
        (f"{PIECE}.tensor", "w@0,0", "used twice"),
        (f"{PIECE}.offset", [1, 0], "overlaps"),
        (f"{PIECE}.offset", [-2, 0], "offset"),
        (f"{PIECE}.offset", [2], "dims"),
        (f"{PIECE}.offset", [2.5, 0], "offset"),
        (f"{PIECE}.offset", ["2", 0], "offset"),
        (f"{PIECE}.shape", [0, 3], "shape"),
        (f"{PIECE}.shape", [2, 3], "not inside"),
        (f"{PIECE}.shape", [1, 2], "cover 8 of the 9"),
        ("tensors.w.shape", [3, 10**30], "shape"),
        ("tensors.w.shape", [3, 2**40], "cover"),
        ("tensors.w.shape", [-3, -3], "shape"),
        ("tensors.w.dtype", "complex64", "dtype"),
        ("tensors.w.pieces", [], "cover 0"),
        ("files", {"../y.safetensors": {"size": 99, "digest": "crc32:00000000"}}, "files"),
        ("step", -1, "step"),
        ("step", True, "step"),
        ("version", 0, "version"),
        ("version", 3, "newer"),
        ("format", "other", "format"),
        ("model.hidden_size", "wide", "hidden_size"),
        ("model.surprise", 1, "surprise"),
        ("surprise", 1, "surprise"),
        ("state", [], "state"),
    ],
)
def test_what_is_wrong_is_refused_and_named(path, value, message):
    raw = json.dumps(change(path, value)).encode()
    with pytest.raises(CheckpointError, match=rf"(?s)here/manifest.json.*{message}"):
        decode_manifest(raw, "here/manifest.json")


def test_files_too_small_for_their_tensors_are_refused():
    raw = json.loads(encode_manifest(small()))
    raw["files"][FILE]["size"] = 43
    with pytest.raises(CheckpointError, match="43 bytes but must hold at least 44"):
        decode_manifest(json.dumps(raw).encode(), "m")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100000, b"null", b"{", b"9" * 5000])
def test_what_is_not_a_manifest_at_all_is_refused(data):
    with pytest.raises(CheckpointError, match=r"^m is"):
        decode_manifest(data, "m")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats()
    | st.sampled_from(["", "../x", "w", FILE, "float32", "crc32:00000000"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), junk=JUNK)
def test_fuzzed_manifests_are_read_or_refused_but_nothing_else(seed, junk):
    """Replace or drop random nodes; what is accepted must still be safe to act on."""
    draw = random.Random(seed)
    raw = json.loads(encode_manifest(small()))
    for _ in range(draw.randrange(1, 3)):
        node = raw
        while True:
            if not isinstance(node, dict | list) or not node:
                break
            key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
            if draw.random() < 0.3 or not isinstance(node[key], dict | list):
                if draw.random() < 0.3:
                    del node[key]
                else:
                    node[key] = copy.deepcopy(junk)
                break
            node = node[key]
    try:
        manifest = decode_manifest(json.dumps(raw).encode(), "m")
    except CheckpointError:
        return
    for entry in manifest.tensors.values():
        assert sum(p.shape[0] * p.shape[1] for p in entry.pieces) == entry.shape[0] * entry.shape[1]
        assert all("/" not in p.file and ".." not in p.file for p in entry.pieces)


def test_model_differences_name_fields_and_both_values():
    other = MODEL.model_copy(update={"norm": "rmsnorm", "ffn_hidden_size": 28})
    assert model_differences(MODEL, other) == [
        "ffn_hidden_size: 20 in the checkpoint, 28 wanted",
        "norm: 'layernorm' in the checkpoint, 'rmsnorm' wanted",
    ]


def test_model_differences_leave_out_what_does_not_change_the_model():
    other = MODEL.model_copy(
        update={"name": "u", "hidden_dropout": 0.1, "vocab_multiple": 64, "init_std": 1.0}
    )
    assert model_differences(MODEL, other) == []
    longer = {"max_seq_length": 99}
    assert len(model_differences(MODEL, MODEL.model_copy(update=longer))) == 1
    rope = MODEL.model_copy(update={"position": "rope"})
    assert model_differences(rope, rope.model_copy(update=longer)) == []
