import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel

from megads.config.compose import compose, run_with_hydra
from megads.config.decode import decode, from_yaml, load_config, schema_defaults, to_yaml
from megads.config.files import config_dir
from megads.config.keys import group_of, leaf_keys
from megads.config.schema import Config, ParallelConfig
from megads.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


def value_of(config: BaseModel, key: str):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


def test_defaults_are_gpt_tiny_on_the_demo_text():
    config = compose()
    assert config.model.name == "gpt-tiny"
    assert config.model.vocab_size == 257
    assert config.model.num_kv_heads == config.model.num_attention_heads
    assert config.parallel == ParallelConfig()
    assert config.precision.name == "fp32"
    assert config.run.dir == "runs/gpt-tiny"
    assert config.train.seq_length == config.model.max_seq_length


def test_choosing_a_model_moves_what_depends_on_it():
    config = compose(["model=gpt-125m"])
    assert config.run.dir == "runs/gpt-125m"
    assert config.train.seq_length == 2048
    assert config.train.steps == schema_defaults()["train"]["steps"]  # the recipe is gpt-tiny's


@pytest.mark.parametrize(
    "choice, fields",
    [
        ("tp8pp4", {"tp": 8, "pp": 4, "dp": None}),
        ("zero1dp2pp2tp2", {"tp": 2, "pp": 2, "dp": 2, "zero": 1}),
        ("pp4vpp2", {"pp": 4, "chunks": 2}),
        ("dp8zero3", {"dp": 8, "zero": 3}),
        ("tp2sp", {"tp": 2, "sequence_parallel": True}),
        ("bloom-176b", {"tp": 4, "pp": 12, "dp": 8, "zero": 1}),
        ("gpt-175b", {"tp": 8, "pp": 16}),
        ("gpt-530b", {"tp": 8, "pp": 35}),
        ("gpt-1t", {"tp": 8, "pp": 64}),
    ],
)
def test_layout_names_and_recipes(choice, fields):
    assert compose([f"parallel={choice}"]).parallel == ParallelConfig(**fields)


def test_a_file_wins_over_the_layout_of_the_same_name(tmp_path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "tp2.yaml").write_text("tp: 3\npp: 5\n")
    assert compose([f"--config-dir={tmp_path}", "parallel=tp2"]).parallel.pp == 5
    words = ["optim.lr=0.5", "--config-dir", str(tmp_path), "parallel=tp2", "train.steps=7"]
    config = compose(words)  # options may come between
    assert (config.optim.lr, config.parallel.pp, config.train.steps) == (0.5, 5, 7)
    assert compose(["parallel=tp2"]).parallel.pp == 1


def test_the_groups_chosen_by_default_leave_the_recipe_as_it_is():
    recipe = OmegaConf.to_container(OmegaConf.load(config_dir() / "recipe" / "gpt-tiny.yaml"))
    composed = compose().model_dump()
    for group, values in recipe.items():
        assert composed[group] == composed[group] | values


