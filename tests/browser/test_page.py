"""The page of `calque serve` in Chromium."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# What a view shows when it is ready.
READY = {
    "align": ".link",
    "search": ".ranked li",
    "space": ".point",
    "dictionary": ".ranked li",
    "attention": ".matrix td",
    "translate": ".translation",
    "study": ".verdicts li",
    "runs": ".curve",
}
# Views that are empty at first, and the example that fills them.
EXAMPLES = {"dictionary": "water", "translate": "Greeting"}
RIGHT_TO_LEFT = {
    "Arabic": "القطة تنام على الكرسي",
    "Urdu": "بلی کرسی پر سوتی ہے",
    "Farsi": "گربه روی صندلی می خوابد",
}
ATTACKS = ("<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>")


def open_view(page: Page, name: str) -> Locator:
    """Open a view, wait until it shows something, and return its panel."""
    page.goto(f"/#{name}")
    panel = page.locator(f"#panel-{name}")
    if name in EXAMPLES:
        panel.get_by_role("button", name=EXAMPLES[name]).click()
    expect(panel).to_be_visible()
    expect(panel.locator(READY[name]).first).to_be_attached()
    return panel


def align(page: Page, src: str, tgt: str) -> list[str]:
    """Align a pair and return the labels of the links."""
    panel = open_view(page, "align")
    panel.get_by_label("Translation").fill(tgt)
    with page.expect_response("**/align") as response:
        panel.get_by_label("Sentence", exact=True).fill(src)
    n_links = len(response.value.json()["pairs"][0]["links"])
    expect(panel.locator(".link")).to_have_count(n_links)
    return read_links(panel)


def read_links(panel: Locator) -> list[str]:
    return [str(link.get_attribute("aria-label")) for link in panel.locator(".link").all()]


@pytest.mark.parametrize("name", READY)
def test_every_view(page: Page, name: str) -> None:
    panel = open_view(page, name)
    expect(page.get_by_role("tab", selected=True)).to_have_text(name.capitalize())
    expect(panel.get_by_role("alert")).to_be_hidden()
    assert find_serious_problems(page) == []
    page.emulate_media(color_scheme="dark")
    assert find_serious_problems(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(100)  # lines and plots are drawn again
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def find_serious_problems(page: Page) -> list[tuple[str, str]]:
    """Return the serious and critical accessibility problems: rule and element."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    return [
        (each["id"], node["html"])
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_german_words_are_linked(page: Page) -> None:
    links = align(page, "das rote Haus", "the red house")
    assert [link.split(":")[0] for link in links] == ["das – the", "rote – red", "Haus – house"]


def test_another_layer_gives_another_result(page: Page) -> None:
    panel = open_view(page, "align")
    before = read_links(panel)
    layer = panel.get_by_label(re.compile("^Layer"))
    with page.expect_response("**/align") as response:
        layer.press("Home")
    assert response.value.json()["layer"] == 0
    expect(panel.locator(".link").first).not_to_have_attribute("aria-label", before[0])


def test_no_link_is_certain(page: Page) -> None:
    """The highest threshold leaves no links: the scores are calibrated."""
    panel = open_view(page, "align")
    with page.expect_response("**/align"):
        panel.get_by_label(re.compile("^Threshold")).press("End")
    expect(panel.get_by_text("No links")).to_be_visible()


def test_another_model_starts_at_its_own_layer(page: Page) -> None:
    panel = open_view(page, "align")
    with page.expect_response("**/align") as response:
        panel.get_by_label("Model").select_option("tiny")
    answer = response.value.json()
    assert (answer["model"], answer["layer"]) == ("tiny", 3)
    layer = panel.get_by_label(re.compile("^Layer"))
    expect(layer).to_have_value("3")
    expect(layer).to_have_attribute("max", "4")
    with page.expect_response("**/align") as response:
        layer.press("End")
    assert response.value.json()["layer"] == 4
    with page.expect_response("**/align"):
        panel.get_by_label("Model").select_option("calque-mini")
    expect(layer).to_have_value("7")
    expect(layer).to_have_attribute("max", "8")


