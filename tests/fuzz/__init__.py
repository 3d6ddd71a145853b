"""Fuzz targets: `check_…(data)` of each target raises if a property does not hold for any bytes.

`scripts/fuzz` searches for failing bytes, guided by the branches that they reach. `test_corpus.py` replays the inputs
in `corpus`: initial examples, and everything that was ever found. The first byte of an input chooses options and cuts.
Bytes above 127 stand for words of the target.
"""
