"""The supervisor of `quire serve`: runs a whole deployment on one host, as child processes that end
with this process."""
