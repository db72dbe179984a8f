"""No setting is a silent no-op: some code outside the configuration package reads each of them."""

import ast
from pathlib import Path

import megads
from megads.config.keys import leaf_keys

PACKAGE = Path(megads.__file__).parent

# Any value but the default is refused (tests/config/test_validate.py).
NOT_YET = ["parallel.offload"]


def attributes_read(sources: list[str]) -> set[str]:
    """Names that are read as an attribute, or by getattr with a loop over a table of strings."""
    names: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


def unread(sources: list[str]) -> list[str]:
    read = attributes_read(sources)
    # `getattr(config, operation)` over the names of ops in kernels/api.py.
    by_name = {f"kernels.{word}" for source in sources for word in _constants_of_getattr(source)}
    return [k for k in leaf_keys() if k.rpartition(".")[2] not in read and k not in by_name]


def _constants_of_getattr(source: str) -> set[str]:
    tree = ast.parse(source)
    if not any(isinstance(n, ast.Name) and n.id == "getattr" for n in ast.walk(tree)):
        return set()
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is str}


def sources() -> list[str]:
    """All of the package but the configuration; the properties of its schema count as readers."""
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if f.parent != PACKAGE / "config"]
    return [f.read_text() for f in (*files, PACKAGE / "config" / "schema.py")]


def test_every_setting_is_read():
    assert unread(sources()) == NOT_YET


def test_an_unread_setting_is_seen():
    without = [s.replace(".loss_scale_window", ".other") for s in sources()]
    assert sorted(unread(without)) == sorted(["precision.loss_scale_window", *NOT_YET])
