"""Every route of the server, compared with the public functions that it stands for."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.server.conftest import VECTORS, CallServer, make_call

import calque
from calque.models.encoder import Encoder
from calque.models.language_maps import LanguageMaps
from calque.server.http_server import CONNECTION_SECONDS
from calque.server.limits import RequestLimits
from calque.server.projection import project
from calque.server.routes import build_server
from calque.server.serve import load_data
from calque.server.served_data import COMPUTE_SECONDS, PROJECTION_SECONDS, ServedData

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
    layers = {model["name"]: (model["n_layers"], model["n_heads"]) for model in found["models"]}
    assert layers == {"tiny": (4, 4), "calque-mini": (8, 6)}
    assert [model["default_layer"] for model in found["models"]] == [3, 7]
    assert found["vector_languages"] == ["de", "en", "fr"]
    assert "translate" not in found["views"]
    assert {"align", "search", "space", "dictionary", "study", "runs"} < set(found["views"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layer": 1},
        {"method": "itermax", "layer": 2},
        {"method": "ot", "threshold": 0.3, "sharpness": 3.0},
        {"method": "probability", "threshold": 0.2},
    ],
)
@pytest.mark.parametrize("model", ["tiny", "calque-mini"])
def test_align_equals_the_word_aligner(
    call: CallServer,
    served_data: ServedData,
    model: str,
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = served_data.models[model].model
    calibration = {"slope": 0.6, "intercept": 0.5, "threshold": 0.3}
    alignment = {**encoder.settings.get("alignment", {}), "calibration": calibration}
    settings = {**encoder.settings, "alignment": alignment}
    monkeypatch.setattr(encoder.config, "calque", settings, raising=False)
    body = {"pairs": as_json(PAIRS), "tokenize": False, "matrix": True, "model": model}
    reply = call("POST", "/align", json=body | options)
    assert reply.status_code == 200, reply.text
    aligner = calque.WordAligner(encoder, **options)  # type: ignore[arg-type]
    found = reply.json()
    assert (found["layer"], found["method"]) == (aligner.layer, aligner.method)
    # Other layers and another sharpness are not calibrated.
    assert found["calibrated"] == (not {"layer", "sharpness"} & set(options))
    links = [[(link["src"], link["tgt"]) for link in pair["links"]] for pair in found["pairs"]]
    assert links == aligner.align(WORDS)
    for pair, (src, tgt) in zip(found["pairs"], WORDS, strict=True):
        assert (pair["src"], pair["tgt"]) == (src, tgt)
        assert np.shape(pair["matrix"]) == ((len(src), len(tgt)) if src else (0,))
        assert all(found["threshold"] - 1e-4 <= link["score"] <= 1 for link in pair["links"])
    scores = [link["score"] for pair in found["pairs"] for link in pair["links"]]
    np.testing.assert_allclose(scores, aligner.align_block(WORDS).links.scores, atol=1e-4)


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


@pytest.fixture(scope="module")
def maps_folder(tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with maps of German at all layers; English needs none."""
    folder = tmp_path_factory.mktemp("maps") / "mapped"
    tiny_encoder.save(folder)
    matrices = torch.randn(1, 5, 64, 64, generator=torch.Generator().manual_seed(0))
    LanguageMaps(matrices, ("de",), (0, 1, 2, 3, 4), "en").save(folder)
    return folder


def test_embed_maps_like_the_public_function(maps_folder: Path) -> None:
    data = load_data(maps_folder, device="cpu")
    call = make_call(build_server(data))
    assert call("GET", "/health").json()["models"][0]["map_languages"] == ["en", "de"]
    texts = ["Guten Morgen!", "Das Haus ist alt."]
    mapped = calque.load(maps_folder, "cpu", maps=True)
    plain = calque.load(maps_folder, "cpu").embed(texts)
    for language in ("de", "en"):
        found = call("POST", "/embed", json={"texts": texts, "language": language}).json()
        expected = mapped.embed(texts, map_from=language)
        np.testing.assert_allclose(found["vectors"], expected, rtol=1e-4, atol=1e-5)
        assert np.allclose(expected, plain) == (language == "en")
    found = call("POST", "/embed", json={"texts": texts}).json()
    np.testing.assert_allclose(found["vectors"], plain, rtol=1e-4, atol=1e-5)
    unknown = call("POST", "/embed", json={"texts": texts, "language": "fr"})
    assert unknown.status_code == 422 and "no map of 'fr'" in unknown.json()["error"]
    data.close()


def test_a_language_needs_maps(call: CallServer) -> None:
    reply = call("POST", "/embed", json={"texts": ["a"], "language": "de"})
    assert reply.status_code == 422 and "'tiny' has no linear maps" in reply.json()["error"]


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


