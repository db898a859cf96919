"""When a service is restarted, and when the run gives up."""

from dataclasses import replace

from quire.supervisor.restart import Exit, Restarts

NO_MEMORY = Exit(status=2, lived_s=1.0, last_line="error: 3 GiB are not there")
NO_REDIS = Exit(status=2, lived_s=11.0, last_line="error: Redis did not answer")
CRASHED = Exit(status=1, lived_s=1.0, last_line="Segmentation fault")
KILLED = Exit(status=-9, lived_s=60.0, last_line="service_started")


def test_the_delay_doubles_with_every_failed_start_up_to_a_limit() -> None:
    restarts = Restarts()
    delays = [restarts.delay_after(NO_MEMORY) for _ in range(8)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_service_killed_while_serving_restarts_at_once() -> None:
    assert [Restarts().delay_after(KILLED) for _ in range(5)] == [0.0] * 5


def test_a_failure_repeated_at_once_is_final() -> None:
    restarts = Restarts()
    verdicts = []
    for _ in range(2):
        restarts.delay_after(CRASHED)
        verdicts.append(restarts.hopeless)
    assert verdicts == [False, True]


def test_a_failure_with_a_reason_is_final() -> None:
    """The service itself has waited for what was missing."""
    restarts = Restarts()
    restarts.delay_after(NO_MEMORY)
    assert restarts.hopeless


def test_failures_of_different_kinds_are_not_hopeless() -> None:
    restarts = Restarts()
    for line in ("Segmentation fault", "Bus error") * 2:
        restarts.delay_after(replace(CRASHED, last_line=line))
    assert not restarts.hopeless


def test_a_slow_start_that_fails_counts_too() -> None:
    """A start that waits for Redis and loads weights may take long before it fails."""
    restarts = Restarts()
    assert [restarts.delay_after(NO_REDIS) for _ in range(3)] == [0.1, 0.2, 0.4]
    assert restarts.hopeless


def test_a_long_run_resets_the_restart_delay() -> None:
    restarts = Restarts()
    for ended in (CRASHED, CRASHED, KILLED, CRASHED):
        delay_s = restarts.delay_after(ended)
    assert delay_s == 0.1
    assert not restarts.hopeless


def test_an_exit_is_described() -> None:
    assert str(NO_MEMORY) == "status 2: error: 3 GiB are not there"
    assert str(KILLED) == "killed by signal 9"
    assert str(Exit(1, 1.0, '{"event": "service_failed"}')) == "status 1"


def test_failures_that_differ_in_numbers_are_equal() -> None:
    restarts = Restarts()
    for free_bytes in (19_696_746_496, 18_000_000_000, 17_193_278_464):
        text = f"pool memory 1 TiB is not available: {free_bytes} bytes are left"
        restarts.delay_after(Exit(1, 3.0, text))
    assert restarts.hopeless
