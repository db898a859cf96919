"""The rule for the names by which clients know models and adapters."""

MAX_NAME_CHARS = 200


def name_problem(name: str) -> str:
    """Return why this cannot be the name of a model, an alias or an adapter; empty if it can.

    Settings list names by commas, with `=` before what has the name, and take `none` for no value.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return f"has {len(name)} characters, not 1 to {MAX_NAME_CHARS}"
    if not name.isprintable() or name != name.strip():
        return "has control characters, or spaces at an end"
    if "," in name or "=" in name:
        return "has a comma or an equals sign"
    return "means no value in settings" if name == "none" else ""
