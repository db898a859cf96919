"""The secret of deployments that tests put together by themselves."""

from services.common.rpc.proof import Guard, Proof
from services.common.runtime.secret import Secret

SECRET = Secret(b"the secret of the tests' deployments")
OTHER = Secret(b"the secret of another deployment")


def guard(server_id: str) -> Guard:
    return Guard(SECRET.rpc_key, server_id)


def proven(method: str, server_id: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call with a proof."""
    return Proof(SECRET.rpc_key, method, server_id).metadata