def test_one_attention_head(page: Page) -> None:
    panel = open_view(page, "attention")
    cell = panel.locator(".matrix td").nth(1)
    mean = str(cell.get_attribute("aria-label"))
    with page.expect_response("**/attention") as response:
        panel.get_by_label("Head").select_option("6")
    assert response.value.request.post_data_json["head"] == 6
    expect(cell).not_to_have_attribute("aria-label", mean)
    expect(panel.get_by_text("In head 6 of layer 7")).to_be_visible()
    with page.expect_response("**/attention") as response:
        panel.get_by_label("Model").select_option("tiny")
    assert "head" not in response.value.request.post_data_json
    expect(panel.get_by_label("Head").locator("option")).to_have_count(1 + 4)
    expect(panel.get_by_label(re.compile("^Layer"))).to_have_attribute("max", "4")


def test_the_newest_request_wins(page: Page) -> None:
    panel = open_view(page, "align")
    held: list[Any] = []
    page.route("**/align", lambda route: held.append(route))
    for n_sent, text in enumerate(("das Haus", "der Baum"), start=1):
        panel.get_by_label("Sentence", exact=True).fill(text)
        while len(held) < n_sent:
            page.wait_for_timeout(20)
    held[1].continue_()
    expect(panel.locator(".words").first).to_have_text("derBaum")
    held[0].continue_()
    page.wait_for_timeout(500)
    expect(panel.locator(".words").first).to_have_text("derBaum")


@pytest.mark.parametrize("text", RIGHT_TO_LEFT.values(), ids=list(RIGHT_TO_LEFT))
def test_right_to_left(page: Page, text: str) -> None:
    align(page, text, "the cat sleeps on the chair")
    words = page.locator(".words").first.locator("li")
    expect(words).to_have_text(text.split())
    lefts = [word.bounding_box()["x"] for word in words.all()]
    assert lefts == sorted(lefts, reverse=True)
    others = page.locator(".words").last.locator("li").all()
    for link in page.locator(".link").all():  # its line ends at the middle of the two words
        src, tgt = re.match("(.*) – (.*):", str(link.get_attribute("aria-label"))).groups()
        ends = link.locator(".line").evaluate(
            """path => [0, path.getTotalLength()].map(
                 at => path.getPointAtLength(at).matrixTransform(path.getScreenCTM()).x)"""
        )
        for x, word, row in zip(ends, (src, tgt), (words.all(), others), strict=True):
            middles = [
                box["x"] + box["width"] / 2
                for each in row
                if each.text_content() == word and (box := each.bounding_box())
            ]
            assert min(abs(middle - x) for middle in middles) < 1


def test_columns_of_the_matrix_run_right_to_left(page: Page) -> None:
    align(page, "the cat sleeps", "القطة تنام")
    cells = page.locator(".matrix tbody tr").first.locator("td").all()
    assert cells[0].bounding_box()["x"] > cells[1].bounding_box()["x"]
    cells[0].focus()
    page.keyboard.press("ArrowLeft")
    expect(cells[1]).to_be_focused()


@pytest.mark.parametrize("text", ATTACKS)
def test_markup_is_shown_as_text(page: Page, text: str) -> None:
    open_view(page, "align")
    before = page.locator("img, script").count()
    align(page, text, text)
    shown = "".join(page.locator(".words").first.locator("li").all_text_contents())
    assert shown == text.replace(" ", "")
    match = {"language": "en", "text": text, "score": 1.0, "line": 1}
    page.route("**/search", lambda route: route.fulfill(json={"matches": [match]}))
    expect(open_view(page, "search").locator(".ranked .text")).to_have_text(text)
    panel = open_view(page, "space")
    with page.expect_response("**/projection"):
        panel.get_by_label("One text per line").fill("".join(f"en\t{text}{k}\n" for k in range(4)))
    expect(panel.get_by_role("img", name=f"{text}0 (English)")).to_have_count(2)
    assert page.locator("img, script").count() == before


