"""Requests drawn from the server's own OpenAPI description never find a way to break it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from support.served import PATIENCE, TRIES, serving

OPERATIONS = (
    *(("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/props", "/slots")),
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/explain")),
    *(("POST", path) for path in ("/tokenize", "/detokenize", "/slots/{slot}")),
)
STATUSES = (200, 400, 401, 404, 405, 413, 429)


@pytest.fixture(scope="module")
def small(engine):
    """A server whose longest conversation is short, so that what happens to be valid is answered soon."""
    before = engine.context
    engine.context = 80
    with serving(engine) as served:
        yield served
        served.settle()
    engine.context = before


@pytest.fixture(scope="module")
def description(small):
    return schemathesis.openapi.from_url(f"{small.url}/openapi.json")


def test_every_operation_is_tried(description):
    found = {(one.ok().method.upper(), one.ok().path) for one in description.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[f"{method} {path}" for method, path in OPERATIONS])
@settings(max_examples=30 * TRIES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_request_makes_the_server_fail(description, method, path, data):
    case = data.draw(description[path][method].as_strategy())
    response = case.call(timeout=PATIENCE)
    case.validate_response(response, checks=[not_a_server_error])
    assert response.status_code in STATUSES, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
