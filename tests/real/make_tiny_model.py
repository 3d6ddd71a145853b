"""Makes a tiny Llama with random weights, its tokenizer and its chat template. Runs offline, in the engines' venv.

usage: make_tiny_model.py DIRECTORY [thinks]

It has two layers and a vocabulary of 512. Prompts and answers are nonsense, but every token depends on the whole KV
cache, so an answer that is decoded on a wrong or missing cache differs.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MAX_POSITIONS = 4096
VOCABULARY = 512
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
# Not special tokens, so that engines without a reasoning parser show them as text.
THINKING_TOKENS = ["<think>", "</think>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. " * 4,
    "A proxy sends the prompt to a prefill engine and then to a decode engine. " * 4,
    "def main():\n    print('hello, world')\n    return 0\n" * 4,
    "0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz",
]
# Everything that a conversation has is part of the prompt, so that no engine and no gateway can lose it unnoticed.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['tool_call_id'] %}{{ m['tool_call_id'] }}: {% endif %}"
    "{% if m['reasoning'] %}<think>{{ m['reasoning'] }}</think>{% endif %}{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['id'] }}: {{ c['function']['name'] }}"
    "({{ c['function']['arguments'] | tojson }}){% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Create a byte-level BPE tokenizer, which can encode every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        model_max_length=MAX_POSITIONS,
    )
    fast.add_tokens(THINKING_TOKENS)
    assert len(fast) <= VOCABULARY  # ids of the model beyond the tokenizer's have no text
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, *, thinks: bool) -> LlamaForCausalLM:
    """Create a model with random weights. Greedy answers have the markers of reasoning only if it `thinks`."""
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            # So wide that the two most likely tokens are far apart, and rounding cannot change a greedy answer.
            initializer_range=0.3,
            tie_word_embeddings=False,
            dtype="float32",
            **ids,
        )
    )
    model.generation_config = GenerationConfig(**ids)
    # No greedy answer has special tokens but the end: vLLM's parsers show others in streams, but not in whole answers.
    never = {*SPECIAL_TOKENS, *([] if thinks else THINKING_TOKENS)} - {tokenizer.eos_token}
    model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(list(never))] = 0
    return model


def main(directory: str, kind: str = "") -> None:
    tokenizer = make_tokenizer()
    make_model(tokenizer, thinks=kind == "thinks").save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
