"""What mkdocs does beside docs/: the repository's own pages, links out of docs/, the API's."""

from __future__ import annotations

import ast
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = [
    "LAYERS",
    "PAGES",
    "links_of",
    "on_config",
    "on_files",
    "on_page_markdown",
    "reference_pages",
]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "odb_megatron"

# Files of the repository that are pages of the site, which lies as docs/ does.
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Layers without an API to call: what stands in for a package that is not there.
LAYERS = {"testing": "for tests of programs that use ODB, and on machines without a GPU"}

_log = logging.getLogger("mkdocs.hooks.docs_site")
# A link, or code, in which nothing is a link. What begins first is what it is.
_LINK_OR_CODE = re.compile(
    r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)"
    r"|```[\s\S]*?```|(?:^ {4}.*\n?)+|`[^`\n]*`",
    re.MULTILINE,
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API's pages into the navigation, and at the end pages that it does not name."""
    nav = config.nav or []
    for entry in nav:
        if entry.get("API") == "reference/":
            entry["API"] = [{title: page} for title, page, _ in reference_pages()]
    named = re.findall(r"'([\w/]+\.md)'", str(nav))
    more = sorted({path.name for path in (ROOT / "docs").glob("*.md")} - set(named))
    if more:
        nav.append({"More": more})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's pages, the files that pages link to, and the API's pages."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for _, page, text in reference_pages():
        files.append(File.generated(config, page, content=text))
    linked = set()
    for page in [*PAGES, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        for _, target in links_of((ROOT / page).read_text(encoding="utf-8")):
            path = _in_repository(target, page)
            if path and path not in PAGES and not path.startswith("docs/"):
                linked.add(path)
    for path in sorted(linked):
        if (ROOT / path).is_file():
            source = str(ROOT / path)
            files.append(File.generated(config, _as_text(path), abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that lead out of docs/ into links inside the site."""
    own = {site: source for source, site in PAGES.items()}
    source = own.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = _in_repository(target, source) if target else None
        if path is None:
            return match.group()
        anchor = f"#{target.partition('#')[2]}" if "#" in target else ""
        if (ROOT / path).is_dir():
            return text  # a folder is no page
        if not (ROOT / path).is_file():
            _log.warning("%s links to %s, which is not in the repository", source, target)
            return match.group()
        to = PAGES.get(path) or (path[5:] if path.startswith("docs/") else _as_text(path))
        folder = str(PurePosixPath(page.file.src_uri).parent)
        return f"[{text}]({os.path.relpath(to, folder)}{anchor})"

    return _LINK_OR_CODE.sub(replaced, markdown)


def links_of(markdown: str) -> list[tuple[str, str]]:
    """Text and target of each link of a page, code aside."""
    return [(text, target) for text, target in _LINK_OR_CODE.findall(markdown) if target]


def reference_pages() -> list[tuple[str, str, str]]:
    """Title, path and text of the API's pages: one per layer, all modules that have `__all__`."""
    by_layer: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.name.startswith("__") or not _has_all(path):
            continue
        layer = parts[1] if len(parts) > 2 else "odb_megatron"
        by_layer.setdefault(layer, []).append(".".join(parts))
    pages = []
    for layer, modules in sorted(by_layer.items()):
        name = layer if layer == "odb_megatron" else f"odb_megatron.{layer}"
        note = f"\n{LAYERS[layer].capitalize()}.\n" if layer in LAYERS else ""
        body = "".join(f"\n::: {module}\n" for module in modules)
        text = f"# {name}\n{note}{body}"
        pages.append((name, f"reference/{layer}.md", text))
    return pages


def _has_all(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(name, ast.Name) and name.id == "__all__" for name in node.targets)
        for node in tree.body
    )


def _in_repository(target: str, page: str) -> str | None:
    """The file or folder that a link of a page leads to, from the repository's root."""
    if target.startswith("#") or re.match(r"[a-z]+:", target):
        return None
    name = target.partition("#")[0]
    return os.path.normpath(os.path.join(os.path.dirname(page), name)).replace(os.sep, "/")


def _as_text(path: str) -> str:
    """Where a source file lies in the site: as text, which browsers show."""
    return f"source/{path}.txt"
