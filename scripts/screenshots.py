"""Pictures of the server's page for the documentation: light, dark and on a phone.

Starts a server with the embedded model, asks about the example picture in a headless Chromium (CHROMIUM names its path)
and writes docs/page-light.png, docs/page-dark.png and docs/page-phone.png. Run it with the test extra installed.
"""

import os
import shutil
import threading
import time
from pathlib import Path

import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from foreglance import Engine, Settings
from foreglance.serve.app import create_app

DOCS = Path(__file__).parents[1] / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
DEPTH = "4"


def main() -> None:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    server = uvicorn.Server(uvicorn.Config(create_app(_engine()), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, picture in (("light", _answer), ("dark", _rows), ("phone", _phone)):
            picture(browser, address, DOCS / f"page-{name}.png")
        browser.close()
    server.should_exit = True
    thread.join()


def _engine() -> Engine:
    return Engine.load("tiny-qwen", Settings(weights="fp32"))


def _open(browser: Browser, address: str, width: int, height: int, **options) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=2, **options)
    page.goto(address)
    page.wait_for_selector("#model:not([hidden])")
    page.locator("[name=depth]").evaluate(
        "(e, depth) => { e.value = depth; e.dispatchEvent(new Event('input', { bubbles: true })) }", DEPTH
    )
    return page


def _ask(page: Page) -> None:
    page.click("#example")
    page.wait_for_selector(".thumb")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".turn-buttons:not([hidden])")


def _answer(browser: Browser, address: str, path: Path) -> None:
    """An answer with its marks."""
    page = _open(browser, address, 1200, 760)
    _ask(page)
    page.locator('.answer .token[data-depth="3"]').first.hover()
    page.screenshot(path=path)


def _rows(browser: Browser, address: str, path: Path) -> None:
    """The rows of the conversation."""
    page = _open(browser, address, 1200, 760, color_scheme="dark")
    _ask(page)
    page.click("#rows summary")
    page.wait_for_selector("#rows-image[src]")
    page.locator("#rows-image").evaluate("image => image.decode()")
    page.locator("#rows").evaluate("e => { e.parentElement.scrollTop = e.offsetTop - 150 }")
    page.screenshot(path=path)


def _phone(browser: Browser, address: str, path: Path) -> None:
    page = _open(browser, address, 390, 760, is_mobile=True, has_touch=True)
    _ask(page)
    page.screenshot(path=path)


if __name__ == "__main__":
    main()
