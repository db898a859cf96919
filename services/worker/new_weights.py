"""Reads new weights of the model that a worker serves, beside the weights that it serves."""

from dataclasses import asdict

from services.engine.weights.packed_file import Progress
from services.model.checkpoint.reading import read_model_config
from services.runtime.errors import InvalidRequest, StartupError
from services.runtime.logging import get_logger
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place
from services.worker.loading import LoadedModel, load

log = get_logger(__name__)


def read_again(
    settings: WorkerSettings, served: LoadedModel, progress: Progress, place: Place | None
) -> LoadedModel | None:
    """Load the weights at the model's path, which may be a link with a new target, for a pool as
    large as the present one. Returns None if the worker serves these weights already.

    New ranks read the shards, so that the present ones compute meanwhile. When the old ranks end,
    their memory is free, even if their GPU's allocator keeps what was freed.

    Raises InvalidRequest if the checkpoint cannot be read, or is of another model: requests go on
    with the new weights, so the tokens and all limits have to mean the same.
    """
    if served.plan.pool_bytes is not None:
        # On a GPU the free memory says nothing while the present pool is there.
        settings = settings.model_copy(update={"pool_memory": str(served.plan.pool_bytes)})
    try:
        config = read_model_config(settings.model).for_context(settings.max_model_len)
        old = {"name": served.layout.model, **asdict(served.model.whole_config)}
        new = {"name": settings.served_name, **asdict(config)}
        for key in old:  # default sampling parameters are the gateways'
            if key != "generation" and new[key] != old[key]:
                text = f"{key} is {new[key]}, and {old[key]} in the model that is served"
                raise StartupError(f"{text}; `quire upgrade` serves another model at its path")
        found = load(settings, progress, place, on_rank_end=_note_end)
    except (StartupError, EOFError, OSError) as error:
        reason = str(error) or "a rank has ended"
        raise InvalidRequest(f"the old weights stay: {settings.model}: {reason}") from error
    if found.layout.fingerprint != served.layout.fingerprint:
        return found
    if found.ranks is not None:
        found.ranks.close()
    return None


def _note_end(rank: int, status: int) -> None:
    """Log the end of a rank that serves no request yet. The call that waits for it fails."""
    log.error("new_rank_ended", rank=rank, exit_status=status)
