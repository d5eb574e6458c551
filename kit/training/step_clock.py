"""Where the time of a training step goes: seconds by phase, without extra synchronisation."""

import time

import torch

PHASES = {  # of a step, in their order, and what each is called in the record
    "data": "waiting for data",
    "copy": "copying",  # the batch to the device
    "forward": "forward",
    "backward": "backward",
    "reduce": "summing gradients",  # of several ranks
    "update": "update",  # clipping, optimizers and the average of the weights
}


class StepClock:
    """`mark(phase)` where a phase begins, `mark("")` where the last one ends, `read()` afterwards.

    On a GPU the marks are CUDA events: the seconds are the device's own, idle time included. Events
    that have not happened yet are counted by the next `read`: a GPU's update is that of the step
    before, since nothing waits for it.
    """

    def __init__(self, device: str):
        self.on_gpu = device == "cuda"
        self.marks = []  # (phase, time), in order
        self.waited_s = 0.0

    def mark(self, phase: str) -> None:
        moment = time.perf_counter()
        if self.on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((phase, moment))

    def wait_for(self, tensor: torch.Tensor) -> list:
        """`tensor.tolist()`, where the CPU waits for the GPU; `sync_s` is how long it waited."""
        began_s = time.perf_counter()
        numbers = tensor.tolist()
        self.waited_s += time.perf_counter() - began_s
        return numbers

    def read(self) -> dict[str, float]:
        """Seconds since the last `read`: `data_s`, `copy_s`, ... and `sync_s`."""
        seconds = {f"{phase}_s": 0.0 for phase in PHASES}
        while len(self.marks) > 1 and self._happened(self.marks[1][1]):
            (phase, began), (_, ended) = self.marks[:2]
            del self.marks[0]
            if phase:
                seconds[f"{phase}_s"] += self._seconds(began, ended)
        seconds["sync_s"] = self.waited_s
        self.waited_s = 0.0
        return seconds

    def _happened(self, moment) -> bool:
        return not self.on_gpu or moment.query()

    def _seconds(self, began, ended) -> float:
        return began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
