"""Many people speak with one voice at once: their texts share batches, a part of each at a time.

Orca (Yu et al. 2022) schedules requests by the step; here it is by the part of a text (a sentence
or so), so that a long text never keeps a short one waiting for more than one part.
"""

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from kit.base.errors import SpeechError
from kit.inference.voice import Voice, truncated_message
from kit.settings import GenerateConfig
from kit.text.sentences import SpokenPart, fade

BATCH_ROWS = 64  # of the model in one batch


@dataclasses.dataclass(eq=False, kw_only=True)
class Job:
    """One text that is being spoken. Iterating over it yields its waveform in chunks (L,)."""

    parts: list[SpokenPart]
    speaker: str
    config: GenerateConfig
    own_speaker: bool  # whether the speaker belongs to this job alone
    streamed: bool  # whether its chunks should come as early as possible
    done: int = 0  # parts that were spoken
    cancelled: bool = False  # nobody is listening any more: the other parts are left out
    truncated: list[str] = dataclasses.field(default_factory=list)  # parts without an end
    # Chunks (L,); None: the end; an exception: what went wrong.
    chunks: queue.SimpleQueue = dataclasses.field(default_factory=queue.SimpleQueue)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield chunks. Raises SpeechError after the last one if a part was truncated."""
        while (chunk := self.chunks.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk
        if self.truncated:
            raise SpeechError(truncated_message(" ".join(self.truncated)))


class SpeechQueue:
    """Speaks texts in one thread, which alone uses the voice's model."""

    def __init__(self, voice: Voice):
        self.voice = voice if voice.decoder else voice.in_format()
        self.speakers = voice.speakers  # without uploads, each of which is for one text alone
        self.jobs: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.uploads = 0  # references that were uploaded so far
        self.thread = threading.Thread(target=self._work, name="speech", daemon=True)
        self.thread.start()

    def submit(
        self,
        text: str,
        speaker: str,
        config: GenerateConfig,
        *,
        reference: tuple[Tensor, int] | None = None,
        streamed: bool = False,
    ) -> Job:
        """Queue `text`; with a `reference`, waveform (L,) and sample rate, in that voice.

        Raises SpeechError for a text, speaker or reference that cannot be used.
        """
        parts = self.voice.parts(text)
        config = self.voice.within(config)
        if reference is None:
            self.voice.reference(speaker)  # raises for an unknown speaker
        with self.changed:
            if self.closed:
                raise SpeechError("The server is being stopped.")
            if reference is not None:
                self.uploads += 1
                speaker = f"upload {self.uploads}"
                self.voice = self.voice.with_speaker(speaker, *reference)
            job = Job(
                parts=parts,
                speaker=speaker,
                config=config,
                own_speaker=reference is not None,
                streamed=streamed,
            )
            self.jobs.append(job)
            self.changed.notify()
        return job

    def close(self) -> None:
        """Stop after the part that is being spoken; texts that wait get a SpeechError."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join()

    def _work(self) -> None:
        while jobs := self._next_jobs():
            try:
                if len(jobs) == 1 and jobs[0].streamed:
                    self._stream_part(jobs[0])
                else:
                    self._speak_parts(jobs)
            except Exception as error:  # whatever it is, the next text must still be spoken
                for job in jobs:
                    job.chunks.put(error)
                    job.cancelled = True
            with self.changed:
                for job in jobs:
                    if job.done == len(job.parts) or job.cancelled:
                        self._end(job)
                    else:
                        self.jobs.remove(job)
                        self.jobs.append(job)
        with self.changed:
            for job in self.jobs:
                job.chunks.put(SpeechError("The server was stopped before this text was spoken."))
            self.jobs.clear()

    def _next_jobs(self) -> list[Job]:
        """Return jobs whose next parts are spoken together; [] when the queue was closed."""
        with self.changed:
            self.changed.wait_for(self._drop_cancelled)
            if self.closed:
                return []
            config = self.jobs[0].config
            alike = [job for job in self.jobs if job.config == config]
            return alike[: max(1, BATCH_ROWS // config.rows_per_text)]

    def _drop_cancelled(self) -> bool:
        """End jobs that were cancelled while they waited; return whether there is work, or none."""
        for job in [job for job in self.jobs if job.cancelled]:
            self._end(job)
        return bool(self.jobs) or self.closed

    def _end(self, job: Job) -> None:
        self.jobs.remove(job)
        job.chunks.put(None)
        if job.own_speaker:
            self.voice = self.voice.without_speaker(job.speaker)

    @torch.inference_mode()
    def _speak_parts(self, jobs: list[Job]) -> None:
        parts = [job.parts[job.done] for job in jobs]
        speakers = [job.speaker for job in jobs]
        rows = self.voice.generate_parts(parts, speakers, jobs[0].config, BATCH_ROWS)
        for job, part, row in zip(jobs, parts, rows):
            wave = self.voice.sound(row.codes, row.states, job.speaker)
            if len(job.parts) > 1:
                wave = fade(wave, self.voice.codec.sample_rate)
            job.chunks.put(wave)
            self._finish_part(job, part, row.stopped)

    @torch.inference_mode()
    def _stream_part(self, job: Job) -> None:
        part = job.parts[job.done]
        config = dataclasses.replace(job.config, best_of=1, retries=0)
        chunks = self.voice.stream_part(part, job.speaker, config, faded=len(job.parts) > 1)
        stopped = False
        while not job.cancelled:
            try:
                job.chunks.put(next(chunks))
            except StopIteration as end:
                stopped = end.value
                break
        self._finish_part(job, part, stopped)

    def _finish_part(self, job: Job, part: SpokenPart, stopped: bool) -> None:
        if part.pause_s:
            job.chunks.put(torch.zeros(round(part.pause_s * self.voice.codec.sample_rate)))
        if not stopped:
            job.truncated.append(part.text)
        job.done += 1
