"""Text as phonemes: espeak-ng's own, in the International Phonetic Alphabet. Off unless asked for.

Plain letters are the default and are enough where spelling follows sound, as in Amharic; English
gains from phonemes. A tokenizer that learned its pieces from phonemes says so in its file, and
spells what a voice is to say in them, too. espeak-ng serves one language in a process, so each has
one of its own, which waits for lines; the same line gives the same phonemes, whatever was before
it. Knows nothing of tokens.
"""

import ctypes
import functools
import json
import re
import subprocess
import sys
import threading

from kit.base.config import CONFIGS
from kit.text.espeak import Espeak

_UTF8 = 1
_IPA = 2  # espeak-ng's numbers for what goes in and what comes out
_OTHER_LANGUAGE = re.compile(r"\([\w-]+\)")  # (en)...(am): where it borrowed another's rules
_STOPS = re.compile(r"([.,;:?!])")  # espeak-ng drops them, and a voice needs them to pause


def phonemize(lines: list[str], language: str) -> list[str]:
    """Each normalised line in IPA with stress marks, its punctuation kept: "hello" -> "həlˈəʊ".

    `language` is espeak-ng's name of it, such as "am" or "en-us". Raises RuntimeError with
    espeak-ng's reason when it cannot (no such voice, not installed).
    """
    return _reader(language).read(list(lines))


@functools.cache
def _reader(language: str) -> "_Reader":
    return _Reader(language)


class _Reader:
    """A process of espeak-ng in one language; it ends with the process that asks it."""

    def __init__(self, language: str):
        self.language = language
        self.lock = threading.Lock()  # a panel speaks from a thread of its own
        self.process = None

    def read(self, lines: list[str]) -> list[str]:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process = self._start()
            try:
                self.process.stdin.write(json.dumps(lines) + "\n")
                self.process.stdin.flush()
                answer = self.process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                raise RuntimeError(self._why())
        return json.loads(answer)

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "kit.text.phonemes", self.language],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",  # a traceback may hold a path in the system's own encoding
            cwd=CONFIGS.parent,
        )

    def _why(self) -> str:
        self.process.kill()
        said = self.process.communicate()[1].strip().splitlines()[-1:]
        return f"espeak-ng gave no phonemes for `{self.language}`: {''.join(said)}"


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
    voice = Espeak(sys.argv[1])
    voice.speaker(0)
    for request in sys.stdin:  # ASCII both ways: json escapes the rest
        print(json.dumps([_line(voice, line) for line in json.loads(request)]), flush=True)
