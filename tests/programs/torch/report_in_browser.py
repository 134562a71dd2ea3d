"""Opens a report in Chromium and prints "fine" for each theme and width; usage: report_in_browser.py FILE CHROMIUM."""

from __future__ import annotations

import sys
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

QUIET = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


def check_access(page: Page) -> None:
    serious = [found for found in Axe().run(page).response["violations"] if found["impact"] in ("serious", "critical")]
    assert not serious, serious


def look(browser: Browser, url: str, theme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    logged: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: logged.append(message.text))
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.goto(url)
    page.wait_for_function("views.length === plots.length")
    charts = page.locator(".plot")
    assert charts.count() > 3 and page.evaluate("views.length") == charts.count()
    inner = page.evaluate("views.map(([id, view]) => document.getElementById(id).clientWidth - view.bbox.width)")
    assert not any(inner), inner  # a chart is as wide as its column
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate("document.documentElement.scrollWidth") == width
    charts.first.scroll_into_view_if_needed()
    charts.first.hover()
    page.wait_for_selector(".bk-tooltip-row-value:visible")
    page.mouse.move(0, 0)
    page.evaluate("document.querySelectorAll('details').forEach((its) => { its.open = true; })")
    cut = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((its) => its.scrollWidth > its.clientWidth).length"
    )
    assert not cut
    page.keyboard.press("Tab")  # by keyboard to the first link, and the theme by its button
    assert page.evaluate("document.activeElement.getAttribute('href')") in ("#advice", "#numbers")
    check_access(page)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != theme
    check_access(page)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("figure > canvas").count() == charts.count()
    page.emulate_media(media="print")
    assert not page.locator("#theme").is_visible() and page.locator("figure").first.is_visible()
    assert logged == [] and requested == [url], (logged, requested)
    context.close()
    print("fine", theme, width, flush=True)


with sync_playwright() as playwright:
    chromium = playwright.chromium.launch(executable_path=sys.argv[2], args=QUIET)
    for colours in ("light", "dark"):
        for wide in (1280, 390):
            look(chromium, Path(sys.argv[1]).resolve().as_uri(), colours, wide)
    chromium.close()
