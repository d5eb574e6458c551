"""Speak with the exported voice in this folder: python speak_onnx.py "text" --out speech.wav

Text is only composed (NFC) and lower-cased: write figures, abbreviations and signs as words.
"""

import argparse
import hashlib
import json
import re
import unicodedata
import wave
from pathlib import Path

import numpy as np
import sentencepiece

SUMS = "SHA256SUMS"  # as `sha256sum -c` reads it
FILES = ("prompt.onnx", "step.onnx", "sound.onnx", "latents.npz", "tokenizer.model")
FILES += ("voice-onnx.json",)


class Voice:
    def __init__(self, folder):
        verify(folder)
        import onnxruntime  # the kit itself does not need it

        self.card = json.loads((folder / "voice-onnx.json").read_text(encoding="utf-8"))
        if not 8000 <= self.card["sample_rate"] <= 192_000:
            raise SystemExit(
                f"{folder / 'voice-onnx.json'} has sample_rate {self.card['sample_rate']}, which "
                "must be 8000 to 192000 Hz: export the voice again."
            )
        self.latents = dict(zip(self.card["speakers"], np.load(folder / "latents.npz")["latents"]))
        self.tokens = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
        files = [str(folder / f"{name}.onnx") for name in ("prompt", "step", "sound")]
        self.prompt, self.step, self.sound = map(onnxruntime.InferenceSession, files)

    def ids(self, text):
        """Return the token ids of `text`, without punctuation that the tokenizer lacks."""
        text = unicodedata.normalize("NFC", text)
        if self.card["language"] == "tr":
            text = text.replace("İ", "i").replace("I", "ı")
        text = text.lower()
        raw = (self.tokens.is_byte, self.tokens.is_unknown)
        lacking = {c for c in text for i in self.tokens.encode(c) if any(test(i) for test in raw)}
        ids = self.tokens.encode(" ".join("".join(c for c in text if c not in lacking).split()))
        unknown = "".join(filter(str.isalnum, lacking))
        if unknown or not any(map(str.isalnum, text)):
            raise SystemExit(f"Cannot say {text!r}: no letters, or unknown ones ({unknown!r}).")
        return ids

    def parts(self, text):
        """Yield the ids of each sentence; one longer than those of training is halved."""
        for sentence in re.split(r"(?<=[.!?።])\s+|\s*\n\s*", text.strip()):
            ids, words = self.ids(sentence), sentence.split()
            if len(ids) <= self.card["max_text_ids"]:
                yield ids
            elif len(words) == 1:
                raise SystemExit(f"Cannot say {sentence!r}: a word of {len(ids)} tokens.")
            else:
                middle = len(words) // 2
                yield from self.parts(" ".join(words[:middle]))
                yield from self.parts(" ".join(words[middle:]))

    def codes(self, ids, speaker, settings):
        """Return codes and the states that predicted them."""
        limit = min(self.card["max_codes"], int(self.card["max_codes_per_text_id"] * len(ids)) + 40)
        rng = np.random.default_rng(abs(settings["seed"]))
        logits, state, new = self.prompt.run(None, {"text": ids, "latents": self.latents[speaker]})
        cache = np.concatenate((new, np.zeros((limit, *new.shape[1:]), new.dtype)))
        codes, states = [], []
        while (code := sample(logits[0], codes, settings, rng)) != self.card["stop_code"]:
            if len(codes) == limit:
                raise SystemExit("A sentence did not end: shorten it, or try another --seed.")
            codes.append(code)
            states.append(state)
            end = len(new) + len(codes) - 1
            inputs = {"code": [code], "code_index": [len(codes)], "cache": cache[:end]}
            logits, state, cache[end : end + 1] = self.step.run(None, inputs)
        return codes, states

    def speak(self, text, speaker, settings):
        waves = []
        for ids in self.parts(text):
            codes, states = self.codes(ids, speaker, settings)
            more = {"states": np.stack(states, 1)} if codes and self.card["uses_states"] else {}
            waves += list(self.sound.run(None, {"codes": [codes]} | more)[0]) if codes else []
            waves.append(np.zeros(self.card["sample_rate"] // 4, np.float32))  # a pause
        return np.concatenate(waves)


def verify(folder):
    """Raise SystemExit for a file that is missing or not as it was exported."""
    for name in (SUMS, *FILES):
        if not (folder / name).is_file():
            raise SystemExit(f"There is no {folder / name}: copy the folder again.")
    with open(folder / SUMS, "rb") as file:
        sums = file.read(10_000).splitlines()
    for name in FILES:
        with open(folder / name, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if f"{sha256}  {name}".encode() not in sums:
            raise SystemExit(f"{folder / name} is damaged (see {SUMS}): copy the folder again.")


def sample(logits, codes, settings, rng):
    """Return a code after repetition penalty, temperature, top-k and top-p, in this order."""
    seen, penalty = logits[codes], settings["repetition_penalty"]
    logits[codes] = np.where(seen > 0, seen / penalty, seen * penalty)
    order = np.argsort(-logits, kind="stable")[: settings["top_k"] or None]
    if not settings["temperature"]:
        return int(order[0])
    probs = np.exp((logits[order] - logits[order[0]]) / max(settings["temperature"], 1e-6))
    probs[np.cumsum(probs) - probs > settings["top_p"] * probs.sum()] = 0
    return int(order[np.argmax(probs / rng.exponential(size=len(probs)))])


def main():
    folder = Path(__file__).parent
    try:
        voice = Voice(folder)
        parser = argparse.ArgumentParser()
        parser.add_argument("text")
        parser.add_argument("--out", default="speech.wav")
        parser.add_argument("--speaker", choices=voice.latents, default=voice.card["speakers"][0])
        for name, value in voice.card["sampling"].items():
            parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
        options = vars(parser.parse_args())
        samples = voice.speak(options["text"], options["speaker"], options)
    except ImportError:
        raise
    except Exception as error:
        reason = repr(error)[:400]
        raise SystemExit(f"Cannot speak with {folder} ({reason}): copy it again.") from error
    with wave.open(options["out"], "wb") as file:
        file.setparams((1, 2, voice.card["sample_rate"], 0, "NONE", ""))
        file.writeframes((np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes())
    print(f"{options['out']}: {len(samples) / voice.card['sample_rate']:.1f} s of speech")


if __name__ == "__main__":
    main()
