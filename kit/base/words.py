"""What the kit says to people, in words: names, paths, times and errors.

Knows nothing of what is talked about.
"""

import difflib


def nearest(name: str, known) -> str:
    """' Did you mean `x`?' when a known name is close to `name`, else the list of known names."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(map(str, known))}."


def brief(what: object, most: int = 200) -> str:
    """`what` in words, cut where it is long: a message may quote a whole file."""
    words = str(what)
    return words if len(words) <= most else f"{words[:most]}..."


def listed(names: list[str], most: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def no_utf8(path) -> str:
    """What is wrong with a path whose name is not UTF-8, in words; "" where it is.

    Such names cannot stand in tables, logs or on a page, and break what prints them.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"{str(path)!a} has a name that is not UTF-8: rename it in plain letters"
    return ""


def clock(seconds: float) -> str:
    """125 -> "2:05", 3725 -> "1:02:05"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_words(error: BaseException) -> str:
    """An exception as one plain line. A ValueError's message is written for the user already."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 400 else f"{text[:400]}..."
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_gib(size_bytes: float) -> str:
    """2_500_000_000 -> "2.33 GiB"."""
    return f"{size_bytes / 2**30:.2f} GiB"


def memory_size(size_bytes: float, sign: str = "-") -> str:
    """2_500_000_000 -> "2.33 GiB", 4_000_000 -> "3.8 MiB"; `sign` "+" makes it "+3.8 MiB"."""
    if abs(size_bytes) >= 2**30:
        return f"{size_bytes / 2**30:{sign}.2f} GiB"
    return f"{size_bytes / 2**20:{sign}.1f} MiB"


def decimal_size(size_bytes: float) -> str:
    """5_900_000_000_000 -> "5.9 TB": three digits, in the units of disks and networks."""
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= unit_bytes:
            return f"{_three_digits(size_bytes / unit_bytes)} {unit}"
    return f"{size_bytes:.0f} bytes"


def rough_time(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 5400 -> "1.5 h": three digits, for what is reckoned."""
    for unit, unit_s in (("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 1.5 * unit_s or (unit == "s" and seconds >= 1):
            return f"{_three_digits(seconds / unit_s)} {unit}"
    return f"{_three_digits(1e3 * seconds)} ms"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
