"""Write the screenshots of the documentation: `python -m tests.browser.screenshots`."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright
from tests.browser.served_page import BROWSER_OPTIONS, CHROMIUM, run_server, write_folders

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1040, "height": 760}
N_COLORS = 128
SENTENCES = """\
en\tThere was an earthquake yesterday.
en\tThe train to Berlin leaves at eight.
de\tGestern war ein Erdbeben.
de\tDer Zug nach Berlin fährt um acht Uhr ab.
fr\tIl y a eu un tremblement de terre hier.
fr\tLe train pour Berlin part à huit heures.
es\tAyer hubo un terremoto.
es\tEl tren a Berlín sale a las ocho.
tr\tDün bir deprem oldu.
tr\tBerlin treni saat sekizde kalkıyor.
ru\tВчера было землетрясение.
ru\tПоезд в Берлин отправляется в восемь.
"""


def show_align(page: Page) -> None:
    page.get_by_role("radio", name="Lines").check()
    expect(page.locator(".matrix")).to_have_count(0)
    page.locator(".link").nth(4).focus()
    page.keyboard.press("ArrowRight")


def show_arabic(page: Page) -> None:
    page.get_by_role("button", name="Arabic").click()
    expect(page.locator(".words").first).to_contain_text("القطة")


def show_search(page: Page) -> None:
    page.get_by_role("button", name="German").click()
    expect(page.locator(".ranked").first).to_contain_text("Berlin")


def show_dictionary(page: Page) -> None:
    page.get_by_role("button", name="house").click()
    expect(page.locator(".ranked").first).to_be_visible()


def show_space(page: Page) -> None:
    expect(page.locator(".point").first).to_be_visible()


def show_attention(page: Page) -> None:
    expect(page.locator(".matrix").first).to_be_visible()


def show_study(page: Page) -> None:
    expect(page.locator(".verdicts").first).to_be_visible()


def show_runs(page: Page) -> None:
    expect(page.locator(".curve").first).to_be_attached()


# Name of the image: address, color scheme and what to do before the picture is taken.
PICTURES = {
    "align": ("align", "light", show_align),
    "align-rtl": ("align", "dark", show_arabic),
    "search": ("search", "light", show_search),
    "space": ("space", "light", show_space),
    "dictionary": ("dictionary", "light", show_dictionary),
    "attention": ("attention", "light", show_attention),
    "study": ("study", "light", show_study),
    "runs": ("runs", "dark", show_runs),
}


def save_image(data: bytes, path: Path) -> None:
    """Write a picture with few colors, which makes it small."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(N_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    expect.set_options(timeout=60_000)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        options = write_folders(Path(folder))
        sentences = Path(folder) / "sentences.tsv"
        sentences.write_text(SENTENCES, "utf-8")
        with (
            run_server([*options, f"--sentences={sentences}"]) as address,
            sync_playwright() as api,
        ):
            browser = api.chromium.launch(executable_path=CHROMIUM, args=BROWSER_OPTIONS)
            for name, (view, scheme, show) in PICTURES.items():
                context = browser.new_context(viewport=SIZE, color_scheme=scheme)
                page = context.new_page()
                page.goto(f"{address}/#{view}")
                show(page)
                page.wait_for_timeout(300)
                save_image(page.screenshot(full_page=True), IMAGES / f"serve-{name}.png")
                context.close()
            browser.close()


if __name__ == "__main__":
    main()
