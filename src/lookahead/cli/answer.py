"""Stream an answer to stdout. On a terminal its colours show how many tokens each step accepted."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from lookahead.cli.common import Completion, Host, Stream
from lookahead.stats import Stats

RESET = "\x1b[0m"
# The fewest accepted tokens, their name in the legend, the colour for rich, and the same colour as a terminal code.
# The colours are the terminal's own, without yellow and blue: on a light or a dark background they are hard to read.
COLOURS = (
    (5, "5 or more", "bold magenta", "\x1b[1;35m"),
    (3, "3-4", "green", "\x1b[32m"),
    (2, "2", "cyan", "\x1b[36m"),
    (0, "1", "", ""),
)
ENDINGS = {"length": " (length limit)", "interrupted": " (interrupted)"}


def coloured(host: Host) -> bool:
    """Whether stdout is a terminal that shows colours and the user did not set NO_COLOR."""
    return host.out.is_terminal and not host.out.no_color and host.out.color_system not in (None, "windows")


def legend(host: Host) -> None:
    """Explain the colours on stderr, if colours are used."""
    if coloured(host) and host.err.is_terminal:
        line = Text("tokens accepted per step:")
        for _, name, style, _ in reversed(COLOURS):
            line.append("  ").append(name, style)
        host.err.print(line)


def paint(piece: str, token_ids: Sequence[int]) -> str:
    """A piece of text, coloured by the number of tokens its step accepted."""
    code = next(code for least, _, _, code in COLOURS if len(token_ids) >= least)
    return f"{code}{piece}{RESET}" if code and piece else piece


def answer(host: Host, stream: Stream, *, show: bool = True) -> Completion:
    """Print a stream until it ends or the user presses Ctrl-C. Returns its completion."""
    colours = show and coloured(host)
    try:
        for piece in stream:
            if show:
                host.write(paint(piece, getattr(piece, "token_ids", ())) if colours else piece)
    except KeyboardInterrupt:
        stream.close()
    if show:
        host.write(f"{RESET}\n" if colours else "\n")
    return stream.completion


def interrupted(completion: Completion) -> bool:
    """Whether Ctrl-C ended it."""
    return completion.finish_reason == "interrupted"


def summary(stats: Stats, finish_reason: str = "") -> str:
    """One line: tokens, steps, S and speed."""
    return (
        f"{stats.generated_tokens} {_plural('token', stats.generated_tokens)} in {stats.steps} "
        f"{_plural('step', stats.steps)}, S = {stats.compression:.2f}, {stats.seconds:.2f} s, "
        f"{stats.tokens_per_second:.1f} tok/s{ENDINGS.get(finish_reason, '')}"
    )


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"
