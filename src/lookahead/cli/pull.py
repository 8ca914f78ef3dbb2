"""`lookahead pull`: fetch the embedded model in advance."""

from __future__ import annotations

from typing import Annotated

import typer

from lookahead.cli.common import Host
from lookahead.loading import embedded as models


def pull(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The embedded model to fetch.")] = models.EMBEDDED,
) -> None:
    """Fetch the embedded model unless it is cached, and print its folder."""
    host = ctx.ensure_object(Host)
    host.write(f"{models.pull(name, log=host.say)}\n")
