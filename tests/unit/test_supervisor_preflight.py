"""The checks of services before a run starts."""

import sys

import pytest

from quire.supervisor.child import ChildSpec, Stage
from quire.supervisor.errors import ServeError
from quire.supervisor.preflight import check_service


@pytest.mark.parametrize(
    ("stage", "role", "said", "told"),
    [
        (
            Stage.WORKER,
            "prefill",
            "bad configuration: QUIRE_PREFILL_CPUS: '99' is not there",
            "bad configuration: --cpus: '99' is not there",
        ),
        (
            Stage.GATEWAY,
            "",
            "TLS needs also QUIRE_GATEWAY_PUBLIC_TLS_KEY",
            "TLS needs also --tls-key",
        ),
        (
            Stage.GATEWAY,
            "",
            "QUIRE_GATEWAY_COLOUR is not a setting, nor QUIRE_GATEWAY_LORA",
            "QUIRE_GATEWAY_COLOUR is not a setting, nor QUIRE_GATEWAY_LORA",
        ),
    ],
)
def test_a_reason_names_the_flags_that_the_user_may_have_typed(
    monkeypatch: pytest.MonkeyPatch, stage: Stage, role: str, said: str, told: str
) -> None:
    """A variable that the user has set keeps its name, as does one without a flag."""
    monkeypatch.setenv("QUIRE_GATEWAY_LORA", "poet=/nope")
    program = "import sys; sys.exit('error: ' + sys.argv[1])"
    spec = ChildSpec("it", (sys.executable, "-c", program, said), stage, role=role)
    with pytest.raises(ServeError, match=f"^it cannot start: {told}$"):
        check_service(spec)