def test_chosen_groups_and_files_win_over_the_recipe(tmp_path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("name: adamw\nlr: 0.25\n")
    optim = compose([f"--config-dir={tmp_path}", "optim=mine"]).optim
    assert (optim.lr, optim.min_lr) == (0.25, compose().optim.min_lr)
    sgd = yaml.safe_load((config_dir() / "optim" / "sgd.yaml").read_text())
    assert compose(["optim=sgd"]).optim.lr == sgd["lr"] != compose().optim.lr
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\ncheckpoint: {every: 7}\n")
    assert compose([f"--config-dir={tmp_path}", "--config-name=mine"]).checkpoint.every == 7
    assert compose(["checkpoint.every=8"]).checkpoint.every == 8


def test_every_file_of_every_group_composes():
    for path in sorted(config_dir().glob("*/*.yaml")):
        group, choice = path.parent.name, path.stem
        if group not in ("recipe", "model"):  # models: tests/models/test_presets.py
            assert isinstance(compose([f"{group}={choice}"]), Config), path


# What must be refused, with the words that have to be in the message.
REFUSED = [
    ("modle.hidden=64", ["modle.hidden", "model.hidden_size"]),
    ("optim.lrr=1", ["optim.lrr", "optim.lr"]),
    ("learning-rate=1e-4", ["learning-rate", "optim.lr"]),
    ("learning-rate", ["learning-rate", "key=value", "optim.lr"]),
    ("--learning-rate=1e-4", ["--learning-rate", "optim.lr"]),
    ("train.lr=1", ["train.lr", "lr is optim.lr"]),
    ("model.tp=2", ["model.tp", "parallel.tp"]),
    ("+new.key=1", ["new.key", "model", "launch"]),
    ("+optim.extra=1", ["optim.extra", "weight_decay"]),
    ("+optim.lr=1", ["optim.lr"]),
    ("~optim.lr", ["optim.lr", "removed"]),
    ("modle=gpt-13b", ["modle", "model=..."]),
    ("model=gpt-13", ["gpt-13", "gpt-13b"]),
    ("precision=bf61", ["bf61", "bf16"]),
    ("kernels=fast", ["fast", "auto", "reference"]),
    ("kernels.name=tritn", ["kernels.name=tritn", "auto, reference, torch, compiled"]),
    ("kernels.rotary=referense", ["kernels.rotary=referense", "did you mean reference"]),
    ("parallel=tp8pp4tp2", ["tp8pp4tp2", "tp comes twice", "tp2pp2dp2zero1"]),
    ("parallel=tpp2", ["tpp2", "tp2"]),
    ("parallel=sigle", ["sigle", "single"]),
    ("parallel=null", ["parallel=null"]),
    ("model=[a,b]", ["model"]),
    ("optim={lr: 3}", ["optim.<key>"]),
    ("train.steps=null", ["train.steps", "whole number"]),
    ("train.steps=[1,2]", ["train.steps", "[1, 2]", "whole number"]),
    ("train.steps=true", ["train.steps", "true"]),
    ("train.steps=abc", ["train.steps", "abc"]),
    ("train.steps=1.5", ["train.steps", "1.5"]),
    ("train.steps=-1", ["train.steps", "-1"]),
    ("optim.lr=abc", ["optim.lr", "abc"]),
    ("optim.lr=nan", ["optim.lr", "nan"]),
    ("optim.lr=1,2", ["optim.lr=1,2", "-m"]),
    ("optim.betas=[0.9]", ["optim.betas"]),
    ("optim.betas=0.9", ["optim.betas", "list"]),
    ("model.activation=gel", ["model.activation", "gel", "swiglu", "gelu"]),
    ("model.hidden_size=30", ["30", "4", "1, 2, 3, 5, 6, 10, 15, 30"]),
    ("model.num_kv_heads=3", ["4", "3", "1, 2, 4"]),
    (
        "model.rope_scaling={kind: llama3, factor: 2, low_freq_factor: 4}",
        ["model.rope_scaling", "low_freq_factor=4.0", "high_freq_factor=4.0"],
    ),
    ("run.dir=${nowhere}", ["nowhere"]),
    ("parallel.tp=[2", ["parallel.tp=[2"]),
    ("foo/bar=1", ["foo/bar"]),
    ("--help", ["--help"]),
    ("-m", ["-m"]),
    ("--config-dir=/does/not/exist", ["/does/not/exist"]),
]


@pytest.mark.parametrize("override, words", REFUSED, ids=[o for o, _ in REFUSED])
def test_refused(override, words):
    message = refused(override)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_all_problems_are_reported_at_once():
    message = refused("optim.lrr=1", "modle=gpt-13b", "model=gpt-13")
    assert len(message.splitlines()) == 3
    message = refused("train.steps=x", "optim.lr=y", "parallel.tp=0")
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    "pair",
    [
        ("optim.lr=1", "optim.lr=2"),
        ("optim.lr=1", "++optim.lr=1"),
        ("model=gpt-13b", "model=gpt-1t"),
        ("parallel=tp2", "parallel=pp2"),
    ],
)
def test_the_same_override_twice_is_refused(pair):
    assert all(text in refused(*pair) for text in ("given twice", *pair))


def test_a_group_and_a_key_of_it_are_not_duplicates():
    assert compose(["parallel=tp2pp2", "parallel.tp=4"]).parallel.tp == 4


