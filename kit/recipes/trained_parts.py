"""What of its model a run trains, from its settings and the voice that it begins with; in words."""

from kit.base.config import build
from kit.base.run import read_run_file
from kit.base.tensor_file import tensors_sha256
from kit.model.lora import LoRAConfig
from kit.model.sequence import GPTConfig
from kit.model.weights import saved_config
from kit.recipes.active_run import ActiveRun
from kit.recipes.start_from import BEGUN, MODEL
from kit.training.trainable import Base, FinetuneConfig, Finetuning
from kit.tuning.memory_plan import count_parameters, count_trained


def finetuning_of(run: ActiveRun) -> Finetuning:
    """What `run` trains. Raises KitError where that needs a voice to begin with."""
    base = None
    if read_run_file(run.folder / BEGUN):
        path = run.folder / MODEL
        base = Base(config=saved_config(path), sha256=tensors_sha256(path), weights=path)
    finetuning = Finetuning(
        config=build(FinetuneConfig, run.section("finetune")),
        lora=build(LoRAConfig, run.section("lora")),
        base=base,
    )
    finetuning.require_voice()
    return finetuning


def told_finetuning(model: GPTConfig, finetuning: Finetuning) -> str:
    """In words, what of `model` trains; "" where all of it does from the first step on."""
    lines = []
    if finetuning.adapters:
        learning = count_trained(model, finetuning).learning
        lora = finetuning.lora
        lines.append(
            f"LoRA: {learning:,} parameters train, {learning / count_parameters(model):.1%} as "
            f"many as the model has: adapters of rank {lora.rank} beside {', '.join(lora.targets)}"
            f"{told_tables(model, finetuning)}. With mixed precision the matrices beside "
            "adapters are held in half the bytes, for they stay as they are."
        )
    if finetuning.config.tables_first:
        first = finetuning.config.tables_first
        lines.append(f"In the first {first:,} steps embeddings and heads train alone.")
    return " ".join(lines)


def told_tables(model: GPTConfig, finetuning: Finetuning) -> str:
    """Which rows of embeddings and heads train beside adapters, in words."""
    if finetuning.config.tables == "all":
        return ", and all embeddings and heads"
    if count_trained(model, finetuning).tables:
        return ", and the new rows of embeddings and heads"
    return ""


def told_rehearsal(figures: dict) -> str:
    """In words, what of an epoch is rehearsal; "" where nothing is."""
    if not figures["rows_an_epoch"]:
        return ""
    return (
        f"{figures['share']:.0%} of an epoch is rehearsal: {figures['rows_an_epoch']:,} rows in "
        f"each, of {figures['rows']:,} that the voice it begins with has spoken."
    )


def finetuning_figures(model: GPTConfig, finetuning: Finetuning) -> dict:
    """The same for the record."""
    figures = finetuning.identity()
    figures["tables_first"] = finetuning.config.tables_first
    figures["trained_parameters"] = count_trained(model, finetuning).learning
    figures["parameters"] = count_parameters(model)
    return figures
