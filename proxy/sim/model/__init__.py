"""The deterministic model: tokenizer, writer, grammar, and the parser that engines run on its text."""
