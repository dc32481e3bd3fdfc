"""The tiny model's file: readable, repeatable, written once."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from servoscope.lab.embedded import gguf as model
from servoscope.lab.embedded.gguf import ModelShape, cached_model, write_model

SMALL = ModelShape(embedding=32, layers=1)


def test_the_file_is_a_model_with_one_token_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, SMALL)
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert fields["tokenizer.ggml.model"] == "gpt2"
    tokens = fields["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == 257
    assert tokens[ord("a")] == "a"
    assert tokens[ord(" ")] == "\u0120"
    assert fields["tokenizer.ggml.eos_token_id"] == 256
    assert fields["llama.context_length"] == SMALL.context
    tensors = {t.name: t for t in reader.tensors}
    assert len(tensors) == 3 + 9 * SMALL.layers
    output = np.asarray(tensors["output.weight"].data)
    assert output.shape == (257, 32)
    assert not output[256].any()  # never ends by itself
    assert not output[:32].any()
    assert output[65].any()


def test_the_same_shape_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write_model(first, SMALL)
    write_model(second, SMALL)
    assert first.read_bytes() == second.read_bytes()
    assert SMALL.digest() == ModelShape(embedding=32, layers=1).digest()
    assert SMALL.digest() != ModelShape(embedding=32, layers=2).digest()


def test_it_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    path = cached_model(folder, SMALL)
    assert path.is_file()
    made = path.stat().st_mtime_ns
    assert cached_model(folder, SMALL) == path
    assert path.stat().st_mtime_ns == made
    assert list(folder.iterdir()) == [path]

    def fail(target: Path, shape: ModelShape) -> None:
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(model, "write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        cached_model(folder, ModelShape(embedding=64, layers=1))
    assert list(folder.iterdir()) == [path]
