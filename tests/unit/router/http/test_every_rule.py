"""Every validation rule has a request that breaks only this rule, and the error that the client gets."""

import inspect
import io
import re
import sys
import time
from pathlib import Path

import msgspec
import pytest
from unit.router.http.rule_cases import decisions, every_dialect, openai, other_dialects, responses
from unit.router.http.rule_cases.case import INFILL, LLAMA, MINIMAL, OLLAMA, STREAM, Case

import caravan_dialects
import caravan_router
from caravan_dialects.api.anthropic import rules as anthropic_rules
from caravan_dialects.api.anthropic.rules import ThreadError
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation import rules as generation_rules
from caravan_dialects.api.openai.bulk import rules as bulk_rules
from caravan_dialects.api.openai.responses import rules as socket_rules
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_scheduler.core.generation import Tenant
from caravan_testing.http_server import events, serving
from caravan_testing.scripted_engine import EOS, ScriptedEngine

KEY = ApiKey(digest=digest_of("a-key"), tenant=Tenant(name="alice"), max_priority=5, operator=True)
CASES = [*every_dialect.CASES, *openai.CASES, *decisions.CASES, *responses.CASES, *other_dialects.CASES]


# Anthropic's errors have another form: test_messages.py has its cases.
ELSEWHERE = {ThreadError}
# test_websocket.py, test_steering.py, test_batches.py, test_mcp.py and test_prompt_embeds.py break these, which are not
# of a JSON body of OpenAI's, or need what was stored before, another model or servers of tools.
IN_OTHER_TESTS = {
    generation_rules.no_prompt_embeds_error,
    generation_rules.row_size_error,
    bulk_rules.endpoint_error,
    bulk_rules.purpose_error,
    bulk_rules.window_error,
    anthropic_rules.custom_id_error,
    anthropic_rules.params_error,
    anthropic_rules.repeated_custom_id_error,
    socket_rules.repeated_server_error,
    socket_rules.event_type_error,
    socket_rules.background_on_socket_error,
    socket_rules.steering_empty_error,
    socket_rules.steering_item_error,
}
# Importing the application imports every dialect's rules.
MODULES = [module for name, module in sorted(sys.modules.items()) if re.fullmatch(r"caravan_dialects\..*\.rules", name)]


def test_every_rule_has_a_case() -> None:
    def leaves(kind: type[ValidationError]) -> set[object]:
        return {leaf for child in kind.__subclasses__() for leaf in leaves(child) or {child}}

    functions: set[object] = {
        member
        for module in MODULES
        for member in vars(module).values()
        if inspect.isfunction(member) and inspect.signature(member).return_annotation is ValidationError
    }
    assert {case.rule for case in CASES} == (functions | leaves(ValidationError)) - ELSEWHERE - IN_OTHER_TESTS


def test_every_rule_stands_among_the_rules() -> None:
    """An error that is made elsewhere would need no case."""
    roots = [Path(str(package.__file__)).parent for package in (caravan_dialects, caravan_router)]
    makes = re.compile(r"(?<![\w.])ValidationError\((?!RequestError\))")
    found = {path for root in roots for path in root.rglob("*.py") if makes.search(path.read_text())}
    assert found == {Path(str(module.__file__)) for module in MODULES}


@pytest.mark.parametrize("case", CASES, ids=[case.rule.__name__ for case in CASES])
async def test_a_broken_rule_is_the_reported_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    original = ValidationError.__init__

    def note(error: ValidationError, field: str, message: str) -> None:
        made_by = type(error) if type(error) is not ValidationError else sys._getframe(1).f_code
        raised.append(made_by)
        original(error, field, message)

    monkeypatch.setattr(ValidationError, "__init__", note)
    access = Access(keyring=Keyring([KEY], time.monotonic()))
    async with serving(ScriptedEngine(model=case.model, controls={"</s>": EOS}), case.limits, access) as service:
        name, value = case.header
        headers = {"Authorization": "Bearer a-key", "Content-Type": "application/json", name: value}
        body = io.BytesIO(msgspec.json.encode(MINIMAL.get(case.path, {}) | case.body))
        response = await service.client.request(case.method, case.path, data=body, headers=headers)
        message = f"Input validation error: {case.message}"
        if case.path.startswith("/v1/") or case.path in {LLAMA, INFILL}:
            error = {"message": message, "type": "invalid_request_error", "param": case.param, "code": "validation"}
            assert (response.status, await response.json()) == (400, {"error": error})
        elif case.path == STREAM:
            assert response.status == 200
            assert events(await response.text()) == [{"error": message, "error_type": "validation"}]
        else:
            assert response.status == (400 if case.path == OLLAMA else 422)
            assert await response.json() == {"error": message, "error_type": "validation"}
        assert raised == [case.rule if isinstance(case.rule, type) else case.rule.__code__]
        assert not service.engine.streams
        assert service.is_idle()
