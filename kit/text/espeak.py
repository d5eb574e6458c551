"""espeak-ng: text to synthetic speech, and text to phonemes (IPA).

It is GPL-3: called through its C interface where espeakng-loader is installed, never bundled.
Letters are enough where spelling follows sound, as in Amharic; English gains from phonemes.
"""

import ctypes
import functools
import json
import re
import subprocess
import sys
import threading

import numpy as np

from kit.base.config import ROOT
from kit.base.errors import KitError
from kit.settings import SPEAKERS

SAMPLE_RATE = 22050
# Constants of espeak-ng's C interface (speak_lib.h).
_SYNCHRONOUS = 2
_UTF8 = 1
_RATE = 1
_PITCH = 3
_IPA = 2
_OTHER_LANGUAGE = re.compile(r"\([\w-]+\)")  # (en)...(am): where it used another language's rules
_STOPS = re.compile(r"([.,;:?!])")  # espeak-ng drops them, and a voice needs them to pause
_in_subprocess = {
    "text": True,
    "encoding": "utf-8",
    "errors": "replace",  # a traceback may hold a path in the system's own encoding
    "cwd": ROOT,
}


class Espeak:
    """The espeak-ng library of this process. Raises KitError when it cannot start."""

    started = False

    def __init__(self, language: str):
        import espeakng_loader  # here, so that a user's own recordings never need it

        # Started again, the library keeps pointers into the phoneme data it has just freed.
        if Espeak.started:
            raise KitError("espeak-ng can start once in a process; use a new process")
        Espeak.started = True
        self.language = language
        self.chunks = []
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        rate = self.library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
        if rate != SAMPLE_RATE:
            raise KitError(f"espeak-ng did not start (code {rate}); reinstall espeakng-loader")
        self.library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # else its noise depends on the time
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self.callback = kind(self._receive)  # kept: C holds only the address
        self.library.espeak_SetSynthCallback(self.callback)

    def _receive(self, wave, count, _events) -> int:
        if count > 0:
            self.chunks.append(np.ctypeslib.as_array(wave, (count,)).copy())
        return 0

    def speaker(self, number: int, pace: float = 1.0) -> None:
        """Switch to the voice SPEAKERS[number], at `pace` times its speed."""
        variant, rate, pitch = SPEAKERS[number]
        voice = f"{self.language}{variant}".encode()
        if self.library.espeak_SetVoiceByName(voice):
            raise KitError(f"espeak-ng has no voice {voice.decode()}")
        self.library.espeak_SetParameter(_RATE, round(pace * rate), 0)
        self.library.espeak_SetParameter(_PITCH, pitch, 0)

    def say(self, text: str) -> np.ndarray:
        """Return int16 samples (T,), with 20 ms of silence. Raises KitError for only silence."""
        self.chunks.clear()
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, 1, 0, _UTF8, None, None)
        wave = np.concatenate([np.zeros(0, np.int16), *self.chunks])
        loud = np.flatnonzero(np.abs(wave) > 200)
        if not loud.size:
            raise KitError(f"espeak-ng spoke {text!r} as silence")
        margin = SAMPLE_RATE // 50
        return wave[max(0, loud[0] - margin) : loud[-1] + margin]

    def phonemes(self, text: str) -> str:
        """`text` in IPA, its punctuation kept."""
        parts = _STOPS.split(text)
        spoken = [part if _STOPS.match(part) else self._clauses(part) for part in parts]
        return re.sub(r" ([.,;:?!])", r"\1", " ".join(" ".join(spoken).split()))

    def _clauses(self, text: str) -> str:
        """One call converts a clause and advances the pointer, which is null at the end."""
        convert = self.library.espeak_TextToPhonemes
        convert.restype = ctypes.c_char_p
        rest = ctypes.c_char_p(text.encode())
        clauses = []
        while rest.value:
            clauses.append((convert(ctypes.byref(rest), _UTF8, _IPA) or b"").decode())
        return _OTHER_LANGUAGE.sub("", " ".join(clauses))


def run_module(module: str, job: dict) -> subprocess.CompletedProcess:
    """Run `module` in a new process with `job` as JSON on its standard input."""
    command = [sys.executable, "-m", module]
    return subprocess.run(command, input=json.dumps(job), capture_output=True, **_in_subprocess)


def phonemize(lines: list[str], language: str) -> list[str]:
    """Each normalised line in IPA with stress marks, its punctuation kept: "hello" -> "həlˈəʊ".

    `language` is espeak-ng's name, such as "am" or "en-us". Raises KitError with its reason.
    """
    return _Phonemizer(language).read(list(lines))


@functools.cache
class _Phonemizer:
    """A process of espeak-ng in one language, which is all that one can serve; waits for lines."""

    def __init__(self, language: str):
        self.language = language
        self.lock = threading.Lock()  # a panel speaks from a thread of its own
        self.process = None

    def read(self, lines: list[str]) -> list[str]:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                command = [sys.executable, "-m", "kit.text.espeak", self.language]
                pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
                self.process = subprocess.Popen(command, **pipes, **_in_subprocess)
            try:
                self.process.stdin.write(json.dumps(lines) + "\n")
                self.process.stdin.flush()
                answer = self.process.stdout.readline()
            except OSError:  # it has ended
                answer = ""
            except BaseException:  # interrupted: its answer would be read as that to the next lines
                self.process.kill()
                self.process.wait()
                raise
            if not answer:
                self.process.kill()
                last = self.process.communicate()[1].strip().splitlines()[-1:]
                error = "".join(last).removeprefix(f"{KitError.__module__}.KitError: ")
                raise KitError(
                    f"espeak-ng gave no phonemes for `{self.language}`: {error}. Give one of its "
                    "names of languages, such as en-us, de or am."
                )
        return json.loads(answer)


if __name__ == "__main__":
    espeak = Espeak(sys.argv[1])
    espeak.speaker(0)
    for request in sys.stdin:  # ASCII both ways: json escapes the rest
        print(json.dumps([espeak.phonemes(line) for line in json.loads(request)]), flush=True)
