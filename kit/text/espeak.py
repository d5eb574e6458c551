"""espeak-ng, a program that reads any text aloud and knows its phonemes.

It is GPL-3: called through its C interface where espeakng-loader is installed, never bundled.
"""

import ctypes
import json
import subprocess
import sys

import numpy as np

from kit.base.config import CONFIGS

SAMPLE_RATE = 22050
# (voice variant, words per minute, pitch 0-99): several people, not one frozen voice.
SPEAKERS = (("", 200, 40), ("", 215, 60), ("", 235, 80), ("+f2", 205, 60), ("+m3", 220, 35))
# espeak-ng's C interface (speak_lib.h): names for the numbers used below.
_SYNCHRONOUS = 2
_UTF8 = 1
_RATE = 1
_PITCH = 3


class Espeak:
    """The espeak-ng library of this process: text in, 16-bit samples at 22 050 Hz out.

    Raises RuntimeError when espeak-ng does not start, or was started in this process before.
    """

    started = False

    def __init__(self, language: str):
        import espeakng_loader  # here, so that a user's own recordings never need it

        # Started again, the library keeps pointers into the phoneme data it has just freed.
        if Espeak.started:
            raise RuntimeError("espeak-ng runs once in a process; start it in a fresh one")
        Espeak.started = True
        self.language = language
        self.chunks = []
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        rate = self.library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
        if rate != SAMPLE_RATE:
            raise RuntimeError(
                f"espeak-ng did not start (answer {rate}); reinstall espeakng-loader"
            )
        self.library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # else its noise starts by the clock
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
        """Go on in the voice of SPEAKERS[number], `pace` times as fast as it is listed."""
        variant, rate, pitch = SPEAKERS[number]
        voice = f"{self.language}{variant}".encode()
        if self.library.espeak_SetVoiceByName(voice):
            raise RuntimeError(f"espeak-ng has no voice {voice.decode()}")
        self.library.espeak_SetParameter(_RATE, round(pace * rate), 0)
        self.library.espeak_SetParameter(_PITCH, pitch, 0)

    def say(self, text: str) -> np.ndarray:
        """`text` as int16 samples (T,), silence trimmed to 20 ms at both ends.

        Raises RuntimeError when espeak-ng says nothing of it.
        """
        self.chunks.clear()
        data = text.encode()
        self.library.espeak_Synth(data, len(data) + 1, 0, 1, 0, _UTF8, None, None)
        wave = np.concatenate([np.zeros(0, np.int16), *self.chunks])
        loud = np.flatnonzero(np.abs(wave) > 200)
        if not loud.size:
            raise RuntimeError(f"espeak-ng spoke {text!r} as silence")
        margin = SAMPLE_RATE // 50
        return wave[max(0, loud[0] - margin) : loud[-1] + margin]


def run_apart(module: str, job: dict) -> subprocess.CompletedProcess:
    """`module` in a fresh process with `job` as JSON on its standard input."""
    return subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",  # a traceback may hold a path in the system's own encoding
        cwd=CONFIGS.parent,
    )
