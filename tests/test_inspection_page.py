"""The page and the picture of an inspection, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from odb_megatron.cli import main
from tests.browser import Browser, browser, page_problems

__all__ = ["browser"]

pytest.importorskip("matplotlib", reason="matplotlib is not installed (the extra pages)")
pytest.importorskip("jinja2", reason="jinja2 is not installed (the extra pages)")

CASES = {
    "long-tail": "--lengths lognormal:mean=500,cv=1.2,max=4096,n=600 --dp 4 --token-budget 8192 "
    "--seq-length 4096 --model-shape layers=4,hidden=256,heads=4,vocab=32000",
    "many-replicas": "--lengths lognormal:mean=80,cv=0.5,max=300,n=480 --dp 24 "
    "--token-budget 2048 --global-batch-size 96 --no-advice",
    "one-length": "--lengths lognormal:mean=64,cv=0,max=64,n=200 --dp 1 --token-budget 256 "
    "--no-advice",
}


@pytest.mark.parametrize("name", CASES)
def test_page(browser: Browser, tmp_path: Path, name: str) -> None:
    page, picture = tmp_path / f"inspect-{name}.html", tmp_path / "a.png"
    assert main(["inspect", *CASES[name].split(), "--html", str(page), "--plot", str(picture)]) == 0
    assert page_problems(browser, page) == []
    html = page.read_text(encoding="utf-8")
    for expected in ("How long samples are", "Padding before and after", "Predicted speed"):
        assert expected in html
    assert ("Balance over replicas" in html) == (name != "one-length")
    assert picture.stat().st_size > 20_000
