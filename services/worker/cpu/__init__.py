"""How the CPUs of a host are divided among its workers."""
