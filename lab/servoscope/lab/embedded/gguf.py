"""A tiny random model as a GGUF file, made on the spot: no download, a second, 10 MB.

Llama architecture, random weights from a fixed seed, and a byte-level BPE tokenizer without useful
merges: one UTF-8 byte of text is one token, so a prompt of n ASCII characters has n tokens. Its
answers are noise. Printable ASCII is preferred by the output layer and other bytes come up now and
then, so some tokens are parts of characters, as in real vocabularies.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CHAT_TEMPLATE", "ModelShape", "cached_model", "write_model"]

#: Short on purpose: what the template adds is the same few tokens for every chat request.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{m['role']}}|>{{m['content']}}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODEL_NAME = "servoscope-embedded-tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The size of the model. The default decodes about 1,000 tokens a second on one core."""

    embedding: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 8192
    seed: int = 20231116

    def digest(self) -> str:
        """Twelve hex digits that name this shape and this version of the recipe."""
        return hashlib.sha256(repr(("v1", astuple(self))).encode()).hexdigest()[:12]


def cached_model(directory: Path, shape: ModelShape | None = None) -> Path:
    """The model's file in ``directory``, written there if missing. Safe for several processes."""
    shape = shape or ModelShape()
    path = directory / f"{MODEL_NAME}-{shape.digest()}.gguf"
    if not path.is_file():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            write_model(partial, shape)
            partial.replace(path)  # whole or absent, whoever else writes it meanwhile
        finally:
            partial.unlink(missing_ok=True)
    return path


def write_model(path: Path, shape: ModelShape) -> None:
    """Write the model to ``path``."""
    writer = gguf.GGUFWriter(path, "llama")
    try:
        _header(writer, shape)
        _tokenizer(writer)
        for name, tensor in _weights(shape):
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _header(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    writer.add_name(MODEL_NAME)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embedding)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(2 * shape.embedding)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.embedding // shape.heads)
    writer.add_vocab_size(_VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


_END = 256  # the end-of-text token follows the 256 bytes
_VOCABULARY = 257


def _tokenizer(writer: gguf.GGUFWriter) -> None:
    letters = _byte_letters()
    tokens = [letters[byte] for byte in range(256)] + ["<|endoftext|>"]
    types = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # The key must be there and not empty; a merge into a token that does not exist never applies.
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(_END)
    writer.add_eos_token_id(_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    letters = {b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = (b for b in range(256) if b not in letters)
    return letters | {b: chr(256 + n) for n, b in enumerate(others)}


Tensor = npt.NDArray[np.float32]


def _weights(shape: ModelShape) -> list[tuple[str, Tensor]]:
    random = np.random.default_rng(shape.seed)
    width, kv_width = shape.embedding, shape.embedding * shape.kv_heads // shape.heads
    inner = 2 * width

    def noise(*size: int, scale: float = 0.05) -> Tensor:
        return (random.standard_normal(size) * scale).astype(np.float32)

    ones = np.ones(width, np.float32)
    tensors = [("token_embd.weight", noise(_VOCABULARY, width, scale=0.5))]
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        tensors += [
            (block + "attn_norm.weight", ones),
            (block + "ffn_norm.weight", ones),
            (block + "attn_q.weight", noise(width, width)),
            (block + "attn_k.weight", noise(kv_width, width)),
            (block + "attn_v.weight", noise(kv_width, width)),
            (block + "attn_output.weight", noise(width, width)),
            (block + "ffn_gate.weight", noise(inner, width)),
            (block + "ffn_up.weight", noise(inner, width)),
            (block + "ffn_down.weight", noise(width, inner)),
        ]
    output = noise(_VOCABULARY, width) * _preference()[:, np.newaxis]
    return [*tensors, ("output_norm.weight", ones), ("output.weight", output)]


def _preference() -> Tensor:
    """Weight of each token's output row: control characters and the end near never, ASCII first."""
    weight = np.full(_VOCABULARY, 0.7, np.float32)
    weight[:32] = 0.0
    weight[32:127] = 1.0
    weight[127] = 0.0
    weight[_END] = 0.0
    return weight
