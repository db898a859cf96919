"""The workers that the gateway knows: found, connected, spoken to."""
