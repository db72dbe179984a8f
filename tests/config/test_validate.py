import functools
import os
import re
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megads.config.compose import compose
from megads.config.decode import decode
from megads.config.directories import make_directories, offload_directory
from megads.config.schema import Config
from megads.config.validate import (
    check,
    resolve_layout,
    valid_tensor_parallel_sizes,
    validate,
)
from megads.errors import ConfigError, LayoutError
from megads.parallel.sharding import Part


@functools.cache
def base() -> Config:
    return compose()


def changed(text: str) -> Config:
    """The default configuration with the given `group.key=value` words, decoded again."""
    values = base().model_dump()
    changes = dict(word.split("=", 1) for word in text.split())
    if text.startswith("model."):  # sizes that follow from others are derived again
        for name in ("num_kv_heads", "head_dim", "ffn_hidden_size"):
            del values["model"][name]
    for key, value in changes.items():
        group, name = key.split(".")
        values[group][name] = yaml.safe_load(value)
    return decode(values)


def problems(text: str, world_size: int | None = None) -> list[str]:
    return validate(changed(text), world_size)


def test_the_default_and_the_documented_layouts_are_valid():
    assert validate(base()) == []
    for overrides in (["parallel=tp2pp2"], ["parallel=tp2pp2dp2zero1"], ["parallel=tp2sp"]):
        assert validate(compose(overrides)) == []


