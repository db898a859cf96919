"""Reads new weights of the model that a worker serves, beside the weights that it serves."""

from dataclasses import asdict

from services.engine.weights.packed_file import Progress
from services.model.checkpoint.reading import read_model_config
from services.runtime.errors import InvalidRequest, StartupError
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place
from services.worker.loading import LoadedModel, load


def read_again(
    settings: WorkerSettings, served: LoadedModel, progress: Progress, place: Place | None
) -> LoadedModel | None:
    """Load the weights at the model's path, which may be a link with a new target, for a pool as
    large as the present one. Returns None if the worker serves these weights already.

    Raises InvalidRequest if the checkpoint cannot be read, or is of another model: requests go on
    with the new weights, so the tokens and all limits have to mean the same.
    """
    if served.ranks is not None:
        raise InvalidRequest("a worker of several ranks gets new weights by `quire upgrade`")
    if served.plan.pool_bytes is not None:
        # On a GPU the free memory says nothing while the present pool is there.
        settings = settings.model_copy(update={"pool_memory": str(served.plan.pool_bytes)})
    try:
        config = read_model_config(settings.model).for_context(settings.max_model_len)
        old = {"name": served.layout.model, **asdict(served.model.whole_config)}
        new = {"name": settings.served_name, **asdict(config)}
        for key in old:
            if new[key] != old[key]:
                text = f"{key} is {new[key]}, and {old[key]} in the model that is served"
                raise StartupError(f"{text}; `quire upgrade` serves another model at its path")
        found = load(settings, progress, place)
    except StartupError as error:
        raise InvalidRequest(f"the old weights stay: {settings.model}: {error}") from error
    return None if found.layout.fingerprint == served.layout.fingerprint else found
