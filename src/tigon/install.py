"""Where Tigon is and how its extras are installed: the one place that changes on the day an index serves it."""

REPOSITORY = "https://github.com/tigon-ml/tigon"


def install(extra: str) -> str:
    """What to do for an extra of Tigon, to stand behind "needs …: " in a message. No index serves Tigon yet."""
    return f"pip install '.[{extra}]' in a checkout of {REPOSITORY}"