# (what is wrong, world size, the numbers and words that the message has to name)
IMPOSSIBLE = [
    (
        "model.num_attention_heads=6 model.hidden_size=96 parallel.tp=4",
        None,
        ["num_attention_heads=6", "tp=4", "1, 2, 3 or 6"],
    ),
    (
        "model.num_attention_heads=12 model.num_kv_heads=6 model.hidden_size=96 parallel.tp=4",
        None,
        ["num_kv_heads=6", "tp=4", "1, 2, 3, 6 or 12"],
    ),
    (
        "model.ffn_hidden_size=50 parallel.tp=4",
        None,
        ["ffn_hidden_size=50", "tp=4", "1 or 2"],
    ),
    ("parallel.tp=2 parallel.pp=3", 4, ["tp=2", "pp=3", "6", "4", "1, 2 or 4"]),
    ("parallel.tp=2 parallel.dp=3 train.global_batch_size=12", 4, ["tp=2", "dp=3", "6", "4"]),
    (
        "train.global_batch_size=10 train.micro_batch_size=4 parallel.dp=2",
        2,
        ["global_batch_size=10", "micro_batch_size=4", "dp=2", "8 or 16"],
    ),
    (
        "train.seq_length=15 parallel.tp=2 parallel.sequence_parallel=true",
        None,
        ["seq_length=15", "tp=2", "14 or 16"],
    ),
    (
        "model.num_layers=1 parallel.pp=2",
        None,
        ["num_layers=1", "pp=2", "1 to 1"],
    ),
    (
        "model.num_layers=7 parallel.pp=4 parallel.chunks=2",
        None,
        ["num_layers=7", "8", "1 to 3"],
    ),
    ("parallel.pp=2 parallel.split=[1,2,1]", None, ["[1,2,1]", "3 entries", "2"]),
    ("parallel.pp=2 parallel.split=[1,2]", None, ["3 layers", "num_layers=4"]),
    ("parallel.pp=3 parallel.split=[2,0,2]", None, ["[2,0,2]", "first and the last"]),
    ("parallel.sequence_parallel=true", None, ["sequence_parallel", "parallel.tp", "1"]),
    (
        'model.rope_scaling={"kind":"linear","factor":2}',
        None,
        ["rope_scaling", "position=rope", "learned"],
    ),
    (
        "kernels.attention=compiled",
        None,
        ["attention=compiled", "norm, activation, rotary"],
    ),
    ("kernels.optimizer=compiled", None, ["optimizer=compiled", "residual", "torch"]),
    ("train.seq_length=129", None, ["seq_length=129", "max_seq_length=128"]),
    ("parallel.pp=2 parallel.schedule=interleaved", None, ["interleaved", "chunks", "1"]),
    ("parallel.pp=2 parallel.chunks=2 parallel.schedule=1f1b", None, ["chunks=2", "1f1b"]),
    (
        "parallel.dp=2 parallel.zero_shard_size=2",
        None,
        ["zero_shard_size=2", "zero=0", "1, 2 or 3"],
    ),
    (
        "parallel.dp=4 parallel.zero=1 parallel.zero_shard_size=3",
        None,
        ["zero_shard_size=3", "data parallel size 4", "1, 2 or 4"],
    ),
    (
        "parallel.tp=2 parallel.zero=3 parallel.zero_shard_size=4",
        4,  # which leave dp=2
        ["zero_shard_size=4", "data parallel size 2", "1 or 2"],
    ),
    ("parallel.offload_path=/scratch", None, ["offload_path=/scratch", "nvme", "none"]),
    (
        "parallel.offload=cpu parallel.offload_path=/scratch",
        None,
        ["offload_path=/scratch", "nvme", "cpu"],
    ),
    ("train.batch_rampup=[4,6,100]", None, ["increment 6", "micro_batch_size=4"]),
    ("train.batch_rampup=[4,8,100]", None, ["from 4", "8", "global_batch_size=16"]),
    ("train.batch_rampup=[32,4,100]", None, ["from 32", "global_batch_size=16"]),
    ("train.steps=300 optim.warmup=301", None, ["warmup=301", "300 steps"]),
    (
        "train.steps=300 optim.schedule=wsd optim.warmup=200 optim.decay=101",
        None,
        ["warmup=200", "decay=101", "300 steps"],
    ),
    (
        "train.steps=8 train.global_batch_size=12 train.batch_rampup=[4,4,24] "
        "train.micro_batch_size=4 optim.units=samples optim.warmup=80",
        None,
        ["warmup=80", "64 samples"],  # 4 * 3 + 8 * 2 + 12 * 3
    ),
    (
        "train.steps=300 optim.units=samples optim.warmup=4801",
        None,
        ["warmup=4801", "4800 samples"],
    ),
    ("optim.decay=5", None, ["decay=5", "wsd", "cosine"]),
    ("optim.momentum=0.9", None, ["momentum=0.9", "sgd", "adamw"]),
    ("optim.name=sgd optim.betas=[0.8,0.95]", None, ["betas=(0.8, 0.95)", "adamw", "sgd"]),
    ("optim.name=sgd optim.eps=1.0e-06", None, ["eps=1e-06", "adamw", "sgd"]),
    ("optim.schedule=inverse_sqrt optim.units=samples", None, ["warmup", "sqrt(16)"]),
    ("optim.lr=0.0001 optim.min_lr=0.001", None, ["min_lr=0.001", "lr=0.0001"]),
    (
        "precision.name=fp16 precision.min_loss_scale=1000000000.0",
        None,
        ["min_loss_scale", "65536"],
    ),
    ("precision.loss_scale_window=7", None, ["loss_scale_window=7", "fp16", "fp32"]),
    ("logging.slow_factor=2.0 logging.ranks_every=0", None, ["slow_factor=2.0", "ranks_every"]),
    (
        "data.valid_paths=[demo] data.valid_fraction=0.5",
        None,
        ["valid_fraction=0.5", "data.valid_paths"],
    ),
    ("data.valid_fraction=0.0", None, ["eval.every=100", "valid_fraction"]),
    ("data.paths=[]", None, ["data.paths is empty", "data=demo"]),
    ("data.weights=[1.0,2.0]", None, ["2 entries", "1 data.paths"]),
    ("data.weights=[0.0]", None, ["data.weights", "0"]),
    ("data.paths=[/no/such.txt]", None, ["data.paths", "/no/such.txt"]),
    ("data.valid_names=[all]", None, ["data.valid_names=['all']", "`all` means all together"]),
    ("data.valid_paths=[/no/such.jsonl]", None, ["data.valid_paths", "/no/such"]),
    ("data.valid_names=[a,b]", None, ["data.valid_names has 2 names for 1 data.paths"]),
    ("data.paths=[/no/such]", None, ["/no/such.bin", "/no/such.idx", ".jsonl"]),
    ("data.tokenizer=/no/t.json", None, ["data.tokenizer=/no/t.json", "byte"]),
    ("model.vocab_size=200", None, ["vocab_size=200", "257"]),
    ("checkpoint.keep=0", None, ["checkpoint.keep=0", "-1"]),
    ("checkpoint.load=/no/such", None, ["checkpoint.load=/no/such"]),
    ("train.spike_loss=3", None, ["spike_loss=3", "train.spike=skip, stop or rewind", "is off"]),
    ("train.rewind_skip=3 train.spike=stop", None, ["rewind_skip=3", "they are stop and stop"]),
    (
        "train.spike=skip train.spike_loss=null train.spike_norm=null",
        None,
        ["train.spike=skip", "spike_loss and train.spike_norm are both null"],
    ),
    (
        "train.nonfinite=rewind train.rewind_skip=2 checkpoint.every=0",
        None,
        ["train.nonfinite=rewind", "checkpoint.every=0"],
    ),
]


