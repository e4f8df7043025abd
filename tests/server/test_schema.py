"""Random requests from the OpenAPI document: no route fails, and all answers are as described."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import HealthCheck, Phase, settings

from calque.server.routes import build_server
from calque.server.served_data import ServedData

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

N_EXAMPLES = 8
schema = schemathesis.pytest.from_fixture("openapi")


@pytest.fixture
def openapi(served_data: ServedData) -> object:
    return schemathesis.openapi.from_asgi("/openapi.json", build_server(served_data))


@pytest.mark.filterwarnings("ignore")
@schema.parametrize()
@settings(
    max_examples=N_EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
def test_random_requests(case: object) -> None:
    reply = case.call()  # type: ignore[attr-defined]
    case.validate_response(reply)  # type: ignore[attr-defined]
    assert "content-security-policy" in {name.lower() for name in reply.headers}
