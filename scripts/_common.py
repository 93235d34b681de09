"""What the scripts share: configs and overrides, simulated devices, one-line refusals, whole files or none."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import runpy
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax

from jax_ep.config import ConfigError, WorkloadConfig
from jax_ep.model_config import ModelConfig
from jax_ep.models.families import config_to_hub
from jax_ep.training.config import TrainConfig

C = TypeVar("C")

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "qwen2_moe")  # the plainest first
_CONCURRENT = "--xla_cpu_enable_concurrency_optimized_scheduler"
_SIMULATE = "--xla_force_host_platform_device_count"


class UsageError(Exception):
    """What the person asked for cannot be done; the message is the one line they read."""


class Parser(argparse.ArgumentParser):
    """Refuses in one line, and names the options nearest to an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse_known_or_refuse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses options and `key=value` overrides in any order."""
        parsed, unknown = self.parse_known_intermixed_args(list(argv))
        if unknown:
            options = [text for action in self._actions for text in action.option_strings]
            raise UsageError(f"unknown option {unknown[0].split('=')[0]}{nearest(unknown[0].split('=')[0], options)}")
        return parsed


def run_main(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Runs a script's main; a refusal becomes one line on stderr and exit code 2, an interruption one and 130."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UsageError, ConfigError) as error:
        line = " ".join(str(error).split())
        print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """The end of a refusal: the names that `name` may have meant, or all where none is near and they are few."""
    names = list(dict.fromkeys(names))
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.5)
    if close:
        return f"; nearest: {', '.join(close)}"
    return f"; there are: {', '.join(names)}" if len(names) <= 12 else ""


def chosen(option: str, text: str, known: Iterable[str], thing: str, unknown: str) -> list[str]:
    """The names in a comma-separated option, once each, in their order.

    Args:
      option: the option's name; `text`: what it was given.
      known: the names there are.
      thing: what a name stands for, as in "names no mode".
      unknown: how the refusal of another name begins.
    """
    known = list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{unknown} {name!r}{nearest(name, known)}")
    if not names:
        raise UsageError(f"{option}={text!r}: names no {thing}; there are: {', '.join(known)}")
    return list(dict.fromkeys(names))


# Configs and overrides.


def load_config(name: str) -> WorkloadConfig:
    """The workload of a file in configs/, by name, or of any file, by path."""
    return _load(name, "get_config", WorkloadConfig, "mini_infer")


def load_model_config(name: str) -> ModelConfig:
    """The model of such a file."""
    return _load(name, "get_model_config", ModelConfig, "tiny_decoder")


def load_train_config(name: str) -> TrainConfig:
    """The training of such a file."""
    return _load(name, "get_train_config", TrainConfig, "tiny_lm")


def _load(name: str, function: str, kind: type[C], example: str) -> C:
    """What `function` of a config file returns.

    Raises:
      UsageError: no such file, one that fails, or one without that function.
    """
    if "/" in name or name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            known = sorted(file.stem for file in CONFIGS.glob("*.py"))
            raise UsageError(f"config={name!r}: there is no such file{nearest(path.stem, known)}")
    else:
        path = CONFIGS / f"{name}.py"
        if not path.is_file():
            known = sorted(file.stem for file in CONFIGS.glob("*.py"))
            raise UsageError(f"unknown config {name!r}{nearest(name, known)}")
    try:
        get = runpy.run_path(str(path)).get(function)
        config = get() if callable(get) else None
    except ConfigError:
        raise
    except Exception as error:  # a config is a program of the user's
        raise UsageError(f"config={name!r}: cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(config, kind):
        rule = f"must define {function}() -> {kind.__name__}, as configs/{example}.py does"
        raise UsageError(f"config={name!r}: {rule}; --config {example} works")
    return config


def published_family(config: ModelConfig) -> str | None:
    """A published family whose files can hold this model."""
    for family in FAMILIES:
        try:
            config_to_hub(config, family)
        except ConfigError:
            continue
        return family
    return None


def fields_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted path -> declared type of every plain field of nested dataclasses."""
    hints = typing.get_type_hints(type(config))
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= fields_of(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hints[field.name]
    return found


def find_field(key: str, paths: Iterable[str]) -> str:
    """The one dotted path that `key` names: in full, or by its last parts where only one path ends so."""
    paths = list(paths)
    if key in paths:
        return key
    ends = [path for path in paths if path.endswith("." + key)]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise UsageError(f"{key!r} could be {' or '.join(ends)}; write it in full")
    raise UsageError(f"unknown key {key!r}{nearest(key, [*paths, *(path.rsplit('.', 1)[-1] for path in paths)])}")


def parse_value(key: str, text: str, kind: Any) -> Any:
    """Reads `text` as the declared type of a field: str, int, float, bool, None, and tuples and unions of them."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        if type(None) in kinds and text.lower() in ("none", "null"):
            return None
        narrow_first = sorted((k for k in kinds if k is not type(None)), key=lambda k: k is str)
        for one in narrow_first[:-1]:
            try:
                return parse_value(key, text, one)
            except UsageError:
                continue
        return parse_value(key, text, narrow_first[-1])
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        parts = [part.strip().strip("\"'") for part in text.strip("()[] ").split(",")]
        return tuple(parse_value(key, part, item) for part in parts if part)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise UsageError(f"{key}={text}: must be True or False; {key}=True works")
    if kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            works = 8 if kind is int else 1.5
            what = "an integer" if kind is int else "a number"
            raise UsageError(f"{key}={text}: must be {what}; {key}={works} works") from None
    return text


def override(config: Any, overrides: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> Any:
    """A config with `key=value` overrides.

    All fields change together, so that overrides which only make sense together are fine in any order. Of two overrides
    of one field the later wins.

    Args:
      config: a dataclass, which may hold others.
      overrides: "key=value", where key is a dotted path or its end.
      elsewhere: dotted path -> how to set it instead, for fields that overrides must leave alone.

    Raises:
      UsageError: no such key, an ambiguous one, one set elsewhere, or a value that is not of the field's type.
      ConfigError: the config refuses the values.
    """
    kinds = fields_of(config)
    changed: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{item!r} is no override; they are written key=value, as in {next(iter(kinds))}=8")
        path = find_field(key.strip(), kinds)
        if elsewhere and path in elsewhere:
            raise UsageError(f"{key.strip()}={text.strip()}: set it with {elsewhere[path]}")
        changed[path] = parse_value(key.strip(), text.strip(), kinds[path])
    return _replace(config, changed)


def _replace(config: Any, changed: dict[str, Any]) -> Any:
    """dataclasses.replace through nested dataclasses, innermost first, each rebuilt (and validated) once."""
    here: dict[str, Any] = {path: value for path, value in changed.items() if "." not in path}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changed.items():
        if "." in path:
            name, rest = path.split(".", 1)
            nested.setdefault(name, {})[rest] = value
    for name, values in nested.items():
        here[name] = _replace(getattr(config, name), values)
    return dataclasses.replace(config, **here) if here else config


# Devices.


def simulate_devices(count: int | None, default: int = 8, in_order: bool = False) -> None:
    """Makes JAX's CPU platform show `count` devices. Only where JAX has not looked for devices yet.

    Accelerators are used where there are some: the CPU platform is then not the default one. Without a count, one
    already in XLA_FLAGS stays. `in_order` has all devices enter collectives in one order, which large programs need.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if count is not None or _SIMULATE not in flags:
        flags = re.sub(rf"{_SIMULATE}=\d+", "", flags) + f" {_SIMULATE}={count or default}"
    # XLA:CPU's concurrent scheduler lets devices wait for one another in different collectives: always in programs from
    # JAX's cache on disk, which have lost their order, and at times in a training step (jax 0.10.2 to 0.12.0).
    if (in_order or os.environ.get("JAX_COMPILATION_CACHE_DIR")) and _CONCURRENT not in flags:
        flags += f" {_CONCURRENT}=false"
    os.environ["XLA_FLAGS"] = " ".join(flags.split())


def visible_devices(asked: int | None) -> list[Any]:
    """The devices there are, the first `asked` of them."""
    try:
        return list(jax.devices()[:asked])
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"JAX finds no device ({error}); JAX_PLATFORMS=cpu works") from error


def environment(device_count: int) -> dict[str, Any]:
    """What a record says of where it was made, on so many devices."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": device_count,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "cpu_cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "simulated": device.platform == "cpu",
    }


# Results.


def refuse_bad_folder(folder: Path, *names: str) -> None:
    """Says now, not after minutes of work, that results of these names cannot be written. Creates nothing."""
    works = f"--out out/{names[0].split('.')[0]} works"
    for name in names:
        if (folder / name).is_dir():
            raise UsageError(f"out={str(folder)!r}: {folder / name} is a folder; {works}")
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(f"out={str(folder)!r}: {existing} is a file; {works}")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"out={str(folder)!r}: {existing} cannot be written to; {works}")


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Writes files into a folder, made where missing; each appears whole or not at all.

    Raises:
      UsageError: a full disk, or a folder that cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            temporary = folder / f".{name}.{os.getpid()}.tmp"
            try:
                temporary.write_bytes(content)
                temporary.replace(folder / name)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        rule = f"cannot be written to: {error.strerror}; a folder with room for it works"
        raise UsageError(f"out={str(folder)!r}: {rule}") from error
