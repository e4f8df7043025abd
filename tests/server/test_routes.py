"""Every route of the server, compared with the public functions that it stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.server.conftest import VECTORS, CallServer

import calque
from calque.server.served_data import ServedData

PAIRS = [
    ("Das Haus ist alt .", "The house is old ."),
    ("Unsere Gäste kommen in ein paar Minuten an .", "Our guests will arrive in a few minutes ."),
    ("مرحبا بكم", "Welcome"),
    ("", "nothing"),
]
WORDS = [(src.split(), tgt.split()) for src, tgt in PAIRS]


def as_json(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"src": src, "tgt": tgt} for src, tgt in pairs]


def test_health(call: CallServer) -> None:
    found = call("GET", "/health").json()
    assert found["status"] == "ok" and found["version"] == calque.__version__
    assert found["model"] == "tiny" and found["models"] == ["tiny", "calque-mini"]
    assert (found["n_layers"], found["default_layer"]) == (4, 3)
    assert found["vector_languages"] == ["de", "en", "fr"]
    assert "translate" not in found["views"]
    assert {"align", "search", "space", "dictionary", "study", "runs"} < set(found["views"])


@pytest.mark.parametrize(
    "options",
    [{}, {"layer": 1}, {"method": "itermax", "layer": -1}, {"method": "ot", "threshold": 0.3}],
)
@pytest.mark.parametrize("model", ["tiny", "calque-mini"])
def test_align_equals_the_word_aligner(
    call: CallServer, served_data: ServedData, model: str, options: dict[str, object]
) -> None:
    body = {"pairs": as_json(PAIRS), "tokenize": False, "matrix": True, "model": model}
    reply = call("POST", "/align", json=body | options)
    assert reply.status_code == 200, reply.text
    encoder = served_data.models[model].model
    aligner = calque.WordAligner(encoder, **options)  # type: ignore[arg-type]
    found = reply.json()
    assert (found["layer"], found["method"]) == (aligner.layer, aligner.method)
    links = [[(link["src"], link["tgt"]) for link in pair["links"]] for pair in found["pairs"]]
    assert links == aligner.align(WORDS)
    for pair, (src, tgt) in zip(found["pairs"], WORDS, strict=True):
        assert (pair["src"], pair["tgt"]) == (src, tgt)
        assert np.shape(pair["matrix"]) == ((len(src), len(tgt)) if src else (0,))
        for link in pair["links"]:
            assert 0 <= link["score"] <= 1
            assert pair["matrix"][link["src"]][link["tgt"]] >= found["threshold"] - 1e-4


def test_a_pair_longer_than_the_model_has_a_whole_matrix(call: CallServer) -> None:
    text = " ".join(f"Das Haus {number} ist alt ." for number in range(60))
    pair = {"src": text, "tgt": text}
    found = call("POST", "/align", json={"pairs": [pair], "tokenize": False, "matrix": True})
    (pair,) = found.json()["pairs"]
    assert len(pair["src"]) == 360
    assert np.diag(np.array(pair["matrix"])).min() > 0.9


def test_words_are_found_in_raw_text(call: CallServer) -> None:
    pairs = as_json([("Das ist gut.", "我喜欢猫。")])
    (pair,) = call("POST", "/align", json={"pairs": pairs}).json()["pairs"]
    assert pair["src"] == ["Das", "ist", "gut", "."]
    assert "".join(pair["tgt"]) == "我喜欢猫。" and len(pair["tgt"]) > 1


def test_embed(call: CallServer, served_data: ServedData) -> None:
    texts = ["Guten Morgen!", "Good morning!", ""]
    found = call("POST", "/embed", json={"texts": texts}).json()
    assert found["dimension"] == 64
    vectors = served_data.default_model.model.embed(texts)
    np.testing.assert_allclose(found["vectors"], vectors, atol=1e-5)


def test_search(call: CallServer) -> None:
    text = "Unsere Gäste kommen in ein paar Minuten an."
    matches = call("POST", "/search", json={"text": text, "n": 2}).json()["matches"]
    assert matches[0] == {"language": "de", "text": text, "score": 1.0, "line": 2}
    languages = [match["language"] for match in matches]
    assert len(set(languages)) == 9 and all(languages.count(name) == 2 for name in languages)
    assert [match["score"] for match in matches] == sorted(
        (match["score"] for match in matches), reverse=True
    )
    some = call("POST", "/search", json={"text": text, "n": 1, "languages": ["ru"]}).json()
    assert [match["language"] for match in some["matches"]] == ["ru"]


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_projection(call: CallServer, method: str) -> None:
    ends = ("ist", "alt", "und", "klein", "aber", "schön")
    texts = [{"text": f"Das Haus {end}", "language": "de"} for end in ends]
    body = {"texts": texts, "method": method}
    found = call("POST", "/projection", json=body).json()
    assert (found["model"], found["method"]) == ("tiny", method)
    assert [(p["text"], p["language"]) for p in found["points"]] == [
        (text["text"], "de") for text in texts
    ]
    assert len({(p["x"], p["y"]) for p in found["points"]}) == 6
    words = call("POST", "/projection", json=body | {"unit": "word", "method": "pca"}).json()
    assert [p["text"] for p in words["points"]][:3] == ["Das", "Haus", "ist"]


def test_a_projection_without_its_library_names_the_extra(
    call: CallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "umap", None)
    texts = [{"text": f"Wort {k}", "language": "de"} for k in range(6)]
    reply = call("POST", "/projection", json={"texts": texts, "method": "umap"})
    assert reply.status_code == 422 and "calque[project]" in reply.json()["error"]


def test_attention_equals_the_public_function(call: CallServer, tiny_folder: Path) -> None:
    (expected,) = calque.pair_attention("Take a seat", "Setz dich", model=tiny_folder)
    body = {"src": "Take a seat", "tgt": "Setz dich"}
    (reading,) = call("POST", "/attention", json=body).json()["readings"]
    assert (reading["kind"], reading["layers"]) == ("self-attention", [1, 2, 3, 4])
    np.testing.assert_allclose(
        np.array(reading["src_to_tgt"])[:, 0], expected.src_to_tgt, atol=1e-4
    )
    np.testing.assert_allclose(reading["shares"], expected.shares, atol=1e-4)
    (one,) = call("POST", "/attention", json=body | {"layer": 2}).json()["readings"]
    assert one["src_to_tgt"] == reading["src_to_tgt"][1:2]
    assert call("POST", "/attention", json=body | {"layer": 5}).status_code == 422
    # Attention is read with other code than hidden states; the model is restored afterwards.
    pairs = as_json(PAIRS)
    assert call("POST", "/align", json={"pairs": pairs}).status_code == 200


def test_lexicon(call: CallServer) -> None:
    found = call("GET", "/lexicon", params={"word": "house", "language": "en", "n": 1}).json()
    assert {
        name: [each["word"] for each in words] for name, words in found["neighbors"].items()
    } == {
        "de": ["Haus"],
        "fr": ["maison"],
    }
    assert call("GET", "/lexicon?word=Hund&language=de").status_code == 404
    assert call("GET", "/lexicon?word=haus&language=de").status_code == 200
    unknown = call("GET", "/lexicon?word=a&language=xx")
    assert unknown.status_code == 422 and ", ".join(sorted(VECTORS)) in unknown.json()["error"]


def test_results_equal_compare(call: CallServer, folders: Path) -> None:
    comparison = calque.compare(folders / "results", baseline="calque-mini")
    found = call("GET", "/results").json()
    assert found["baseline"] == "calque-mini" and found["models"] == list(comparison.models)
    for task, expected in zip(found["tasks"], comparison.tasks, strict=True):
        cells = {(cell["model"], cell["language"]): cell for cell in task["cells"]}
        for model, each in expected.models.items():
            cell = cells[model, "mean"]
            assert cell["difference"] == pytest.approx(each.overall.difference)
            assert cell["category"] == each.overall.category
            scores = [seed["score"] for seed in cell["seeds"]]
            assert np.mean(scores) == pytest.approx(each.overall.model.mean)
            if each.gap is not None:
                gaps = [seed["score"] for seed in cells[model, "gap"]["seeds"]]
                assert np.mean(gaps) == pytest.approx(each.gap.model.mean)
    some = call("GET", "/results", params={"task": "pos", "language": "de"}).json()
    assert [task["task"] for task in some["tasks"]] == ["pos"]
    assert {cell["language"] for cell in some["tasks"][0]["cells"]} == {"de"}
    other = call("GET", "/results?baseline=rounded").json()
    assert other["baseline"] == "rounded"
    assert call("GET", "/results?baseline=nobody").status_code == 422


def test_results_are_compared_once(
    call: CallServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = call("GET", "/results").json()
    monkeypatch.setattr("calque.server.study.compare", None)
    assert call("GET", "/results").json() == expected
    monkeypatch.undo()
    file = folders / "results" / "results.jsonl"
    text = file.read_text("utf-8")
    file.write_text("".join(line for line in text.splitlines(True) if '"tatoeba"' not in line))
    try:
        assert len(call("GET", "/results").json()["tasks"]) == len(expected["tasks"]) - 1
    finally:
        file.write_text(text, "utf-8")


def test_plots(call: CallServer) -> None:
    names = [name for task in call("GET", "/results").json()["tasks"] for name in task["plots"]]
    for name in names:
        reply = call("GET", f"/results/plots/{name}.svg")
        assert reply.headers["content-type"].startswith("image/svg+xml"), name
        assert reply.text.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
        assert "<script" not in reply.text
    assert call("GET", "/results/plots/nothing.svg").status_code == 404


def test_runs(call: CallServer) -> None:
    (run,) = call("GET", "/runs").json()
    assert (run["name"], run["state"], run["step"], run["steps"]) == ("first", "running", 200, 1000)
    assert run["eta_seconds"] == pytest.approx(400)
    found = call("GET", "/runs/first?after=180").json()["metrics"]
    assert [row["step"] for row in found] == [190, 200]
    assert found[0]["loss/mlm"] == pytest.approx(4.05)


def test_translate_needs_a_translator(call: CallServer) -> None:
    assert call("POST", "/translate", json={"texts": ["Hello"]}).status_code == 404


@pytest.mark.slow
def test_translate(
    translator_folder: Path, tiny_folder: Path, taught_pairs: list[tuple[str, str]]
) -> None:
    from tests.server.conftest import make_call

    from calque.server.routes import build_server
    from calque.server.serve import load_data

    data = load_data(tiny_folder, translator=translator_folder, device="cpu")
    call = make_call(build_server(data))
    assert "translate" in call("GET", "/health").json()["views"]
    english, german = zip(*taught_pairs, strict=True)
    found = call("POST", "/translate", json={"texts": english, "tgt_lang": "de"})
    assert found.json()["translations"] == list(german)
    assert call("POST", "/translate", json={"texts": ["a"], "tgt_lang": "xx"}).status_code == 422
    data.queue.close()


def test_page(call: CallServer) -> None:
    page = call("GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    again = call("GET", "/", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert call("GET", "/page/main.js").headers["content-type"].startswith("text/javascript")
    plain = call("GET", "/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.text == page.text
