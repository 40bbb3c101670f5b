"""Weights are data: a checkpoint whose weights are pickled is refused before anything reads them."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.quark.preflight import preflight
from laptop import tiny


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.mark,)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unread(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    folder = tmp_path / "model"
    shutil.copytree(tiny.target_path(), folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(KimiError, match="safetensors"):
        preflight(folder).raise_for_problems()
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes())
    assert mark.exists()  # the file would have done it
