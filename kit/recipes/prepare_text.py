"""The text pieces of a run: learned from its texts, or taken as they lie there; a run that begins
with a voice adds them to that voice's own.
"""

from pathlib import Path

from kit.base.files import digest, write_atomic
from kit.base.run import read_run_file
from kit.recipes.active_run import ActiveRun
from kit.recipes.prepare_source import RunSource
from kit.recipes.start_from import start_digest, tokenizer_of_start
from kit.text.grow_tokenizer import grow_tokenizer
from kit.text.tokenizer import BaseTokenizer, load_tokenizer
from kit.text.train_tokenizer import TokenizerConfig, train_fitted_tokenizer


def fitted_pieces(
    run: ActiveRun, source: RunSource, config: TokenizerConfig, lines: list[str]
) -> BaseTokenizer:
    """The tokenizer of `run` for the training texts `lines`, where none was made of them yet."""
    path = run.path("tokenizer.model")
    mark = run.path("tokenizer.key")  # what the one that lies there was made from
    made_from = [config, lines, source.language, source.text_stamp() or ""]
    base = tokenizer_of_start(run, source.language)
    if base is not None:
        made_from.append(start_digest(run))
    key = digest(*made_from)
    if not path.exists() or read_run_file(mark) != key:
        more = Path(source.text) if source.text else None
        if base is None:
            train_fitted_tokenizer(lines, path, config, more, source.language)
        else:
            grow_tokenizer(base, lines, path, config, more, source.language)
        write_atomic(mark, key)
    return load_tokenizer(path, source.language)