@pytest.mark.parametrize("text, world_size, words", IMPOSSIBLE, ids=[x[0] for x in IMPOSSIBLE])
def test_impossible_is_refused_naming_both_sides(text, world_size, words):
    found = problems(text, world_size)
    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_hidden_size_against_heads_is_refused_by_the_schema():
    with pytest.raises(ConfigError) as caught:
        compose(["model.hidden_size=30"])
    for word in ("hidden_size=30", "num_attention_heads=4", "1, 2, 3, 5, 6, 10, 15, 30"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "text, world_size",
    [
        ("model.vocab_size=1009 parallel.tp=2", None),  # padded
        ("model.num_kv_heads=2 parallel.tp=4", None),  # KV heads replicated
        ("model.num_kv_heads=1 parallel.tp=4", None),
        ("parallel.sequence_parallel=true parallel.tp=2", None),
        ("kernels.norm=compiled", None),
        ("kernels.name=compiled", None),  # what it lacks is chosen as by auto
        ("optim.name=sgd optim.momentum=0.9", None),
        ("optim.schedule=inverse_sqrt", None),
        ("optim.schedule=inverse_sqrt optim.units=samples optim.warmup=160", None),
        ("optim.schedule=wsd", None),
        ("parallel.pp=3 parallel.split=[0,4,0]", None),
        ("model.num_layers=5 parallel.pp=2", 2),
        ("parallel.pp=2 parallel.chunks=2", 4),
        ("parallel.zero=1", 4),
        ("parallel.zero=2", 4),
        ("parallel.zero=3", 4),
        ("parallel.zero=3", None),  # on one process there is nobody to share with
        ("parallel.offload=cpu", None),
        ("parallel.zero=2 parallel.offload=cpu", 4),
        ("parallel.zero=3 parallel.offload=nvme", 4),
        ("parallel.zero=3 parallel.offload=nvme parallel.offload_path=/scratch", 4),
        ("parallel.zero=2 parallel.zero_shard_size=2", 4),
        ("parallel.zero=1 parallel.zero_shard_size=1", 4),
        ("model.position=rope train.seq_length=1000", None),
        ("train.batch_rampup=[4,4,100]", None),
        ("train.steps=0 optim.warmup=5", None),
        ("train.steps=1", None),
        ("optim.schedule=constant optim.lr=1e-05 optim.min_lr=0.001", None),
    ],
)
def test_possible(text, world_size):
    assert problems(text, world_size) == []


def test_all_problems_at_once():
    found = problems(
        "parallel.tp=3 parallel.pp=9 parallel.zero_shard_size=2 data.paths=[/no/such.txt] "
        "optim.warmup=1000 train.global_batch_size=7"
    )
    assert len(found) == 7
    with pytest.raises(ConfigError) as caught:
        check(changed("parallel.tp=3 parallel.zero_shard_size=2"))
    assert len(caught.value.problems) == 3


def test_refusing_is_quick_in_one_process():
    started = time.process_time()
    for overrides in (["parallel=tp3"], ["parallel=pp8"], ["model=gpt-13b", "parallel=tp7"]):
        assert validate(compose(overrides))
    assert (time.process_time() - started) / 3 < 2


def test_a_folder_that_holds_a_tokenizer(tmp_path):
    (found,) = problems(f"data.tokenizer={tmp_path}")
    assert f"data.tokenizer={tmp_path}" in found and "folder" in found
    (tmp_path / "tokenizer.json").touch()
    assert problems(f"data.tokenizer={tmp_path}") == []
    (tmp_path / "tokenizer.vocab").touch()
    (found,) = problems(f"data.tokenizer={tmp_path}/tokenizer.vocab")
    assert "ending in .model or .json" in found


def test_missing_half_of_a_token_file(tmp_path):
    (tmp_path / "x.bin").touch()
    (found,) = problems(f"data.paths={tmp_path}/x")
    assert f"{tmp_path / 'x.idx'} is missing" in found
    (tmp_path / "x.idx").touch()
    assert problems(f"data.paths=[{tmp_path}/x,{tmp_path}/x.bin]") == []


