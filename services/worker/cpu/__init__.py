"""Divides the CPUs of a host among its workers."""
