"""Functions of the kernel that the page can call."""

CALLBACKS = {}


def register_callback(name: str, callback) -> None:
    CALLBACKS[name] = callback
