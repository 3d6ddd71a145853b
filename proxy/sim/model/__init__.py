"""The deterministic model: tokenizer, writer, grammar, and the engines' parser of what it writes."""
