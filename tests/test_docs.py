"""The documentation's site: no warning, no dead link, pictures that are drawn as they stand."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = _tool("docs_site")
PAGES = [*SITE.PAGES, *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))]


class _Names(HTMLParser):
    """Ids and addresses in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if (
                name in ("href", "src", "srcset")
                and value
                and tag in ("a", "img", "source", "link", "script")
            ):
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install mkdocs-material)")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings-python is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_link_and_picture_of_the_site_is_there(site: Path) -> None:
    """Files and anchors, in every page, the API's too; mkdocs itself looks at Markdown alone."""
    parsed = {}
    for path in site.rglob("*.html"):
        parsed[path] = _Names()
        parsed[path].feed(path.read_text(encoding="utf-8"))
    assert len(parsed) > 20
    broken = []
    for path, names in parsed.items():
        if path.name == "404.html":
            continue
        for link in names.links:
            if re.match(r"[a-z]+:", link):
                continue
            address, anchor = urldefrag(unquote(link))
            target = (path.parent / address).resolve() if address else path
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file():
                broken.append(f"{path.relative_to(site)}: {link}")
            elif anchor and target in parsed and anchor not in parsed[target].ids | {"__skip"}:
                broken.append(f"{path.relative_to(site)}: {link}: no such anchor")
    assert not broken, "\n".join(broken[:20])


def test_the_site_asks_no_other_host_for_anything(site: Path) -> None:
    loading = re.compile(
        r"""<(?:script|link|img|source|iframe)[^>]+(?:src|href)=["']?(https?://[^"' >]+)"""
    )
    for path in site.rglob("*.html"):
        found = [
            url
            for url in loading.findall(path.read_text(encoding="utf-8"))
            if "canonical" not in url
        ]
        assert not found, f"{path.relative_to(site)}: {found[:3]}"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    for name in (
        "odb_megatron.plan.step_planner.plan_step",
        "odb_megatron.data.step_loader.StepLoader",
        "odb_megatron.megatron.run.OdbRun",
        "odb_megatron.bridge.activation.enable",
        "odb_megatron.report.simulate.simulate",
        "odb_megatron.elastic.main",
    ):
        assert f'id="{name}"' in text, name


def test_modules_without_a_list_of_names_are_packages_or_private() -> None:
    """Else the reference would not have them."""
    listed = "".join(text for _, _, text in SITE.reference_pages())
    for path in sorted((ROOT / "odb_megatron").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not path.name.startswith("__"):
            assert f"\n::: {module}\n" in listed, f"{module} has no __all__"


@pytest.mark.parametrize("page", PAGES)
def test_links_hold_where_the_repository_is_read_too(page: str) -> None:
    """On a code host nothing is rewritten: each relative link is a path from the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for _, target in SITE.links_of(text):
        if not re.match(r"[a-z]+:|#", target):
            path = ROOT / Path(page).parent / target.partition("#")[0]
            assert path.exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_lists_have_an_empty_line_before_them(page: str) -> None:
    """Code hosts do without; the site's Markdown then makes one paragraph of them."""
    lines = ["", *(ROOT / page).read_text(encoding="utf-8").splitlines()]
    for before, line in pairwise(lines):
        if re.match(r"(?:[-*] |\d+\. )", line) and before.strip():
            is_item = re.match(r"\s*(?:[-*] |\d+\. )|\s", before)
            assert is_item, f"{page}: {line!r} would not begin a list"


@pytest.mark.parametrize(
    ("page", "markdown", "expected"),
    [
        ("index.md", "[a](docs/concepts.md#resuming)", "[a](concepts.md#resuming)"),
        ("index.md", "[`launch/`](launch)", "`launch/`"),
        ("concepts.md", "[a](../README.md#options)", "[a](index.md#options)"),
        ("concepts.md", "[a](faults.md), [b](https://x.y/z)", "[a](faults.md), [b](https://x.y/z)"),
        ("nemo.md", "[a](../examples/nemo/odb.yaml)", "[a](source/examples/nemo/odb.yaml.txt)"),
        ("concepts.md", "`[a](../README.md)`", "`[a](../README.md)`"),
        ("concepts.md", "    [a](../README.md)", "    [a](../README.md)"),
        (
            "benchmarks.md",
            "[a](../docs/reports.md) [b](#quality)",
            "[a](reports.md) [b](#quality)",
        ),
    ],
)
def test_links_in_the_site(page: str, markdown: str, expected: str) -> None:
    class _Page:
        class file:
            src_uri = page

    assert SITE.on_page_markdown(markdown, _Page, None, None) == expected


def test_a_link_to_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class _Page:
        class file:
            src_uri = "concepts.md"

    SITE.on_page_markdown("[a](../nothing.md)", _Page, None, None)
    assert "docs/concepts.md links to ../nothing.md, which is not in the repository" in caplog.text


def test_pictures_are_those_that_are_drawn_now() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pages)")
    pictures = _tool("draw_concepts")
    text = (DOCS / "concepts.md").read_text(encoding="utf-8")
    drawn = pictures.drawn()
    assert set(re.findall(r"pictures/([\w-]+\.svg)", text)) == set(drawn)
    for name, svg in drawn.items():
        assert (pictures.FOLDER / name).read_text(encoding="utf-8") == svg, (
            f"{name} is not what is drawn now: python tools/draw_concepts.py"
        )