@pytest.mark.parametrize("text", ["1e-4", "'1e-4'", '"1e-4"', "0.0001", "1.0E-4"])
def test_numbers_as_text_become_numbers(text):
    assert compose([f"optim.lr={text}"]).optim.lr == 1e-4


def test_numbers_in_files(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [train, _self_]\noptim: {lr: 1e-4, min_lr: '1e-5', warmup: '7'}\n"
    )
    optim = compose([f"--config-dir={tmp_path}", "--config-name=mine"]).optim
    assert (optim.lr, optim.min_lr, optim.warmup) == (1e-4, 1e-5, 7)


def test_unknown_keys_in_files_are_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\noptim: {lrr: 1}\nmodle: 3\n")
    message = refused(f"--config-dir={tmp_path}", "--config-name=mine")
    assert "optim.lrr is not a setting; did you mean optim.lr?" in message
    assert "modle is not a setting" in message


def test_a_broken_file_is_reported(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\noptim: {lr: [1\n")
    assert "YAML" in refused(f"--config-dir={tmp_path}", "--config-name=mine")


def test_one_path_needs_no_list():
    assert compose(["data.paths=a.txt"]).data.paths == ("a.txt",)
    assert compose(["data.paths=[a.txt,b]"]).data.paths == ("a.txt", "b")


def test_nested_values():
    scaling = compose(["model.rope_scaling={kind: linear, factor: 2}"]).model.rope_scaling
    assert scaling is not None and scaling.factor == 2.0
    assert compose(["model=llama3-405b"]).model.rope_scaling.kind == "llama3"
    assert compose(["model=llama3-405b", "model.rope_scaling=null"]).model.rope_scaling is None


def _other_value(key: str, annotation, now) -> str:
    """A value for the key that differs from `now`, as an override writes it."""
    if key in SPECIAL:
        return SPECIAL[key]
    literals = (
        typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
    )
    if literals:
        return str(next(x for x in literals if x != now))
    if isinstance(now, bool):
        return str(not now).lower()
    if isinstance(now, int):
        return str(now + 1)
    if isinstance(now, float):
        return repr(now / 2 if now else 0.5)
    return "other" if isinstance(now, str) else "1"


SPECIAL = {
    "model.num_attention_heads": "8",
    "model.num_kv_heads": "2",
    "model.hidden_size": "256",
    "parallel.split": "[1,3]",
    "train.batch_rampup": "[4,4,100]",
    "train.spike_loss": "3.0",
    "optim.betas": "[0.8,0.99]",
    "data.paths": "[x.txt]",
    "data.valid_paths": "[y.txt]",
    "data.valid_names": "[y]",
    "data.weights": "[1.0]",
    "data.epochs": "[2.0]",
    "data.limits": "[5]",
    "data.skip": "[[5,9]]",
    "model.rope_fraction": "0.5",
    "model.rope_scaling.kind": "linear",
    "model.rope_scaling.factor": "3.5",
    "checkpoint.load": "somewhere",
    "logging.loggers": "[tensorboard]",
    "logging.slow_factor": "1.5",
    "logging.profile_steps": "[5]",
    "logging.profile_ranks": "[0]",
    "launch.slurm.time": "1:00:00",
    "launch.slurm.setup": "[module load x]",
    "launch.slurm.options": "[--exclusive]",
}


def _annotation(key: str):
    group = Config
    for part in key.split("."):
        annotation = group.model_fields[part].annotation
        group = group_of(annotation)
    return annotation


@pytest.mark.parametrize("group", Config.model_fields)
def test_changing_any_setting_changes_the_configuration(group):
    base_model = ["model=llama3-405b"] if group == "model" else []
    before = compose(base_model)
    changes = {
        key: _other_value(key, _annotation(key), value_of(before, key))
        for key in leaf_keys()
        if key.startswith(f"{group}.")
    }
    assert changes
    after = compose([*base_model, *(f"{key}={value}" for key, value in changes.items())])
    unchanged = [key for key in changes if value_of(after, key) == value_of(before, key)]
    assert not unchanged


def test_yaml_round_trip(tmp_path):
    config = compose(["model=llama3-405b", "optim.lr=1e-5", "parallel.split=[1,3]"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    assert from_yaml(to_yaml(config).replace("factor: 8.0", "factor: 4.0")) != config
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="not a mapping"):
        from_yaml("[1]")


def test_decode_names_what_is_missing():
    values = schema_defaults()
    del values["optim"]
    with pytest.raises(ConfigError, match="optim is missing"):
        decode(values)


def test_the_task_gets_the_configuration_and_gives_the_status(capsys):
    seen = []
    assert run_with_hydra(lambda c, a: seen.append((c, a)) or 7, ["optim.lr=0.5"]) == 7
    assert seen[0][0].optim.lr == 0.5 and seen[0][1] == ["optim.lr=0.5"]
    with pytest.raises(ConfigError, match=r"^optim.lrr is not a setting; did you mean optim.lr\?$"):
        run_with_hydra(lambda c, _: seen.append(c) or 0, ["optim.lrr=0.5"])
    assert len(seen) == 1
    assert capsys.readouterr() == ("", "")


def test_multirun_runs_every_combination_in_its_own_directory():
    seen = []
    argv = ["-m", "optim.lr=1e-3,1e-4", "parallel=tp2,pp2", "train.steps=5"]
    arguments = []
    assert run_with_hydra(lambda c, a: seen.append(c) or arguments.append(a) or 0, argv) == 0
    assert [(c.optim.lr, c.parallel.tp, c.parallel.pp) for c in seen] == [
        (1e-3, 2, 1),
        (1e-3, 1, 2),
        (1e-4, 2, 1),
        (1e-4, 1, 2),
    ]
    assert seen[1].run.dir == "runs/gpt-tiny/optim.lr=0.001,parallel=pp2"
    assert len({c.run.dir for c in seen}) == 4
    assert [compose(words) for words in arguments] == seen  # as a job that is started later does


def test_multirun_keeps_directories_that_differ_and_stops_at_a_failure():
    seen = []
    argv = ["-m", "train.seed=1,2,3", "run.dir=runs/${train.seed}"]
    assert run_with_hydra(lambda c, _: seen.append(c.run.dir) or c.train.seed - 1, argv) == 1
    assert seen == ["runs/1", "runs/2"]


def test_multirun_checks_every_combination_first():
    seen = []
    with pytest.raises(ConfigError, match=r"train\.steps=x"):
        run_with_hydra(lambda c, _: seen.append(c) or 0, ["-m", "train.steps=1,x"])
    assert not seen


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--help"], ["megads-train", "parallel: ", "gpt-175b", "weight_decay"]),
        (["--cfg", "job"], ["model:", "lr: 0.002"]),
        (["-c", "job", "parallel=tp8pp4"], ["tp: 8", "pp: 4"]),
        (["--cfg", "job", "--resolve"], ["dir: runs/gpt-tiny"]),
        (["--version"], ["megads "]),
        (["--shell-completion", "install=bash"], ["complete "]),
    ],
)
def test_options_print_and_do_not_run(argv, words, capsys):
    assert run_with_hydra(lambda c, _: pytest.fail("the task ran"), argv) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words)


def test_tab_completion(capsys, monkeypatch):
    for line, expected in [
        ("megads-train parallel=tp", "parallel=tp8pp4"),
        ("megads-train model=gpt-13", "model=gpt-13b"),
        ("megads-train optim.l", "optim.lr="),
    ]:
        monkeypatch.setenv("COMP_LINE", line)
        assert run_with_hydra(lambda c, _: 1, ["--shell-completion", "query=bash"]) == 0
        assert expected in capsys.readouterr().out.split()


def test_nothing_is_written_and_torch_is_not_imported(tmp_path):
    program = (
        "import sys\n"
        "from megads.config.compose import run_with_hydra\n"
        "from megads.config.validate import validate\n"
        "status = run_with_hydra(lambda c, _: len(validate(c)), sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for argv in (["--cfg", "job"], ["-m", "train.seed=1,2"], ["train.steps=1"]):
        subprocess.run(
            [sys.executable, "-c", program, *argv],
            cwd=tmp_path,
            env=environment,
            check=True,
            timeout=60,
            capture_output=True,
        )
    assert list(tmp_path.iterdir()) == []
