"""Reads new weights of the model that a worker serves, beside the weights that it serves."""

from dataclasses import fields

from services.engine.weights.packed_file import Progress
from services.model.checkpoint.reading import read_model_config
from services.model.config.model_config import ModelConfig
from services.runtime.errors import InvalidRequest, StartupError
from services.worker.config import WorkerSettings
from services.worker.cpu.place import Place
from services.worker.loading import LoadedModel, load


def read_again(
    settings: WorkerSettings, served: LoadedModel, progress: Progress, place: Place | None
) -> LoadedModel | None:
    """Load the weights at the model's path, which may be a link that has another target now, for a
    pool as large as the present one. Returns None if the worker serves these weights already.

    Raises InvalidRequest if the checkpoint cannot be read, or is of another model.
    """
    if served.ranks is not None:
        raise InvalidRequest("a worker of several ranks gets new weights by `quire upgrade`")
    if served.plan.pool_bytes is not None:
        # On a GPU the free memory says nothing while the present pool is there.
        settings = settings.model_copy(update={"pool_memory": str(served.plan.pool_bytes)})
    try:
        config = read_model_config(settings.model).for_context(settings.max_model_len)
        _check_same(served.model.whole_config, config)
        if settings.served_name != served.layout.model:
            raise StartupError(
                f"{settings.model} is called {settings.served_name} now, and the model "
                f"{served.layout.model}: set model_name"
            )
        found = load(settings, progress, place)
    except StartupError as error:
        raise InvalidRequest(f"the new weights are not served: {error}") from error
    return None if found.layout.fingerprint == served.layout.fingerprint else found


def _check_same(served: ModelConfig, found: ModelConfig) -> None:
    """Raises StartupError if the configurations differ: requests go on with the new weights, and
    neither their tokens nor the gateways' settings may mean anything else there."""
    for name in (field.name for field in fields(served)):
        old, new = getattr(served, name), getattr(found, name)
        if old != new:
            raise StartupError(
                f"{name} is {new}, and {old} in the model that is served: `quire upgrade` serves "
                "another model at the same path"
            )