def test_run_dir_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    directory = str(tmp_path / "file" / "run")
    (found,) = problems(f"run.dir={directory}")
    assert found == f"run.dir={directory}: {tmp_path / 'file'} is not a directory"
    with pytest.raises(ConfigError, match="cannot be written"):
        make_directories(changed(f"run.dir={directory}"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_dir_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    (found,) = problems(f"run.dir={tmp_path / 'run'!s}")
    assert "is not writable" in found


@pytest.mark.parametrize("key", ["run.dir", "parallel.offload_path"])
def test_directories_are_made_and_probed_before_anything_starts(tmp_path, key):
    other = f" run.dir={tmp_path / 'run'} parallel.offload=nvme" if key != "run.dir" else ""
    directory = tmp_path / "a" / "b"
    make_directories(changed(f"{key}={directory}{other}"))
    assert directory.is_dir() and not list(directory.iterdir())
    if os.path.isdir("/proc/self"):
        message = rf"{re.escape(key)}=/proc/self/x: cannot be written"
        with pytest.raises(ConfigError, match=message):
            make_directories(changed(f"{key}=/proc/self/x{other}"))


def test_state_files_lie_in_the_run_directory_unless_told_otherwise(tmp_path):
    config = changed(f"run.dir={tmp_path}")
    assert offload_directory(config) == tmp_path
    config = changed(f"run.dir={tmp_path} parallel.offload=nvme parallel.offload_path=/x")
    assert str(offload_directory(config)) == "/x"


@given(
    tp=st.integers(1, 4), pp=st.integers(1, 4), dp=st.none() | st.integers(1, 4),
    world=st.none() | st.integers(1, 64),
)  # fmt: skip
@settings(deadline=None)
def test_resolved_layout_fills_the_world_or_is_refused(tp, pp, dp, world):
    config = changed(
        f"parallel.tp={tp} parallel.pp={pp} parallel.dp={'null' if dp is None else dp}"
    )
    fits = world is None or (world % (tp * pp) == 0 if dp is None else world == tp * pp * dp)
    if not fits:
        with pytest.raises(LayoutError, match=f"there are {world}"):
            resolve_layout(config, world)
        return
    layout = resolve_layout(config, world)
    assert (layout.tp, layout.pp) == (tp, pp)
    assert layout.dp == (dp or 1) if world is None else layout.world_size == world


@given(heads=st.integers(1, 24), group=st.integers(1, 4), ffn=st.integers(1, 96))
@settings(deadline=None)
def test_valid_sizes_are_those_that_shard(heads, group, ffn):
    """Against the sharding arithmetic itself."""
    kv = heads // group if heads % group == 0 else heads
    model = changed(
        f"model.num_attention_heads={heads} model.num_kv_heads={kv} "
        f"model.hidden_size={8 * heads} model.ffn_hidden_size={ffn}"
    ).model

    def shards(tp: int) -> bool:
        try:
            Part("kv", kv).copies(tp)
            return Part("q", heads).copies(tp) == 1 == Part("up", ffn).copies(tp)
        except ValueError:
            return False

    assert valid_tensor_parallel_sizes(model) == [tp for tp in range(1, heads + 1) if shards(tp)]


def test_every_size_of_a_batch_ramp_has_to_split():
    start, increment = problems("train.batch_rampup=[6,5,100] train.micro_batch_size=4")
    assert "start 6" in start and "micro_batch_size=4" in start
    assert "increment 5" in increment


def test_epochs_limits_and_skips():
    two = "data.paths=[demo,demo] "
    assert problems(two + "data.epochs=1.5 data.limits=[7,null] data.skip=[[3,9],[0,1]]") == []
    epochs, limits, skip = problems("data.epochs=[1,2,3] data.limits=[7,8] data.skip=[[3,4],[9,9]]")
    assert "data.epochs has 3 entries for 1 data.paths" in epochs
    assert "data.limits has 2 entries for 1 data.paths" in limits
    assert "data.skip=[[9, 9]]" in skip
    for wrong in ("data.epochs=0", "data.epochs=true", "data.limits=[1.5]", "data.skip=[[1,2,3]]"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            changed(wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("12.5", 12.5), ("90m", 5400), ("3h50m", 13_800), ("1d2s", 86_402), ("1.5s", 1.5)],
)
def test_times_are_seconds_or_have_units(text: str, seconds: float) -> None:
    assert compose([f"launch.stop_after={text}"]).launch.stop_after == seconds


@pytest.mark.parametrize("text", ["3h50", "m", "50m3h", "2x", "''", "true", "-5", "0"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.stop_after"):
        compose([f"launch.stop_after={text}"])
