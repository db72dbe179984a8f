"""From the command line to a `Config`. The only module that imports Hydra.

Hydra composes the YAML groups and applies the overrides; its own side effects (output directories,
working directory, logging) are not used. Two things that are not files are served to it by a config
source with the scheme `megads://`: `schema`, the defaults of every setting, and `parallel/<layout>`
for any layout name. The source comes last on the search path, so files win over it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import version as hydra_version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megads.config.decode import decode, explain_error, schema_defaults
from megads.config.files import PRIMARY, config_dir
from megads.config.keys import (
    explain_not_an_override,
    explain_unknown_choice,
    explain_unknown_key,
    is_known,
)
from megads.config.layout_name import EXAMPLES, parse_layout_name
from megads.config.schema import Config
from megads.errors import ConfigError

Task = Callable[[Config, list[str]], int]
"""What to do with a configuration and the arguments that give it; returns the exit status."""


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that `megads-train *overrides` would run.

    Raises:
        ConfigError: with every problem found, each naming the key it is about.
    """
    args = _parse_args(list(overrides))
    if args.multirun or not _is_run(args):
        raise ConfigError("options like --help and -m are for megads-train started on its own")
    with _session(args) as session:
        return session.config(args.overrides)


def run_with_hydra(task: Task, argv: Sequence[str] | None = None) -> int:
    """The command line of a task: compose, decode and run it; returns the exit status.

    Handles Hydra's options: `--help`, `--cfg`, `--info`, shell completion, `--config-dir`,
    and `-m`, which runs every combination of the values given, one after the other. What these
    ask for goes to stdout. Raises ConfigError, and what the task raises.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        sys.stdout.write(f"megads {importlib.metadata.version('megads')}\n")
        return 0
    with _session(_parse_args(arguments)) as session:
        args = session.args
        if not _is_run(args):
            session.show()
            return 0
        runs = session.sweep() if args.multirun else [session.run(args.overrides)]
    for config, arguments in runs:
        status = task(config, arguments)
        if status:
            return status
    return 0


class MegadsSource(ConfigSource):
    """Serves `schema` and `parallel/<layout name>` to Hydra."""

    @staticmethod
    def scheme() -> str:
        return "megads"

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{self.full_path()} has no {config_path}")
        values = parse_layout_name(name) if group else schema_defaults()
        package = group or "_global_"
        return ConfigResult(
            self.provider, self.full_path(), OmegaConf.create(values), {"package": package}
        )

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "parallel")

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group == "":
            return name == "schema"
        if group != "parallel":
            return False
        try:
            parse_layout_name(name)
        except ConfigError:
            return False
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        groups = {"": ["parallel"]}.get(config_path, [])
        configs = {"": ["schema"], "parallel": sorted(EXAMPLES)}.get(config_path, [])
        if results_filter is ObjectType.GROUP:
            return groups
        return configs if results_filter is ObjectType.CONFIG else sorted(groups + configs)


class _Session:
    """Hydra set up for one command line."""

    def __init__(self, args: argparse.Namespace, hydra: Hydra) -> None:
        self.args = args
        self.name: str = args.config_name or PRIMARY
        self._hydra = hydra
        loader = cast(ConfigLoaderImpl, hydra.config_loader)
        self._parser = OverridesParser.create(config_loader=loader)
        self._files = loader.repository  # without the copies that the loader's own listing makes

    def config(self, overrides: list[str]) -> Config:
        """Check the overrides, compose and decode."""
        parsed = self._checked(overrides)
        for override in parsed:
            if override.is_sweep_override():
                raise ConfigError(
                    f"{override.input_line}: several values need -m, which runs each of them; "
                    f"a list is written {override.key_or_group}=[a,b]"
                )
        return decode(self._values(overrides))

    def run(self, overrides: list[str]) -> tuple[Config, list[str]]:
        """The configuration, and the arguments that give it: overrides, files to look in."""
        where = [(f"--config-{n}", vars(self.args)[f"config_{n}"]) for n in ("path", "name", "dir")]
        options = [word for option, value in where if value is not None for word in (option, value)]
        return self.config(overrides), options + overrides

    def sweep(self) -> list[tuple[Config, list[str]]]:
        """The runs of a multirun, all of them checked before the first one starts.

        Runs that would share a directory get one each below it, named after what they vary.
        """
        parsed = self._checked(self.args.overrides)
        varied = {o.get_key_element() for o in parsed if o.is_sweep_override()}
        jobs = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
        runs = [self.run(list(job)) for job in jobs]
        if len({config.run.dir for config, _ in runs}) == len(runs):
            return runs
        for number, job in enumerate(jobs):
            label = ",".join(o for o in job if o.partition("=")[0] in varied).replace("/", "_")
            place = QuotedString(str(Path(runs[number][0].run.dir, label)), Quote.single)
            rest = [o for o in job if o.partition("=")[0] != "run.dir"]
            runs[number] = self.run([*rest, f"run.dir={place.with_quotes()}"])
        return runs

    def show(self) -> None:
        """Print what was asked for instead of running."""
        args, overrides = self.args, self.args.overrides
        if args.help:
            self._hydra.app_help(self.name, get_args_parser(), args)
        elif args.hydra_help:
            self._hydra.hydra_help(self.name, get_args_parser(), args)
        elif args.shell_completion:
            self._hydra.shell_completion(self.name, overrides)
        elif args.info is not None:
            self._hydra.show_info(args.info, self.name, overrides)
        else:
            self._checked(overrides)
            self._hydra.show_cfg(self.name, overrides, args.cfg, args.package, args.resolve)

    def _values(self, overrides: list[str]) -> dict[str, Any]:
        composed = self._hydra.compose_config(self.name, overrides, RunMode.RUN)
        job = OmegaConf.masked_copy(composed, [str(k) for k in composed if k != "hydra"])
        values = OmegaConf.to_container(job, resolve=True, throw_on_missing=True)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def _checked(self, overrides: list[str]) -> list[Override]:
        """The parsed overrides, after refusing what Hydra would report less well or not at all."""
        for text in overrides:
            if "=" not in text and not text.startswith("~"):
                raise ConfigError(explain_not_an_override(text))
        parsed = [self._parse(text) for text in overrides]
        groups = set(self._groups())
        problems: list[str] = []
        seen: dict[str, str] = {}
        for override in parsed:
            key = override.get_key_element().lstrip("+~")
            if key in seen and not override.is_hydra_override():
                problems.append(f"{key} is given twice: {seen[key]} and {override.input_line}")
            seen[key] = str(override.input_line)
            problems += self._problem(override, groups)
        if problems:
            raise ConfigError(problems)
        return parsed

    def _parse(self, text: str) -> Override:
        try:
            return self._parser.parse_overrides([text])[0]
        except OverrideParseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{text}: cannot be read ({reason}); quote special signs") from None

    def _problem(self, override: Override, groups: set[str]) -> list[str]:
        key = override.key_or_group
        if override.is_hydra_override() or key.partition(".")[0] == "hydra":
            if self.args.multirun and key in ("hydra/launcher", "hydra/sweeper"):
                return [f"{key}: -m runs its jobs itself, one after the other"]
            return []
        if key in groups:
            return self._group_problems(override)
        if is_known(key) and override.is_delete():
            return [f"{override.input_line}: a setting has a value and cannot be removed"]
        if is_known(key):
            return []
        return [explain_unknown_key(key, groups)]

    def _group_problems(self, override: Override) -> list[str]:
        group = override.key_or_group
        if override.is_delete() or "hydra.searchpath" in " ".join(self.args.overrides):
            return []  # nothing to look up; Hydra knows the directories that were added
        swept = override.is_sweep_override()
        chosen = list(override.sweep_iterator()) if swept else [override.value()]
        options = self._files.get_group_options(group)
        return [
            explain_unknown_choice(group, choice, options)
            for choice in chosen
            if not isinstance(choice, str) or not self._files.config_exists(f"{group}/{choice}")
        ]

    def _groups(self, parent: str = "") -> Iterator[str]:
        for name in self._files.get_group_options(parent, ObjectType.GROUP):
            path = f"{parent}/{name}" if parent else name
            if path != "hydra":
                yield path
                yield from self._groups(path)


@contextmanager
def _session(args: argparse.Namespace) -> Iterator[_Session]:
    """Set Hydra up, take it down, and turn its errors into `ConfigError`."""
    if GlobalHydra.instance().is_initialized():
        raise ConfigError("compose() cannot be used inside another Hydra application")
    hydra_version.setbase("1.3")
    Plugins.instance().register(MegadsSource)
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    path.append("main", f"file://{Path(args.config_path or config_dir()).absolute()}")
    if args.config_dir is not None:
        directory = Path(args.config_dir).absolute()
        if not directory.is_dir():
            raise ConfigError(f"--config-dir {args.config_dir}: there is no such directory")
        path.append("command-line", f"file://{directory}")
    path.append("megads", "megads://")
    path.append("schema", "structured://")
    try:
        yield _Session(args, Hydra.create_main_hydra2("megads", path))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_error(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"a configuration file is not valid YAML: {error}") from None
    finally:
        GlobalHydra.instance().clear()


def _parse_args(arguments: list[str]) -> argparse.Namespace:
    args, unknown = get_args_parser().parse_known_intermixed_args(arguments)
    if unknown:
        raise ConfigError([explain_not_an_override(text) for text in unknown])
    return args


def _is_run(args: argparse.Namespace) -> bool:
    return not (
        args.help or args.hydra_help or args.cfg or args.info is not None or args.shell_completion
    )
