"""The secret of deployments that a test composes itself."""

from services.runtime.rpc.proof import Guard, Proof
from services.runtime.secret import Secret

SECRET = Secret(b"the secret of the tests' deployments")
OTHER = Secret(b"the secret of another deployment")


def guard(server_id: str) -> Guard:
    return Guard(SECRET.rpc_key, server_id)


def proven(method: str, server_id: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a proof of the secret."""
    return Proof(SECRET.rpc_key, method, server_id).metadata
