"""Makes a small random Llama model directory: configuration, trained tokenizer, saved weights.

Runs with the engine environment's own Python (tokenizers, transformers and torch are there):
``python make_model.py DIRECTORY HIDDEN LAYERS``. The weights are random but saved, with a spread
large enough that attention matters: with dummy weights the output ignores the context and proves
nothing about what a scheduler did.
"""

from __future__ import annotations

import json
import pathlib
import sys
import sysconfig

import torch  # type: ignore[import-not-found,unused-ignore]
from tokenizers import (  # type: ignore[import-not-found,unused-ignore]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    AutoConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 2048
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(out: pathlib.Path) -> None:
    """Byte-level BPE trained on the standard library's own source text."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    tokenizer.train([str(p) for p in sorted(library.glob("*.py"))[:60]], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT
    fast.model_max_length = 8192
    fast.save_pretrained(out)
    # The name that transformers 5 writes is unknown to transformers 4, which older engines have.
    settings = out / "tokenizer_config.json"
    named = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(named, indent=1))


def save_config(out: pathlib.Path, hidden: int, layers: int) -> None:
    """A Llama of this width and depth."""
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": max(2, hidden // 64),
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "attention_bias": False,
        "initializer_range": 0.02,
        **tokens,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps(tokens))


def save_weights(out: pathlib.Path) -> None:
    """Random weights from a fixed seed."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(out)
    config.initializer_range = 0.08
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(directory)
    save_config(directory, int(sys.argv[2]), int(sys.argv[3]))
    save_weights(directory)
