"""The rules of the code base: who may import whom, and what belongs in one place only.

Each rule is a function from modules to complaints; `test_architecture` runs them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60
WAIVER = "# length: "

PURE = {
    "checkpoint.manifest",
    "checkpoint.reshard",
    "checkpoint.tiling",
    "convert.hf.architectures",
    "convert.hf.config",
    "convert.hf.names",
    "convert.hf.positions",
    "data.audit",
    "data.blend",
    "data.ledger",
    "data.order",
    "data.plan",
    "data.sampler",
    "models.activations",
    "models.families",
    "models.flops",
    "models.stage",
    "optim.lr",
    "parallel.layout",
    "parallel.ledger",
    "parallel.sharding",
    "pipeline.partition",
    "pipeline.schedule",
    "pipeline.simulate",
    "train.guard",
    "train.memory",
    "zero.memory",
    "zero.partition",
}
"""Modules that plan; like all of `errors`, `config`, `report` and most of `launch` they never load
torch."""
TORCH_FREE = PURE | {
    "cli.report",
    "cli.train",
    "config",
    "data.prepare",
    "errors",
    "extras",
    "launch",
    "report",
}
TORCH_USERS_IN_LAUNCH = {"launch.supervisor"}

BASE = {"errors", "config", "pure", "extras"}
LAYERS = {
    "errors": set(),
    "extras": {"errors"},
    "config": {"errors", "extras"},
    "pure": BASE,
    "launch": BASE,
    "parallel": BASE,
    "kernels": BASE,
    "tensor_parallel": BASE | {"parallel", "kernels"},
    "models": BASE | {"parallel", "kernels", "tensor_parallel"},
    "pipeline": BASE | {"parallel"},
    "optim": BASE | {"parallel", "kernels"},
    "zero": BASE | {"parallel", "kernels", "optim"},
    "checkpoint": BASE | {"parallel"},
    "data": BASE | {"parallel"},
    "convert": BASE | {"parallel", "checkpoint"},
    "report": BASE | {"checkpoint", "launch"},
}
"""What a package may import beside itself; `train` takes all but `cli`, and `cli` everything."""
LAUNCH_FOR_TRAIN = {"launch.activity", "launch.env", "launch.signals", "launch.watchdog"}
PURE_FOR_CONFIG = {"parallel.layout"}
"""The plans are made from the configuration, which so knows nothing of them but sizes."""


@dataclass(frozen=True)
class Module:
    """A module below `megads`, by its name without that prefix ("" for the package itself)."""

    name: str
    source: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def layer(self) -> str:
        return "pure" if self.name in PURE else self.name.partition(".")[0]


def package() -> list[Module]:
    """All modules of megads."""
    modules = []
    for path in sorted((ROOT / "megads").rglob("*.py")):
        parts = path.relative_to(ROOT / "megads").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, path.read_text()))
    return modules


def made_up(**sources: str) -> list[Module]:
    """Modules from source text; `__` in a keyword stands for a dot."""
    return [Module(name.replace("__", "."), text) for name, text in sources.items()]


def imported(module: Module) -> Iterator[str]:
    """Full dotted names of everything imported, in functions too; `from a import b` is `a.b`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["megads", *module.name.split(".")][: -node.level or None]
            base = ".".join([*here, node.module or ""]).strip(".") if node.level else node.module
            yield from (f"{base}.{alias.name}" for alias in node.names)


def dependencies(modules: list[Module]) -> dict[str, set[str]]:
    """Which modules of the package each of them imports."""
    known = {module.name for module in modules} - {""}
    graph: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for name in imported(module):
            name = name.removeprefix("megads.")
            candidates = [name, name.rpartition(".")[0], name.rpartition(".")[0].rpartition(".")[0]]
            target = next((c for c in candidates if c in known), None)
            if target is not None and target != module.name:
                graph[module.name].add(target)
    return graph


def wrong_directions(modules: list[Module]) -> list[str]:
    by_name = {module.name: module for module in modules}
    wrong = []
    for name, targets in dependencies(modules).items():
        source = by_name[name].layer
        for target in sorted(targets):
            layer = by_name[target].layer
            if source == "train":
                fine = layer != "cli" and (layer != "launch" or target in LAUNCH_FOR_TRAIN)
            elif source in ("cli", ""):
                fine = True
            else:
                fine = layer == source or layer in LAYERS.get(source, set())
                fine |= source == "config" and target in PURE_FOR_CONFIG
            if not fine:
                wrong.append(f"{name} imports {target}")
    return wrong


def cycles(modules: list[Module]) -> list[str]:
    graph, state, found = dependencies(modules), {}, []

    def visit(name: str, path: list[str]) -> None:
        state[name] = "open"
        for target in sorted(graph[name]):
            if state.get(target) == "open":
                found.append(" -> ".join([*path[path.index(target) :], target]))
            elif target not in state:
                visit(target, [*path, target])
        state[name] = "done"

    for name in graph:
        if name not in state:
            visit(name, [name])
    return found


def global_statements(modules: list[Module]) -> list[str]:
    return [
        f"{module.name}:{node.lineno} global"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Global)
    ]


def environment_readers(modules: list[Module]) -> list[str]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    return [
        f"{module.name}:{node.lineno} uses the environment"
        for module in modules
        if module.name != "launch.env"
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and _is_name(node.value, "os"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and names & {alias.name for alias in node.names}
        )
    ]


def prints(modules: list[Module]) -> list[str]:
    return [
        f"{module.name}:{node.lineno} prints"
        for module in modules
        if module.layer != "cli"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and _is_name(node.func, "print")
    ]


def communicators(modules: list[Module]) -> list[str]:
    """Users of torch.distributed outside `parallel` and the local supervisor's file."""
    return [
        f"{module.name} uses torch.distributed"
        for module in modules
        if not module.name.startswith("parallel") and module.name not in TORCH_USERS_IN_LAUNCH
        if any(name.startswith("torch.distributed") for name in imported(module))
        or any(
            isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and _is_name(node.value, "torch")
            for node in ast.walk(module.tree)
        )
    ]


def overlong(modules: list[Module]) -> list[str]:
    """Long files without a waiver in a line of its own, long functions without one inside."""
    found = []
    for module in modules:
        lines = module.source.splitlines()
        waived = any(line.startswith(WAIVER) for line in lines)
        if len(lines) > MAX_FILE_LINES and not waived:
            found.append(f"{module.name} has {len(lines)} lines")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            own = lines[node.lineno - 1 : node.end_lineno]
            if len(own) > MAX_FUNCTION_LINES and not any(WAIVER in line for line in own):
                found.append(f"{module.name}.{node.name} has {len(own)} lines")
    return found


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def torch_loaders(names: list[str]) -> list[str]:
    """Those of the full module names that load torch, each imported in turn by one interpreter."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name)\n"
        "        for loaded in list(sys.modules):\n"
        "            if loaded.partition('.')[0] in ('torch', 'megads'):\n"
        "                del sys.modules[loaded]\n"
    )
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
