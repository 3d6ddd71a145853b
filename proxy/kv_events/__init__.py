"""What engines publish of their KV caches, and what follows from it for those who choose among them.

blocks.py  the blocks of one rank, and how far back its cache reaches
"""
