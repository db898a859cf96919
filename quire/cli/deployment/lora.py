"""`quire lora`: loads and unloads LoRA adapters of a running deployment."""

from typing import Annotated

from typer import Argument, Option, Typer

from quire.cli.flags import OperationsFlags, with_flags

app = Typer(help="Load and unload LoRA adapters.", no_args_is_help=True, add_completion=False)

_Name = Annotated[str, Argument(metavar="NAME", help="what requests name as their model")]


def load(
    name: _Name,
    directory: Annotated[str, Argument(metavar="DIR", help="as PEFT writes it, on the servers")],
    gateway: OperationsFlags,
    model: Annotated[str, Option(help="the model that it is for; default: the only one")] = "",
) -> None:
    """Serve an adapter."""
    with gateway.connect() as client:
        print(f"{name} is served, on {client.load_adapter(name, directory, model)}")


def unload(name: _Name, gateway: OperationsFlags) -> None:
    """Take no new requests for an adapter; those that run go on."""
    with gateway.connect() as client:
        client.unload_adapter(name)
    print(f"{name} is not served any more")


app.command()(with_flags(load))
app.command()(with_flags(unload))
