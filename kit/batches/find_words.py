"""Find where the words of recordings begin, in their text ids and in their codes.

The run's recogniser aligns each recording with its text; between two words it is the quietest
frame. What is found is read by a WordSpans (word_spans.py).
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from kit.audio.clip import load_speech
from kit.audio.recognizer import RecognizerOutput, SpeechRecognizer
from kit.base.files import write_atomic
from kit.base.tensor_file import pack_tensors
from kit.batches.batching import chunks
from kit.batches.code_cache import CodeCache
from kit.dataset.alignment import best_path, frames_needed
from kit.dataset.manifest import Utterance
from kit.text.normalize import letters
from kit.text.tokenizer import BaseTokenizer

SLACK_S = 0.05  # a recogniser may be this early or late with a letter
CLIPS_AT_ONCE = 16
WORD_MARK = "▁"  # what SentencePiece begins the first piece of a word with


def find_words(
    rows: Sequence[Utterance],
    cache: CodeCache,
    tokenizer: BaseTokenizer,
    recognizer: SpeechRecognizer,
    frame_rate: float,
    path: Path,
    progress: Callable = lambda *_: None,
) -> int:
    """Write where the words of `rows` lie to `path`, for a WordSpans; return of how many rows.

    `cache` holds the same rows, `frame_rate` codes a second.
    """
    texts = [token_edges(tokenizer, row.text, cache.texts[i]) for i, row in enumerate(rows)]
    edges: list[tuple] = [((), ())] * len(rows)  # in text ids and in codes
    counts = cache.lengths(range(len(rows)), "codes").tolist()
    split = [i for i, own in enumerate(texts) if own]
    split.sort(key=lambda i: rows[i].seconds)  # little padding in a batch
    rate = recognizer.input_sample_rate
    done = 0
    for batch in chunks(split, CLIPS_AT_ONCE):
        waves = [load_speech(rows[i].audio, rate) for i in batch]
        for i, output in zip(batch, recognizer.recognize(waves, rate), strict=True):
            frames = word_frames(recognizer, output, rows[i].text.split())
            codes = code_edges(frames, recognizer.frame_s * frame_rate, counts[i])
            if len(texts[i]) == len(codes):
                edges[i] = (texts[i], codes)
        done += len(batch)
        progress(done, len(split))
    arrays = {
        "counts": np.array([len(ids) for ids, _ in edges]),
        "texts": np.array([edge for ids, _ in edges for edge in ids], dtype=np.int32),
        "codes": np.array([edge for _, codes in edges for edge in codes], dtype=np.int32),
    }
    write_atomic(path, pack_tensors(arrays))
    return sum(len(ids) > 0 for ids, _ in edges)


def spoken_words(words: list[str]) -> list[int]:
    """The numbers of `words` that have a letter: a lone dash belongs to the word before it."""
    return [number for number, word in enumerate(words) if letters(word)]


def token_edges(tokenizer: BaseTokenizer, text: str, ids: Sequence[int]) -> list[int]:
    """Where the spoken words of `text` begin in its `ids`, and where the last one ends.

    Empty where the ids do not tell: with the tag of a language before them, or in phonemes that
    join two words.
    """
    words = text.split()
    starts = [n for n, i in enumerate(ids) if tokenizer.piece(int(i)).startswith(WORD_MARK)]
    spoken = spoken_words(words)
    if len(starts) != len(words) or not spoken or starts[0] != 0:
        return []
    return [0, *(starts[number] for number in spoken[1:]), len(ids)]


def word_frames(
    recognizer: SpeechRecognizer, output: RecognizerOutput, words: list[str]
) -> list[int]:
    """The output frames of a clip at which its spoken words begin, and where the last one ends.

    Between two words it is the quietest frame. Empty where the text cannot be aligned.
    """
    spelt = [recognizer.encode(letters(words[number])).tolist() for number in spoken_words(words)]
    space = [recognizer.alphabet.find(" ") + 1] if " " in recognizer.alphabet else []
    ids = list(spelt[0]) if spelt else []
    firsts = [0]  # of each word in `ids`
    for word in spelt[1:]:
        ids += space
        firsts.append(len(ids))
        ids += word
    target = torch.tensor(ids)
    total = len(output.log_probs)
    if not all(spelt) or frames_needed(target) > total:
        return []
    spans, _ = best_path(output.log_probs, target)
    slack = max(1, round(SLACK_S / recognizer.frame_s))
    frames = [0]
    for first, word in itertools.pairwise(zip(firsts, spelt)):
        ends = spans[first[0] + len(first[1]) - 1].end
        begins = spans[word[0]].start
        start = max(frames[-1] + 1, ends - slack)
        stop = max(start + 1, min(begins + slack, total))
        frames.append(start + int(output.loudness[start:stop].argmin()))
    return [*frames, total]


def code_edges(frames: list[int], codes_a_frame: float, count: int) -> list[int]:
    """The codes of a clip of `count` at which its words begin, from output `frames`.

    Every word has a code of its own. Empty where there are too few.
    """
    words = len(frames) - 1
    if not 0 < words <= count:
        return []
    edges = [0]
    for number, frame in enumerate(frames[1:-1], 1):
        nearest = round((frame + 0.5) * codes_a_frame)
        edges.append(min(max(nearest, edges[-1] + 1), count - (words - number)))
    return [*edges, count]
