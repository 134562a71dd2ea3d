"""Opens a report in Chromium; usage: report_in_browser.py FILE CHROMIUM. Says "fine" for each theme and width."""

from __future__ import annotations

import sys
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def look(browser: Browser, url: str, theme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.wait_for_selector(".main-svg")
    charts = page.locator("figure").count()
    assert charts > 3 and page.locator("figure:has(.main-svg)").count() == charts
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.keyboard.press("Tab")  # by keyboard to the first link, and the theme by its button
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#advice"
    serious = [its for its in Axe().run(page).response["violations"] if its["impact"] in ("serious", "critical")]
    assert not serious, serious
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != theme
    page.emulate_media(media="print")
    assert not page.locator("#theme").is_visible() and page.locator("figure").first.is_visible()
    assert said == [] and [one for one in asked if one != url] == [], (said, asked)
    context.close()
    print("fine", theme, width, flush=True)


with sync_playwright() as playwright:
    chromium = playwright.chromium.launch(executable_path=sys.argv[2], args=QUIET)
    for colours in ("light", "dark"):
        for wide in (1280, 390):
            look(chromium, Path(sys.argv[1]).resolve().as_uri(), colours, wide)
    chromium.close()
