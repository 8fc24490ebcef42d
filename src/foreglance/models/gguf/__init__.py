"""GGUF files as checkpoints: reading them, laying them out as hub folders, and writing them.

Owns the format, the names that llama.cpp gives tensors and sizes, and what it changes in them. The families know
nothing of it: a laid-out folder has a config, a tokenizer and tensors by their hub names. Must not touch a forward.
"""
