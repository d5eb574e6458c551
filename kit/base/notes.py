"""Warnings of the kit as the sentences that they are.

Python shows a warning with the file, the line and the code that it comes from. Those of the kit say
what was found and what follows; where in the kit it was noticed helps nobody.
"""

import warnings


class Note(UserWarning):
    """Something that whoever runs the kit should know, and that stops nothing."""


_as_python_does = warnings.formatwarning


def plain_notes() -> None:
    """From now on a warning that is a Note shows as its sentence alone."""
    warnings.formatwarning = _format


def _format(message, category, filename, lineno, line=None) -> str:
    if issubclass(category, Note):
        return f"Note: {message}\n"
    return _as_python_does(message, category, filename, lineno, line)
