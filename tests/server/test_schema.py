"""Random requests from the OpenAPI document: no route fails, and all answers are as described."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from calque.server.limits import HEADERS
from calque.server.projection import project_by_pca
from calque.server.routes import build_server
from calque.server.served_data import ServedData

N_EXAMPLES = 10


@pytest.fixture(scope="module")
def schema(served_data: ServedData) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schemathesis = pytest.importorskip("schemathesis", reason="it is not installed")
    return schemathesis.openapi.from_asgi("/openapi.json", build_server(served_data))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_random_requests(schema: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    monkeypatch.setattr("calque.server.projection._project_by_umap", project_by_pca)  # slow
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == 12
    for operation in operations:
        if mode == "NEGATIVE" and operation.path in ("/health", "/runs"):
            continue  # nothing in such a request can be wrong

        @given(case=operation.as_strategy(generation_mode=GenerationMode[mode]))
        @settings(
            max_examples=N_EXAMPLES,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        def check(case: Any) -> None:
            reply = case.call()
            # A layer, a model or a language of the right form need not exist.
            case.validate_response(reply, excluded_checks=[positive_data_acceptance])
            assert reply.headers["content-security-policy"] == [HEADERS["content-security-policy"]]

        check()
