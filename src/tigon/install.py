"""Where Tigon will be published, and how to install extras until then.

This is the only place to change once an index serves Tigon.
"""

REPOSITORY = "https://github.com/tigon-ml/tigon"


def install(extra: str) -> str:
    """How to install a Tigon extra, to follow "needs …: " in a message.

    No index serves Tigon yet, and nothing is served at REPOSITORY: messages name the local checkout.
    """
    return f"pip install '.[{extra}]' in a checkout of Tigon"
