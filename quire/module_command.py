"""The command that runs one of Quire's modules in a process of its own."""

import sys


def module_command(module: str, *arguments: str, **options: object) -> list[str]:
    """`python -m MODULE ARGUMENTS --OPTION=VALUE`; an option that is None is left out."""
    # -P: a directory `services` in the user's working directory must not hide Quire's package.
    command = [sys.executable, "-P", "-m", module, *arguments]
    given = {name: value for name, value in options.items() if value is not None}
    return command + [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def service_command(service: str) -> list[str]:
    if service in ("prefill", "decode"):  # the roles of a worker
        return module_command("services.worker", role=service)
    return module_command(f"services.{service}")
