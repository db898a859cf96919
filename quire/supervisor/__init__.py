"""`quire serve`: a whole deployment on one host, as processes that end with this one."""

from quire.supervisor.errors import NoSuchRun, ServeError
from quire.supervisor.options import ServeOptions
from quire.supervisor.run_directory import RUNS, stop_run
from quire.supervisor.supervisor import serve

__all__ = ["RUNS", "NoSuchRun", "ServeError", "ServeOptions", "serve", "stop_run"]
