"""Draw the figures of how-it-works.md from the code: `python docs/figures.py`, or `--check` to compare only.

Every position, edge and mask entry comes from `algorithm.window`, `algorithm.tree` and a real first step, so a change
of the layout changes the figures, and `--check` fails when the files are out of date. The runtime figure names files,
and fails when one of them is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lookahead
from lookahead.algorithm.sequence import DecodingSequence
from lookahead.algorithm.tree import TokenTree, window_layout
from lookahead.algorithm.visibility import dense_visibility
from lookahead.algorithm.window import Window
from lookahead.bench.report.canvas import BLUE, FAINT, GREEN, GREY, INK, LINE, ORANGE, PURPLE, RED, TEAL, Canvas
from lookahead.config import LookaheadConfig

IMAGES = Path(__file__).parent / "img"
SOURCE = Path(lookahead.__file__).parent
W, N, G = 5, 4, 2
PROMPT = ["the", "cat", "sat", "on", "one", "mat", ",", "the", "cat", "ran", "off", ",", "the"]
PREFIX = 3

ROWS = (ORANGE, GREEN, RED)
AGES = ("oldest row", "row 1", "newest row")


@dataclass(frozen=True)
class Cell:
    """What stands in the window here instead of a token id: where the token came from."""

    name: str
    fill: str


def offset(depth: int) -> str:
    return f"p+{depth}" if depth else "p"


def window_figure() -> str:
    """One step's window, the n-gram of one column, and the window after it has rolled."""
    layout = window_layout(W, N)
    window: Any = Window(W, N, [0])  # any: it holds cells here, not token ids
    window.rows = [[Cell(str(layout.depths[r * W + j]), ROWS[r]) for j in range(W)] for r in range(N - 1)]
    root, accepted = Cell("c", BLUE), Cell("c'", BLUE)
    new = [Cell(str(layout.depths[node] + 1), TEAL) for node in layout.newest]

    left, pitch, lane = 150, 56, 46
    canvas = Canvas(
        870,
        560,
        f"The window, W={W} and N={N}",
        "Rows of guessed tokens by position; a column is a diagonal and gives one n-gram; then it rolls.",
    )

    def place(depth: int, row: int, top: int) -> tuple[int, int]:
        return left + pitch * depth + pitch // 2, top + lane * row

    def axis(top: int) -> None:
        for depth in range(W + N - 1):
            x, _ = place(depth, 0, top)
            canvas.text(x, top - 32, offset(depth), fill=FAINT, anchor="middle", size=13)
        canvas.text(24, top - 32, "position", fill=FAINT, size=13)

    def rows(top: int, first: Cell, start: int) -> list[list[tuple[int, int, Cell]]]:
        cells = [first, *window.flat()]
        spots = [place(start + layout.depths[i], i // W, top) for i in range(layout.size)]
        return [[(*spots[i], cells[i]) for i in range(r * W, (r + 1) * W)] for r in range(N - 1)]

    # This step: the rows, the new targets below them, and column 1's n-gram.
    top = 96
    canvas.text(24, 34, f"This step: N-1 = {N - 1} rows of W = {W} guesses", bold=True, size=16)
    axis(top)
    grid = rows(top, root, 0)
    ends = [place(layout.depths[node] + 1, N - 1, top) for node in layout.newest]
    targets = [(x, y, cell) for (x, y), cell in zip(ends, new, strict=True)]
    spots = {(cell.name, cell.fill): (x, y) for row in [*grid, targets] for x, y, cell in row}
    ngram = window.ngrams(root, new)[1]
    canvas.path([spots[cell.name, cell.fill] for cell in ngram], "#f2c230", 42, opacity=0.75)
    for r, row in enumerate(grid):
        canvas.text(24, top + lane * r + 5, AGES[r], fill=ROWS[r], bold=True)
        for x, y, cell in row:
            canvas.chip(x, y, 42, 30, cell.name, cell.fill)
    canvas.text(24, top + lane * (N - 1) + 5, "new targets", fill=TEAL, bold=True)
    for x, y, cell in targets:
        canvas.box(x - 21, y - 15, 42, 30, "#ffffff", edge=TEAL, dash="4 3")
        canvas.text(x, y + 5, cell.name, fill=TEAL, anchor="middle", bold=True)
    note = left + pitch * (W + N - 1) + 24
    canvas.text(note, top + 5, "c: last accepted token,", fill=FAINT)
    canvas.text(note, top + 23, "column 0 of the oldest row", fill=FAINT)
    canvas.text(note, top + lane + 27, "a column is a diagonal:", fill=FAINT)
    canvas.text(note, top + lane + 45, f"its {N} tokens are one", fill=FAINT)
    canvas.text(note, top + lane + 63, f"{N}-gram for the pool", fill=FAINT)

    # The next step: the same cells after `roll`, drawn at the same positions.
    window.roll(new)
    top = 390
    canvas.path([(24, top - 92), (846, top - 92)], LINE, 1)
    heading = "Next step: the oldest row is gone, the targets are the newest row"
    canvas.text(24, top - 62, heading, bold=True, size=16)
    axis(top)
    for r, row in enumerate(rows(top, accepted, 1)):
        canvas.text(24, top + lane * r + 5, AGES[r], fill=row[1][2].fill, bold=True)
        for x, y, cell in row:
            canvas.chip(x, y, 42, 30, cell.name, cell.fill)
    canvas.text(note, top + 5, "c': the token accepted now;", fill=FAINT)
    canvas.text(note, top + 23, "it takes the place of the", fill=FAINT)
    canvas.text(note, top + 41, "guess that stood there", fill=FAINT)
    about = "Numbers are positions relative to c. In this step one token was accepted."
    canvas.text(24, 540, about, fill=FAINT, size=13)
    return canvas.done()


def step_tree() -> tuple[TokenTree, list[str], list[str]]:
    """The first step of a toy prompt whose last word was seen twice before; a label and a colour per node."""
    ids = {word: i for i, word in enumerate(dict.fromkeys(PROMPT))}
    words = list(ids)
    sequence = DecodingSequence([ids[word] for word in PROMPT], LookaheadConfig.paper(W, N, G, prompt=True))
    tree = guess_by_guess(sequence.propose())
    labels = ["c", *[str(depth) for depth in tree.depths[1 : tree.branch]]]
    labels += [words[token] for token in tree.tokens[tree.branch :]]
    fills = [BLUE, *[ROWS[i // W] for i in range(1, tree.branch)], *[PURPLE] * (len(tree) - tree.branch)]
    return tree, labels, fills


def guess_by_guess(tree: TokenTree) -> TokenTree:
    """The same tree, guess after guess and not best first, so that no score can move a figure."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(tree.branch, len(tree)):
        paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    order = [*range(tree.branch), *sorted(range(tree.branch, len(tree)), key=paths.__getitem__)]
    place = {node: i for i, node in enumerate(order)}
    return TokenTree(
        tokens=[tree.tokens[node] for node in order],
        parents=[place.get(tree.parents[node], -1) for node in order],
        depths=[tree.depths[node] for node in order],
        needed=tree.needed,
        branch=tree.branch,
        width=tree.width,
    )


def lanes(tree: TokenTree) -> Iterator[int]:
    """A line per node: the window's rows from 0 down, the guesses' paths from -1 up."""
    taken: dict[int, int] = {}
    free = -1
    for node, parent in enumerate(tree.parents):
        if node < tree.branch:
            yield node // W
            continue
        siblings = [n for n in taken if tree.parents[n] == parent]
        lane = taken.get(parent, free) if not siblings else free
        free = min(free, lane - 1)
        taken[node] = lane
        yield lane


def tree_figure() -> str:
    """One step's token tree by position, with the rows whose logits are needed."""
    tree, labels, fills = step_tree()
    left, pitch, lane, top = 70, 92, 62, 170
    canvas = Canvas(
        720,
        450,
        f"One step's token tree, W={W}, N={N}, G={G}",
        "The lookahead branch and the trie of guesses both hang from c, the last accepted token.",
    )
    lines = list(lanes(tree))
    spots = [(left + pitch * d, top + lane * line) for d, line in zip(tree.depths, lines, strict=True)]
    bottom = top + lane * (N - 2) + 34
    for depth in range(max(tree.depths) + 1):
        x = left + pitch * depth
        canvas.path([(x, min(y for (at, y) in spots if at == x)), (x, bottom)], LINE, 1)
        canvas.text(x, bottom + 20, offset(depth), fill=FAINT, anchor="middle", size=13)
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            canvas.path([spots[parent], spots[node]], fills[node], 3, opacity=0.6)
    for node, (x, y) in enumerate(spots):
        wide = 52 if node >= tree.branch else 42
        canvas.chip(x, y, wide, 30, labels[node], fills[node], ring=node in tree.needed)
    side = left + pitch * (N - 1) + 52
    y = top + lane * min(lines) - 6
    canvas.text(side, y, "Verification branch", fill=PURPLE, bold=True, size=16)
    canvas.text(side, y + 22, f"G = {G} guesses from the pool;", fill=FAINT)
    canvas.text(side, y + 41, "a shared beginning is one node", fill=FAINT)
    side = left + pitch * (W - 1) + 52
    canvas.text(side, top - 8, "Lookahead branch", bold=True, size=16)
    canvas.text(side, top + 14, f"W = {W} columns, N-1 = {N - 1} rows", fill=FAINT)
    y = bottom + 58
    for r in range(N - 1):
        canvas.box(24 + 120 * r, y - 12, 15, 15, ROWS[r], radius=3)
        canvas.text(46 + 120 * r, y, AGES[r], fill=FAINT)
    canvas.box(24 + 120 * (N - 1), y - 12, 15, 15, "#ffffff", edge=INK, radius=3)
    canvas.text(46 + 120 * (N - 1), y, "ring: this token's logits are needed", fill=FAINT)
    canvas.text(24, y + 34, "A token sees the prefix, its ancestors and itself. Nothing else.", bold=True)
    return canvas.done()


def mask_figure() -> str:
    """Figure 2(b) of the paper: who sees whom in that tree, the prefix included."""
    tree, labels, fills = step_tree()
    sees = dense_visibility(tree.parents)
    size, pitch, left, top = len(tree), 24, 138, 106
    width, height = pitch * (PREFIX + size), pitch * size
    canvas = Canvas(
        left + width + 36,
        top + height + 88,
        f"The attention mask of one step, W={W}, N={N}, G={G}",
        "Rows are the step's tokens as queries, columns the prefix and the step's tokens as keys.",
    )
    canvas.text(24, 34, "Who sees whom: row = query, column = key", bold=True, size=16)
    start = left + pitch * PREFIX
    canvas.text(left + pitch * PREFIX // 2, top - 12, "prefix", fill=FAINT, anchor="middle", size=13)
    for i in range(size):
        x, y = start + pitch * i + pitch // 2, top + pitch * i + pitch // 2
        canvas.text(left - 12, y + 5, labels[i], fill=fills[i], anchor="end", bold=True)
        if i < tree.branch:
            canvas.text(x, top - 12, labels[i], fill=fills[i], anchor="middle", bold=True)
        else:
            canvas.text(x + 5, top - 12, labels[i], fill=fills[i], bold=True, turn=-55)
        for j in range(PREFIX):
            canvas.box(left + pitch * j + 2, y - 10, pitch - 4, pitch - 4, GREY, radius=3)
        for j in range(size):
            fill = fills[j] if sees[i, j] else "#eef1f5"
            canvas.box(start + pitch * j + 2, y - 10, pitch - 4, pitch - 4, fill, radius=3)
    right = left + width + 6
    edge = tree.branch * pitch
    canvas.path([(left - 100, top + edge), (right, top + edge)], INK, 1)
    canvas.path([(start + edge, top - 46), (start + edge, top + height + 6)], INK, 1)
    canvas.text(44, top + edge // 2, "Lookahead", anchor="middle", bold=True, turn=-90)
    middle = top + (edge + height) // 2
    canvas.text(44, middle, "Verification", fill=PURPLE, anchor="middle", bold=True, turn=-90)
    y = top + height + 36
    keys = [(GREY, "prefix"), (BLUE, "c"), *zip(ROWS, AGES, strict=True), (PURPLE, "guesses")]
    x = 24
    for fill, name in keys:
        canvas.box(x, y - 12, 15, 15, fill, radius=3)
        canvas.text(x + 21, y, name, fill=FAINT)
        x += 46 + 8 * len(name)
    canvas.text(24, y + 30, "Numbers are positions relative to c. Pale: not visible.", fill=FAINT, size=13)
    return canvas.done()


@dataclass(frozen=True)
class Stage:
    """A box of the runtime figure: the part's name, what it does, and the file to read."""

    x: int
    y: int
    name: str
    does: tuple[str, ...]
    file: str
    fill: str


STAGE_WIDTH, STAGE_HEIGHT = 190, 104
STAGES = (
    Stage(24, 74, "request", ("tokens, config, sampling,", "stop rules"), "engine/request.py", GREY),
    Stage(244, 74, "1. schedule", ("who decodes, and which", "prompt chunks run"), "engine/scheduler.py", BLUE),
    Stage(464, 74, "2. propose", ("a tree per sequence:", "window and draft tokens"), "algorithm/drafting.py", BLUE),
    Stage(684, 74, "5. verify", ("follow the targets down", "each tree, and commit"), "algorithm/verify.py", BLUE),
    Stage(904, 74, "events", ("accepted tokens", "per request"), "engine/step.py", GREY),
    Stage(
        464,
        256,
        "3. plan",
        ("pages, kind of step, packet", "of numbers for the device"),
        "backends/graph/planner.py",
        TEAL,
    ),
    Stage(684, 256, "read", ("targets and top tokens", "of the needed rows"), "backends/graph/running.py", TEAL),
    Stage(
        574,
        438,
        "4. run(kind, packet)",
        ("two captured graphs:", "forward pass, targets"),
        "backends/graph/runner.py",
        PURPLE,
    ),
)
"""In the order of a step. What each does is said once more in the text below the figure."""


def runtime_figure() -> str:
    """A step of the runtime: request, engine, planner, runner, verify."""
    canvas = Canvas(1118, 640, "One step of the runtime", "Request, engine, planner, runner, verify, events.")
    canvas.text(24, 34, "One step of many requests", bold=True, size=16)
    lanes = (
        ("Engine, on the host", 52, BLUE),
        ("Backend, on the host", 234, TEAL),
        ("Backend, on the device", 416, PURPLE),
    )
    for label, top, fill in lanes:
        canvas.box(12, top, 1094, 148, "none", edge=fill, radius=8, dash="5 4")
        canvas.text(24, top + 138, label, fill=fill, bold=True, size=13)
    for stage in STAGES:
        if not (SOURCE / stage.file).is_file():
            raise FileNotFoundError(f"the runtime figure names {stage.file}, which does not exist")
        canvas.box(stage.x, stage.y, STAGE_WIDTH, STAGE_HEIGHT, stage.fill, radius=7)
        middle = stage.x + STAGE_WIDTH // 2
        canvas.text(middle, stage.y + 25, stage.name, fill="#ffffff", anchor="middle", bold=True, size=15)
        for number, line in enumerate(stage.does):
            canvas.text(middle, stage.y + 48 + 18 * number, line, fill="#ffffff", anchor="middle", size=13)
        canvas.text(middle, stage.y + 92, stage.file, fill="#ffffff", anchor="middle", size=11)
    center = STAGE_HEIGHT // 2
    for x in (214, 434, 874):  # from box to box in the engine
        canvas.arrow((x, 74 + center), (x + 30, 74 + center))
    canvas.arrow((559, 178), (559, 256))
    canvas.text(552, 222, "trees, prompt chunks", fill=FAINT, anchor="end", size=13)
    canvas.arrow((600, 360), (640, 438))
    canvas.text(606, 404, "kind and packet", fill=FAINT, anchor="end", size=13)
    canvas.arrow((700, 438), (740, 360))
    canvas.text(736, 404, "one array of results", fill=FAINT, size=13)
    canvas.arrow((779, 256), (779, 178))
    canvas.text(786, 222, "targets, top tokens", fill=FAINT, size=13)
    for number, line in enumerate(
        ("While the device runs, the host learns from the", "step before and sends that step's events.")
    ):
        canvas.text(792, 482 + 18 * number, line, fill=FAINT, size=13)
    for number, line in enumerate(
        ("Accepted K/V move next to their prefix when the", "next packet says so: a commit costs no launch.")
    ):
        canvas.text(24, 482 + 18 * number, line, fill=FAINT, size=13)
    note = "The eager and the CPU backend stand in the same spot: trees in, targets out. They run a step in one call."
    canvas.text(24, 600, note, fill=FAINT, size=13)
    canvas.text(24, 622, "Files are in src/lookahead.", fill=FAINT, size=13)
    return canvas.done()


def figures() -> dict[Path, str]:
    """Every figure as it should be: file -> SVG."""
    return {
        IMAGES / "window.svg": window_figure(),
        IMAGES / "tree.svg": tree_figure(),
        IMAGES / "mask.svg": mask_figure(),
        IMAGES / "runtime.svg": runtime_figure(),
    }


def stale() -> list[Path]:
    """The files that are not what the code draws."""
    return [p for p, svg in figures().items() if not p.is_file() or p.read_text(encoding="utf-8") != svg]


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the figures of how-it-works.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    if parser.parse_args().check:
        old = stale()
        for path in old:
            print(f"{path.name} is out of date; run: python docs/figures.py", file=sys.stderr)
        return 1 if old else 0
    IMAGES.mkdir(exist_ok=True)
    for path, svg in figures().items():
        path.write_text(svg, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
