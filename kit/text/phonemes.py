"""Text as phonemes: espeak-ng's own, in the International Phonetic Alphabet. Off unless called.

Plain letters are the default and are enough where spelling follows sound, as in Amharic; English
gains from phonemes. A voice trained on phonemes must be given them when it speaks, too: pass both
training and spoken text through `phonemize`. espeak-ng carries state from one call to the next, so
every call is a process of its own, and the same lines give the same phonemes. Knows nothing of
tokens.
"""

import ctypes
import json
import re
import sys

from kit.text.espeak import Espeak, run_apart

_UTF8 = 1
_IPA = 2  # espeak-ng's numbers for what goes in and what comes out
_OTHER_LANGUAGE = re.compile(r"\([\w-]+\)")  # (en)...(am): where it borrowed another's rules
_STOPS = re.compile(r"([.,;:?!])")  # espeak-ng drops them, and a voice needs them to pause


def phonemize(lines: list[str], language: str) -> list[str]:
    """Each normalised line in IPA with stress marks, its punctuation kept: "hello" -> "həlˈəʊ".

    Raises RuntimeError with espeak-ng's reason when it cannot (no such voice, not installed).
    """
    run = run_apart("kit.text.phonemes", {"lines": list(lines), "language": language})
    if run.returncode:
        why = run.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"espeak-ng gave no phonemes for `{language}`: {''.join(why)}")
    return json.loads(run.stdout)


def _line(espeak: Espeak, text: str) -> str:
    parts = [p if _STOPS.match(p) else _clauses(espeak, p) for p in _STOPS.split(text)]
    return re.sub(r" ([.,;:?!])", r"\1", " ".join(" ".join(parts).split()))


def _clauses(espeak: Espeak, text: str) -> str:
    """One call of the library reads one clause and moves the pointer; at the end it is null."""
    convert = espeak.library.espeak_TextToPhonemes
    convert.restype = ctypes.c_char_p
    rest = ctypes.c_char_p(text.encode())
    found = []
    while rest.value:
        found.append((convert(ctypes.byref(rest), _UTF8, _IPA) or b"").decode())
    return _OTHER_LANGUAGE.sub("", " ".join(found))


if __name__ == "__main__":
    task = json.load(sys.stdin)
    voice = Espeak(task["language"])
    voice.speaker(0)
    json.dump([_line(voice, line) for line in task["lines"]], sys.stdout)
