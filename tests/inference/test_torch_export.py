"""The exported programs say the same codes as the kit, in a process that does not have it."""

import copy
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import LINES, opinionated_voice

from kit.base.errors import SpeechError
from kit.inference.generate import generate
from kit.inference.sampling import GenerateConfig
from kit.inference.torch_export import export_program
from kit.inference.voice import Voice

GREEDY = GenerateConfig(temperature=0, max_codes_per_text_id=100)


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> Voice:
    return opinionated_voice(tmp_path_factory.mktemp("voice"))


def test_a_file_is_no_folder_to_export_to(voice, tmp_path):
    (tmp_path / "voice").write_text("")
    with pytest.raises(SpeechError, match="is a file: name a folder"):
        export_program(voice, tmp_path / "voice")


@pytest.fixture(scope="module")
def programs(voice, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", "")  # no C++ compiler is needed
    before = copy.deepcopy(voice.model.state_dict())
    folder = export_program(voice, tmp_path_factory.mktemp("programs"))
    patch.undo()
    after = voice.model.state_dict()
    assert all(torch.equal(after[n], w) for n, w in before.items())
    return folder


def test_the_programs_speak_without_the_kit(voice, programs):
    texts = [[5], [7, 8], voice.ids(LINES[0]), list(range(20, 38))]  # the shortest, the longest
    asked = [(ids, speaker) for ids in texts for speaker in voice.speakers]
    manual = re.search(r"```python\n(.*?)```", (programs / "README.md").read_text(), re.S)[1]
    ask = f"print([speak(*a) for a in {asked!r}])\nimport sys\nassert 'kit' not in sys.modules"
    run = [sys.executable, "-c", manual + ask]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(run, cwd=programs, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr

    cond = torch.stack([voice.reference(speaker) for _, speaker in asked])
    wanted = [
        generate(voice.model, [ids], mel[None], GREEDY)[0].codes.tolist()
        for (ids, _), mel in zip(asked, cond)
    ]
    assert json.loads(found.stdout) == wanted and len({tuple(row) for row in wanted}) > 2


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch.export.load
def test_the_programs_hold_what_they_need_and_no_more(voice, programs):
    files = {"prefill.pt2", "decode_one.pt2", "latents.safetensors", "tokenizer.model", "README.md"}
    assert {p.name for p in programs.iterdir()} == files
    program, model = torch.export.load(programs / "decode_one.pt2"), voice.model
    assert program.example_inputs is None  # a whole cache
    parts = (model.gpt, model.final_norm, model.code_embedding, model.code_position)
    needed = sum(w.numel() for part in (*parts, model.code_head) for w in part.parameters())
    assert sum(w.numel() for w in program.state_dict.values()) == needed
