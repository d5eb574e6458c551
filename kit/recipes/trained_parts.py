"""What a run trains, and from which weights: its own model, or all or parts of a base model."""

from kit.base.config import build
from kit.base.run import read_run_file
from kit.base.tensor_file import tensors_sha256
from kit.batches.batching import DataConfig
from kit.model.gpt import SpeechGPT
from kit.model.lora import LoRAConfig
from kit.model.sequence import GPTConfig
from kit.model.weights import load_model, saved_config, warm_start_model
from kit.recipes.active_run import ActiveRun
from kit.text.tokenizer import BaseTokenizer, base_spellings, load_tokenizer
from kit.training.config import TrainConfig
from kit.training.switches import SpeedConfig
from kit.training.trainable import Base, FinetuneConfig, Finetuning
from kit.tuning.memory_plan import count_parameters, count_trained
from kit.tuning.preflight import Workload

# Files in a run's folder that start_from_base has copied from a base model.
START_FROM = "start_from"  # the SHA-256 of the base model's weights, and its path
MODEL = "start.safetensors"
TOKENIZER = "start-tokenizer.model"


def load_base_tokenizer(run: ActiveRun, language: str) -> BaseTokenizer | None:
    """The base model's tokenizer, for texts in `language`; None if there is no base model."""
    if not read_run_file(run.folder / START_FROM):
        return None
    return load_tokenizer(run.folder / TOKENIZER, language)


def first_model(run: ActiveRun, config: GPTConfig, *, tokenizer: BaseTokenizer) -> SpeechGPT:
    """The model before its first training step: the base model's weights, or random ones.

    Raises DamagedFileError if `config` is no longer that of the base model.
    """
    base = load_base_tokenizer(run, tokenizer.language)
    if base is None:
        return SpeechGPT(config)
    return warm_start_model(config, load_model(run.folder / MODEL), base_spellings(base, tokenizer))


def describe_base_voice(run: ActiveRun, tokenizer: BaseTokenizer) -> str:
    """Describe the base model; "" if there is none."""
    base = load_base_tokenizer(run, tokenizer.language)
    if base is None:
        return ""
    new = len(base_spellings(base, tokenizer))
    return (
        f"It starts from the voice in {read_run_file(run.folder / START_FROM).partition(' ')[2]}: "
        f"{tokenizer.vocab_size - new} text ids stay, {new} new ones are initialised from the ids "
        "that spelt them before."
    )


def finetuning_of(run: ActiveRun) -> Finetuning:
    """What of the model `run` trains. Raises KitError if that needs a base model."""
    base = None
    if read_run_file(run.folder / START_FROM):
        path = run.folder / MODEL
        base = Base(config=saved_config(path), sha256=tensors_sha256(path), weights=path)
    finetuning = Finetuning(
        config=build(FinetuneConfig, run.section("finetune")),
        lora=build(LoRAConfig, run.section("lora")),
        base=base,
    )
    finetuning.require_voice()
    return finetuning


def workload(run: ActiveRun, **parts) -> Workload:
    """A training step of `run` as its settings say; `parts` are fields that replace them.

    Without lengths in `parts` it has the longest that the model has positions for.
    """
    settings = {
        "model": build(GPTConfig, run.section("model")),
        "train": build(TrainConfig, run.section("train")),
        "speed": build(SpeedConfig, run.section("speed")),
        "data": build(DataConfig, run.section("data")),
        "hw": run.hw,
        "precision": run.precision.value,
    }
    return Workload(**settings | run.section("memory") | parts)


def describe_finetuning(model: GPTConfig, finetuning: Finetuning) -> str:
    """Describe what of `model` trains; "" if all of it does from the first step on."""
    line = ""
    if finetuning.adapters:
        trained = count_trained(model, finetuning)
        lora = finetuning.lora
        tables = ", and the new rows of embeddings and heads" if trained.tables else ""
        if finetuning.config.tables == "all":
            tables = ", and all embeddings and heads"
        line = (
            f"LoRA: {trained.learning:,} parameters train, "
            f"{trained.learning / count_parameters(model):.1%} as many as the model has: adapters "
            f"of rank {lora.rank} beside {', '.join(lora.targets)}{tables}. With mixed precision "
            "the frozen matrices beside them take half the memory. "
        )
    if finetuning.config.tables_first:
        steps = finetuning.config.tables_first
        line += f"In the first {steps:,} steps only embeddings and heads train."
    return line.strip()


def describe_rehearsal(figures: dict) -> str:
    """Describe how much of an epoch is rehearsal; "" if nothing is."""
    if not figures["rows_an_epoch"]:
        return ""
    return (
        f"{figures['share']:.0%} of an epoch is rehearsal: {figures['rows_an_epoch']:,} rows in "
        f"each, of {figures['rows']:,} that the base voice has spoken."
    )


def finetuning_figures(model: GPTConfig, finetuning: Finetuning) -> dict:
    """What of `model` trains, for the report."""
    return finetuning.identity() | {
        "tables_first": finetuning.config.tables_first,
        "trained_parameters": count_trained(model, finetuning).learning,
        "parameters": count_parameters(model),
    }
