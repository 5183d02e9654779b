"""When an MCP server that fails is started again."""

from caravan_router.mcp.restarts import Restarts


def test_each_failure_in_a_row_doubles_the_wait_to_a_minute() -> None:
    restarts, waits = Restarts(), []
    assert restarts.wait_s(100.0) == 0.0
    for _ in range(40):
        restarts.failed(100.0)
        waits.append(restarts.wait_s(100.0))
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(waits[7:]) == {60}
    assert restarts.wait_s(159.0) == 1.0
    assert restarts.wait_s(160.5) == 0.0


def test_a_server_that_has_answered_is_started_at_once() -> None:
    restarts = Restarts()
    restarts.failed(100.0)
    restarts.worked()
    assert restarts.wait_s(100.0) == 0.0
    restarts.failed(200.0)
    assert restarts.wait_s(200.0) == 1.0