@pytest.mark.slow
def test_umap() -> None:
    pytest.importorskip("umap", reason="the extra `project` is not installed")
    near, far = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    near[:, 0] += 20
    far[:, 0] -= 20
    points = project(np.concatenate([near, far]), "umap")
    assert points.shape == (12, 2)
    assert np.isfinite(points).all() and len(np.unique(points, axis=0)) == 12


@pytest.mark.parametrize("unit", ["sentence", "word"])
def test_projection_at_a_layer(call: CallServer, served_data: ServedData, unit: str) -> None:
    """Jobs of several layers share a pass; each gets the vectors of its own."""
    words = ("Das", "Haus", "alt", "und")
    body = {"texts": [{"text": word, "language": "de"} for word in words], "unit": unit}
    points = {}
    for layer in (1, 3, None):
        reply = call("POST", "/projection", json=body | {"layer": layer}).json()
        points[layer] = np.array([(point["x"], point["y"]) for point in reply["points"]])
    assert not np.allclose(points[1], points[3])
    default = {"sentence": 2, "word": 3}[unit]
    np.testing.assert_array_equal(points[None], points.get(default, points[None]))
    if unit == "sentence":
        vectors = served_data.default_model.model.embed(words, layer=1)
        np.testing.assert_allclose(points[1], project(vectors, "pca"), atol=1e-3)
    assert call("POST", "/projection", json=body | {"layer": 5}).status_code == 422


def test_a_projection_that_takes_too_long_is_answered(
    call: CallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def compile_first(vectors: np.ndarray) -> np.ndarray:
        may_end.wait(20)
        return vectors[:, :2]

    monkeypatch.setattr("calque.server.model_routes.PROJECTION_SECONDS", 0.2)
    monkeypatch.setattr("calque.server.projection._project_by_umap", compile_first)
    texts = [{"text": f"Wort {k}", "language": "de"} for k in range(6)]
    body = {"texts": texts, "method": "umap"}
    for _ in range(2):
        reply = call("POST", "/projection", json=body)
        assert reply.status_code == 503 and reply.headers["retry-after"]
        assert "compiles its code" in reply.json()["error"]
    assert call("POST", "/projection", json=body | {"method": "pca"}).status_code == 200
    may_end.set()
    monkeypatch.setattr("calque.server.model_routes.PROJECTION_SECONDS", 20)
    assert call("POST", "/projection", json=body).status_code == 200


def test_requests_are_answered_before_they_are_cut_off() -> None:
    body_seconds = RequestLimits().body_seconds
    assert body_seconds + COMPUTE_SECONDS + PROJECTION_SECONDS < CONNECTION_SECONDS


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
    np.testing.assert_allclose(reading["src_to_tgt"], expected.src_to_tgt, atol=1e-4)
    np.testing.assert_allclose(reading["shares"], expected.shares, atol=1e-4)
    (one,) = call("POST", "/attention", json=body | {"layer": 2}).json()["readings"]
    assert one["src_to_tgt"] == reading["src_to_tgt"][1:2]
    assert call("POST", "/attention", json=body | {"layer": 5}).status_code == 422
    (expected,) = calque.pair_attention("Take a seat", "Setz dich", model=tiny_folder, head=2)
    (head,) = call("POST", "/attention", json=body | {"head": 2}).json()["readings"]
    np.testing.assert_allclose(head["tgt_to_src"], expected.tgt_to_src, atol=1e-4)
    assert not np.allclose(head["tgt_to_src"], reading["tgt_to_src"], atol=1e-4)
    reply = call("POST", "/attention", json=body | {"head": 5})
    assert reply.status_code == 422 and "choose 1 to 4" in reply.json()["error"]
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


def test_runs(call: CallServer, folders: Path) -> None:
    (folders / "runs" / "first" / "metrics.jsonl").touch()  # a run is running if it was written now
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
    data = load_data(tiny_folder, translator=translator_folder, device="cpu")
    call = make_call(build_server(data))
    health = call("GET", "/health").json()
    assert "translate" in health["views"] and health["target_languages"] == ["de", "en"]
    english, german = zip(*taught_pairs, strict=True)
    found = call("POST", "/translate", json={"texts": english, "tgt_lang": "de"})
    assert found.json()["translations"] == list(german)
    assert call("POST", "/translate", json={"texts": ["a"], "tgt_lang": "xx"}).status_code == 422
    data.close()


def test_page(call: CallServer) -> None:
    page = call("GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    again = call("GET", "/", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert call("GET", "/page/main.js").headers["content-type"].startswith("text/javascript")
    plain = call("GET", "/", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.text == page.text
