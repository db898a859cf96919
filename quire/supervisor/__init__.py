"""The supervisor of `quire serve`: runs a whole deployment on one host, as child processes that end
with this process."""

from quire.supervisor.errors import NoSuchRun, ServeError
from quire.supervisor.options import ServeOptions
from quire.supervisor.run_directory import RUNS, stop_run
from quire.supervisor.supervisor import serve

__all__ = ["RUNS", "NoSuchRun", "ServeError", "ServeOptions", "serve", "stop_run"]
