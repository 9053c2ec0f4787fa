"""Where Tigon will be published, and how its extras are installed until then.

This is the one place that changes on the day an index serves Tigon.
"""

REPOSITORY = "https://github.com/tigon-ml/tigon"


def install(extra: str) -> str:
    """How to install an extra of Tigon, to stand behind "needs …: " in a message.

    No index serves Tigon yet, and nothing is served at REPOSITORY: messages name the checkout that you have.
    """
    return f"pip install '.[{extra}]' in a checkout of Tigon"
