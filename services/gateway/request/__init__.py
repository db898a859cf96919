"""One request on its way through the workers: state machine, tickets, crash attribution."""
