"""No setting is a silent no-op: some code outside the configuration package reads each of them.

A reading is an attribute of what is known to be the setting's group: `x.train.steps`, or in the
same file `y.steps` where `y = x.train` or `y: TrainConfig`, or anywhere `x.y.steps` where a class
has a field `y: TrainConfig`.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import megads
from megads.config import model, schema
from megads.config.directories import offload_directory
from megads.config.keys import group_of, leaf_keys
from megads.config.schema import Config, KernelsConfig
from megads.config.streams import is_streamed, num_lanes
from megads.config.validate import fill_layout

PACKAGE = Path(megads.__file__).parent

# kernels/api.py reads the backend of each op this way.
BY_NAME = {"getattr(config, operation)": [f"kernels.{op}" for op in KernelsConfig.model_fields]}


def groups(group: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Class name and dotted path of every group."""
    for name, field in group.model_fields.items():
        inner = group_of(field.annotation)
        if inner is not None:
            yield inner.__name__, prefix + name
            yield from groups(inner, f"{prefix}{name}.")


OF_CLASS = dict(groups())
OF_NAME = {path.rpartition(".")[2]: path for path in OF_CLASS.values()}


def last_name(node: ast.expr) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value


def names_of_groups(tree: ast.AST) -> dict[str, set[str]]:
    """What each name in a file can stand for, by its annotations and what is assigned to it."""
    known: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None)
        name = node.arg if isinstance(node, ast.arg) else last_name(getattr(node, "target", node))
        for word in ast.walk(annotation) if isinstance(annotation, ast.expr) else ():
            if last_name(word) in OF_CLASS:
                known[name].add(OF_CLASS[last_name(word)])
    for target, value in assignments(tree):
        if isinstance(value, ast.Attribute) and value.attr in OF_NAME:
            known[last_name(target)].add(OF_NAME[value.attr])
        elif isinstance(value, ast.Name | ast.Attribute):
            known[last_name(target)] |= known.get(last_name(value), set())
    return known


def fields_of_classes(sources: list[str]) -> dict[str, set[str]]:
    fields: dict[str, set[str]] = defaultdict(set)
    for node in (n for s in sources for n in ast.walk(ast.parse(s)) if isinstance(n, ast.ClassDef)):
        declared = ast.Module([n for n in node.body if isinstance(n, ast.AnnAssign)], [])
        for name, paths in names_of_groups(declared).items():
            fields[name] |= paths
    return fields


def keys_read(source: str, fields: dict[str, set[str]]) -> set[str]:
    tree = ast.parse(source)
    known = names_of_groups(tree)
    found = {key for text, keys in BY_NAME.items() if text in source for key in keys}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in OF_CLASS:  # a property of the schema
            found |= {
                f"{OF_CLASS[node.name]}.{n.attr}"
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute) and last_name(n.value) == "self"
            }
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base, paths = node.value, set(known.get(last_name(node.value), ()))
            if isinstance(base, ast.Attribute):
                paths |= fields.get(base.attr, set())
                paths |= {OF_NAME[base.attr]} if base.attr in OF_NAME else set()
            found |= {f"{path}.{node.attr}" for path in paths}
    return found


def unread(sources: list[str]) -> list[str]:
    fields = fields_of_classes(sources)
    read = set().union(*(keys_read(source, fields) for source in sources))
    return [key for key in leaf_keys() if key not in read]


def sources() -> list[str]:
    """All of the package but the configuration, of which what derives values counts as well."""
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if f.parent != PACKAGE / "config"]
    deriving = (fill_layout, is_streamed, num_lanes, offload_directory, model, schema)
    derived = [inspect.getsource(part) for part in deriving]
    return [*(f.read_text() for f in files), *derived]


def test_every_setting_is_read():
    assert unread(sources()) == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (".loss_scale_window", "precision.loss_scale_window"),
        ("checkpoint.every", "checkpoint.every"),  # eval.every and logging.every are still read
        ("config.eval.steps", "eval.steps"),  # train.steps is still read
    ],
)
def test_an_unread_setting_is_seen(text, key):
    without = [s.replace(text, "config.other") for s in sources()]
    assert unread(without) == [key]


@pytest.mark.parametrize(
    "source",
    [
        "a.config.train.seed",
        "def f(x: TrainConfig): x.seed",
        "def f(x: 'int', *, y: TrainConfig | None): return y.seed",
        "optim, train = config.optim, config.train\ntrain.seed",
        "class A:\n def __init__(self, c: TrainConfig): self._c = c\n def f(self): self._c.seed",
    ],
)
def test_what_counts_as_reading(source):
    assert keys_read(source, {}) == {"train.seed"}


@pytest.mark.parametrize(
    "source", ["model.seed", "eval.seed", "def f(x: EvalConfig): x.seed", "config.train.seed = 1"]
)
def test_what_does_not_count(source):
    assert "train.seed" not in keys_read(source, {})
