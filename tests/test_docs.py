"""The documents say what the code does: figures and the table of models come from it, and the files they name exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SAMPLE = (
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "GraniteMoeForCausalLM",
    "MambaForCausalLM",
    "LlavaForConditionalGeneration",
    "T5ForConditionalGeneration",
    "BlipForConditionalGeneration",
)
"""Full and sliding attention, and experts; one that is refused for its recurrent state; one that takes images, too, an
encoder-decoder, and one that cannot be decoded from text alone."""
HOW = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]


@pytest.fixture(scope="module")
def figures() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("docs_figures", DOCS / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_figures_are_what_the_code_draws(figures: ModuleType) -> None:
    old = [path.name for path in figures.stale()]
    assert not old, f"{', '.join(old)} out of date; run: python docs/figures.py"


def test_check_notices_a_changed_and_a_missing_figure(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    assert figures.main() == 0
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    assert figures.main() == 0
    (tmp_path / "tree.svg").write_text("<svg/>", encoding="utf-8")
    (tmp_path / "mask.svg").unlink()
    assert figures.main() == 1
    said = capsys.readouterr().err
    assert "tree.svg" in said
    assert "mask.svg" in said
    assert "window.svg" not in said


def test_figures_are_well_formed_and_stay_on_their_card(figures: ModuleType) -> None:
    for path, svg in figures.figures().items():
        root = ElementTree.fromstring(svg)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for element in root.iter():
            x, y = float(element.get("x", 0)), float(element.get("y", 0))
            right, bottom = x + float(element.get("width", 0)), y + float(element.get("height", 0))
            assert min(x, y) >= 0, path.name
            assert right <= width, path.name
            assert bottom <= height, path.name


def test_every_file_of_the_code_map_exists() -> None:
    _, _, code_map = HOW.partition("## Where in the code")
    named = re.findall(r"`([\w./-]+/[\w./-]+)`", code_map)
    assert len(named) >= 10
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing


def test_every_image_and_link_of_the_page_exists() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", HOW)
    assert {"img/window.svg", "img/tree.svg", "img/mask.svg"} <= set(targets)
    missing = [target for target in targets if not (DOCS / target).is_file()]
    assert not missing


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    """The links of a document to a file or to a heading that does not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{document.name}: {link}")
    return broken


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert len(DOCUMENTS) > 15
    assert not [link for document in DOCUMENTS for link in broken_links(document)]


def test_links_to_a_missing_file_or_heading_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n## What `exact` means\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n```sh\n# no heading\n```\n"
        "[a](#page) [b](other.md#what-exact-means) [c](https://example.org/#x) "
        "[d](other.md#limits) [e](gone.md) [f](#no-heading)",
        encoding="utf-8",
    )
    assert broken_links(page) == ["page.md: other.md#limits", "page.md: gone.md", "page.md: #no-heading"]


def check_table_of_models(*names: str) -> None:
    command = [sys.executable, str(DOCS / "models.py"), "--check", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_table_of_models_of_a_sample() -> None:
    check_table_of_models(*SAMPLE)


@pytest.mark.slow
def test_table_of_models() -> None:
    """Every generative class of transformers, decoded as it is and with lookahead."""
    check_table_of_models()


def test_the_oldest_transformers_is_the_one_that_is_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    newest, oldest = (
        dict(re.findall(r"^(\w+)==(.+)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE))
        for name in ("constraints.txt", "constraints-oldest.txt")
    )
    assert re.findall(r'"transformers>=([\d.]+),', project) == [oldest["transformers"].removesuffix(".0")]
    assert oldest["torch"] == newest["torch"]
