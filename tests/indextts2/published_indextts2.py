"""A release made by the package's own classes, with random weights: no file of it is published."""

import copy
import dataclasses
from pathlib import Path

import sentencepiece as spm
import torch
import yaml


def encoder(width: int, hidden: int, heads: int, blocks: int) -> dict:
    sizes = {"output_size": width, "linear_units": hidden, "attention_heads": heads}
    return {**sizes, "num_blocks": blocks, "input_layer": "conv2d2", "perceiver_mult": 2}


FULL = {
    **{"model_dim": 1280, "layers": 24, "heads": 20},
    **{"max_mel_tokens": 1815, "max_text_tokens": 600},
    **{"number_text_tokens": 12_000, "start_text_token": 0, "stop_text_token": 1},
    **{"number_mel_codes": 8194, "start_mel_token": 8192, "stop_mel_token": 8193},
    **{"mel_length_compression": 1024, "condition_type": "conformer_perceiver"},
    **{"use_mel_codes_as_input": True, "train_solo_embeddings": False},
    "condition_module": encoder(512, 2048, heads=8, blocks=6),
    "emo_condition_module": encoder(512, 1024, heads=4, blocks=4),
}
PIECES = 120
SMALL = {
    **FULL,
    **{"model_dim": 64, "layers": 3, "heads": 4},
    **{"max_mel_tokens": 640, "max_text_tokens": 118, "number_text_tokens": PIECES},
    **{"number_mel_codes": 66, "start_mel_token": 64, "stop_mel_token": 65},
    "condition_module": encoder(16, 24, heads=2, blocks=2),
    "emo_condition_module": encoder(16, 24, heads=2, blocks=1),
}
CODEC = {
    **{"codebook_size": 64, "hidden_size": 1024, "codebook_dim": 8},
    **{"vocos_dim": 16, "vocos_intermediate_dim": 24, "vocos_num_layers": 2},
    # Not in a release, whose w2v-BERT is larger.
    **{"layer": 2, "semantic_heads": 2, "semantic_hidden": 32},
}
SENTENCES = [
    "THE CAT SAT ON THE MAT, AND THE DOG RAN IN THE RAIN.",
    "WHO ARE YOU? WE WENT HOME EARLY; IT WAS COLD.",
    "EVERY MORNING SHE BUYS BREAD AND FRESH FIGS AT THE MARKET!",
    "QUICK BROWN FOXES JUMP OVER LAZY DOGS WITH VERY LITTLE ZEAL.",
]


def package_model(gpt: dict):
    """The package's model, of this section `gpt`, whose every weight matters."""
    from indextts.gpt.model_v2 import UnifiedVoice

    torch.manual_seed(7)
    model = UnifiedVoice(**gpt, checkpointing=False).eval()
    with torch.no_grad():
        model.speed_emb.weight.normal_()  # 0 in a new one
        for name, weight in model.named_parameters():
            if name.endswith("bias") or ".norm" in name:
                weight += 0.1 * torch.randn_like(weight)
        # Greedy codes differ from step to step, as a trained model's do.
        model.mel_head.weight *= 20 if gpt["model_dim"] < 512 else 4
        model.mel_pos_embedding.emb.weight += torch.randn_like(model.mel_pos_embedding.emb.weight)
        model.text_embedding.weight += torch.randn_like(model.text_embedding.weight)
    return model


def write_vocabulary(path: Path, pieces: int, lines: list[str] = SENTENCES * 3) -> None:
    texts = {"sentence_iterator": iter(lines), "model_prefix": str(path.with_suffix(""))}
    sizes = {"vocab_size": pieces, "hard_vocab_limit": True, "character_coverage": 1.0}
    ids = {"bos_id": 0, "eos_id": 1, "unk_id": 2}
    spm.SentencePieceTrainer.train(model_type="bpe", minloglevel=2, **texts, **sizes, **ids)


def write_release(folder: Path, model, gpt: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(copy.deepcopy(model).state_dict(), folder / "gpt.pth")
    settings = {"gpt": gpt, "semantic_codec": CODEC, "dataset": {"bpe_model": "bpe.model"}}
    files = {"gpt_checkpoint": "gpt.pth", "w2v_stat": "wav2vec2bert_stats.pt"}
    settings |= files | {"version": 2.0}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    write_vocabulary(folder / "bpe.model", min(gpt["number_text_tokens"], PIECES))
    stats = {"mean": 0.1 * torch.randn(1024), "var": torch.rand(1024) + 0.5}
    torch.save(stats, folder / "wav2vec2bert_stats.pt")
    return folder


def write_codec(folder: Path) -> Path:
    """w2v-BERT and MaskGCT's codec beside a release: small, with a layer too many."""
    import safetensors.torch

    from kit.extras.indextts2.codec import IndexTTS2CodecConfig, quantiser, w2v_bert

    torch.manual_seed(11)
    config = IndexTTS2CodecConfig(**CODEC)
    semantic = w2v_bert(dataclasses.replace(config, layer=3))
    for name, module in {"w2v-bert-2.0": semantic, "semantic_codec": quantiser(config)}.items():
        (folder / name).mkdir(exist_ok=True)
        safetensors.torch.save_model(module, str(folder / name / "model.safetensors"))
    semantic.config.save_pretrained(folder / "w2v-bert-2.0")
    return folder
