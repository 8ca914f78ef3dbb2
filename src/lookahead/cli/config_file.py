"""`--config FILE`: a verb's options from a YAML file. What the command line gives wins."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

NAME = "config"


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of `--config`: the file's values become the defaults of the verb's other options.

    Raises ValueError with one line that names the file and the option.
    """
    if path is not None:
        ctx.default_map = {**(ctx.default_map or {}), **defaults_of(ctx, path)}
    return path


def defaults_of(ctx: typer.Context, path: Path) -> dict[str, Any]:
    """The values in a file, by the names of the verb's parameters."""
    known, negated = options_of(ctx)
    found: dict[str, Any] = {}
    for given, value in read_yaml(path).items():
        name = str(given).replace("_", "-")
        if name not in known:
            near = get_close_matches(name, list(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"--config {path}: no option {given!r}; {hint}")
        option = known[name]
        if option.name in found:
            raise ValueError(f"--config {path}: {given!r} is given twice; remove one")
        if value is not None:
            found[option.name] = checked(ctx, path, given, option, value)
            if name in negated:
                found[option.name] = not found[option.name]
    return found


def options_of(ctx: typer.Context) -> tuple[dict[str, Any], set[str]]:
    """The verb's options by their names without dashes, and those names that switch one off."""
    known: dict[str, Any] = {}
    negated: set[str] = set()
    for option in ctx.command.params:
        if option.name in (NAME, "help"):
            continue
        off = {name.lstrip("-") for name in option.secondary_opts}
        negated |= off
        known |= dict.fromkeys([*(name.lstrip("-") for name in option.opts), *off], option)
    return known, negated


def checked(ctx: typer.Context, path: Path, given: Any, option: Any, value: Any) -> Any:
    """A value of the file as the option's own type."""
    where = f"--config {path}: {given}"
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise ValueError(f"{where} is true or false, not {value!r}")
        return value
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not option.multiple:
        raise ValueError(f"{where} takes one value, not a list")
    for one in values:
        if isinstance(one, (bool, dict, list)) or one is None:
            raise ValueError(f"{where} cannot be {one!r}; give a text or a number")
    texts = [str(one) for one in values]
    try:
        option.process_value(ctx, texts if option.multiple else texts[0])
    except typer.BadParameter as error:
        why = error.message[:1].lower() + error.message[1:]
        raise ValueError(f"{where} cannot be {value!r}: {why}") from error
    return texts if option.multiple else texts[0]


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must have lines such as 'port: 9000', not a {type(found).__name__}")
    return found
