"""A headless Chromium for tests of pages, and the checks of layout that every page must pass.

    from tests.browser import browser  # a fixture: pytest finds it by its name in the module
    def test_page(browser, tmp_path):
        assert page_problems(browser, tmp_path / "page.html") == []

One browser serves a module. Screenshots go to the folder ODB_SCREENSHOTS, where it is set.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["SIZES", "Browser", "browser", "page_problems"]

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}

_LOCAL = ("file:", "data:", "about:", "chrome:")  # the last is of the browser's own first page
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One page at a time, at a size and in a colour scheme."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int, height: int, is_dark: bool) -> None:
        """Show a file; the window is then as high as the page, so that nothing is off screen."""
        command = self.driver.execute_cdp_cmd
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._resize(width, height)
        self.driver.get(path.resolve().as_uri())
        whole = self.driver.execute_script("return document.documentElement.scrollHeight")
        self._resize(width, max(height, whole))

    def script(self, code: str) -> Any:
        """Run JavaScript in the page."""
        return self.driver.execute_script(code)

    def requests(self) -> list[str]:
        """Return the addresses asked for since the last call, files and data aside."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith(_LOCAL)]

    def screenshot(self, path: Path) -> None:
        """Write what is shown as a PNG."""
        options = {"format": "png", "captureBeyondViewport": True}
        found = self.driver.execute_cdp_cmd("Page.captureScreenshot", options)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _resize(self, width: int, height: int) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser of this module's; skips where there is none."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed (pip install selenium)"
    )
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver (Debian: apt-get install chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()


def page_problems(shown: Browser, path: Path) -> list[str]:
    """Return what is wrong with a page's layout, at each size, light and dark.

    Sideways scrolling; text of a chart that overlaps other text, is cut, or is outside its picture;
    text below 10 px; contrast below 4.5:1 (3:1 for large text); axes that show nothing; requests to
    a network; a page that does not change with the colour scheme.
    """
    problems, backgrounds = [], set()
    shown.requests()
    for name, (width, height) in SIZES.items():
        for is_dark in (False, True):
            at = f"{name} {'dark' if is_dark else 'light'}"
            shown.open(path, width=width, height=height, is_dark=is_dark)
            found = shown.script(_CHECKS)
            backgrounds.add(found["background"])
            problems += [f"{at}: {problem}" for problem in found["problems"]]
            if "ODB_SCREENSHOTS" in os.environ:
                folder = Path(os.environ["ODB_SCREENSHOTS"])
                shown.screenshot(folder / f"{path.stem}-{at.replace(' ', '-')}.png")
    problems += [f"asks the network for {url}" for url in shown.requests()]
    if len(backgrounds) != 2:
        problems.append(f"one background, light and dark: {sorted(backgrounds)}")
    return problems


_CHECKS = r"""
const problems = [];
for (const details of document.querySelectorAll('details')) details.open = true;
const doc = document.documentElement;
if (doc.scrollWidth > doc.clientWidth)
  problems.push(`scrolls sideways: ${doc.scrollWidth} px in ${doc.clientWidth} px`);
const shown = (e) => { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0; };
const label = (e) => JSON.stringify(e.textContent.trim().slice(0, 40));
const inScroller = (e) => e.closest('.scroll, pre') !== null;
for (const e of document.querySelectorAll('body *')) {
  const r = e.getBoundingClientRect();
  if (shown(e) && !e.closest('svg') && !inScroller(e) && r.right > doc.clientWidth + 1)
    problems.push(`<${e.tagName.toLowerCase()}> ${label(e)} ends at ${r.right.toFixed()} px`);
}
const parse = (text) => {
  const n = (text.match(/[\d.]+/g) || []).map(Number);
  return n.length < 3 ? null : { rgb: n.slice(0, 3), alpha: n.length > 3 ? n[3] : 1 };
};
const mix = (over, alpha, under) => over.map((v, i) => v * alpha + under[i] * (1 - alpha));
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((v) => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [x, y] = [luminance(a), luminance(b)];
  return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
};
const htmlBackground = (e) => {
  const layers = [];
  for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor);
    if (c && c.alpha > 0) { layers.push(c); if (c.alpha === 1) break; }
  }
  return layers.reverse().reduce((under, c) => mix(c.rgb, c.alpha, under), [255, 255, 255]);
};
const behind = (text) => {  // the shapes of the chart under the middle of a label
  const r = text.getBoundingClientRect();
  const hit = document.elementsFromPoint(r.x + r.width / 2, r.y + r.height / 2);
  let under = htmlBackground(text.closest('svg'));
  for (const e of hit.reverse()) {
    if (!(e instanceof SVGGeometryElement) || e.closest('svg') !== text.closest('svg')) continue;
    const style = getComputedStyle(e), c = parse(style.fill);
    if (c) under = mix(c.rgb, c.alpha * style.opacity * style.fillOpacity, under);
  }
  return under;
};
const check = (e, size, weight, colour, under) => {
  if (size < 10) problems.push(`${label(e)} is ${size.toFixed(1)} px`);
  const least = size >= 24 || (size >= 18.66 && weight >= 700) ? 3 : 4.5;
  const c = contrast(mix(colour.rgb, colour.alpha, under), under);
  if (c < least) problems.push(`${label(e)} has contrast ${c.toFixed(2)}`);
};
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('svg') || !shown(e)) continue;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
  const s = getComputedStyle(e);
  check(e, parseFloat(s.fontSize), +s.fontWeight, parse(s.color), htmlBackground(e));
}
for (const svg of document.querySelectorAll('svg')) {
  if (!shown(svg)) continue;
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].filter((t) => t.textContent.trim() && shown(t));
  const boxes = texts.map((t) => t.getBoundingClientRect());
  texts.forEach((text, i) => {
    const m = text.getScreenCTM(), s = getComputedStyle(text), a = boxes[i];
    const fill = parse(s.fill);
    check(text, parseFloat(s.fontSize) * Math.hypot(m.a, m.b), +s.fontWeight,
      { rgb: fill.rgb, alpha: fill.alpha * s.opacity }, behind(text));
    if (a.left < frame.left - 1 || a.right > frame.right + 1 ||
        a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
      problems.push(`${label(text)} is cut by the edge of ${svg.getAttribute('aria-label')}`);
    for (let j = i + 1; j < texts.length; j++) {
      const b = boxes[j];
      const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (w > 1 && h > 2) problems.push(`${label(text)} overlaps ${label(texts[j])}`);
    }
  });
  for (const axes of svg.querySelectorAll('g[id*="axes_"]')) {
    const drawn = [...axes.querySelectorAll('path, use, rect, image')].filter((e) =>
      !e.closest('[id*="matplotlib.axis"], .spine, .background, defs, clipPath'));
    const size = (e) => { const r = e.getBoundingClientRect(); return r.width + r.height; };
    if (!drawn.some((e) => size(e) > 1))
      problems.push(`axes of ${svg.getAttribute('aria-label')} show nothing`);
  }
}
return { problems: [...new Set(problems)], background: getComputedStyle(doc).backgroundColor };
"""
