"""`quire lora`: loads, lists and unloads LoRA adapters of a running deployment."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from quire.cli.flags import Json, OperationsFlags, with_flags
from quire.cli.output import Columns, print_items
from quire.reports import Model

app = Typer(help="Load, list and unload LoRA adapters.", no_args_is_help=True, add_completion=False)

_COLUMNS: Columns[Model] = {
    "ADAPTER": lambda adapter: adapter.id,
    "MODEL": lambda adapter: adapter.parent,
}

_Name = Annotated[str, Argument(metavar="NAME", help="what requests name as their model")]


def load(
    name: _Name,
    directory: Annotated[
        Path,
        Argument(
            metavar="DIR",
            help="as PEFT writes it; gateways and workers read it under the same path",
        ),
    ],
    gateway: OperationsFlags,
    model: Annotated[str, Option(help="the model that it is for; default: the only one")] = "",
) -> None:
    """Serve an adapter."""
    path = str(directory.expanduser().absolute())
    with gateway.connect() as client:
        print(f"{name} is served, on {client.load_adapter(name, path, model)}")


def unload(name: _Name, gateway: OperationsFlags) -> None:
    """Take no new requests for an adapter; those that run go on."""
    with gateway.connect() as client:
        client.unload_adapter(name)
    print(f"{name} is not served any more")


def list_adapters(gateway: OperationsFlags, as_json: Json = False) -> None:
    """List the adapters that are served."""
    with gateway.connect() as client:
        print_items(as_json, _COLUMNS, [model for model in client.models() if model.parent])


app.command()(with_flags(load))
app.command("list")(with_flags(list_adapters))
app.command()(with_flags(unload))
