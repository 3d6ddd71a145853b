"""Make a small byte-level tokenizer in a directory, which has tokens for every text. Runs in the tools' environment."""

from __future__ import annotations

import sys
from string import ascii_letters

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = ["The quick brown fox jumps over the lazy dog. " * 4, ascii_letters, "0123456789"]
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def main(directory: str) -> None:
    """Write the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=320, show_progress=False, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=100_000)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1])
