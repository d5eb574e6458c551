"""How far a model that went on learning has moved from the one it began as.

The first model reads some sentences aloud. At each of its codes it says how likely every code is;
the other model is asked the same, at the same places. How surprised the other one is on average by
what the first expects (the cross-entropy), less the first one's own surprise (its entropy), is what
it has forgotten: 0 where nothing is (Li and Hoiem 2016, arXiv:1606.09282, train against it). No
recording is needed and no recogniser. Knows models and ids alone.

Shapes: N codes and the STOP after them, V code vocabulary, M mels, T reference frames.
"""

import dataclasses

import torch
from torch import Tensor

from kit.inference.generate import GeneratedCodes
from kit.model.gpt import SpeechGPT
from kit.model.sequence import pack


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSample:
    """A sentence as the first model read it aloud."""

    base_ids: list[int]  # of its text, as the first model's tokenizer spells it
    tuned_ids: list[int]  # and as the other one's does
    spoken: GeneratedCodes
    mel: Tensor  # (M, T) of the voice that it was read in


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseDivergence:
    """Nats a code at what the first model might say next."""

    base: float  # of that model itself
    tuned: float  # of the other one

    @property
    def forgotten(self) -> float:
        """What the other model has more: the Kullback-Leibler divergence."""
        return self.tuned - self.base


@torch.inference_mode()
def measure_divergence(
    base: SpeechGPT, tuned: SpeechGPT, readings: list[BaseSample]
) -> BaseDivergence:
    """The mean over all codes of `readings`; both models must be in eval mode."""
    own = []
    other = []
    for reading in readings:
        expected = code_log_probs(base, reading.base_ids, reading)
        found = code_log_probs(tuned, reading.tuned_ids, reading)
        weights = expected.exp()
        own.append(-(weights * expected).sum(-1))
        other.append(-(weights * found).sum(-1))
    return BaseDivergence(base=float(torch.cat(own).mean()), tuned=float(torch.cat(other).mean()))


@torch.inference_mode()
def code_log_probs(model: SpeechGPT, ids: list[int], reading: BaseSample) -> Tensor:
    """How likely `model` finds every code at each place of `reading`, (N, V) in nats, on the CPU.

    The last place is that of STOP where the reading had found its end.
    """
    # As a model is spoken from, whatever rows it was trained on.
    spoken_from = dataclasses.replace(model.config, text_stop_input=True, stop_targets=1)
    codes = reading.spoken.codes.tolist()
    device = model.final_norm.weight.device
    batch = pack(spoken_from, [ids], [codes], reading.mel[None].float()).to(device)
    places = batch.code_indices[: len(codes) + reading.spoken.stopped]
    states = model.hidden(batch).flatten(0, 1)[places]
    return model.code_head(states).float().log_softmax(-1).cpu()
