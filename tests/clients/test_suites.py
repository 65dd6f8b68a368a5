"""Public clients work with the gateway as their own suites say; what fails by design is explained, one by one."""

from __future__ import annotations

import pytest
from tests.clients.explained import EXPLAINED
from tests.clients.run import CLIENTS, SUITES, Client, rows, run


def test_every_suite_is_listed_in_the_documentation() -> None:
    assert {client.name for client in CLIENTS} == {path.stem.removesuffix("_suite") for path in SUITES.glob("*.py")}
    assert set(rows()) <= {client.title for client in CLIENTS}


def test_the_documentation_explains_what_fails() -> None:
    titles = {client.title: client.name for client in CLIENTS}
    for title, line in rows().items():
        assert "not explained" not in line
        failed = int(line.split("|")[4])
        assert failed == len(EXPLAINED[titles[title]])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_a_client_fails_at_nothing_but_what_is_explained(client: Client) -> None:
    if client.missing:
        pytest.skip(client.missing)
    outcomes = await run(client)
    failed = {each.test: each.message for each in outcomes if each.result == "failed"}
    assert {name: why for name, why in failed.items() if name not in EXPLAINED[client.name]} == {}
    assert set(EXPLAINED[client.name]) <= set(failed), "some of them pass now"
    assert sum(each.result == "passed" for each in outcomes) >= 4
