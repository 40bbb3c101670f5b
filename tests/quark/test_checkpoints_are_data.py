"""A checkpoint is data: pickled weights are refused unread, and its chat template reaches nothing but its input."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from support.sglang_program import BOTH, found

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.preflight import preflight
from kimi_w4a8_laptop import tiny


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.mark,)


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    mark, folder = tmp_path / "executed", tmp_path / "model"
    shutil.copytree(tiny.target_path(), folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
        with pytest.raises(KimiError, match="safetensors"):
            preflight(folder).raise_for_problems()
        (folder / name).rename(folder.parent / name)
    assert not mark.exists()
    pickle.loads((folder.parent / name).read_bytes())
    assert mark.exists()  # the file would have done it


TEMPLATES = {
    "{{ messages[0].content }}": "hi",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "SecurityError",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ raise_exception.__globals__ }}": "",  # undefined
    "{% include '/etc/passwd' %}": "TypeError",  # this environment loads no files
}
PROGRAM = f"""
import json
from transformers import PreTrainedTokenizerFast
from kimi_w4a8_laptop import tiny

tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny.target_path() / "tokenizer.json"))
said = {{}}
for tokenizer.chat_template in {list(TEMPLATES)!r}:
    try:
        text = tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}], tokenize=False)
        said[tokenizer.chat_template] = text
    except Exception as error:
        said[tokenizer.chat_template] = type(error).__name__
print(json.dumps(said))
"""


@BOTH
def test_a_chat_template_is_rendered_in_a_sandbox(newest: bool) -> None:
    """With the transformers of each release, in the process in which SGLang and the plugin are loaded."""
    assert found(PROGRAM, newest) == TEMPLATES
