"""Names, paths, sizes, durations and errors as text for messages."""

import difflib


def nearest(name: str, known) -> str:
    """' Did you mean `x`?' when a known name is close to `name`, else the list of known names."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(map(str, known))}."


def shorten(value: object, max_chars: int = 200) -> str:
    """`value` as text, with "..." where it is long: a message may quote a whole file."""
    text = str(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def join_names(names: list[str], max_names: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = len(names) - max_names
    return ", ".join(names[:max_names]) + (f" and {more} more" if more > 0 else "")


def non_utf8_problem(path) -> str:
    """What is wrong with a path whose name is not UTF-8; "" where it is.

    Such names cannot be written to tables, logs or a page, and printing them fails.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"{str(path)!a} has a name that is not UTF-8: rename it in plain letters"
    return ""


def clock(seconds: float) -> str:
    """125 -> "2:05", 3725 -> "1:02:05"."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe_error(error: BaseException) -> str:
    """An exception as one line. A ValueError's message is written for the user already."""
    text = shorten(" ".join(str(error).split()), 400)
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def format_gib(size_bytes: float) -> str:
    """2_500_000_000 -> "2.33 GiB"."""
    return f"{size_bytes / 2**30:.2f} GiB"


def format_memory(size_bytes: float, sign: str = "-") -> str:
    """2_500_000_000 -> "2.33 GiB", 4_000_000 -> "3.8 MiB"; `sign` "+" makes it "+3.8 MiB"."""
    if abs(size_bytes) >= 2**30:
        return f"{size_bytes / 2**30:{sign}.2f} GiB"
    return f"{size_bytes / 2**20:{sign}.1f} MiB"
