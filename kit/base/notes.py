"""Warnings of the kit, shown as one sentence without the source line that raised them."""

import warnings


class Note(UserWarning):
    """Something the user should know that stops nothing."""


_default_format = warnings.formatwarning


def show_plain_notes() -> None:
    """From now on a warning that is a Note shows as its sentence alone."""
    warnings.formatwarning = _format


def _format(message, category, filename, lineno, line=None) -> str:
    if issubclass(category, Note):
        return f"Note: {message}\n"
    return _default_format(message, category, filename, lineno, line)
