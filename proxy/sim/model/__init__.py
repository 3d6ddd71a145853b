"""The deterministic model: tokenizer, writer, grammar, and the engines' parser of its text."""
