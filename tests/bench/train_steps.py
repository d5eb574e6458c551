"""The training steps that `bench_train.py` measures: the kit's, coqui-tts's, transformers' GPT-2's.

Each is set up as its users run it, through its public classes, with random weights in one size. A
step is a callable that goes once through forward, backward, clipping and AdamW and returns the
loss.
"""

import itertools
import logging
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from kit.base.hardware import detect
from kit.extras.xtts_v2.tensor_names import from_released, to_released
from kit.model.gpt import SpeechGPT
from kit.model.sequence import Batch, EffectiveBatch, pack
from kit.settings import GPTConfig, SpeedConfig, TrainConfig
from kit.training import loop
from kit.training.config import FULL, Finetuning
from kit.training.trainer import Trainer

Step = Callable[[], float]
ROWS, TEXT, CODES = 2, 60, 200
FRAMES = {"1 s": 86, "6 s": 517}  # of the reference: what the kit caches, what coqui-tts computes
RATE_HZ, HOP, REFERENCE_SAMPLES = 22_050, 1024, 132_300  # of XTTS; its reference is padded to 6 s


def xtts(width: int, **over) -> GPTConfig:
    """XTTS-v2's layout at 6 layers, or as many as `over` says."""
    sizes = {"text_vocab": 6681, "code_vocab": 1026, "max_text": 404, "max_code": 608}
    reference = {"latents": 32, "cond_blocks": 6, "perceiver_layers": 2, "perceiver_heads": 8}
    return GPTConfig(width=width, heads=width // 64, **sizes, **reference, **over)


def parts(config: GPTConfig, frames: int = FRAMES["1 s"]) -> tuple:
    """Text ids (2, 60), codes (2, 200) and reference mels (2, 80, frames), the same each time."""
    random = torch.Generator().manual_seed(0)
    texts = torch.randint(3, config.text_vocab - 2, (ROWS, TEXT), generator=random)
    codes = torch.randint(0, config.start_code, (ROWS, CODES), generator=random)
    return texts, codes, torch.randn(ROWS, config.n_mels, frames, generator=random)


def packed(config: GPTConfig, frames: int = FRAMES["1 s"]) -> Batch:
    texts, codes, cond = parts(config, frames)
    return pack(config, texts.tolist(), codes.tolist(), cond)


def kit_state(config: GPTConfig, bf16=False, finetuning: Finetuning = FULL, **speed) -> Trainer:
    """A run at its first step; `speed` are more switches that are on."""
    torch.manual_seed(0)
    endless = TrainConfig(max_steps=10**9, eval_steps=10**9, lr=1e-5)
    on = SpeedConfig(sdpa=True, fused_adamw=True, mixed_precision=bf16, **speed)
    state = Trainer(SpeechGPT(config), endless, on, detect(), finetuning)
    wanted = "bf16" if bf16 else "fp32"
    assert state.applied.precision == wanted, f"no {wanted} here: {state.applied.notes}"
    return state


def kit_step(config: GPTConfig, frames: int = FRAMES["1 s"], bf16: bool = False) -> Step:
    """The kit's own loop, on codes and mels that are ready."""
    batch = EffectiveBatch(micro=[packed(config, frames)], position={})
    events = loop.train(kit_state(config, bf16), itertools.repeat(batch))
    return lambda: next(events).loss


def text_tokenizer(folder: Path, size: int) -> str:
    """A file with a vocabulary of `size` entries, START and STOP where the kit has them."""
    from tokenizers import Tokenizer, models

    names = {1: "[UNK]", size - 2: "[START]", size - 1: "[STOP]"}
    vocab = {names.get(i, f"<{i}>"): i for i in range(size)}
    path = str(folder / "vocab.json")
    Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[UNK]")).save(path)
    return path


class Coqui:
    """coqui-tts's Trainer around its GPTTrainer, with the settings of its XTTS-v2 recipe.

    The one change: gradients are clipped to 1, as the kit's are. Leaves torch's threads alone,
    which coqui-tts sets to one when it is imported.
    """

    def __init__(self, config: GPTConfig):
        threads = torch.get_num_threads()
        logging.disable(logging.WARNING)
        from trainer import Trainer, TrainerArgs
        from TTS.tts.configs.xtts_config import XttsAudioConfig
        from TTS.tts.layers.xtts.trainer.gpt_trainer import GPTArgs, GPTTrainer, GPTTrainerConfig

        self.config, self.steps = config, itertools.count(1)
        self.home = tempfile.TemporaryDirectory()
        folder = Path(self.home.name)
        torch.save(torch.ones(80), folder / "mel_norms.pth")
        torch.save({}, folder / "dvae.pth")
        arguments = GPTArgs(
            max_conditioning_length=REFERENCE_SAMPLES,
            mel_norm_file=str(folder / "mel_norms.pth"),
            dvae_checkpoint=str(folder / "dvae.pth"),
            tokenizer_file=text_tokenizer(folder, config.text_vocab),
            gpt_num_audio_tokens=config.code_vocab,
            gpt_start_audio_token=config.start_code,
            gpt_stop_audio_token=config.stop_code,
            gpt_use_masking_gt_prompt_approach=True,
            gpt_use_perceiver_resampler=True,
            gpt_layers=config.layers,
            gpt_n_model_channels=config.width,
            gpt_n_heads=config.heads,
        )
        settings = GPTTrainerConfig(
            model_args=arguments,
            audio=XttsAudioConfig(sample_rate=RATE_HZ, dvae_sample_rate=RATE_HZ),
            optimizer="AdamW",
            optimizer_params={"betas": [0.9, 0.96], "eps": 1e-8, "weight_decay": 1e-2},
            optimizer_wd_only_on_weights=True,
            grad_clip=1.0,
            precision="bf16",  # where a step asks for mixed precision; the recipe does not
            run_eval=False,
            **dict.fromkeys(("print_step", "plot_step", "save_step"), 10**9),
        )
        model, how = GPTTrainer(settings), {"train_samples": [{}], "eval_samples": []}
        how["parse_command_line_args"] = False
        self.trainer = Trainer(TrainerArgs(), settings, folder, model=model, **how)
        self.trainer.total_steps_done = 1  # at 0 it prints
        model.on_train_epoch_start(self.trainer)
        self.gpt = model.xtts.gpt
        torch.set_num_threads(threads)

    def step(self, texts: Tensor, codes: int, bf16: bool = False) -> Step:
        """All of it: mels of the reference, codes of the recording, then the GPT."""
        wave = 0.1 * torch.randn(len(texts), 1, codes * HOP)
        reference = 0.1 * torch.randn(len(texts), 1, 1, REFERENCE_SAMPLES)

        def run() -> float:
            self.trainer.config.mixed_precision = bf16
            batch = {"padded_text": texts, "wav": wave, "conditioning": reference}
            batch |= self.lengths(texts, codes)
            _, losses = self.trainer.train_step(batch, 10**9, next(self.steps), time.time())
            return float(losses["loss"])

        return run

    def lengths(self, texts: Tensor, codes: int) -> dict:
        text_lengths = torch.full((len(texts),), texts.shape[1])
        wav_lengths = torch.full((len(texts),), codes * HOP)
        segments = torch.tensor([[0, REFERENCE_SAMPLES // 2]] * len(texts))
        known = {"text_lengths": text_lengths, "wav_lengths": wav_lengths}
        return known | {"cond_lens": None, "cond_idxs": segments}

    def ready(self, texts: Tensor, codes: Tensor, cond: Tensor) -> dict:
        """A batch as the GPT gets it after `format_batch`: codes and mels are ready."""
        batch = {"text_inputs": texts, "audio_codes": codes, "cond_mels": cond[:, None]}
        return batch | self.lengths(texts, codes.shape[1])

    def gpt_step(self, texts: Tensor, codes: Tensor, cond: Tensor, bf16: bool = False) -> Step:
        """The GPT alone: forward, backward, clipping, AdamW."""
        trainer = self.trainer

        def run() -> float:
            trainer.config.mixed_precision = bf16
            batch = self.ready(texts, codes, cond)
            losses = trainer.optimize(batch, trainer.optimizer[0], None, None, None)[1]
            return float(losses["loss"])

        return run

    @torch.no_grad()
    def losses(self, texts: Tensor, codes: Tensor, cond: Tensor) -> tuple[float, float]:
        """Mean text and code loss without dropout, no segment left out."""
        batch = self.ready(texts, codes, cond) | {"cond_idxs": None}
        self.gpt.eval()
        text, code, _ = self.gpt(**batch)
        self.gpt.train()
        return float(text), float(code)

    def give_weights(self, model: SpeechGPT) -> None:
        """Copy the GPT's weights into the kit's model, which must have a place for each."""
        released = {f"gpt.{name}": value for name, value in self.gpt.state_dict().items()}
        assert released.keys() == to_released(model.state_dict()).keys(), "another model"
        model.load_state_dict(from_released(released, model.config))


def require_same_loss(config: GPTConfig, coqui: Coqui) -> None:
    """Assert that one set of weights gives one loss, and that both count the same targets."""
    model, batch = SpeechGPT(config).eval(), packed(config, FRAMES["6 s"])
    coqui.give_weights(model)
    with torch.no_grad():
        text, code = model(batch)
    results = (text.item() / len(batch.text_targets), code.item() / len(batch.code_targets))
    wanted = coqui.losses(*parts(config, FRAMES["6 s"]))
    print(f"  losses with the same weights: {results}, coqui-tts {wanted}", flush=True)
    for a, b, size in zip(results, wanted, (config.text_vocab, config.code_vocab)):
        alike = math.isclose(a, b, rel_tol=1e-3) and abs(b - math.log(size)) < 1
        assert alike, "the two models compute two losses"


def gpt2_step(config: GPTConfig, batch: Batch, dropout: float) -> Step:
    """transformers' GPT-2 with SDPA over the kit's own joint ids, on the device of `batch`.

    AdamW is fused, as in its Trainer.
    """
    model = gpt2(config, batch.tokens.shape[1], dropout).to(batch.tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def run() -> float:
        loss = model(input_ids=batch.tokens, labels=batch.tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return run


def gpt2(config: GPTConfig, length: int, dropout: float = 0.1) -> nn.Module:
    """GPT2LMHeadModel as wide and deep as `config`, one vocabulary of texts and codes."""
    logging.disable(logging.WARNING)
    from transformers import AutoModelForCausalLM, GPT2Config

    sizes = {"vocab_size": config.text_vocab + config.code_vocab, "n_positions": length}
    sizes |= {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return AutoModelForCausalLM.from_config(GPT2Config(**sizes), attn_implementation="sdpa").train()