def test_a_bitext_is_aligned_and_downloaded(page: Page) -> None:
    panel = open_view(page, "align")
    panel.get_by_role("radio", name="Bitext").check()
    with page.expect_response("**/align"):
        panel.get_by_label("One pair per line").fill("das Haus ||| the house\nein Baum\ta tree\n")
    expect(panel.locator(".links")).to_have_count(2)
    with page.expect_download() as download:
        panel.get_by_role("button", name="Pharaoh").click()
    assert Path(download.value.path()).read_text("utf-8") == "0-0 1-1\n0-0 1-1\n"
    with page.expect_download() as download:
        panel.get_by_role("button", name="JSON").click()
    saved = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert [pair["tgt"] for pair in saved["pairs"]] == [["the", "house"], ["a", "tree"]]
    panel.get_by_label("One pair per line").fill("das Haus ||| the house\nein Baum")
    expect(panel.get_by_role("alert")).to_contain_text("Line 2")


def press_until(page: Page, key: str, target: Locator) -> None:
    """Press a key until an element has the focus."""
    for _ in range(40):
        if target.evaluate("node => node === document.activeElement"):
            return
        page.keyboard.press(key)
    pytest.fail(f"{key} does not lead to {target}")


def test_keyboard_alone(page: Page) -> None:
    page.goto("/")
    panel = page.locator("#panel-align")
    expect(panel.locator(".link").first).to_be_attached()
    press_until(page, "Tab", panel.get_by_role("button", name="Turkish"))
    with page.expect_response("**/align"):
        page.keyboard.press("Enter")
    expect(panel.locator(".words").first).to_contain_text("Yarın")
    press_until(page, "Tab", panel.get_by_label(re.compile("^Layer")))
    with page.expect_response("**/align"):
        page.keyboard.press("ArrowLeft")
    press_until(page, "Tab", panel.locator(".link").first)
    page.keyboard.press("ArrowRight")
    second = panel.locator(".link").nth(1)
    expect(second).to_be_focused()
    expect(page.locator(".tooltip")).to_have_text(str(second.get_attribute("aria-label")))
    press_until(page, "Tab", panel.locator(".matrix td:not(.corner)").first)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(panel.locator(".matrix tbody tr").nth(1).locator("td").nth(1)).to_be_focused()
    press_until(page, "Shift+Tab", page.get_by_role("tab", name="Align"))
    press_until(page, "ArrowRight", page.get_by_role("tab", name="Study"))
    page.keyboard.press("Enter")
    cell = page.locator("#panel-study td a").first
    expect(cell).to_be_visible()
    press_until(page, "Tab", cell)
    page.keyboard.press("Enter")
    expect(page.locator(".seeds")).to_contain_text("seed 5")


def test_search_groups_by_language(page: Page) -> None:
    panel = open_view(page, "search")
    with page.expect_response("**/search"):
        panel.get_by_label("Sentence").fill("Gestern war ein Erdbeben.")
    german = panel.locator("section", has_text="German")
    expect(german.locator("li").first).to_contain_text("Gestern war ein Erdbeben.")
    english = panel.locator("section", has_text="English")
    expect(english.locator("li").first).to_contain_text("There was an earthquake yesterday.")


def test_the_space_shows_and_hides_languages(page: Page) -> None:
    panel = open_view(page, "space")
    expect(panel.locator("figcaption")).to_have_text(["calque-mini", "tiny"])
    expect(panel.locator(".point")).to_have_count(2 * 30)
    panel.get_by_role("button", name="Arabic").click()
    expect(panel.locator(".point:visible")).to_have_count(2 * 25)
    with page.expect_response("**/projection") as response:
        panel.get_by_role("radio", name="t-SNE").check()
    assert response.value.json()["method"] == "tsne"


