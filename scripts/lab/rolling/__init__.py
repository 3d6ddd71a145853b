"""The measurement behind scripts/rolling: what clients see while engines, or the gateway, are replaced.

clients     ask the same again and again, and look whether each answer is whole, right, and comes steadily
"""
