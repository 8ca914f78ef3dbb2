"""The `lookahead` command: one file per verb.

Modules import only typer and rich. A verb imports torch and transformers when it needs them, so that help and option
errors appear at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from lookahead.cli import bench, chat, env, generate, pull, serve, tune
from lookahead.cli.common import DEVICE_LOST, Host, Verbs
from lookahead.cli.quiet import quiet_torchao
from lookahead.machine import package_version

__all__ = ["app", "main"]

app = typer.Typer(
    name="lookahead",
    cls=Verbs,
    help="Lookahead decoding: the same text from a causal LM in fewer steps, with no draft model.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("bench")(bench.bench)
app.command("serve")(serve.serve)
app.command("tune")(tune.tune)
app.command("pull")(pull.pull)
app.command("env")(env.env)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"lookahead {package_version('lookahead-decoding') or 'unknown'}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", hidden=True, help="Show tracebacks.")] = False,
) -> None:
    ctx.ensure_object(Host).debug = debug


def main(args: Sequence[str] | None = None) -> None:
    """The entry point. `args` defaults to the command line's."""
    quiet_torchao()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # do not fail on a character that the terminal cannot show
            stream.reconfigure(errors="replace")
    try:
        app(args, prog_name="lookahead", obj=Host(arguments=sys.argv[1:] if args is None else args))
    except SystemExit as end:
        if end.code == DEVICE_LOST:  # at once: what is left on a lost device cannot be freed, and may crash or hang
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(DEVICE_LOST)
        raise