def test_the_space_shows_other_models_and_layers(page: Page) -> None:
    panel = open_view(page, "space")
    layer = panel.get_by_label("Layer of model 2")
    expect(layer.locator("option")).to_have_count(1 + 5)
    before = read_places(panel.locator("figure").nth(1))
    with page.expect_response(is_projection_of("tiny")) as response:
        layer.select_option("4")
    assert response.value.request.post_data_json["layer"] == 4
    expect(panel.locator("figure").nth(1).locator(".point").first).not_to_have_attribute(
        "transform", before[0]
    )
    with page.expect_response("**/projection"):
        panel.get_by_label("Model 2", exact=True).select_option("calque-mini")
    expect(layer.locator("option")).to_have_count(1 + 9)
    expect(layer).to_have_value("")
    expect(panel.locator("figcaption")).to_have_text(["calque-mini", "calque-mini"])


def is_projection_of(model: str) -> Any:
    return lambda response: (
        response.url.endswith("/projection") and response.json()["model"] == model
    )


def read_places(figure: Locator) -> list[str]:
    return [str(point.get_attribute("transform")) for point in figure.locator(".point").all()]


def read_numbers(transform: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+", transform)]


def test_the_space_is_zoomed_and_moved(page: Page) -> None:
    panel = open_view(page, "space")
    figure = panel.locator("figure").first
    plot = figure.locator(".scatter")
    start = read_places(figure)
    expect(plot).not_to_have_class(re.compile("zoomed"))
    plot.scroll_into_view_if_needed()
    point = figure.locator(".point").nth(7)
    point.locator("path").hover()
    page.mouse.wheel(0, -100)
    expect(plot).to_have_class(re.compile("zoomed"))
    zoomed = read_places(figure)
    # The point under the mouse stays there, and the others move away from it.
    moves = [math.dist(*map(read_numbers, places)) for places in zip(start, zoomed, strict=True)]
    assert moves[7] < 2 < sorted(moves)[2]
    page.mouse.down()
    page.mouse.move(10, 10, steps=3)
    page.mouse.up()
    assert read_places(figure) != zoomed
    figure.get_by_role("button", name="Show all points").click()
    assert read_places(figure) == start


def test_the_space_is_zoomed_by_keyboard(page: Page) -> None:
    """Points outside the frame come into view when the arrow keys reach them."""
    panel = open_view(page, "space")
    figure = panel.locator("figure").first
    zoom_in = figure.get_by_role("button", name="Zoom in")
    zoom_in.focus()
    for _ in range(4):
        page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
        frame = figure.locator(".scatter").bounding_box()
        point = page.locator(".point:focus path").bounding_box()
        assert frame["x"] <= point["x"] + point["width"] / 2 <= frame["x"] + frame["width"]
        assert frame["y"] <= point["y"] + point["height"] / 2 <= frame["y"] + frame["height"]
        assert 0 <= point["y"] <= page.viewport_size["height"]


def test_a_slow_projection_says_what_to_do(page: Page) -> None:
    panel = open_view(page, "space")
    held: list[Any] = []
    page.route("**/projection", lambda route: held.append(route))
    panel.get_by_role("radio", name="UMAP").check()
    expect(panel.get_by_role("status")).to_contain_text("compiles its code")
    problem = {"error": "UMAP compiles its code: try again later, or choose PCA."}
    held[0].fulfill(status=503, headers={"Retry-After": "1"}, json=problem)
    expect(panel.get_by_role("alert")).to_contain_text("choose PCA. Try again in 1 s.")


def test_the_dictionary_has_neighbors_in_every_language(page: Page) -> None:
    panel = open_view(page, "dictionary")
    expect(panel.locator("section", has_text="German").locator("li").first).to_contain_text(
        "Wasser"
    )
    expect(panel.locator("section", has_text="Arabic").locator("li").first).to_contain_text("ماء")
    panel.get_by_label("Word", exact=True).fill("unknownword")
    expect(panel.get_by_role("alert")).to_contain_text("unknownword")


def test_the_study_filters_and_leads_to_seeds(page: Page) -> None:
    panel = open_view(page, "study")
    panel.get_by_label("Task").select_option("pos")
    panel.get_by_label("Language").select_option("ar")
    expect(panel.locator("section.card h3")).to_have_text(["pos"])
    expect(panel.locator("tbody th")).to_have_text(["Arabic (ar)", "Mean", "Transfer gap"])
    panel.get_by_role("row", name="Arabic").get_by_role("link").first.click()
    expect(panel.locator(".seeds tbody th")).to_have_text([f"seed {k}" for k in range(1, 6)])
    page.reload()
    expect(panel.locator(".seeds")).to_be_visible()
    panel.get_by_text("Plots").first.click()
    image = panel.locator("img.plot").first
    expect(image).to_have_attribute("src", re.compile("^data:image/svg"))
    assert image.evaluate("async node => (await node.decode(), node.naturalWidth)") > 100


def test_runs_are_polled_only_while_visible(page: Page) -> None:
    panel = open_view(page, "runs")
    expect(panel.locator(".legend").first).to_contain_text("mlm, validation")
    with page.expect_response(lambda response: response.url.endswith("/runs"), timeout=4000):
        pass
    page.get_by_role("tab", name="Align").click()
    seen: list[Any] = []
    page.on("request", lambda request: "/runs" in request.url and seen.append(request.url))
    page.wait_for_timeout(2500)
    assert seen == []


def test_translations(page: Page, taught_pairs: list[tuple[str, str]]) -> None:
    """The tiny translator knows eight sentences by heart."""
    panel = open_view(page, "translate")
    english, german = zip(*taught_pairs[:2], strict=True)
    panel.get_by_label("One sentence per line").fill("\n".join(english))
    panel.get_by_role("button", name="Translate").click()
    expect(panel.locator(".translation p:last-child")).to_have_text(german)
    panel.get_by_label("One sentence per line").fill("\n".join(german))
    panel.get_by_label("To language").select_option(label="English")
    panel.get_by_role("button", name="Translate").click()
    expect(panel.locator(".translation p:last-child")).to_have_text(english)


def test_translations_are_shown_as_text(page: Page) -> None:
    page.route("**/translate", lambda route: route.fulfill(json={"translations": ["<b>Hallo</b>"]}))
    panel = open_view(page, "translate")
    expect(panel.get_by_text("<b>Hallo</b>")).to_be_visible()


def test_the_token_is_asked_for_once(page: Page) -> None:
    def answer(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": "this server needs a token"})

    page.route("**/align", answer)
    page.goto("/#align")
    panel = page.locator("#panel-align")
    expect(panel.get_by_role("alert")).to_have_text("this server needs a token")
    page.get_by_label("Token").fill("secret")
    page.keyboard.press("Enter")
    expect(panel.locator(".link").first).to_be_attached()
    page.reload()
    expect(panel.locator(".link").first).to_be_attached()
    expect(page.get_by_label("Token")).to_be_hidden()


def test_the_theme_can_be_switched(page: Page) -> None:
    open_view(page, "align")
    color = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(color)
    page.get_by_role("button", name="Switch to dark colors").click()
    assert page.evaluate(color) != before
    page.reload()
    expect(page.get_by_role("button", name="Switch to light colors")).to_be_visible()


def test_weight_and_first_paint(page: Page) -> None:
    open_view(page, "align")
    sizes = page.evaluate(
        """performance.getEntriesByType("resource").filter(entry => !entry.name.endsWith("/align"))
             .map(entry => entry.encodedBodySize)"""
    )
    assert sum(sizes) < 60_000
    paint = page.evaluate('performance.getEntriesByName("first-contentful-paint")[0].startTime')
    assert paint < 1000
