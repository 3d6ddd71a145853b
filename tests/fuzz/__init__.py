"""What holds for any bytes whatsoever, one function per target: `check_…(data)` raises where it does not hold.

`scripts/fuzz` looks for such bytes, steered by what they reach in the code. `test_corpus.py` replays those in `corpus`:
examples to begin with, and everything that was ever found. The first byte of an input chooses how it is tried:
what is asked for, how the bytes are cut into pieces. Bytes above 127 stand for words of the target.
"""
