"""The client of the functions in the server: connections, ordered commands, loss and recovery."""
