"""From a request as it arrives to one that may wait: checks, defaults, token ids."""
