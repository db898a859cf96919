"""How many random examples a property gets."""

from hypothesis import settings


def examples(number: int) -> int:
    """`number` in `make test-full`, a quarter of it in `make test`."""
    return number if settings.get_current_profile_name() == "full" else -(-number // 4)
